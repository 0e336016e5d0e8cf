"""Two replicas of a real vLLM behind a router that turns in a circle, and behind a sticky one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.samples import Layout, Page, Series
from tests.agent.fleet.prometheus_fleet import told, watched
from tests.collector.oracle import Prometheus, Target, running
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
    assert fleet_diagnosis.observed.recorded == []


def test_before_the_second_scrape_nothing_is_known(prometheus: Prometheus) -> None:
    first_s = next(iter(CaptureReader(CAPTURES / f"{STICKY}.r0.jsonl.gz"))).t_s
    fleet_diagnosis = watched(prometheus, at_s=first_s + 0.5, selector=f'instance=~"{STICKY}.*"')
    assert fleet_diagnosis.health == "unknown"
    assert {engine.health for engine in fleet_diagnosis.engines} == {"unknown"}


def test_recorded_series_come_first_and_the_rest_is_raw() -> None:
    """The recording rules remember what one moment cannot show: stage 4 among it."""
    labels = (("engine", "0"), ("job", "vllm"), ("model_name", "m"))
    values = {
        "vllm:num_requests_running": 4.0,
        "vllm:kv_cache_usage_perc": 0.5,
        "kneewatch:running": 4.0,
        "kneewatch:running_avg": 7.0,
        "kneewatch:kv_usage_ratio": 0.6,
        "kneewatch:cascade_stage": 4.0,
        "kneewatch:cascade_severity": 3.0,
    }
    layout = Layout(tuple(Series(name, labels) for name in values), {})
    rows = [
        (1_795_000_000_000 + 15_000 * at, Page(layout, list(values.values()))) for at in range(9)
    ]
    with running(require("prometheus")) as server:
        server.load([Target("a:8000", rows), Target("b:8000", rows)])
        fleet_diagnosis = watched(server, at_s=1_795_000_120.0)
        assert {"running", "kv_usage_ratio", "cascade_stage"} <= set(
            fleet_diagnosis.observed.recorded
        )
        assert "waiting" in fleet_diagnosis.observed.raw
        assert "running" not in fleet_diagnosis.observed.raw
        assert [engine.stage for engine in fleet_diagnosis.engines] == [4, 4]
        assert fleet_diagnosis.engines[0].values["running_avg"] == 7.0
        assert fleet_diagnosis.health == "critical"
        server.load([Target("c:8000", [(t, raw_only(page)) for t, page in rows])])
        mixed = watched(server, at_s=1_795_000_120.0)
        assert mixed.observed.recorded == [], "the rules do not cover every replica"
        assert len(mixed.engines) == 3


def raw_only(page: Page) -> Page:
    kept = [(s, v) for s, v in page.samples() if s.name.startswith("vllm:")]
    return Page(Layout(tuple(s for s, _ in kept), {}), [v for _, v in kept])
