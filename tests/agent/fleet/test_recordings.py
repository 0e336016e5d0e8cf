"""Two replicas of a real vLLM behind a router that turns in a circle, and behind a sticky one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kneewatch.collector.captures.capture import CaptureReader
from tests.agent.fleet.prometheus_fleet import told, watched
from tests.collector.oracle import Prometheus, running
from tests.collector.oracle_targets import captured
from tests.programs import require
from tests.recordings import CAPTURES

ROUND_ROBIN, STICKY = "round_robin_two_replicas", "sticky_two_replicas"
WINDOW_S = 30.0


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """A real Prometheus with both recordings; their names keep them apart."""
    with running(require("prometheus")) as server:
        server.load([captured(f"{name}.r{at}") for name in (ROUND_ROBIN, STICKY) for at in (0, 1)])
        yield server


def moments(name: str) -> list[float]:
    phases = json.loads((CAPTURES / "labels.json").read_text())[name]["phases"]
    steady = next(phase for phase in phases if phase["name"] == "steady")
    return [steady["from_t"] + WINDOW_S + 2 + 10 * at for at in range(4)]


@pytest.mark.parametrize("at", range(4))
def test_round_robin_dilutes(prometheus: Prometheus, at: int) -> None:
    selector = f'instance=~"{ROUND_ROBIN}.*"'
    fleet_diagnosis = watched(
        prometheus, at_s=moments(ROUND_ROBIN)[at], window_s=WINDOW_S, selector=selector
    )
    assert told(fleet_diagnosis) == {"routing_dilution": (f"{ROUND_ROBIN}.r0", f"{ROUND_ROBIN}.r1")}
    assert fleet_diagnosis.health == "warning"


@pytest.mark.parametrize("at", range(4))
def test_sticky_does_not(prometheus: Prometheus, at: int) -> None:
    selector = f'instance=~"{STICKY}.*"'
    fleet_diagnosis = watched(
        prometheus, at_s=moments(STICKY)[at], window_s=WINDOW_S, selector=selector
    )
    assert told(fleet_diagnosis) == {}
    assert fleet_diagnosis.health == "ok"


def test_before_the_second_scrape_nothing_is_known(prometheus: Prometheus) -> None:
    first_s = next(iter(CaptureReader(CAPTURES / f"{STICKY}.r0.jsonl.gz"))).t_s
    fleet_diagnosis = watched(prometheus, at_s=first_s + 0.5, selector=f'instance=~"{STICKY}.*"')
    assert fleet_diagnosis.health == "unknown"
    assert {engine.health for engine in fleet_diagnosis.engines} == {"unknown"}
