"""A fleet on the triage page: its pools with their history, their replicas, past moments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace

from kneewatch.agent.api.app import make_app
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch, stored
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import Store
from kneewatch.diagnose.fleet.inventory import Gone, Why
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from tests.agent.api.serving import service_of, settings_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.diagnose.fleet.example_fleets import fleet, pod, verdict
from tests.reports.diagnoses import HEALTHY, NOW_S
from tests.waiting import until

POOL = "fleet/prod/m"
FULL = {"kv_usage_ratio": 0.99, "preemption_per_s": 2.0, "preemption_ratio_per_s": 0.25}
ILL = verdict(*fleet(3), (pod("hot"), {**FULL, "waiting": 7.0, "ttft_p99_s": 4.2}))
WELL = verdict(*fleet(4))
SMALL = fleet(1, model_name="small")


def at(fleet_verdict: FleetVerdict, t_s: float) -> FleetMoment:
    """The fleet at a moment, with what is known of its replica r1."""
    engine: Verdict = replace(HEALTHY, t_s=t_s)
    targets, then = Targets(ttft_p99_s=1.5), replace(fleet_verdict, t_s=t_s)
    return FleetMoment.of(then, {("prod/m", "r1"): [engine]}, targets, 30.0)


class Watched:
    """A daemon that watches a fleet, and its page."""

    def __init__(self, folder: Path) -> None:
        path = folder / "s.sqlite"
        self.store = Store.open(path, retention=Retention())
        self.watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
        self.reader = Reader(path)
        service = service_of(fleet=self.watch)
        self.service = replace(service, reader=self.reader, store=self.store)
        app = make_app(self.service)
        self.client = TestClient(app, base_url="http://127.0.0.1")

    def judge(self, fleet_verdict: FleetVerdict, t_s: float) -> None:
        """As a cycle of the watch does when the metrics system answered."""
        moment = at(fleet_verdict, t_s)
        saw(self.watch, moment, seen_s=t_s)
        for pool in moment.pools.values():
            self.store.put(stored(pool))

    def page(self, **parameters: str) -> str:
        """The page's HTML."""
        answer = self.client.get("/triage", params=parameters)
        assert answer.status_code == 200
        return answer.text


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    daemon = Watched(tmp_path)
    yield daemon
    daemon.reader.close()
    daemon.store.close(5.0)


def test_the_page_of_one_pool_has_its_causes_and_replicas(watched: Watched) -> None:
    watched.judge(ILL, NOW_S - 1)
    html = watched.page()
    assert "kv_pressure" in html
    assert "4 replicas: 1 critical, 3 ok" in html
    assert "Not judged" not in html
    assert html.index(">hot<") < html.index(">r0<"), "the worst first"
    assert "7 waiting; TTFT P99 up to 4.2 s (target 1.5 s)" in html
    assert "latency judged against targets: TTFT P99 1.5 s" in html
    assert "quiet times" not in html, "what changed is judged for a replica"
    assert watched.client.get("/", follow_redirects=False).headers["location"] == "triage"


def test_several_pools_are_rows_with_links(watched: Watched) -> None:
    watched.judge(verdict(*fleet(3), (pod("hot"), FULL), *SMALL), NOW_S - 1)
    html = watched.page()
    assert "target=fleet%2Fprod%2Fm" in html
    assert html.index("fleet/prod/m<") < html.index("fleet/prod/small<")
    assert "fleet/prod/small" not in watched.page(target=POOL)


def test_a_replica_has_the_page_of_a_server(watched: Watched) -> None:
    watched.judge(ILL, NOW_S - 1)
    html = watched.page(target=f"{POOL}/r1")
    assert "target=fleet%2Fprod%2Fm" in html, "back to its pool"
    answer = watched.client.get(f"/api/v1/triage/{POOL}/r1", params={"format": "json"})
    assert [each["target"] for each in answer.json()["targets"]] == [f"{POOL}/r1"]
    assert "No longer watched" in watched.page(target=f"{POOL}/gone")


def test_the_name_of_a_tier_in_a_message_leads_to_its_pool(watched: Watched) -> None:
    watched.judge(ILL, NOW_S - 1)
    assert "4 replicas" in watched.page(target=f"{POOL} on H100")


def test_what_was_said_then_is_shown_then(watched: Watched) -> None:
    watched.judge(ILL, NOW_S - 600)
    watched.judge(WELL, NOW_S - 300)
    watched.judge(WELL, NOW_S - 1)
    watched.store.flush()
    until(lambda: watched.store.stats().written >= 3)
    now = watched.page(since="15m")
    assert "Cause kv_pressure" in now, "the timeline has it"
    assert "CRITICAL" not in now.split("<h1")[0]
    then = watched.page(at="2026-11-20T23:56:42Z", target=POOL)
    assert "kv_pressure" in then
    assert "replicas at that moment are unknown" in then, "the metrics system is down"


def test_a_pool_that_is_no_longer_there_is_no_target(watched: Watched) -> None:
    watched.judge(ILL, NOW_S - 2)
    watched.judge(verdict(*SMALL), NOW_S - 1)
    assert [state.name for state in watched.service.states()] == ["fleet/prod/small"]
    assert watched.service.state(POOL) is None


def test_a_lost_metrics_system_is_said_and_nothing_is_ok(watched: Watched) -> None:
    watched.judge(WELL, NOW_S - 900)
    html = watched.page()
    assert "UNKNOWN" in html
    assert "No answer since" in html


def test_a_metrics_system_that_never_answered_is_said_by_every_form(watched: Watched) -> None:
    before = watched.page()
    assert "UNKNOWN" in before
    assert "not been queried yet" in before
    watched.watch.cycle()
    why = "no answer since the start at "
    for html in (watched.page(), watched.page(target="fleet")):
        assert "UNKNOWN" in html
        assert "Metrics system does not answer" in html
        assert "Check the metrics system" in html
        assert why in html
        assert "No targets" not in html
    text = watched.client.get("/api/v1/triage", params={"format": "text"}).text
    assert "1 unknown" in text
    assert why in " ".join(text.split())
    document = watched.client.get("/api/v1/triage", params={"format": "json"}).json()
    (fleet_verdict,) = document["targets"]
    assert (fleet_verdict["target"], fleet_verdict["health"]) == ("fleet", "unknown")
    assert fleet_verdict["causes"][0]["id"] == "metrics_system_down"
    assert why in watched.client.get("/readyz").text
    assert why in watched.client.get("/api/v1/fleet", params={"format": "json"}).text
    watched.judge(WELL, NOW_S - 1)
    assert "fleet/prod/m" in watched.page()
    assert "Metrics system" not in watched.page()


def test_a_replica_that_is_gone_is_listed_without_a_link(watched: Watched) -> None:
    gone = [Gone("away", "prod/m", Why.DOWN)]
    watched.judge(verdict(*fleet(2), gone=gone), NOW_S - 1)
    html = watched.page()
    assert "away" in html
    assert f"{POOL}/away".replace("/", "%2F") not in html


def test_a_browser_that_asks_for_the_fleet_is_sent_to_the_page(watched: Watched) -> None:
    watched.judge(WELL, NOW_S - 1)
    answer = watched.client.get(
        "/api/v1/fleet", headers={"accept": "text/html"}, follow_redirects=False
    )
    assert (answer.status_code, answer.headers["location"]) == (307, "../../triage")


def test_pools_are_stored_as_targets() -> None:
    (pool,) = at(ILL, NOW_S).pools.values()
    cycle = stored(pool)
    assert (cycle.target, cycle.t_s) == (POOL, NOW_S)
    assert [engine.diagnosis.causes[0].id for engine in cycle.engines] == ["kv_pressure"]
