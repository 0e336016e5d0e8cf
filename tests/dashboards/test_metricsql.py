"""The rules for VictoriaMetrics mean there what they mean to Prometheus: a real one is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kneewatch.dashboards.prometheus.baseline_rules import compared_with, season_group
from kneewatch.dashboards.prometheus.rule_files import groups, metricsql
from kneewatch.dashboards.prometheus.rule_group import Plan, Record
from kneewatch.rules.baseline import HOUR_S, WEEK_S
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.playing import process
from tests.programs import require
from tests.waiting import PATIENCE_S

AGES_S = (70, 55, 40, 25, 10)
SERIES = {
    "jumped_before": (0, 100, 110, 120, 130),
    "began_anew": (500, 600, 610, 5, 15),
    "stood": (0, 7, 7, 7, 7),
}
"""Counters, a value at each age: the first one is before a window of 60 s."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A VictoriaMetrics that has the series."""
    folder, port = tmp_path_factory.mktemp("victoria"), free_port()
    at, own = f"http://{LOOPBACK}:{port}", f"-httpListenAddr={LOOPBACK}:{port}"
    command = [require("victoria-metrics"), f"-storageDataPath={folder}/data", own]
    with process(command, ready=f"{at}/health", log=Path(folder) / "log"):
        lines = [
            f"{name} {value} {NOW_MS - 1000 * age_s}"
            for name, values in SERIES.items()
            for age_s, value in zip(AGES_S, values, strict=True)
        ]
        lines += [line for hour in HOURS for late_s in LATE_S for line in recorded(hour, late_s)]
        body = "\n".join(lines).encode()
        for path, data in (("api/v1/import/prometheus", body), ("internal/force_flush", None)):
            with urlopen(f"{at}/{path}", data, timeout=PATIENCE_S) as answer:
                answer.read()
        yield at


NOW_MS = round(1000 * time.time()) - 60_000
"""Past what VictoriaMetrics hides of the newest (-search.latencyOffset)."""


PLAN = Plan(ordered=False)
TAIL = "ttft_p99_p50_ratio"
HELD = metricsql(compared_with(PLAN, TAIL))
DAY_S = 24 * HOUR_S
MIDNIGHT_S = (NOW_MS / 1000 - 2 * HOUR_S) // DAY_S * DAY_S
HOURS = {
    "midnight": MIDNIGHT_S,
    "before midnight": MIDNIGHT_S - HOUR_S,
    "noon": MIDNIGHT_S - DAY_S / 2,
}
"""Beginnings of hours that are over: of the same times of day whenever the tests run."""

LATE_S = (0, 137)
"""When an hour is recorded: vmalert evaluates a group at multiples of its interval, so at the full
hour; Prometheus at some second of the interval."""


def instance_of(hour: str, late_s: float, *, new: bool = False) -> str:
    return f"{hour} + {late_s} s{', new' if new else ''}"


def recorded(hour: str, late_s: float) -> Iterator[str]:
    """What the rules have recorded of an engine at the end of the hour: the medians of two weeks, 4
    and 5, what was usual at the hour and at the hour before, and the quiet median, each minute.

    A new engine has no hour before: what is usual at this hour is the first sample of its series.
    """
    start_s, season = HOURS[hour], 'season="week",'
    for new in (False, True):
        engine = f'instance="{instance_of(hour, late_s, new=new)}",model_name="m"'
        rows: list[tuple[str, float, float]] = []
        for week, median in ((1, 4.0), (2, 5.0)):
            began_s = start_s - week * WEEK_S + late_s
            rows.append((f"hour{{{engine}}}", median, began_s + HOUR_S))
            rows.append((f"hour{{{engine}}}", 9.0, began_s))
        rows.append((f"usual{{{season}{engine}}}", 4.5, start_s + late_s))
        if not new:
            rows.append((f"usual{{{season}{engine}}}", 3.5, start_s + late_s - HOUR_S))
            rows += [(f"quiet{{{engine}}}", 2.0, start_s + 60 * at) for at in range(-10, 71)]
        yield from (
            f"kneewatch:{TAIL}:{row} {value} {round(1000 * t_s)}" for row, value, t_s in rows
        )


def asked(
    url: str, expr: str, at_s: float = NOW_MS / 1000, *, instance: str | None = None
) -> float | None:
    query = urlencode({"query": expr, "time": at_s, "nocache": 1})
    with urlopen(f"{url}/api/v1/query?{query}", timeout=PATIENCE_S) as answer:
        result = json.loads(answer.read())["data"]["result"]
    values = [float(row["value"][1]) for row in result if row["metric"].get("instance") == instance]
    return values[0] if values else None


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        pytest.param("rate(jumped_before[60s])", 30 / 45, id="100 to 130 in 45 s"),
        pytest.param("rate(began_anew[60s])", 25 / 45, id="10, then 5 from nothing, then 10"),
        pytest.param("rate(stood[60s])", 0.0, id="nothing within"),
        pytest.param("increase(jumped_before[60s])", 30.0, id="as it was counted"),
        pytest.param("changes(stood[60s])", 0.0, id="the change was before"),
        pytest.param("rate(jumped_before[20s])", None, id="of one sample there is no rate"),
    ],
)
def test_a_window_begins_with_the_first_sample_inside(
    expr: str, value: float | None, url: str
) -> None:
    assert asked(url, metricsql(expr)) == (None if value is None else pytest.approx(value))
    assert asked(url, expr) != pytest.approx(value if value is not None else -1.0), (
        "VictoriaMetrics's own is another"
    )


@pytest.mark.parametrize("hour", HOURS)
@pytest.mark.parametrize("late_s", LATE_S)
@pytest.mark.parametrize(
    ("minutes", "usual"), [(0, 4.5), (4, 4.5), pytest.param(6, None, id="told once an hour")]
)
def test_weeks_are_told_as_prometheus_tells_them(
    minutes: float, usual: float | None, late_s: float, hour: str, url: str
) -> None:
    name = f"kneewatch:{TAIL}:usual"
    (rule,) = (r for r in season_group(PLAN).rules if isinstance(r, Record) and r.name == name)
    at_s, instance = HOURS[hour] + 60 * minutes, instance_of(hour, late_s)
    assert asked(url, metricsql(rule.expr), at_s, instance=instance) == usual


@pytest.mark.parametrize("hour", HOURS)
@pytest.mark.parametrize(
    ("late_s", "minutes", "worse"),
    [
        pytest.param(0, -1, 3.5, id="the hour before"),
        pytest.param(0, 0, 4.5, id="from its first millisecond on"),
        pytest.param(0, 59, 4.5, id="to its end"),
        pytest.param(0, 66, 2.0, id="no longer"),
        pytest.param(137, 0, 3.5, id="the hour before, until this one is recorded"),
        pytest.param(137, 4, 4.5, id="recorded within it"),
        pytest.param(137, 66, 4.5, id="until the next one may be recorded"),
        pytest.param(137, 68, 2.0, id="recorded within it: no longer"),
    ],
)
def test_what_is_usual_holds_for_its_hour(
    late_s: float, minutes: float, worse: float, hour: str, url: str
) -> None:
    at_s, instance = HOURS[hour] + 60 * minutes, instance_of(hour, late_s)
    assert asked(url, HELD, at_s, instance=instance) == worse


@pytest.mark.parametrize("hour", HOURS)
def test_what_is_first_recorded_at_a_full_hour_holds_from_the_next_evaluation_on(
    hour: str, url: str
) -> None:
    """VictoriaMetrics 1.79.5 reads only the days before midnight for a query at midnight, to the
    millisecond: a series whose first sample is of that millisecond is missing in that answer, and
    in no later one. The rules need no change: a series that they have recorded before is found at
    midnight too, and a new one cannot be read at the moment at which vmalert writes it anyway."""
    start_s, instance = HOURS[hour], instance_of(hour, 0, new=True)
    assert asked(url, HELD, start_s - 0.001, instance=instance) is None
    for seconds in (0.001, PLAN.interval_s):
        assert asked(url, HELD, start_s + seconds, instance=instance) == 4.5


def test_every_rule_is_spelled() -> None:
    exprs = [rule.expr for group in groups(Plan(ordered=False)) for rule in group.rules]
    translated = [metricsql(expr) for expr in exprs]
    assert sum("rate(" in expr for expr in exprs) > 50
    for own in ("rate(", "increase(", "changes("):
        left = [
            expr
            for expr in translated
            if f" {own}" in expr or f"({own}" in expr or expr.startswith(own)
        ]
        assert left == [], own
