"""Causes over time: what comes and goes at its edge stays told while it goes on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.unexplained import Explained
from kneewatch.diagnose.engine.diagnosis import Aftermath, CauseTracker
from kneewatch.diagnose.ranking import BY_ID, over
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.diagnose.situations import CONCLUSIVE, NOW_S

SCRAPE_S = 5.0


def test_a_cause_keeps_its_place_while_its_consequence_stands() -> None:
    full, queue = (
        CONCLUSIVE[cause_id].causes()[cause_id] for cause_id in ("kv_pressure", "queue_saturation")
    )
    tracker = CauseTracker[Cause](scale=1.0)
    tracker.update(NOW_S, [full, queue])
    kept = tracker.update(NOW_S + SCRAPE_S, [queue])
    assert [cause.id for cause in kept] == ["kv_pressure", "queue_saturation"]
    assert [cause.id for cause in tracker.update(NOW_S + 60, [queue])] == ["queue_saturation"]
    tracker.update(NOW_S + 165, [full, queue])
    tracker.update(NOW_S + 175, [queue])
    ended = tracker.update(NOW_S + 215, [])
    assert [cause.id for cause in ended] == ["queue_saturation"], "nothing follows from it now"


def test_a_throttled_gpu_ends_with_the_slow_steps_that_it_makes() -> None:
    both = [CONCLUSIVE[each].causes()[each] for each in ("gpu_throttled", "slow_steps")]
    tracker = CauseTracker[Cause](scale=1.0)
    tracker.update(NOW_S - 30, both)
    assert tracker.update(NOW_S, both) == tracker.update(NOW_S + 15, []) != []
    assert len(tracker.update(NOW_S + 20, both[1:])) == 2
    assert len(tracker.update(NOW_S + 40, both[1:])) == 2, "its clock is back, the window's is not"
    assert tracker.update(NOW_S + 65, []) == []


def test_a_cause_stays_for_a_minute_while_its_effect_on_latency_lasts() -> None:
    cause = CONCLUSIVE["slow_steps"].causes()["slow_steps"]
    tracker = CauseTracker[Cause](scale=1.0)
    onset_s = BY_ID["slow_steps"].onset_s.value
    tracker.update(NOW_S - onset_s, [cause])
    tracker.update(NOW_S, [cause])
    assert tracker.update(NOW_S + 55, [], lasting=["slow_steps"])
    assert not tracker.update(NOW_S + 60, [], lasting=["slow_steps"])


def test_latency_that_is_as_late_as_before_lasts_until_something_else_explains_it() -> None:
    slow = CONCLUSIVE["slow_steps"]
    explained, cause = Explained(BY_ID), slow.causes()["slow_steps"]
    slow = slow.but(itl_mean_drift_ratio=3.0, itl_mean_s=0.03)
    late = slow.facts()
    assert not explained.lasting([cause], late)
    explained.without([cause], late)
    assert explained.lasting([], late) == ["slow_steps"]
    assert not explained.lasting([cause], late)
    assert not explained.lasting([], slow.but(itl_mean_drift_ratio=1.5).facts())
    assert not explained.lasting([], slow.but(itl_mean_s=0.02).facts())


def test_a_load_that_grew_is_a_note_beside_the_cause_of_the_latency_that_it_brings() -> None:
    situation = CONCLUSIVE["queue_saturation"]
    queue, facts = situation.causes()["queue_saturation"], situation.facts()
    load = replace(queue, id="workload_drift", severity=Severity.WARNING)
    assert Explained(BY_ID).without([load], facts) == [load]
    told = Explained(BY_ID).without([queue, load], facts)
    assert [cause.severity for cause in told] == [queue.severity, Severity.INFO]


@pytest.mark.parametrize("cause_id", ["queue_saturation", "prefill_interference"])
def test_a_cause_that_pauses_is_told_throughout_and_ends_in_the_end(cause_id: str) -> None:
    cause = CONCLUSIVE[cause_id].causes()[cause_id]
    tracker = CauseTracker[Cause](scale=1.0)
    shown: list[bool] = []
    for at in range(40):
        # Three scrapes of each nine for two minutes, then none.
        there = at % 9 < 3 and at < 24
        causes = tracker.update(NOW_S + SCRAPE_S * at, [cause] if there else [])
        shown.append(bool(causes))
    assert all(shown[1:24])
    assert not any(shown[30:])


def test_a_cause_that_is_surely_over_is_not_reported_for_its_clear_time() -> None:
    stalls = CONCLUSIVE["prefill_interference"]
    tracker = CauseTracker[Cause](scale=1.0)
    for at in range(3):
        tracker.update(NOW_S + SCRAPE_S * at, [stalls.causes()["prefill_interference"]])
    fewer = stalls.but(itl_stall_per_s=0.02, itl_stall_time_ratio=0.04)
    kept = tracker.update(NOW_S + 15, [], over(fewer.facts()))
    assert [cause.id for cause in kept] == ["prefill_interference"]
    none = stalls.but(itl_stall_per_s=0.0, itl_stall_time_ratio=0.0)
    assert tracker.update(NOW_S + 20, [], over(none.facts())) == []


def test_stalls_are_not_over_while_the_itl_target_is_missed() -> None:
    none = CONCLUSIVE["prefill_interference"].but(itl_stall_per_s=0.0, itl_p99_s=0.2)
    assert "prefill_interference" in over(none.facts())
    missed = replace(none, targets=Targets(itl_p99_s=0.1))
    assert "prefill_interference" not in over(missed.facts())


@pytest.mark.parametrize(("drained_per_s", "silent"), [(0.2, True), (0.0, False)])
def test_a_queue_that_stays_after_its_cause_is_reported(
    drained_per_s: float, *, silent: bool
) -> None:
    queued = CONCLUSIVE["queue_saturation"]
    full = CONCLUSIVE["kv_pressure"].causes()["kv_pressure"]
    aftermath, causes = Aftermath(), [full]
    aftermath.reported(NOW_S, causes)
    for at in range(25):
        moment = queued.but(waiting=60.0 - drained_per_s * SCRAPE_S * at).facts()
        now = replace(moment, now_s=NOW_S + SCRAPE_S * at)
        causes = aftermath.without(now, [queued.causes()["queue_saturation"]])
        aftermath.reported(now.now_s, causes)
    assert (causes == []) == silent


def test_what_comes_back_while_a_backlog_drains_is_told_again() -> None:
    queued, full = CONCLUSIVE["queue_saturation"], CONCLUSIVE["kv_pressure"].causes()
    queue = queued.causes()["queue_saturation"]
    for reported in ([full["kv_pressure"]], [full["kv_pressure"], queue]):
        aftermath = Aftermath()
        aftermath.reported(NOW_S, reported)
        assert aftermath.without(queued.but(waiting=60.0).facts(), []) == []
        aftermath.reported(NOW_S, [])
        later = replace(queued.but(waiting=50.0).facts(), now_s=NOW_S + 20.0)
        assert aftermath.without(later, [queue]) == [each for each in reported if each is queue]
        assert aftermath.drains


def test_a_backlog_drains_once_what_caused_it_is_only_noted() -> None:
    fault = replace(CONCLUSIVE["gpu_fault"].causes()["gpu_fault"], severity=Severity.CRITICAL)
    queued, aftermath = CONCLUSIVE["queue_saturation"], Aftermath()
    noted = replace(fault, severity=Severity.INFO)
    aftermath.reported(NOW_S, [fault])
    causes = [noted, queued.causes()["queue_saturation"]]
    assert aftermath.without(queued.but(waiting=60.0).facts(), causes) == [noted]
    assert aftermath.drains


def test_a_tail_that_a_draining_queue_leaves_is_not_reported() -> None:
    past = CONCLUSIVE["past_knee"]
    tail = past.causes()["past_knee"]
    limit = CONCLUSIVE["admission_limit"].causes()["admission_limit"]
    aftermath = Aftermath()
    aftermath.reported(NOW_S, [replace(limit, explains=("past_knee",))])
    assert aftermath.without(past.but(waiting=60.0).facts(), [tail]) == []


def test_a_missed_target_leaves_no_backlog_that_hides_the_next() -> None:
    bound = CONCLUSIVE["prefill_bound"]
    aftermath = Aftermath()
    aftermath.reported(NOW_S, list(CONCLUSIVE["slo_conflict"].causes().values()))
    causes = list(bound.causes().values())
    assert aftermath.without(bound.facts(), causes) == causes
