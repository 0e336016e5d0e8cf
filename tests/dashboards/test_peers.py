"""A server behind its peers: the exported rule weighs as `diagnose --prometheus` does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.dashboards.prometheus.causes import cause_queries, gate_of
from kneewatch.dashboards.prometheus.gpu_alerts import ENGINE_CLOCK, ENGINE_HEAT, ENGINE_XID
from kneewatch.dashboards.prometheus.rule_files import groups
from kneewatch.dashboards.prometheus.rule_group import Plan, Record
from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis
from tests.diagnose.fleet.example_fleets import USUAL, pod, verdict
from tests.programs import require

PLAN = Plan(gpu_join=(("pod", "exported_pod"),))
SIGNALS = (
    *("running", "running_avg", "waiting", "arrival_per_s"),
    *("itl_p50_s", "itl_mean_s", "itl_p99_s"),
)
FIELDS: Mapping[str, tuple[str, float]] = {
    "sm_clock_mhz": (ENGINE_CLOCK, 1e6),
    "temperature_c": (ENGINE_HEAT, 1.0),
    "xid": (ENGINE_XID, 1.0),
}
SURE = 'kneewatch:cause_confidence{cause="bad_node"} >= 0.5'
ASKED = f"round(100 * max by (model_name, pod) ({SURE}))"
WELL = {"sm_clock_mhz": 1755.0, "temperature_c": 60.0, "xid": 0.0}


class Odd(Struct, frozen=True):
    """Of so many servers the first few: what is not as usual of them, and of their GPUs."""

    own: Mapping[str, float]
    gpu: Mapping[str, float] | None = None
    servers: int = 4
    gpus: bool = False
    few: int = 1

    def engines(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Pods and their signals."""
        for at in range(self.servers):
            values = {**USUAL, **(self.own if at < self.few else {})}
            yield f"p{at}", {"itl_mean_s": values["itl_p50_s"], **values}

    def boards(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Pods and the figures of their GPUs; none where DCGM is not there."""
        if self.gpus or self.gpu is not None:
            for at in range(self.servers):
                yield f"p{at}", {**WELL, **(self.gpu or {} if at == 0 else {})}

    def verdict(self) -> FleetDiagnosis:
        """The verdict of `diagnose --prometheus`."""
        return verdict(
            *((pod(name), own) for name, own in self.engines()), gpus=dict(self.boards())
        )

    def confidence(self) -> float | None:
        """The confidence of `diagnose --prometheus` in a bad node."""
        causes = self.verdict().causes
        shown = {c.cause.confidence for c in causes if c.cause.id == "bad_node"}
        return shown.pop() if shown else None

    def own_causes(self) -> Iterator[tuple[str, Cause]]:
        """Pods and the causes of their engines."""
        for engine in self.verdict().engines:
            yield from ((engine.member.name, cause) for cause in engine.causes)


SLOW = {"itl_p50_s": 0.05, "itl_p99_s": 0.09}
FULL = {**SLOW, "preemption_per_s": 4.0, "preemption_ratio_per_s": 0.2, "waiting": 6.0,
        "kv_usage_ratio": 0.99, "kv_usage_avg_ratio": 0.98}  # fmt: skip
CASES = {
    "slow for its own KV pressure": Odd(FULL),
    "a low clock with KV pressure": Odd(FULL, {"sm_clock_mhz": 1000.0}),
    "slow": Odd(SLOW),
    "hardly slow enough": Odd({"itl_p50_s": 0.031}),
    "not slow enough": Odd({"itl_p50_s": 0.029, "itl_p99_s": 0.09}),
    "on two sides of a bucket's edge": Odd({**SLOW, "itl_mean_s": 0.026}),
    "slow with more to do": Odd({**SLOW, "arrival_per_s": 3.0}),
    "slow with somewhat more to do": Odd({**SLOW, "arrival_per_s": 2.5}),
    "of three": Odd(SLOW, servers=3),
    "of two": Odd(SLOW, servers=2),
    "slow, its GPU as the others": Odd(SLOW, gpus=True),
    "slow and hot": Odd(SLOW, {"temperature_c": 75.0}),
    "slow with an XID": Odd(SLOW, {"xid": 63.0}),
    "slow with a low clock": Odd(SLOW, {"sm_clock_mhz": 1200.0}),
    "a low clock alone": Odd({}, {"sm_clock_mhz": 1000.0}),
    "a clock that is low enough": Odd({}, {"sm_clock_mhz": 0.85 * 1755}),
    "a low clock without work": Odd({"running": 0.0, "running_avg": 0.5}, {"sm_clock_mhz": 345.0}),
}
GUARDED = {
    "a kind of GPU": Odd(SLOW, servers=8, few=3),
}
"""What only the diagnosis tells, to somebody who looks."""


def series(case: str, odd: Odd) -> Iterator[dict[str, str]]:
    """What is recorded of a case's servers; each case is a model."""

    def level(name: str, where: str, value: float, **more: str) -> dict[str, str]:
        labels = {**pod(where), "model_name": case, **more}
        inner = ", ".join(f'{label}="{text}"' for label, text in labels.items())
        return {"series": f"{name}{{{inner}}}", "values": f"{value!r} {value!r}"}

    for where, own in odd.engines():
        yield from (level(f"kneewatch:{key}", where, own[key]) for key in SIGNALS)
    for where, figures in odd.boards():
        for key, (name, scale) in FIELDS.items():
            yield level(name, where, scale * figures[key])
    for where, cause in odd.own_causes():
        yield level("kneewatch:cause_confidence", where, cause.confidence, cause=cause.id)


def played(tmp_path: Path, cases: Mapping[str, Odd], expected: list[dict[str, Any]]) -> str:
    """What promtool has against the expectations; nothing where they hold."""
    (query,) = (query for query in cause_queries(PLAN) if query.record.id == "bad_node")
    rules = [
        *query.needs,
        *(
            rule
            for group in groups(PLAN)
            for rule in group.rules
            if isinstance(rule, Record)
            and (rule.name == gate_of(query) or rule.labels.get("cause") == query.series)
        ),
    ]
    recorded_rules = [{"record": r.name, "expr": r.expr, "labels": dict(r.labels)} for r in rules]
    test = {
        "interval": "15s",
        "input_series": [row for case, odd in cases.items() for row in series(case, odd)],
        "promql_expr_test": [{"expr": ASKED, "eval_time": "15s", "exp_samples": expected}],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "rules.yml").write_text(
        json.dumps({"groups": [{"name": "peers", "rules": recorded_rules}]})  # JSON is YAML
    )
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    command = [require("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def test_it_is_as_sure_as_the_diagnosis(tmp_path: Path) -> None:
    confidences = {case: odd.confidence() for case, odd in CASES.items()}
    assert {case for case, sure in confidences.items() if sure is None} == {
        "slow for its own KV pressure",
        "not slow enough",
        "on two sides of a bucket's edge",
        "slow with more to do",
        "of two",
        "a low clock without work",
    }
    expected = [
        {"labels": f'{{model_name="{case}", pod="p0"}}', "value": round(100 * sure)}
        for case, sure in confidences.items()
        if sure is not None
    ]
    assert played(tmp_path, CASES, expected) == ""


def test_nobody_is_woken_for_what_is_no_node(tmp_path: Path) -> None:
    assert all(odd.confidence() is not None for odd in GUARDED.values())
    few = {"two of eight": Odd(SLOW, servers=8, few=2)}
    expected_samples = [
        {"labels": f'{{model_name="two of eight", pod="p{at}"}}', "value": 75} for at in (0, 1)
    ]
    assert played(tmp_path, {**GUARDED, **few}, expected_samples) == ""
