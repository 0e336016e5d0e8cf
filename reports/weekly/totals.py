"""Spans put together: engines of an hour, hours of a day, days of a period. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum

from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.observed import EngineObserved, Together
from kneewatch.reports.weekly.spans import Level, Span
from kneewatch.reports.weekly.tally import NOTHING, Tally, added

EMPTY = Span()


def beside(spans: Sequence[Span]) -> Span:
    """Spans of several engines over the same time as one."""
    return _merged(spans, clock_s=max((span.clock_s for span in spans), default=0.0))


def in_turn(spans: Sequence[Span]) -> Span:
    """Spans that follow each other as one."""
    return _merged(spans, clock_s=fsum(span.clock_s for span in spans))


def hourly(engines: Sequence[EngineObserved], together: Together) -> list[Span]:
    """The hours of a tier; empty without engines."""
    known = [*(engine.spans for engine in engines), *([together.spans] if together.spans else ())]
    return [beside(spans) for spans in zip(*known, strict=True)]


def by_day(grid: Grid, hours: Sequence[Span]) -> list[Span]:
    """The days of a period from its hours."""
    days: list[list[Span]] = [[] for _ in grid.day_starts_s]
    for slot, span in zip(grid.slots, hours, strict=True):
        days[slot.day].append(span)
    return [in_turn(day) for day in days]


def by_steps(hours: Sequence[Span], *, hours_each: int) -> list[Span]:
    """Hours put together, so many at a time."""
    return [in_turn(hours[at : at + hours_each]) for at in range(0, len(hours), hours_each)]


def _merged(spans: Sequence[Span], *, clock_s: float) -> Span:
    if len(spans) == 1:
        return spans[0]
    return Span(
        engine_s=fsum(span.engine_s for span in spans),
        clock_s=clock_s,
        watched_s=fsum(span.watched_s for span in spans),
        idle_s=fsum(span.idle_s for span in spans),
        counts=_counts(span.counts for span in spans),
        tallies=_tallies([span.tallies for span in spans]),
        levels=_levels([span.levels for span in spans]),
    )


def _counts(all_counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    made: dict[str, float] = {}
    for counts in all_counts:
        for key, value in counts.items():
            made[key] = made.get(key, 0.0) + value
    return made


def _tallies(all_tallies: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    keys = dict.fromkeys(key for tallies in all_tallies for key in tallies)
    return {key: added(tallies.get(key, NOTHING) for tallies in all_tallies) for key in keys}


def _levels(all_levels: Sequence[Mapping[str, Level]]) -> dict[str, Level]:
    made: dict[str, Level] = {}
    for levels in all_levels:
        for key, level in levels.items():
            before = made.get(key)
            made[key] = level if before is None else _level(before, level)
    return made


def _level(one: Level, other: Level) -> Level:
    known_s = one.known_s + other.known_s
    high, top = max(one.high, other.high), max(one.top, other.top)
    if known_s <= 0:
        return Level(one.mean, high, 0.0, top)
    mean = (one.mean * one.known_s + other.mean * other.known_s) / known_s
    return Level(mean, high, known_s, top)
