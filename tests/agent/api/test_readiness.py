"""`/readyz`: reachable while a source is down, strict on request."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.agent.api.service import Service
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.reports.health import SourceState
from tests.agent.api.serving import WELL_STATE, asking, service_of, settings_of, state_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.diagnose.fleet.example_fleets import fleet, verdict
from tests.recordings import NO_TARGETS
from tests.reports.diagnoses import HEALTHY, NOW_S


def fleet_watch(moment: FleetMoment | None = None, **queries: Any) -> FleetWatch:  # noqa: ANN401
    """A fleet whose metrics system is never queried."""
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    watch.state = replace(watch.state, began_s=NOW_S - 900)
    saw(watch, moment, **queries)
    return watch


REFUSED = SourceState("page", NOW_S, success=False, duration_s=0.0, error="connection refused")
DOWN: dict[str, Any] = {
    "moment": FleetMoment.of(verdict(*fleet(3)), {}, NO_TARGETS, 30.0),
    "seen_s": NOW_S - 900,
    "failing": 5,
    "error": "refused",
}


@pytest.mark.parametrize(
    ("service", "status", "strict_status", "reason"),
    [
        pytest.param(service_of(), 200, 200, None, id="nothing is watched"),
        pytest.param(service_of(WELL_STATE), 200, 200, None, id="every target was judged"),
        pytest.param(service_of(names=["r9"]), 503, 503, "r9: not scraped yet", id="start"),
        pytest.param(
            service_of(WELL_STATE, names=["r9"]), 200, 503, "r9: not scraped yet", id="a new target"
        ),
        pytest.param(
            service_of(state_of("r1", HEALTHY, t_s=NOW_S - 600)),
            200, 503, "r1: no scrape for 10 min", id="a target is late",
        ),
        pytest.param(
            service_of(state_of("r1", HEALTHY, failing=6, sources=(REFUSED,))),
            200, 503, "r1: 6 scrapes in a row failed: connection refused", id="a target is down",
        ),
        pytest.param(
            service_of(fleet=fleet_watch(error="connection refused", failures=1)),
            503, 503,
            "fleet: no answer since the start at 2026-11-20 23:51:40 UTC: connection refused",
            id="Prometheus is down at the start",
        ),
        pytest.param(
            service_of(fleet=fleet_watch(**DOWN)),
            200, 503, "fleet: no answer since 2026-11-20 23:51:40 UTC: refused",
            id="Prometheus went down",
        ),
    ],
)  # fmt: skip
def test_a_source_that_fails_later_takes_only_strict_readiness(
    service: Service, status: int, strict_status: int, reason: str | None
) -> None:
    with asking(service) as client:
        default, strict = client.get("/readyz"), client.get("/readyz?strict")
        for no in ("false", "FALSE", "No", "0"):
            assert client.get(f"/readyz?strict={no}").status_code == status
    assert (default.status_code, strict.status_code) == (status, strict_status)
    assert default.json()["ready"] == (status == 200)
    assert strict.json()["ready"] == (strict_status == 200)
    reasons = [] if reason is None else [reason]
    assert default.json()["reasons"] == strict.json()["reasons"] == reasons


@pytest.mark.parametrize(
    ("value", "taken"), [("", True), ("TRUE", True), ("yes", True), ("0", True), ("maybe", False)]
)
def test_strict_is_read_as_the_schema_states(value: str, taken: bool) -> None:
    with asking(service_of()) as client:
        assert (client.get(f"/readyz?strict={value}").status_code == 200) is taken
        document = client.get("/openapi.json").json()
    (strict,) = document["paths"]["/readyz"]["get"]["parameters"]
    assert (re.search(strict["schema"]["pattern"], value) is not None) is taken


def test_unknown_since_stays_reachable_while_prometheus_is_down() -> None:
    with asking(service_of(fleet=fleet_watch(**DOWN))) as client:
        assert client.get("/readyz").status_code == 200
        answer = client.get("/api/v1/fleet?format=json").json()
    assert answer["health"] == "unknown"
    assert answer["lost"] == "no answer since 2026-11-20 23:51:40 UTC: refused"


def test_strict_is_a_boolean() -> None:
    with asking(service_of()) as client:
        refused = client.get("/readyz?strict=perhaps")
    assert refused.status_code == 422
    assert refused.json()["detail"] == "strict: must be true or false"


def test_triage_leads_to_the_fleet_where_no_target_is_watched() -> None:
    where = "no single target is configured, only a fleet: see /api/v1/fleet for its diagnosis"
    with asking(service_of(fleet=fleet_watch(**DOWN))) as client:
        assert where in client.get("/api/v1/triage").text
        assert client.get("/api/v1/triage?format=json").json()["notices"] == [where]
    with asking(service_of(WELL_STATE, fleet=fleet_watch(**DOWN))) as client:
        assert where not in client.get("/api/v1/triage").text
