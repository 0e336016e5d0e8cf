"""Intervals over scrapes, failures, restarts of the engine and of the daemon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.change import (
    AWAY_STEPS,
    BRIDGED_S,
    GRACE_S,
    LEAST_STEP_S,
    TARGET_DOWN,
    TIMES_KEPT,
    Change,
    Interval,
    IntervalBook,
)
from kneewatch.rules.rule import Severity

OK, INFO, WARNING, CRITICAL = Severity


class Conditions(Struct, frozen=True):
    """What a scrape says."""

    t_s: float
    told: tuple[Interval, ...]
    restarted: bool
    read: bool

    @property
    def has_stage(self) -> bool:
        return any(each.kind == "stage" for each in self.told)


def seen(
    t_s: float,
    *causes: str,
    stage: int | None = 0,
    health: str = "ok",
    severity: Severity = WARNING,
    since_s: float | None = None,
    restarted: bool = False,
) -> Conditions:
    """What a scrape says."""
    since_s = t_s if since_s is None else since_s
    told = [Interval("health", health, OK, t_s, t_s)]
    told += [] if stage is None else [Interval("stage", str(stage), OK, t_s, t_s)]
    told += [Interval("cause", cause, severity, since_s, t_s) for cause in causes]
    return Conditions(t_s, tuple(told), restarted, stage is not None)


def take(book: IntervalBook, verdict: Conditions) -> list[Change]:
    return book.take(verdict.t_s, verdict.told, read=verdict.read, restarted=verdict.restarted)


class Kept(Struct, dict=True):
    """What a store would have: intervals by their changes. [id, start, end, how]"""

    book: IntervalBook = field(default_factory=IntervalBook)
    rows: list[Interval] = field(default_factory=list[Interval])

    def take(self, *verdicts: Conditions) -> Kept:
        for verdict in verdicts:
            self.apply(take(self.book, verdict))
        return self

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            known = any(interval is change.interval for interval in self.rows)
            assert (change.what == "began") != known
            self.rows += [] if known else [change.interval]

    def of(self, kind: str) -> list[tuple[str, float, float | None, str]]:
        return [
            (interval.id, interval.start_s, interval.end_s, interval.ended)
            for interval in self.rows
            if interval.kind == kind
        ]

    def restarted(self) -> Kept:
        """The same after a restart of the daemon: it knows what the store knows."""
        self.apply(self.book.pause())
        opened = [interval for interval in self.rows if interval.end_s is None]
        return Kept(IntervalBook(opened), self.rows)


def test_a_cause_begins_when_it_says_and_ends_when_it_is_told_no_more() -> None:
    kept = Kept().take(seen(0), seen(5), seen(10, "kv", since_s=4), seen(15, "kv"), seen(20))
    assert kept.of("cause") == [("kv", 4, 20, "ended")]


def test_stages_follow_each_other_without_gap_or_overlap() -> None:
    kept = Kept().take(seen(0), seen(5, stage=2), seen(10, stage=2), seen(15, stage=0))
    assert kept.of("stage") == [
        ("0", 0, 5, "ended"), ("2", 5, 15, "ended"), ("0", 15, None, "")
    ]  # fmt: skip


def test_the_worst_severity_stays() -> None:
    book = IntervalBook()
    take(book, seen(0, "kv", severity=WARNING))
    (worse,) = take(book, seen(5, "kv", severity=CRITICAL))
    assert worse.interval.severity == CRITICAL
    assert take(book, seen(10, "kv", severity=INFO)) == []
    assert worse.interval.severity == CRITICAL


def test_a_page_that_cannot_be_read_ends_no_cause_but_the_stage_that_was_told_last() -> None:
    down = [seen(t_s, "down", stage=None, health="critical") for t_s in (10, 15, 20)]
    kept = Kept().take(seen(0, "kv"), seen(5, "kv"), *down, seen(25, "kv"))
    assert kept.of("cause") == [("kv", 0, None, ""), ("down", 10, 25, "ended")]
    assert kept.of("stage") == [("0", 0, 5, "unwatched"), ("0", 25, None, "")]
    assert [row[0] for row in kept.of("health")] == ["ok", "critical", "ok"]


def test_what_is_gone_after_an_unreadable_page_ended_when_it_was_last_seen() -> None:
    down = seen(10, "down", stage=None)
    kept = Kept().take(seen(0, "kv"), seen(5, "kv"), down, seen(15))
    assert kept.of("cause")[0] == ("kv", 0, None, "")  # rates need a window: perhaps it goes on
    kept.take(*(seen(15 + later_s) for later_s in range(5, int(GRACE_S) + 5, 5)))
    assert kept.of("cause")[0] == ("kv", 0, 5, "unwatched")


def test_a_long_pause_is_not_bridged() -> None:
    kept = Kept().take(seen(0, "kv"), seen(5, "kv"), seen(10, "down", stage=None))
    later_s = 5 + BRIDGED_S + 1
    kept.take(seen(later_s, "kv", since_s=0))
    assert kept.of("cause")[0] == ("kv", 0, 5, "unwatched")
    # It says since 0, but nobody knows of the time in between.
    assert kept.of("cause")[-1] == ("kv", later_s, None, "")
    assert kept.of("stage") == [("0", 0, 5, "unwatched"), ("0", later_s, None, "")]


def test_a_restart_of_the_engine_ends_what_its_process_had() -> None:
    kept = Kept().take(
        seen(0, "kv", stage=2), seen(5, "kv", stage=2), seen(10, "restarted", restarted=True)
    )
    assert kept.of("cause") == [("kv", 0, 5, "restarted"), ("restarted", 10, None, "")]
    assert kept.of("stage") == [("2", 0, 5, "restarted"), ("0", 10, None, "")]


def test_causes_go_on_over_a_restart_of_the_daemon_stages_end_before_it() -> None:
    kept = Kept().take(seen(0, "kv", stage=2), seen(5, "kv", stage=2)).restarted()
    kept.take(seen(60, stage=0, health="unknown"))  # one scrape has no rates: it says nothing yet
    kept.take(seen(65, "kv", stage=2, since_s=65))
    assert kept.of("cause") == [("kv", 0, None, "")]
    assert kept.of("stage") == [("2", 0, 5, "unwatched"), ("2", 65, None, "")]
    assert kept.of("health") == [("ok", 0, 5, "unwatched"), ("ok", 65, None, "")]


def test_what_is_gone_after_a_restart_of_the_daemon_ended_before_it() -> None:
    kept = Kept().take(seen(0, "kv", stage=2), seen(5, "kv", stage=2)).restarted()
    kept.take(seen(60, health="warning"), seen(60 + GRACE_S, health="warning"))
    assert kept.of("cause") == [("kv", 0, 5, "unwatched")]
    assert kept.of("stage") == [("2", 0, 5, "unwatched"), ("0", 60, None, "")]
    assert kept.of("health") == [("ok", 0, 5, "unwatched"), ("warning", 60, None, "")]


def test_an_engine_that_is_gone_leaves_nothing_open() -> None:
    kept = Kept().take(seen(0, "kv"), seen(5, "kv"))
    kept.apply(kept.book.close())
    assert {(row.end_s, row.ended) for row in kept.rows} == {(5, "unwatched")}


def test_a_clock_set_back_ends_nothing_before_it_began() -> None:
    kept = Kept().take(seen(7200, "kv"), seen(7205, "kv"), seen(3605), seen(3610, "kv"))
    assert kept.of("cause") == [("kv", 7200, 7205, "unwatched"), ("kv", 3610, None, "")]


def test_a_clock_that_was_set_leaves_only_what_was_watched() -> None:
    times = [0, 5, 10, -3590, -3585, 3620, 3625, 25, 30]
    kept = Kept().take(*(seen(t_s) for t_s in times))
    spans = [(start_s, end_s) for _, start_s, end_s, _ in kept.of("health")]
    assert spans == [(0, 10), (-3590, -3585), (3620, 3625), (25, None)]
    assert kept.of("stage") == [("0", *row[1:]) for row in kept.of("health")]


def test_a_stage_that_cannot_be_judged_ended_when_it_was_told_last() -> None:
    unknown = replace(seen(10, stage=None, health="unknown"), read=True)
    kept = Kept().take(seen(0), seen(5), unknown, seen(15))
    assert kept.of("stage") == [("0", 0, 5, "unwatched"), ("0", 15, None, "")]


def test_scrapes_that_come_ever_more_rarely_still_watch() -> None:
    kept = Kept().take(*(seen(t_s) for t_s in (0, 5, 10, 25, 60, 180)))
    assert kept.of("health") == [("ok", 0, None, "")]
    kept.take(seen(180 + 601))
    assert kept.of("health") == [("ok", 0, 180, "unwatched"), ("ok", 781, None, "")]


def test_a_stage_that_says_it_is_old_does_not_cover_the_time_when_nobody_looked() -> None:
    again = Interval("stage", "2", WARNING, 0, 100)
    kept = Kept().take(seen(0, stage=2), seen(5, stage=2), seen(10, "down", stage=None))
    late = seen(100)
    kept.take(replace(late, told=(late.told[0], again)))
    assert kept.of("stage") == [("2", 0, 5, "unwatched"), ("2", 100, None, "")]


def test_a_since_that_is_no_time_or_in_the_future_is_now() -> None:
    kept = Kept().take(seen(5, "kv", since_s=math.nan), seen(10, "kv", "queue", since_s=1e12))
    assert [row[1] for row in kept.of("cause")] == [5, 10]


@pytest.mark.parametrize("daemon_restarts", [False, True])
@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 2000),
            st.sets(st.sampled_from(["kv", "queue", "down"])),
            st.none() | st.integers(0, 4),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_intervals_of_one_kind_never_overlap(
    daemon_restarts: bool, steps: list[tuple[float, set[str], int | None, bool]]
) -> None:
    kept, t_s = Kept(), 0.0
    for step_s, causes, stage, restarted in steps:
        t_s += step_s
        if daemon_restarts and step_s > 1000:
            kept = kept.restarted()
        kept.take(seen(t_s, *sorted(causes), stage=stage, restarted=restarted))
    slots: dict[str, list[tuple[float, float]]] = {}
    for interval in kept.rows:
        end_s = interval.end_s
        slot = interval.id if interval.kind == "cause" else interval.kind
        slots.setdefault(slot, []).append((interval.start_s, math.inf if end_s is None else end_s))
    for spans in slots.values():
        assert spans == sorted(spans)
        assert all(start_s <= end_s for start_s, end_s in spans)
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(spans))


# Against a naive definition: each interval by itself, looking ahead from a scrape that names it


class Naive(Struct, frozen=True, dict=True):
    """The intervals of verdicts with ascending times, all of which say something."""

    seen: Sequence[Conditions]

    def broken(self, at: int) -> bool:
        """Whether nobody looked right before a scrape."""
        chain = [self.seen[0].t_s]
        for verdict in self.seen[1 : at + 1]:
            steps = [b - a for a, b in pairwise(chain[-TIMES_KEPT:])]
            away = steps and verdict.t_s - chain[-1] > AWAY_STEPS * max(LEAST_STEP_S, *steps)
            chain = [verdict.t_s] if away else [*chain, verdict.t_s]
        return at > 0 and len(chain) == 1

    def readable_s(self, at: int) -> float:
        """Since when pages could be read without a break; -inf where this one cannot be."""
        since_s = -math.inf
        for place in range(at, -1, -1):
            if not self.seen[place].read:
                break
            since_s = self.seen[place].t_s
            if self.broken(place):
                break
        return since_s

    def told(self, at: int) -> dict[tuple[str, str], Interval]:
        return {(each.kind, each.id): each for each in self.seen[at].told}

    def after(self, name: tuple[str, str], at: int) -> tuple[int | None, float | None, str]:
        """Where it is named next and goes on, or when and how it ended."""
        kind, last_s, paused = name[0], self.seen[at].t_s, False
        for place, verdict in enumerate(self.seen[at + 1 :], at + 1):
            if self.broken(place):
                if kind != "cause":
                    return None, last_s, "unwatched"
                paused = True
            late = paused and verdict.t_s - last_s > BRIDGED_S
            if name in self.told(place) and not late:
                return place, None, ""
            if verdict.restarted and kind != "health" and name[1] != TARGET_DOWN:
                # Named again so late, it ended before this process.
                return None, last_s, "unwatched" if name in self.told(place) else "restarted"
            settled = verdict.read and (
                name[1] == TARGET_DOWN or verdict.t_s - self.readable_s(place) >= GRACE_S
            )
            if late or (paused and settled):
                return None, last_s, "unwatched"
            if paused:
                continue
            if kind == "health" or (verdict.read and (kind == "cause" or verdict.has_stage)):
                return None, verdict.t_s, "ended"
            if kind == "stage":
                return None, last_s, "unwatched"
            paused = True
        return None, None, ""

    def intervals(self) -> list[tuple[str, str, float, float | None, str]]:
        """Kind, id, start, end and how it ended."""
        begun: list[tuple[int, tuple[str, str], float | None, str]] = []
        going_on: set[tuple[int, tuple[str, str]]] = set()
        for at in range(len(self.seen)):
            for name in self.told(at):
                if (at, name) in going_on:
                    continue
                place, end_s, how = self.after(name, at)
                while place is not None:
                    going_on.add((place, name))
                    place, end_s, how = self.after(name, place)
                begun.append((at, name, end_s, how))
        rows: list[tuple[str, str, float, float | None, str]] = []
        for at, name, end_s, how in begun:
            t_s, since_s = self.seen[at].t_s, self.told(at)[name].start_s
            before_s = [
                row[3]
                for row in rows
                if row[3] is not None
                and row[0] == name[0]
                and (name[0] != "cause" or row[1] == name[1])
            ]
            start_s = max(
                since_s if since_s <= t_s else t_s, self.readable_s(at), *before_s, -math.inf
            )
            rows.append((*name, min(start_s, t_s), end_s, how))
        return rows


@st.composite
def verdicts(draw: st.DrawFn) -> list[Conditions]:
    drawn: list[Conditions] = []
    t_s = 0.0
    for _ in range(draw(st.integers(1, 25))):
        t_s += draw(st.sampled_from([1.0, 5.0, 5.0, 5.0, 20.0, 70.0, 300.0, 1000.0]))
        read = draw(st.sampled_from([True, True, True, False]))
        stage = draw(st.none() | st.integers(0, 2)) if read else None
        ago_s = draw(st.sampled_from([0.0, 3.0, 50.0, 2000.0, -10.0]))
        causes = draw(st.sets(st.sampled_from(["kv", "queue", TARGET_DOWN])))
        restarted = read and draw(st.sampled_from([False, False, False, True]))
        health = draw(st.sampled_from(["ok", "warning"]))
        verdict = seen(
            t_s, *sorted(causes), stage=stage, health=health, since_s=t_s - ago_s,
            restarted=restarted,
        )  # fmt: skip
        drawn.append(replace(verdict, read=read))
    return drawn


@given(verdicts())
def test_intervals_are_those_of_the_naive_definition(judged: list[Conditions]) -> None:
    kept = Kept().take(*judged)
    rows = [
        (interval.kind, interval.id, interval.start_s, interval.end_s, interval.ended)
        for interval in kept.rows
    ]
    assert sorted(rows, key=repr) == sorted(Naive(judged).intervals(), key=repr)
