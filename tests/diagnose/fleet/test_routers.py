"""Routers in front of a pool: what they do to engines that could serve."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kneewatch.collector.signals.routers import ROUTERS, router_queries
from kneewatch.diagnose.fleet.routers import RouterState, routers_of
from tests.diagnose.fleet.example_fleets import Row, pod, verdict
from tests.programs import require

PLACE = {"namespace": "prod"}
EPP, OLD_EPP, STACK, RAY, RUST, SMG, DYNAMO = map(str, range(7))
IDLE: Mapping[str, float] = {"waiting": 0.0, "kv_usage_ratio": 0.2, "arrival_per_s": 0.0}
BUSY: Mapping[str, float] = {"waiting": 6.0, "kv_usage_ratio": 0.9}
FREE: Mapping[str, float] = {"waiting": 0.0, "kv_usage_ratio": 0.2, "arrival_per_s": 1.0}


def engines(*values: Mapping[str, float]) -> list[Row]:
    """Engines of one namespace."""
    return [(pod(f"r{at}"), own) for at, own in enumerate(values)]


def router(at: str, **gauges: float) -> list[RouterState]:
    """A router that shows these gauges."""
    return routers_of(
        {f"router_{key}": [({**PLACE, "router": at}, value)] for key, value in gauges.items()}
    )


def picking(at: str, label: str, picks: Mapping[str, float]) -> list[RouterState]:
    """A router that picked endpoints so often in five minutes."""
    rows = [({**PLACE, "router": at, "engine": name}, value) for name, value in picks.items()]
    return routers_of({"router_ready": [({**PLACE, "router": at}, 3.0)], "router_picks": rows})


def with_breaker(at: str, worker: str) -> list[RouterState]:
    """A router whose breaker for this worker is open."""
    labels = {**PLACE, "router": at, "engine": worker}
    return routers_of({"router_breaker": [(labels, 1.0)]})


POD_PICKS = {"r0": 900.0, "r1": 100.0, "r2": 100.0}
EVEN_PICKS = dict.fromkeys(POD_PICKS, 300.0)
URL_PICKS = {f"http://r{at}:8000": value for at, value in enumerate(POD_PICKS.values())}
ONE_HOT = engines(BUSY, FREE, FREE)


@pytest.mark.parametrize(
    ("rows", "routers", "severity", "says"),
    [
        pytest.param(engines(IDLE), router(EPP, ready=0.0), "critical", "no ready endpoint",
                     id="no endpoint"),
        pytest.param(engines(IDLE), router(OLD_EPP, ready=0.0), "critical", "inference extension",
                     id="no endpoint, old names"),
        pytest.param(engines(FREE), router(EPP, ready=0.0), None, "",
                     id="engines get requests: another router serves"),
        pytest.param(engines(IDLE), router(EPP, ready=2.0), None, "", id="endpoints are ready"),
        pytest.param(engines(FREE, FREE), router(EPP, queue=7.0), "warning", "holds 7 requests",
                     id="a queue before idle engines"),
        pytest.param(engines(FREE), router(RAY, queue=7.0), "warning", "Ray Serve",
                     id="a queue of Ray's before an idle engine"),
        pytest.param(engines(FREE), router(EPP, queue=1.0), None, "", id="one request in passing"),
        pytest.param(engines(FREE, BUSY), router(EPP, queue=7.0), None, "",
                     id="an engine is full: the router holds back rightly"),
        pytest.param(engines({**FREE, "waiting": float("nan")}), router(EPP, queue=7.0), None, "",
                     id="whether the engine has a queue is unknown"),
        pytest.param(engines(FREE), router(EPP, errors=3.0), "warning", "stale data",
                     id="errors in each minute"),
        pytest.param(engines(FREE), router(EPP, errors=0.0), None, "", id="a minute without"),
        pytest.param(ONE_HOT, picking(EPP, "endpoint_name", POD_PICKS), "warning",
                     "picks r0 9.0x as often", id="one engine gets most and queues"),
        pytest.param(ONE_HOT, picking(STACK, "server", URL_PICKS), "warning", "picks r0 9.0x",
                     id="endpoints by address"),
        pytest.param(engines(FREE, FREE), with_breaker(RUST, "http://r1:8000"), "warning",
                     "sent r1 nothing", id="a breaker is open on an engine that answers"),
        pytest.param(engines(FREE), with_breaker(SMG, "http://gone:8000"), None, "",
                     id="a breaker of a worker that is no engine here"),
        pytest.param(engines(FREE, IDLE), router(EPP, stale=2.0), "warning", "too old",
                     id="stale backpressure before idle engines"),
        pytest.param(engines(FREE, BUSY), router(EPP, stale=2.0), None, "",
                     id="stale endpoints, and an engine is full"),
        pytest.param(engines(FREE), router(DYNAMO, rejected=40.0), "warning", "rejected 40",
                     id="rejected before idle engines"),
        pytest.param(engines(FREE), router(DYNAMO, rejected=2.0), None, "", id="few rejections"),
        pytest.param(engines(BUSY), router(SMG, rejected=40.0), None, "",
                     id="rejected while engines are full"),
        pytest.param(engines(FREE), router(DYNAMO, queue=9.0), "warning", "holds 9 requests",
                     id="Dynamo's queue before an idle engine"),
        pytest.param(engines(FREE, FREE, FREE), picking(EPP, "endpoint_name", POD_PICKS), None, "",
                     id="prefix affinity without a queue"),
        pytest.param(ONE_HOT, picking(EPP, "endpoint_name", EVEN_PICKS), None, "", id="even picks"),
    ],
)  # fmt: skip
def test_a_router_is_blamed_where_engines_could_serve(
    rows: list[Row], routers: list[RouterState], severity: str | None, says: str
) -> None:
    by_id = {each.id: each for each in verdict(*rows, routers=routers).causes}
    cause = by_id.get("router_fault")
    assert (None if cause is None else cause.severity.word) == severity
    assert cause is None or says in cause.summary


def test_engines_of_another_namespace_are_not_the_routers() -> None:
    elsewhere = [(pod("r0") | {"namespace": "other"}, IDLE)]
    assert not verdict(*elsewhere, routers=router(EPP, ready=0.0)).causes


def test_engines_elsewhere_are_the_routers_if_it_names_their_addresses() -> None:
    labels = pod("r0") | {"namespace": "other", "instance": "r0:8000"}
    assert "router_fault" in {
        cause.id
        for cause in verdict((labels, FREE), routers=with_breaker(RUST, "http://r0:8000")).causes
    }


def test_an_engine_that_a_router_never_picks_is_compared_too() -> None:
    workers = {f"http://r{at}:8000": 1.0 for at in range(3)}
    rows = [({**PLACE, "router": RUST, "engine": name}, up) for name, up in workers.items()]
    picks = ({**PLACE, "router": RUST, "engine": "http://r0:8000"}, 600.0)
    states = routers_of({"router_health": rows, "router_picks": [picks]})
    (cause,) = verdict(*ONE_HOT, routers=states).causes[:1]
    assert "picks r0 600.0x as often" in cause.summary


def test_first_tokens_that_wait_before_the_engines_are_told() -> None:
    rows = engines({**FREE, "ttft_mean_s": 0.2}, {**FREE, "ttft_mean_s": 0.4})
    (cause,) = verdict(*rows, routers=router(DYNAMO, ttft=3.3)).causes
    assert "First tokens wait 3.0 s before the engines: their mean TTFT is 300 ms" in cause.summary
    assert not verdict(*rows, routers=router(DYNAMO, ttft=0.9)).causes


def test_several_routers_of_one_namespace_are_each_judged() -> None:
    states = (*router(EPP, queue=0.0), *router(DYNAMO, queue=9.0))
    assert len(routers_of({"router_queue": [
        ({**PLACE, "router": EPP}, 0.0), ({**PLACE, "router": DYNAMO}, 9.0)
    ]})) == 2  # fmt: skip
    assert "Dynamo" in verdict(*engines(FREE), routers=states).causes[0].summary


def test_of_two_names_of_one_router_the_newer_counts() -> None:
    rows = [({**PLACE, "router": at}, value) for at, value in ((OLD_EPP, 0.0), (EPP, 3.0))]
    (state,) = routers_of({"router_ready": rows})
    assert (state.router, state.value("ready")) == (ROUTERS[0], 3.0)


def test_the_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": key, "expr": query} for key, query in router_queries().items()
    ]  # JSON is YAML
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "routers", "rules": rules}]}))
    command = [require("promtool"), "check", "rules", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_fault_of_a_router_names_its_setting() -> None:
    for row in ROUTERS:
        asked = ("queue", "health", "breaker", "stale", "rejected", "own")
        named = {
            question
            for question in asked
            if question in (*row.metrics, *(["own"] if row.own else []))
        }
        assert row.levers.keys() == named | ({"routing", "eviction"} if row.reuse else set())
        assert ("stale" in row.metrics) == ("saturation" in row.metrics)
