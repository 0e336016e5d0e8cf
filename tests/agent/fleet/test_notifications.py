"""Receivers are told of a fleet as of any target: begins, worse, ended; unknown is not over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from kneewatch.agent.fleet.watch import SYSTEM_DOWN, FleetWatch, lost_state, states_of
from kneewatch.agent.notify.alert_state import AlertState
from kneewatch.agent.notify.events import Event, message
from kneewatch.agent.notify.message import text, webhook
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.notify.receivers import receivers
from kneewatch.diagnose.fleet.inventory import Gone, Why
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from tests.agent.api.serving import settings_of
from tests.agent.notify.factories import receiver, settings
from tests.diagnose.fleet.example_fleets import fleet, pod, verdict

STEP_S, HOLD_S = 60.0, 120.0
FULL = {
    "kv_usage_ratio": 0.99,
    "kv_usage_avg_ratio": 0.98,
    "preemption_per_s": 0.5,
    "preemption_ratio_per_s": 0.06,
}
QUEUE = {"waiting": 20.0, "waiting_by_capacity": 20.0}
HOOK = 'kind = "webhook"\nurl = "http://127.0.0.1:1/"\nseverity = "warning"\n'
DOWN = (Gone("r1", "prod", Why.DOWN),)


@pytest.fixture
def ledger(tmp_path: Path) -> AlertState:
    return AlertState(receiver(tmp_path, f"{HOOK}hold_s = {HOLD_S}"))


def later(fleet_diagnosis: FleetVerdict, steps: int) -> FleetVerdict:
    return replace(fleet_diagnosis, t_s=fleet_diagnosis.t_s + STEP_S * steps)


def told(ledger: AlertState, *answers: FleetVerdict) -> list[Event]:
    """What answers a minute apart give to tell; all of it arrives."""
    events: list[Event] = []
    for at, answer in enumerate(answers):
        for state in states_of(later(answer, at), interval_s=STEP_S):
            news = ledger.update(state)
            for event in news:
                assert ledger.sent(event)
                ledger.delivered(event)
            events += news
    return events


def words(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(event.kind, event.key.target, event.key.id) for event in events]


def ill(**more: float) -> FleetVerdict:
    return verdict(*fleet(3), (pod("hot"), {**FULL, **more}))


WELL = verdict(*fleet(3), (pod("hot"), {}))


def test_a_replicas_cascade_begins_gets_worse_and_ends_once_for_its_pool(
    ledger: AlertState,
) -> None:
    worse = ill(preemption_per_s=2.0, preemption_ratio_per_s=0.25)
    events = told(ledger, WELL, *[ill()] * 2, *[worse] * 2, *[WELL] * 5)
    assert words(events) == [
        (kind, "fleet/prod/m", "kv_pressure") for kind in ("began", "worse", "ended")
    ]
    said = text(message(events[:1], receiver="hook", base="https://k.example"))
    assert "1 of 4 engines, worst hot: KV cache full" in said
    assert "https://k.example/triage?target=fleet%2Fprod%2Fm" in said


def test_a_cause_across_replicas_is_told_once(ledger: AlertState) -> None:
    down = verdict(*fleet(3), gone=DOWN)
    events = told(ledger, down, down, down)
    assert words(events) == [("began", "fleet/prod", "target_down")]
    json.dumps(to_builtins(webhook(message(events, receiver="hook", base=""))), allow_nan=False)


def test_what_a_partial_answer_lacks_is_not_over(ledger: AlertState) -> None:
    partial = verdict(*fleet(3), (pod("hot"), {}), warnings=["a shard is down"])
    assert "ended" not in {event.kind for event in told(ledger, ill(**QUEUE), *[partial] * 6)}


def test_a_metrics_system_that_is_lost_is_told_and_ends_nothing_else(ledger: AlertState) -> None:
    t_s = WELL.t_s
    assert told(ledger, *[ill(**QUEUE)] * 3)
    lost = [
        lost_state("http://p", "refused", t_s=t_s + STEP_S * at, interval_s=STEP_S)
        for at in range(3, 10)
    ]
    events = [event for state in lost for event in ledger.update(state)]
    assert words(events) == [("began", "fleet", SYSTEM_DOWN)]
    said = message(events, receiver="hook", base="")
    assert "refused" in text(said)
    json.dumps(to_builtins(webhook(said)), allow_nan=False)
    assert ledger.sent(events[0])
    back = [later(ill(**QUEUE), at) for at in range(10, 14)]
    ended = [
        e for answer in back for s in states_of(answer, interval_s=1) for e in ledger.update(s)
    ]
    assert words(ended) == [("ended", "fleet", SYSTEM_DOWN)]


def test_the_job_names_what_is_told_and_keeps_it_while_an_answer_is_partial(
    tmp_path: Path,
) -> None:
    state_file = tmp_path / "store.notify.json"
    old = {"target": "fleet/prod/m/r9", "model": "m", "engine": "0", "id": "kv_pressure"}
    row = {**old, "severity": "critical", "stage": 3, "since": 1.0, "told": 1.0, "ended": None}
    configured = receivers(settings(tmp_path, f"[[notify]]\n{HOOK}"))
    kept = {"troubles": [{**row, "how": ""}], "heard": []}
    state_file.write_text(
        json.dumps({"schema": "kneewatch.notify/1", "receivers": {configured[0].name: kept}})
    )
    notifier = Notifier(configured, state_file=state_file)
    changes: list[frozenset[str]] = []
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    watch.notify_through(notifier, lambda: changes.append(watch.names))
    try:
        assert watch.names == {"fleet/prod/m/r9"}, "told before the restart"
        watch.cycle()
        failing = watch.state.watching.failing
        assert (changes, failing) == ([], 1), "an answer that is missing names nobody"
    finally:
        notifier.close(0.2)
