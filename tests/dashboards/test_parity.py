"""Prometheus's own rule engine over the recordings says what the sidecar says, when it does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kneewatch.collector.samples import Series
from kneewatch.dashboards.prometheus.causes import cause_groups
from kneewatch.dashboards.prometheus.recording_rules import Recorded
from kneewatch.dashboards.prometheus.rule_files import Flavor
from kneewatch.dashboards.prometheus.rule_group import CAUSE, Plan, Record, met
from kneewatch.diagnose.causes.availability import Stalled
from kneewatch.rules.cascade import EVIDENCE, KV_USAGE
from kneewatch.rules.facts import recorded
from tests.dashboards.parity import STAGE, Difference, differences
from tests.dashboards.promtool import evaluate
from tests.programs import require
from tests.recordings import CAPTURES

RECORDINGS = (
    "healthy_light",
    "itl_spikes_no_chunked",
    "kv_pressure_cascade",
    "lora_thrash",
    "prefix_lost",
    "prefix_off",
    "queue_overload",
    "restart_mid_run",
    "spec_mixed",
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_prometheus_says_the_same(name: str, tmp_path: Path) -> None:
    require("promtool")
    assert differences(CAPTURES / f"{name}.jsonl.gz", tmp_path) == []


def test_a_ruler_without_keep_firing_for_says_the_same(tmp_path: Path) -> None:
    require("promtool")
    path = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    assert differences(path, tmp_path, flavor=Flavor.UNKEPT) == []


def test_what_promql_cannot_conclude_it_cannot_fold_either(tmp_path: Path) -> None:
    require("promtool")
    differing = differences(CAPTURES / "round_robin_two_replicas.r1.jsonl.gz", tmp_path)
    # The sidecar tells these stalls with prefix_churn, which needs the KV capacity.
    assert {difference.key for difference in differing} == {"prefill_interference"}


def test_a_difference_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("promtool")
    sooner = tuple((stage, KV_USAGE >= 0.2 if stage == 1 else when) for stage, when in EVIDENCE)
    monkeypatch.setattr("kneewatch.dashboards.prometheus.recording_rules.EVIDENCE", sooner)
    path = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    differing = differences(path, tmp_path, wanted=lambda rule: rule.get("record") == STAGE)
    assert any(
        isinstance(difference, Difference) and difference.key == "stage" for difference in differing
    )


def test_an_exported_cause_explains_others_only_where_the_live_one_does(tmp_path: Path) -> None:
    """Answers twice as long as usual explain a queue; answers that are hardly longer do not."""
    require("promtool")
    groups = cause_groups(Plan())
    judged = [
        {"record": rule.name, "expr": rule.expr, "labels": dict(rule.labels)}
        for rule in groups[0].rules
        if isinstance(rule, Record)
        and (
            "runaway_generation" in rule.name + rule.labels.get("cause", "")
            or (rule.name == met(CAUSE) and rule.labels["cause"] == "queue_saturation")
        )
    ]
    usual = {"output_tokens_mean:baseline": 100, "generation_tokens_per_s:baseline": 1000}
    ramble = {"finished_length_drift_points": 0.6, "finished_length_ratio": 0.9}
    series = {
        Series(recorded(key), (("instance", instance),)): f"{value}x20"
        for instance, tokens in (("longer", 200), ("alike", 110))
        for key, value in {
            **usual, **ramble, "running": 8, "completed_per_s": 2, "output_tokens_mean": tokens,
        }.items()
    }  # fmt: skip
    for instance in ("longer", "alike"):
        queue = (("cause", "queue_saturation"), ("instance", instance))
        series[Series(recorded("cause_severity"), queue)] = "2x20"
    expr = f'{met(CAUSE)}{{cause=~"queue_saturation|runaway_generation.*"}}'
    document = json.dumps({"groups": [{"name": "causes", "rules": judged}]})
    answers = evaluate(tmp_path, document, series, [expr], step_s=15.0, steps=10, from_step=9)
    reported = {
        (labels["instance"], labels["cause"])
        for sample in answers[expr][-1]
        if (labels := dict(re.findall(r'(\w+)="([^"]*)"', sample.labels)))
    }
    assert reported == {
        ("longer", "runaway_generation"),
        ("alike", "runaway_generation:apart"),
        ("alike", "queue_saturation"),
    }


def test_an_exported_stall_is_concluded_when_no_prefill_explains_it_any_more(
    tmp_path: Path,
) -> None:
    """Prefills that took up to 100 s explain a silence of 75 s, and none explains 135 s."""
    require("promtool")
    instance, step_s, silent_from = ("instance", "a"), 15.0, 20
    series = {
        Series(recorded("running"), (instance,)): "1x40",
        Series(recorded("waiting"), (instance,)): "0x40",
        Series("vllm:kv_cache_usage_perc", (instance,)): "0.5x40",
        Series("vllm:generation_tokens_total", (instance,)): f"0+99x{silent_from} 1980x19",
        Series("vllm:request_success_total", (instance, ("finished_reason", "stop"))): "7x40",
    }
    for le, count in (("60", 6), ("100", 7), ("+Inf", 7)):
        bucket = Series("vllm:request_prefill_time_seconds_bucket", (instance, ("le", le)))
        series[bucket] = f"{count}x40"
    expr = Stalled(whole=True).promql(Recorded(Plan()), side=True).vector
    answers = evaluate(tmp_path, '{"groups": []}', series, [expr], step_s=step_s, steps=30)[expr]
    stalled_s = [step_s * (at - silent_from) for at, samples in enumerate(answers) if samples]
    assert stalled_s[:1] == [120.0]
