"""The hour of the week in the exported rules: promtool plays weeks, Python says what is usual."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.dashboards.prometheus.baseline_rules import COMPARED
from kneewatch.dashboards.prometheus.rule_files import groups
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.rules.baseline import (
    MORE_IS_BETTER,
    SCRAPES_MIN,
    TRACKED_SIGNALS,
    WEEKS,
    hourly,
    usual,
)
from tests.programs import require

HOUR = 12
"""A step is five minutes; rules are evaluated each hour."""

WEEK = 168 * HOUR
MORNING = 9 * HOUR
"""The busy hour of the week."""

NIGHT = 2 * HOUR
NOW = WEEKS * WEEK + MORNING + HOUR
"""The last moment of the busy hour: what was usual at its beginning holds until then."""

TAIL, HITS = "ttft_p99_p50_ratio", "prefix_hit_ratio"
WANTED = re.compile(
    rf"kneewatch:(({TAIL}|{HITS}):(hour|usual|quiet)|ttft_p99_p50_drift_ratio|prefix_hit_quiet_ratio)"
)


class Weeks(Struct, frozen=True):
    """A signal as it was on the busy mornings before, the last week's last, and is `now`; and in
    the quiet night before. Each hour before has so many values."""

    before: Sequence[float]
    now: float
    night: float | None
    fires: bool = False
    scrapes_per_hour: int = HOUR

    def inverted(self) -> Weeks:
        """The same of a signal that is bad when it is low."""
        before = [1 / value for value in self.before]
        night = None if self.night is None else 1 / self.night
        return Weeks(before, 1 / self.now, night, scrapes_per_hour=self.scrapes_per_hour)

    def series(self, key: str, labels: str) -> Iterator[tuple[str, str]]:
        """The recorded signal until ten o'clock of the fifth week, and its quiet values, as
        promtool writes them."""
        samples = ["_"] * NOW
        for back, value in enumerate(reversed(self.before), 1):
            begins = NOW - back * WEEK - HOUR + 1
            samples[begins : begins + self.scrapes_per_hour] = [str(value)] * self.scrapes_per_hour
        yield f"kneewatch:{key}{labels}", " ".join([*samples, str(self.now)])
        if self.night is not None:
            yield f"kneewatch:{key}:calm{labels}", f"_x{NOW - HOUR - NIGHT} {self.night}x{NIGHT}"

    def held_against(self, key: str) -> float | None:
        """What the sidecar holds it against: the rule of rules/baseline.py."""
        weeks = [hourly({key: [value] * self.scrapes_per_hour}) for value in self.before]
        references = [
            reference for reference in (self.night, usual(weeks).get(key)) if reference is not None
        ]
        worse = min if key in MORE_IS_BETTER else max
        return worse(references) if references else None


CASES = {
    "Mondays alike": Weeks([5.0, 5.6], 5.4, 2.0),
    "twice as slow as on earlier Mondays": Weeks([5.0, 5.6], 11.0, 2.0, fires=True),
    "one Monday is no habit": Weeks([5.0], 5.4, 2.0, fires=True),
    "Mondays with nothing in common": Weeks([5.0, 50.0], 5.4, 2.0, fires=True),
    "an incident among four": Weeks([5.0, 50.0, 5.2, 4.8], 5.4, 2.0),
    "too little was seen": Weeks(
        [5.0, 5.6], 5.4, 2.0, fires=True, scrapes_per_hour=SCRAPES_MIN - 1
    ),
    "enough was seen": Weeks([5.0, 5.6], 5.4, 2.0, scrapes_per_hour=SCRAPES_MIN),
    "better Mondays accuse nobody": Weeks([1.0, 1.0], 3.0, 2.0),
    "no quiet but Mondays": Weeks([5.0, 5.6], 5.4, None),
    "nothing to hold it against": Weeks([], 5.4, None),
}


def labels_of(case: str) -> str:
    return f'{{instance="{case}", job="vllm", model_name="m", engine="0"}}'


def asked() -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """What is asked at which step, and the samples that are expected."""
    drifts: list[dict[str, Any]] = []
    fewest: list[dict[str, Any]] = []
    for case, weeks in CASES.items():
        against = weeks.held_against(TAIL)
        if against is not None:
            drifts.append({"labels": labels_of(case), "value": round(1e6 * weeks.now / against)})
        low = weeks.inverted().held_against(HITS)
        if low is not None:
            fewest.append({"labels": labels_of(case), "value": round(1e6 * low)})
    yield NOW, "round(1e6 * kneewatch:ttft_p99_p50_drift_ratio)", drifts
    for at in (NOW - HOUR, NOW):  # from the hour's beginning on
        yield at, "round(1e6 * kneewatch:prefix_hit_quiet_ratio)", fewest
    fires = [case for case, weeks in CASES.items() if weeks.fires]
    expected_samples = [{"labels": f'{{instance="{case}"}}', "value": 1} for case in fires]
    yield NOW, "count by (instance) (kneewatch:finding_met)", expected_samples


def test_what_is_usual_at_this_hour_of_the_week_is_no_anomaly(tmp_path: Path) -> None:
    # One group, seasons first: promtool evaluates groups in any order, once an hour here.
    rules = [
        written_rule
        for group in reversed(groups(Plan()))
        for rule in group.rules
        if (written_rule := written(rule))
    ]
    series = [
        {"series": name, "values": values}
        for case, weeks in CASES.items()
        for key, shown in ((TAIL, weeks), (HITS, weeks.inverted()))
        for name, values in shown.series(key, labels_of(case))
    ]
    expected = [
        {"expr": expr, "eval_time": f"{5 * at}m", "exp_samples": samples}
        for at, expr, samples in asked()
    ]
    test = {"interval": "5m", "input_series": series, "promql_expr_test": expected}
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1h", "tests": [test]}
    group = {"name": "all", "rules": rules}
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [group]}))  # JSON is YAML
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    command = [require("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def written(rule: Record | Alert) -> dict[str, Any] | None:
    """A rule as a file has it, if it has to do with these signals."""
    if isinstance(rule, Alert):
        return None
    tail = rule.name == "kneewatch:finding_met" and rule.labels["rule"] == "TTFT-TAIL"
    if not (tail or WANTED.fullmatch(rule.name)):
        return None
    return {"record": rule.name, "expr": rule.expr, "labels": dict(rule.labels)}


def test_what_is_recorded_is_used() -> None:
    exprs = [rule.expr for group in groups(Plan()) for rule in group.rules]
    for key in COMPARED:
        assert key in TRACKED_SIGNALS
        quiet = re.compile(rf"\bkneewatch:{key}:quiet\b")
        used = [expr for expr in exprs if quiet.search(expr)]
        compared = [expr for expr in used if f"kneewatch:{key}:usual" in expr]
        assert compared, "it is held against the usual value at this hour, or else the quiet one"
        assert len(used) == len(compared) + 1, "its own rule"
