"""Several queries in one request: a real Prometheus answers each as it would by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kneewatch.agent.fleet.queries import AnswerLog, KeptAnswers, QueryMoment
from kneewatch.collector.prometheus.client import PrometheusSource
from tests.agent.fleet.prometheus_fleet import QUICK, observed, watched
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


def asked_by(kept: KeptAnswers, moment: QueryMoment, later_s: float, **queries: str) -> int:
    """How many requests these questions take so much later, about one engine."""
    before = moment.source.asked
    about = frozenset({("pod", "a")}) if "hour" in queries else frozenset[tuple[str, str]]()
    answers = kept.instants(replace(moment, at_s=moment.at_s + later_s), queries, about)
    assert answers.keys() == queries.keys()
    return moment.source.asked - before


def test_an_hour_is_asked_about_once_a_minute(moment: QueryMoment) -> None:
    kept, hour = KeptAnswers(), "avg_over_time(up[1h])"
    asked = [asked_by(kept, moment, at_s, hour=hour) for at_s in (0, 15, 59, 60, 75, 30)]
    assert asked == [1, 0, 0, 1, 0, 1]  # the last one is a moment before
    before = moment.source.asked
    assert kept.instants(replace(moment, at_s=moment.at_s + 31), {"hour": "up"}, {("pod", "new")})
    assert moment.source.asked == before + 1, "another engine"


def test_an_exporter_that_is_missing_is_looked_for_once_a_minute(moment: QueryMoment) -> None:
    kept = KeptAnswers()
    missing = [asked_by(kept, moment, at_s, gpus="up > 2", xids="up > 3") for at_s in (0, 15, 60)]
    assert missing == [1, 0, 1]
    present = [asked_by(kept, moment, at_s, xids="up > 2", targets="up") for at_s in (0, 15, 30)]
    assert present == [1, 1, 1]


def test_an_answer_that_failed_is_asked_for_again(moment: QueryMoment) -> None:
    kept = KeptAnswers()
    assert [asked_by(kept, moment, at_s, hour="up{") for at_s in (0, 15)] == [1, 1]


def test_the_age_of_a_process_is_that_of_its_page(server: Prometheus) -> None:
    at_s = float(int(time.time()))
    fleet = observed(server, at_s=at_s)
    ages_s = [values["age_s"] for values in fleet.values.values()]
    assert len(ages_s) == 3
    started_s = server.ask("process_start_time_seconds", int(1000 * at_s))
    assert sorted(ages_s) == sorted(at_s - each.value for each in started_s)
