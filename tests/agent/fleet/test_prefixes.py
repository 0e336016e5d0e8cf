"""Every prefix that a page may have is found in a metrics system as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kneewatch.agent.fleet.queries import QueryScope, running_requests
from kneewatch.agent.report.prometheus import queries
from kneewatch.collector.names.vllm_metrics import PREFIXES, VLLM_PREFIX
from kneewatch.collector.page import Layout, Page
from tests.agent.fleet.prometheus_fleet import watched
from tests.collector.oracle import Prometheus, Target, running
from tests.collector.oracle_targets import captured
from tests.programs import require

RECORDING = captured("sticky_two_replicas.r0")
AT_MS = RECORDING.scrapes[30][0]
WINDOW_S = 30.0


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """One recording under each prefix, which is also what its instance is called."""
    with running(require("prometheus")) as server:
        server.load(map(spelled, PREFIXES))
        yield server


def spelled(prefix: str) -> Target:
    """The recording under a prefix."""

    def renamed(page: Page) -> Page:
        series = [series._replace(name=series.name.replace(VLLM_PREFIX, prefix))
                  for series in page.layout.series]  # fmt: skip
        return Page(Layout(tuple(series), {}), page.values)

    return Target(prefix, [(t, page and renamed(page)) for t, page in RECORDING.scrapes[:40]])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_fleet_shows_the_same_under_every_prefix(prometheus: Prometheus, prefix: str) -> None:
    own, plain = (
        watched(
            prometheus, at_s=AT_MS / 1000, window_s=WINDOW_S, selector=f'instance="{instance}"'
        ).engines[0]
        for instance in (prefix, VLLM_PREFIX)
    )
    assert own.replica == prefix
    assert own.values == plain.values
    assert own.values["running_avg"]
    assert own.values["ttft_p99_s"]


def test_one_fleet_may_have_all_of_them(prometheus: Prometheus) -> None:
    fleet_diagnosis = watched(prometheus, at_s=AT_MS / 1000, window_s=WINDOW_S)
    assert {engine.replica for engine in fleet_diagnosis.engines} == set(PREFIXES)
    assert all(engine.values["running_avg"] for engine in fleet_diagnosis.engines)


def test_a_report_asks_for_all_of_them(prometheus: Prometheus) -> None:
    asking = QueryScope("", WINDOW_S, ("instance",))
    pages = queries.pages(asking, {"job": ""}, WINDOW_S)
    asked = {
        "presence": queries.presence(asking, WINDOW_S),
        "running": running_requests(asking, ("instance",)),
        **{key: queries.gauges(asking, key, WINDOW_S) for key in queries.GAUGES},
        "preempted": queries.watched(asking, queries.PREEMPTED, None, WINDOW_S),
        "late": queries.watched(asking, queries.LATE, 1.0, WINDOW_S),
        "configs": queries.configs(asking, WINDOW_S),
        "pages": f"count by (instance) (last_over_time({pages})) > 100",
    }
    for name, query in asked.items():
        instances = {series.labels["instance"] for series in prometheus.ask(query, AT_MS)}
        assert instances == set(PREFIXES), name
