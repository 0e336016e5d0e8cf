"""A made-up fleet in a real Prometheus: what was planted is named, the rest is left alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kneewatch.agent.console import FOUND, NO_DATA
from kneewatch.collector.errors import CollectError
from kneewatch.reports.json_schemas import schema as schema_of
from tests import fleets
from tests.agent.fleet.prometheus_fleet import told, watched
from tests.agent.running import Main
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.programs import require

REPLICAS = 60
IN_TIME_S = 20.0


@pytest.fixture(scope="module")
def end_s() -> int:
    return int(time.time()) // 15 * 15


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, end_s: int) -> Iterator[Prometheus]:
    require("promtool")
    blocks = tmp_path_factory.mktemp("fleet") / "blocks"
    fleets.write_blocks(blocks, fleets.fleet(REPLICAS), end_s=end_s)
    with running(require("prometheus"), blocks=blocks) as server:
        yield server


@pytest.fixture
def argv(prometheus: Prometheus, end_s: int) -> list[str]:
    url = f"http://{LOOPBACK}:{prometheus.port}"
    return ["diagnose", "--prometheus", url, "--at", str(end_s), "--fleet-queries-per-s", "1000"]


def test_what_was_planted_is_named_and_nothing_else(prometheus: Prometheus, end_s: int) -> None:
    fleet = fleets.fleet(REPLICAS)
    fleet_diagnosis = watched(prometheus, at_s=end_s)
    causes = told(fleet_diagnosis)
    for cause in (
        "kv_pressure",
        "replica_imbalance",
        "bad_node",
        "cold_replica",
        "target_down",
        "routing_dilution",
        "underused",
    ):
        assert sorted(causes.pop(cause)) == sorted(fleet.planted(cause)), cause
    assert sorted(causes.pop("mixed_tiers")) == sorted(fleet.planted("mixed_tiers"))
    assert causes == {}
    pressed = [e.replica for e in fleet_diagnosis.engines if e.stage and e.stage.level]
    assert pressed == fleet.planted("kv_pressure")
    unwell = [e.replica for e in fleet_diagnosis.engines if e.health not in ("ok", "info")]
    assert unwell == fleet.planted("kv_pressure")
    assert len(fleet_diagnosis.engines) == REPLICAS - 1, "one is down"


def test_a_tier_is_a_kind_of_gpu_by_dcgm(prometheus: Prometheus, end_s: int) -> None:
    fleet_diagnosis = watched(prometheus, at_s=end_s, selector='namespace="mixed"')
    assert [tier.tier for tier in fleet_diagnosis.tiers] == [
        "NVIDIA A100 80GB",
        "NVIDIA H100 80GB HBM3",
    ]


def test_the_load_is_counted_and_grows_only_by_the_samples(
    prometheus: Prometheus, end_s: int
) -> None:
    all_of_it = watched(prometheus, at_s=end_s).load
    part = watched(prometheus, at_s=end_s, selector='namespace="chat"').load
    assert part.queries < 70
    assert all_of_it.queries - part.queries < REPLICAS / 2, "several replicas in each query"
    assert all_of_it.seconds < IN_TIME_S


def test_the_command_and_its_document(argv: list[str], main: Main) -> None:
    ended = main(*argv, "--format", "json", "--docs-url", "https://wiki/k")
    assert ended.status == FOUND
    (document,) = ended.documents
    schema = schema_of("fleet")
    validator: Any = Draft202012Validator(schema)  # its stubs leave an argument untyped
    errors = [error.message for error in validator.iter_errors(document)]
    assert errors == []
    assert document["schema"] == "kneewatch.fleet/1"
    down = next(cause for cause in document["causes"] if cause["id"] == "target_down")
    assert down["docs"] == "https://wiki/k/causes/target_down"
    assert document["engines"] == REPLICAS - 1
    assert "queries" in ended.err


def test_the_command_for_people(argv: list[str], main: Main) -> None:
    shown = main(*argv)
    assert shown.status == FOUND
    assert shown.out.startswith("CRITICAL")
    assert "bad_node (warning" in shown.out
    assert "its peers' clock" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    assert "docs:" not in shown.out
    linked = main(*argv, "--docs-url", "https://wiki/k")
    assert "   docs: https://wiki/k/causes/bad_node" in linked.out
    marked = main(*argv, "--format", "markdown", "--docs-url", "https://wiki/k")
    assert "\n- docs: https://wiki/k/causes/bad_node\n" in marked.out


def test_a_part_of_the_fleet(argv: list[str], main: Main) -> None:
    ended = main(*argv, "--format", "json", "--selector", 'namespace="idle"')
    assert ended.status == 0
    assert ended.documents[0]["replicas"] == len(fleets.fleet(REPLICAS).planted("underused"))


def test_wrong_usage(argv: list[str], main: Main) -> None:
    for wrong, said in (
        (["diagnose"], "TARGET"),
        ([*argv, "localhost:8000"], "not both"),
        (["diagnose", "localhost:1", "--selector", 'a="b"'], "--prometheus"),
        ([*argv, "--selector", "up{"], "--selector"),
        ([*argv, "--fleet-label", "rack=x"], "no part 'rack'"),
        ([*argv, "--selector", 'namespace="none"'], "no series of vLLM servers"),
    ):
        ended = main(*wrong)
        assert ended.status == NO_DATA, wrong
        assert said in ended.err
        assert ended.out == ""


def test_nothing_there_is_an_error_and_not_health(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with running(require("prometheus")) as empty, pytest.raises(CollectError, match="no series"):
        watched(empty)
