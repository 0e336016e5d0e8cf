"""How the daemon's watching of a fleet stands: what is old or followed by a failure is not told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.metrics import exposition
from kneewatch.agent.api.service import source_problems
from kneewatch.agent.fleet import watch as of_watch
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.fleet.inventory import Observed
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from tests.agent.api.serving import Asker, service_of, settings_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.diagnose.fleet.example_fleets import fleet, shaped, verdict
from tests.recordings import NO_TARGETS
from tests.reports.diagnoses import NOW_S


@pytest.fixture
def watch() -> FleetWatch:
    """One whose metrics system is never asked; its newest answer is ten seconds old."""
    fleet_watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    moment = FleetMoment.of(verdict(*fleet(3)), {}, NO_TARGETS, 30.0)
    saw(fleet_watch, moment, seen_s=NOW_S - 10, cycles=1)
    return fleet_watch


def test_a_fresh_answer_is_told(watch: FleetWatch) -> None:
    diagnosis = watch.state.current(NOW_S)
    assert diagnosis is not None
    assert (diagnosis.health, diagnosis.lost) == ("ok", None)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"seen_s": NOW_S - 200}, id="three intervals old"),
        pytest.param({"failing": 1, "error": "503"}, id="a failure since"),
    ],
)
def test_what_was_seen_before_says_nothing_of_now(
    watch: FleetWatch, changes: dict[str, Any]
) -> None:
    saw(watch, **changes)
    diagnosis = watch.state.current(NOW_S)
    assert diagnosis is not None
    assert (diagnosis.health, diagnosis.partial) == ("unknown", False)
    assert diagnosis.lost is not None
    assert diagnosis.lost.startswith("no answer since ")
    service = service_of(fleet=watch)
    assert any(diagnosis.lost in why for why in source_problems(service))
    families = {family.name
                for family in text_string_to_metric_families(exposition(service).decode())
                if family.samples}  # fmt: skip
    assert "kneewatch_fleet_health" in families
    assert not families & {"kneewatch_fleet_cause", "kneewatch_fleet_engines",
                           "kneewatch_recommended_replicas"}  # fmt: skip


def test_a_bug_makes_it_unknown_as_well(watch: FleetWatch) -> None:
    after_s = watch.crashed(ZeroDivisionError())
    assert after_s is not None
    diagnosis = watch.state.current(NOW_S)
    assert diagnosis is not None
    assert diagnosis.health == "unknown"
    assert "ZeroDivisionError" in (diagnosis.lost or "")


def test_it_is_asked_again_later_each_time(watch: FleetWatch) -> None:
    first_s = watch.cycle()
    saw(watch, failing=9)
    later_s = watch.cycle()
    assert first_s is not None
    assert later_s is not None
    assert first_s <= 10 < 40 < later_s <= 60
    assert watch.state.watching.failing == 10
    assert "refused" in watch.state.watching.error


def test_settings_that_are_wrong_change_nothing(watch: FleetWatch) -> None:
    with pytest.raises(SettingsError, match=r"fleet\.labels"):
        watch.adopt(settings_of(fleet__labels={"planet": "x"}))


def test_a_reload_of_unchanged_settings_keeps_what_is_going_on(
    watch: FleetWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[object] = []

    def observed(_source: object, _config: object, _engines: object) -> Observed:
        return Observed(NOW_S, "p", 60.0, shaped([]))

    def diagnosed(_observed: object, _profile: object, comparisons: object) -> FleetVerdict:
        used.append(comparisons)
        return verdict(*fleet(3))

    monkeypatch.setattr(of_watch, "observe", observed)
    monkeypatch.setattr(of_watch, "diagnose", diagnosed)
    for settings in (settings_of(), settings_of(window_s=20.0)):
        watch.cycle()
        watch.adopt(settings)
    watch.cycle()
    first, reloaded, scaled = used
    assert first is reloaded
    assert scaled is not first


def test_the_document_of_the_api_describes_the_route(watch: FleetWatch) -> None:
    app = make_app(service_of(fleet=watch))
    document = app.openapi()
    operation = document["paths"]["/api/v1/fleet"]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    with asyncio.Runner() as runner:
        asker = Asker(app, runner)
        answer = asker.get("/api/v1/fleet?format=json")
        page = asker.get("/triage")
        assert asker.get("/api/v1/fleet?format=xml").status_code == 422
    validator: Any = Draft202012Validator({**schema, "components": document["components"]})
    validator.validate(answer.json())
    assert page.status_code == 200


def test_without_a_fleet_there_is_no_such_route() -> None:
    assert "/api/v1/fleet" not in make_app(service_of()).openapi()["paths"]
