"""No fault is learned, unless somebody accepts it or it has lasted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from kneewatch.agent.stream import AcceptRequest, TargetStream, accept
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import Judge
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.rebuilt import entries

CASE, SLOW_FROM_S = "eager5", 150.0
"""A capture whose engine becomes slow at this time and stays so."""


@cache
def scrapes() -> Sequence[Entry]:
    """All scrapes of the capture."""
    return list(entries(CASE))


def played(stream: TargetStream, from_s: float = 0.0, to_s: float = float("inf")) -> list[Verdict]:
    """The verdicts on a part of the capture."""
    begun_s = scrapes()[0].t_s
    return [
        verdict
        for entry in scrapes()
        if from_s <= entry.t_s - begun_s < to_s
        for verdict in stream.replay(entry)
    ]


def judge_of(stream: TargetStream) -> Judge:
    """The judge of the only engine."""
    (engine,) = stream.monitor.engines
    return engine.judge


@pytest.fixture
def stream() -> TargetStream:
    """A stream that has seen the engine become slow."""
    stream = TargetStream("gpu-7", Profile(), Limits())
    assert ids(played(stream, to_s=360.0)[-1]) == {"slow_steps"}
    return stream


def ids(verdict: Verdict) -> set[str]:
    """The causes at warning or worse."""
    return {cause.id for cause in verdict.causes if cause.severity >= Severity.WARNING}


def test_what_is_accepted_becomes_usual(stream: TargetStream) -> None:
    now_s = scrapes()[0].t_s + 360.0
    (shown,) = accept(stream.monitor, now_s, AcceptRequest(target="gpu-7", dry_run=True))
    speed = next(each for each in shown.deviations if each.signal == "engine_speed_ratio")
    assert (speed.usual, speed.family) == (1.0, "speed")
    assert speed.now < 0.7
    assert SLOW_FROM_S <= speed.since_s - scrapes()[0].t_s < SLOW_FROM_S + 30.0
    assert accept(stream.monitor, now_s, AcceptRequest(target="gpu-7")) == [shown]
    after = played(stream, 360.0)
    assert all(ids(verdict) == set() for verdict in after[20:])
    (told,) = [cause for cause in after[-1].causes if cause.id == "usual_changed"]
    assert told.severity == Severity.INFO
    assert "(accepted)" in told.summary
    assert "instead of" in told.summary
    again = accept(stream.monitor, after[-1].t_s, AcceptRequest(target="gpu-7"))
    assert [each.deviations for each in again] == [[]]


def test_only_what_is_named_is_accepted(stream: TargetStream) -> None:
    now_s = scrapes()[0].t_s + 360.0
    request = AcceptRequest(target="gpu-7", what=("lengths",))
    assert [each.deviations for each in accept(stream.monitor, now_s, request)] == [[]]
    assert accept(stream.monitor, now_s, AcceptRequest(target="gpu-7", engine="7")) == []
    assert ids(played(stream, 360.0)[-1]) == {"slow_steps"}


def test_what_has_lasted_becomes_usual_and_is_told() -> None:
    stream = TargetStream("gpu-7", Profile(usual_after_s=120.0), Limits())
    verdicts = played(stream)
    told = [verdict for verdict in verdicts if any(c.id == "usual_changed" for c in verdict.causes)]
    assert told
    assert told[0].t_s - scrapes()[0].t_s > SLOW_FROM_S + 120.0
    (cause,) = [cause for cause in told[-1].causes if cause.id == "usual_changed"]
    assert "(lasted 2 min)" in cause.summary


def test_a_restart_of_the_daemon_forgets_nothing(stream: TargetStream) -> None:
    now_s = scrapes()[0].t_s + 360.0
    state = judge_of(stream).learned.state(now_s)
    assert state is not None
    assert judge_of(stream).learned.state(now_s + 60.0) is None, "stored once an hour"
    fresh, forgetful = (TargetStream("gpu-7", Profile(), Limits()) for _ in range(2))
    played(fresh, 360.0, 366.0)
    judge_of(fresh).stored = state
    assert ids(played(fresh, 366.0)[-1]) == {"slow_steps"}
    assert ids(played(forgetful, 360.0)[-1]) == set(), "without it, the fault is what is usual"
    assert accept(stream.monitor, now_s, AcceptRequest(target="gpu-7"))
    accepted = judge_of(stream).learned.state(now_s)
    assert accepted is not None
    later = TargetStream("gpu-7", Profile(), Limits())
    played(later, 360.0, 366.0)
    judge_of(later).stored = accepted
    assert all(ids(verdict) == set() for verdict in played(later, 366.0)[20:])


def test_a_stored_state_that_cannot_be_read_is_left_out(stream: TargetStream) -> None:
    judge_of(stream).stored = b"{"
    assert ids(played(stream, 360.0)[-1]) == {"slow_steps"}
