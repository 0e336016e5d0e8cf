"""Prometheus's own rule engine over the recordings says what the sidecar says, when it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from kneewatch.dashboards.prometheus.rule_files import Flavor
from kneewatch.rules.cascade import EVIDENCE, KV_USAGE
from tests.dashboards.parity import STAGE, Difference, differences
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
    found = differences(CAPTURES / "round_robin_two_replicas.r1.jsonl.gz", tmp_path)
    # The sidecar tells these stalls with prefix_churn, which needs the KV capacity.
    assert {one.key for one in found} == {"prefill_interference"}


def test_a_difference_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("promtool")
    sooner = tuple((stage, KV_USAGE >= 0.2 if stage == 1 else when) for stage, when in EVIDENCE)
    monkeypatch.setattr("kneewatch.dashboards.prometheus.recording_rules.EVIDENCE", sooner)
    path = CAPTURES / "kv_pressure_cascade.jsonl.gz"
    found = differences(path, tmp_path, wanted=lambda rule: rule.get("record") == STAGE)
    assert any(isinstance(one, Difference) and one.key == "stage" for one in found)
