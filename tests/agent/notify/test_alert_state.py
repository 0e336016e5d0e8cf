"""What is told and when, by states alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.agent.notify.alert_state import ACTIVE_MAX, AlertState
from kneewatch.agent.notify.events import Event, Key, message, problems
from kneewatch.agent.notify.message import text
from kneewatch.agent.notify.receivers import Receiver, receivers
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.target_state import TargetState
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.recommend.advice import FlagChange
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.cascade import staged
from kneewatch.rules.rule import Severity
from tests.agent.notify.factories import (
    FP8,
    cause,
    healthy,
    receiver,
    settings,
    sick,
    state,
    unreadable,
)
from tests.recordings import CAPTURES
from tests.reports.diagnoses import NOW_S

HOLD_S = 20.0


@pytest.fixture
def who(tmp_path: Path) -> Receiver:
    text = 'kind = "webhook"\nurl = "http://127.0.0.1/"\nseverity = "warning"\n'
    return receiver(tmp_path, f"{text}hold_s = {HOLD_S}")


def told(ledger: AlertState, *states: TargetState) -> list[tuple[str, str]]:
    """What each state gives to tell; all of it arrives."""
    events: list[Event] = []
    for target_state in states:
        news = ledger.update(target_state)
        for event in news:
            assert ledger.sent(event)
            ledger.delivered(event)
        events += news
    return [(event.kind, event.key.id) for event in events]


def test_a_stage_and_its_cause_are_one_trouble() -> None:
    troubles = problems(state(sick()), Severity.WARNING)
    assert [(key.id, trouble.stage, trouble.severity) for key, trouble in troubles.items()] == [
        ("kv_pressure", 3, Severity.CRITICAL)
    ]
    alone = problems(state(sick(causes=[])), Severity.WARNING)
    assert [(key.id, trouble.cause) for key, trouble in alone.items()] == [("kv_pressure", None)]


def test_a_stage_that_harms_nobody_is_no_trouble() -> None:
    filling = healthy(stage=staged(1, NOW_S, Severity.INFO, 60.0, ()))
    assert problems(state(filling), Severity.WARNING) == {}


def test_the_page_that_cannot_be_read_is_one_trouble_of_the_target() -> None:
    troubles = problems(state(unreadable(), unreadable(engine="1")), Severity.WARNING)
    assert list(troubles) == [Key("r0", "", "", "target_down")]


def test_what_cannot_be_read_is_not_over(who: Receiver) -> None:
    ledger = AlertState(who)
    assert told(ledger, state(sick())) == [("began", "kv_pressure")]
    blind = [state(unreadable(), after_s=5.0 * n) for n in range(1, 20)]
    assert told(ledger, *blind) == [("began", "target_down")]
    # Two states without it are over the hold time only from when the page can be read again.
    assert told(ledger, state(healthy(), after_s=100), state(healthy(), after_s=110)) == []
    assert told(ledger, state(healthy(), after_s=121)) == [
        ("ended", "target_down"),
        ("ended", "kv_pressure"),
    ]


@pytest.mark.parametrize(
    "blind",
    [
        pytest.param(healthy(health="unknown"), id="too few scrapes"),
        pytest.param(
            healthy(causes=[cause("metrics_missing", Severity.WARNING)]), id="core metrics lack"
        ),
        pytest.param(
            healthy(causes=[replace(cause("engine_stalled"), explains=("kv_pressure",))]),
            id="a graver cause explains it",
        ),
    ],
)
def test_what_is_not_judged_is_not_over(who: Receiver, blind: object) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick()))
    states = [state(blind, after_s=5.0 * n) for n in range(1, 40)]  # type: ignore[arg-type]
    assert ("ended", "kv_pressure") not in told(ledger, *states)


def test_what_became_milder_is_not_over(tmp_path: Path) -> None:
    """A receiver of critical problems gets no end while the problem is a warning."""
    ledger = AlertState(receiver(tmp_path, f'kind = "slack"\nurl = "http://h/"\nhold_s = {HOLD_S}'))
    assert told(ledger, state(sick())) == [("began", "kv_pressure")]
    milder = [state(sick(Severity.WARNING, 2), after_s=5.0 * n) for n in range(1, 20)]
    assert told(ledger, *milder, state(sick(), after_s=100)) == []
    over = [state(healthy(), after_s=110.0 + 10 * n) for n in range(3)]
    assert told(ledger, *over) == [("ended", "kv_pressure")]


def test_the_end_says_that_the_advice_changed_and_shows_what_was_told(who: Receiver) -> None:
    ledger, larger = AlertState(who), FlagChange("--num-gpu-blocks-override", 160, 960)
    first = replace(FP8, changes=(replace(larger, after=288),))
    told(ledger, state(sick(recommendations=(first,))))
    told(ledger, state(sick(recommendations=(replace(FP8, changes=(larger,)),)), after_s=20))
    told(ledger, state(healthy(), after_s=30), state(healthy(), after_s=40))
    over = ledger.update(state(healthy(), after_s=51))
    assert [event.shown_s for event in over] == [NOW_S]
    assert (
        "  advice changed: --num-gpu-blocks-override 960. "
        "The message before advised --num-gpu-blocks-override 288."
    ) in text(message(over, receiver="x", base="")).splitlines()


def test_a_trouble_that_still_develops_is_told_once(who: Receiver) -> None:
    warned, worse = sick(Severity.WARNING, 2), sick(Severity.CRITICAL, 4)
    ledger = AlertState(who)
    assert told(ledger, state(warned), state(warned, after_s=10)) == []
    assert told(ledger, state(worse, after_s=15)) == [("began", "kv_pressure")]
    assert told(ledger, state(worse, after_s=80)) == []


def test_a_warning_that_stays_one_is_told_after_a_minute(who: Receiver) -> None:
    warned, worse = sick(Severity.WARNING, 2), sick(Severity.CRITICAL, 4)
    ledger = AlertState(who)
    assert told(ledger, state(warned)) == []
    assert told(ledger, state(warned, after_s=25)) == [("began", "kv_pressure")]
    assert told(ledger, state(worse, after_s=30), state(worse, after_s=80)) == []
    assert told(ledger, state(worse, after_s=85)) == [("worse", "kv_pressure")]
    assert told(ledger, state(worse, after_s=150)) == []


def test_no_page_for_what_is_ending(who: Receiver) -> None:
    """A problem may get worse within a minute of the first page, and be gone after it."""

    def slow(severity: Severity, after_s: float, seen_s: float | None = None) -> TargetState:
        slower = cause("slow_steps", severity)
        seen = NOW_S + (after_s if seen_s is None else seen_s)
        return state(healthy(causes=[replace(slower, seen_s=seen)]), after_s=after_s)

    ledger = AlertState(who)
    assert told(ledger, slow(Severity.WARNING, 0), slow(Severity.WARNING, 25)) == [
        ("began", "slow_steps")
    ]
    ending = [slow(Severity.CRITICAL, after_s, 50) for after_s in (75, 90, 105)]
    assert told(ledger, slow(Severity.CRITICAL, 50), *ending) == []
    assert told(ledger, slow(Severity.CRITICAL, 110)) == [("worse", "slow_steps")]


def test_another_cause_that_the_filling_window_shows_is_told_alone(who: Receiver) -> None:
    """At first only the slowest tokens of a window are slow, as behind long prefills."""
    tail = cause("prefill_interference", Severity.WARNING, since_s=NOW_S)
    whole = cause("slow_steps", Severity.WARNING, since_s=NOW_S + 30)
    ledger = AlertState(who)
    tails = [state(healthy(causes=[tail]), after_s=after_s) for after_s in (0, 15)]
    assert told(ledger, *tails) == []
    assert told(ledger, state(healthy(causes=[whole]), after_s=30)) == [("began", "slow_steps")]
    ledger = AlertState(who)
    assert told(ledger, *tails) == []
    stays = state(healthy(causes=[tail]), after_s=60)
    assert told(ledger, stays) == [("began", "prefill_interference")]


def test_what_is_back_after_an_outage_is_in_the_message_of_its_end(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick()), state(unreadable(), after_s=5), state(healthy(), after_s=40))
    ended = [event for n in range(45, 70, 5) for event in ledger.update(state(sick(), after_s=n))]
    assert [(event.kind, event.key.id, event.left) for event in ended] == [
        ("ended", "target_down", ("kv_pressure",))
    ]
    assert "still active: kv_pressure" in text(message(ended, receiver="ops", base=""))


def test_a_warning_that_is_over_at_once_is_not_told(who: Receiver) -> None:
    ledger = AlertState(who)
    calm = [state(healthy(), after_s=10.0 * n) for n in range(1, 6)]
    assert told(ledger, state(sick(Severity.WARNING, 2)), *calm) == []
    assert ledger.rows() == []


def test_a_warning_of_which_no_queue_grows_is_told_at_once(who: Receiver) -> None:
    failing = healthy(causes=[cause("requests_failing", Severity.WARNING)])
    assert told(AlertState(who), state(failing)) == [("began", "requests_failing")]


def test_an_engine_that_leaves_a_readable_page_takes_its_trouble_along(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(healthy(), sick(engine="1")))
    states = [state(healthy(), after_s=10.0 * n) for n in range(1, 5)]
    assert told(ledger, *states) == [("ended", "kv_pressure")]


def test_one_missed_scrape_is_no_end_whatever_the_clock_says(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick()))
    assert told(ledger, state(healthy(), after_s=3600)) == []
    assert told(ledger, state(sick(), after_s=3605)) == []


def test_a_clock_set_back_only_delays_the_end(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick()), state(healthy(), after_s=5))
    back = [state(healthy(), after_s=10.0 * n - 3600) for n in range(4)]
    assert told(ledger, *back) == [("ended", "kv_pressure")]


def test_a_trouble_that_is_back_before_its_end_was_sent_goes_on(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick()))
    late: list[Event] = []
    for after_s in (5, 15, 26):
        late += ledger.update(state(healthy(), after_s=after_s))
    again = ledger.update(
        state(sick(causes=[cause("kv_pressure", since_s=NOW_S + 30)]), after_s=30)
    )
    assert [event.kind for event in (*late, *again)] == ["ended"]
    assert not ledger.sent(late[0]), "the end is out of date"
    over: list[Event] = []
    for after_s in (35, 45, 56):
        over += ledger.update(state(healthy(), after_s=after_s))
    assert [event.kind for event in over] == ["ended"], "one beginning, one end"
    assert ledger.sent(over[0])
    anew = ledger.update(state(sick(causes=[cause("kv_pressure", since_s=NOW_S + 60)]), after_s=60))
    assert [event.kind for event in anew] == ["began"], "its end is on its way"
    ledger.delivered(over[0])
    assert ledger.sent(anew[0]), "the late end does not close the new trouble"


def test_an_end_names_what_is_still_wrong_there(who: Receiver) -> None:
    ledger = AlertState(who)
    other = cause("admission_limit")
    told(ledger, state(sick(), healthy(engine="1", causes=[cause("gpu_fault")])))
    told(ledger, state(healthy(causes=[other]), after_s=5))
    (over,) = [
        event
        for after_s in (10, 20, 30)
        for event in ledger.update(state(healthy(causes=[other]), after_s=after_s))
        if event.key.id == "kv_pressure"
    ]
    assert over.left == ("admission_limit",)
    assert "still active: admission_limit" in text(message([over], receiver="x", base=""))


def test_a_replica_that_is_down_and_then_crashes_again_is_one_trouble(who: Receiver) -> None:
    ledger, down, loops = AlertState(who), cause("target_down"), cause("engine_restarted")
    states = [state(healthy(causes=[each]), after_s=10.0 * at) for at, each in
              enumerate((down, loops, loops, loops, loops))]  # fmt: skip
    over = [state(healthy(), after_s=after_s) for after_s in (60, 70, 81)]
    assert told(ledger, *states, *over) == [("began", "target_down"), ("ended", "target_down")]


def test_rows_and_restore_are_inverse(who: Receiver) -> None:
    ledger = AlertState(who)
    told(ledger, state(sick(), name="a"), state(sick(), name="b"))
    ledger.update(state(sick(), name="c"))
    ledger.drop("b", NOW_S + 9)
    rows = ledger.rows()
    again = AlertState(who)
    again.restore(rows)
    assert again.rows() == rows
    assert [(row["target"], row["told"] is None, row["how"]) for row in rows] == [
        ("a", False, ""),
        ("b", False, "no longer watched"),
        ("c", True, ""),
    ]


STATES = st.sampled_from(["well", "ill", "worse", "blind"])


@given(st.lists(STATES, max_size=60))
def test_ends_and_beginnings_alternate(kinds: list[str]) -> None:
    who = Receiver(
        name="x", kind="webhook", endpoint=None,  # type: ignore[arg-type]
        severity=Severity.WARNING, targets=(), labels={}, own=True, alerts=True, group_wait_s=1,
        hold_s=HOLD_S, repeat_s=None, give_up_s=1, timeout_s=1, triage_url="", docs_url="",
        origin="",
    )  # fmt: skip
    verdicts = {
        "well": healthy(),
        "ill": sick(Severity.WARNING, 2),
        "worse": sick(Severity.CRITICAL, 4),
        "blind": healthy(health="unknown"),
    }
    ledger, going, gone = AlertState(who), False, 0
    for number, kind in enumerate(kinds):
        words = [kind for kind, _ in told(ledger, state(verdicts[kind], after_s=10.0 * number))]
        gone = gone + 1 if kind == "well" else 0
        if kind in ("ill", "worse"):
            assert words in ([], ["worse"] if going else ["began"])
            going = going or words == ["began"]
            assert going or kind == "ill", "only a warning is held"
        elif "ended" in words:
            assert going
            assert gone >= 3, "10 s a scrape: three of them span the hold time"
            going = False
        else:
            assert words == []
            assert not (going and kind == "well" and gone >= 3)


@pytest.mark.parametrize(
    ("name", "headlines"),
    [
        ("healthy_light", []),
        ("queue_overload", []),  # a warning, not critical
        (
            "kv_pressure_cascade",
            ["CRITICAL: kv_pressure on r0", "RESOLVED: kv_pressure on r0"],
        ),
        ("restart_mid_run", ["CRITICAL: target_down on r0", "RESOLVED: target_down on r0"]),
    ],
)
def test_recordings_of_a_real_server_give_few_messages(
    tmp_path: Path, name: str, headlines: list[str]
) -> None:
    text = 'window_s = 15\n[[notify]]\nkind = "webhook"\nurl = "http://127.0.0.1/"'
    (configured,) = receivers(settings(tmp_path, text))
    ledger, stream = AlertState(configured), TargetStream("r0", Profile(window_s=15.0), Limits())
    events: list[Event] = []
    for entry in CaptureReader(CAPTURES / f"{name}.jsonl.gz"):
        said = tuple(stream.replay(entry))
        news = ledger.update(TargetState("r0", "", {}, entry.t_s, said, 0.0, 1.0, 1, 0, 0))
        assert all(ledger.sent(event) for event in news)
        events += news
    lines = [message([event], receiver="x", base="").headline for event in events]
    assert len(lines) == len(headlines)
    assert all(a.startswith(b) for a, b in zip(lines, headlines, strict=True)), lines


def test_troubles_without_end_are_not_all_held(who: Receiver) -> None:
    ledger = AlertState(who)
    for number in range(2):
        engines = [sick(engine=f"{number}.{engine}") for engine in range(ACTIVE_MAX)]
        told(ledger, state(*engines, after_s=5.0 * number))
    assert len(ledger.rows()) == ACTIVE_MAX
    later = [("ended", "kv_pressure")] * ACTIVE_MAX + [("began", "kv_pressure")]
    calm = [state(healthy(engine="0"), after_s=HOLD_S * number) for number in (1, 2, 3)]
    assert told(ledger, *calm, state(sick(), after_s=4 * HOLD_S)) == later


def slow(severity: Severity, itl_p50_s: float, *, seen_s: float | None = None) -> Verdict:
    """An engine with slow steps."""
    slow_node = replace(cause("bad_node", severity), since_s=NOW_S, seen_s=seen_s)
    values = {**healthy().values, "itl_p50_s": itl_p50_s}
    return healthy(health=severity.word, causes=[slow_node], values=values)


def test_a_problem_is_worse_only_where_requests_suffer_more(who: Receiver) -> None:
    ledger = AlertState(who)
    warned = slow(Severity.WARNING, 0.050)
    assert told(ledger, state(warned, after_s=55), state(warned, after_s=60)) == [
        ("began", "bad_node")
    ]
    at_target = slow(Severity.CRITICAL, 0.056)  # its median was just below its target
    assert told(ledger, state(at_target, after_s=180)) == []
    grown = slow(Severity.CRITICAL, 0.064)
    assert told(ledger, state(grown, after_s=240)) == [("worse", "bad_node")]


def test_a_warning_that_may_change_waits_for_a_second_scrape(who: Receiver) -> None:
    """Scraped once a minute, a problem is a minute old when it is first seen."""
    ledger = AlertState(who)
    assert told(ledger, state(slow(Severity.WARNING, 0.08), after_s=60)) == []
    assert told(ledger, state(slow(Severity.CRITICAL, 0.08), after_s=120)) == [
        ("began", "bad_node")
    ]


def test_a_warning_that_ends_before_its_message_is_due_sends_none(who: Receiver) -> None:
    ledger = AlertState(who)
    ending = slow(Severity.WARNING, 0.03, seen_s=NOW_S + 30)
    begun = state(slow(Severity.WARNING, 0.08), after_s=30)
    assert told(ledger, begun, state(ending, after_s=60), state(ending, after_s=90)) == []
    again = slow(Severity.WARNING, 0.08, seen_s=NOW_S + 105)
    assert told(ledger, state(again, after_s=105)) == [("began", "bad_node")]


def test_a_warning_that_comes_and_goes_between_two_looks_is_sent(who: Receiver) -> None:
    """A fleet is looked at once a minute, and scraped four times as often."""
    paused = slow(Severity.WARNING, 0.08, seen_s=NOW_S + 45)
    begun = state(slow(Severity.WARNING, 0.08, seen_s=NOW_S + 15), after_s=15)
    assert told(AlertState(who), begun, state(paused, after_s=75)) == [("began", "bad_node")]
    over = slow(Severity.WARNING, 0.08, seen_s=NOW_S + 15)
    assert told(AlertState(who), begun, state(over, after_s=75)) == []
