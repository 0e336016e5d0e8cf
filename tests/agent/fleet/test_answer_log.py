"""Several queries in one request: a real Prometheus answers each as it would by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kneewatch.agent.fleet.queries import AnswerLog, QueryMoment
from kneewatch.collector.prometheus.client import PrometheusSource
from tests.agent.fleet.prometheus_fleet import QUICK, watched
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.living_fleet import LivingFleet
from tests.programs import require

QUERIES = {
    "targets": "up",
    "running": "sum by (pod) (vllm:num_requests_running)",
    "nothing": "up > 2",
    "a number": "vector(7)",
    "either": "up > 2 or up",
    "times": "time() - up * 0",
    "tokens": "rate(vllm:generation_tokens_total[2m])",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Prometheus]:
    fleet = LivingFleet(scrape_s=15, epoch_s=int(time.time()) - 600)
    fleet.pool("Deployment", "chat", 3)
    with running(require("prometheus")) as started:
        fleet.load(started, from_s=0, to_s=600)
        yield started


@pytest.fixture
def moment(server: Prometheus) -> Iterator[QueryMoment]:
    with PrometheusSource(f"http://{LOOPBACK}:{server.port}", QUICK) as source:
        yield QueryMoment(source, AnswerLog(), float(int(time.time())))


def test_queries_share_requests_and_are_answered_as_alone(moment: QueryMoment) -> None:
    together = moment.instants(QUERIES)
    assert moment.source.asked == 2
    for key, query in QUERIES.items():
        alone = moment.instants({key: query})[key]
        assert {(tuple(sorted(s.labels.items())), s.value) for s in together[key]} == {
            (tuple(sorted(s.labels.items())), s.value) for s in alone
        }, key
    assert len(together["targets"]) == 4
    assert together["nothing"] == []


def test_a_query_that_fails_takes_no_other_with_it(moment: QueryMoment) -> None:
    answers = moment.instants({"wrong": "up{", **QUERIES})
    assert moment.log.failed.keys() == {"wrong"}
    assert answers["wrong"] == ()
    assert len(answers["targets"]) == 4


def test_a_diagnosis_needs_few_requests(server: Prometheus) -> None:
    fleet_diagnosis = watched(server)
    assert fleet_diagnosis.failed == {}
    assert fleet_diagnosis.load.queries <= 40
