"""What an engine looks like at an hour of the week: medians over the weeks before. Pure.

Monday's first hour is slower than the quiet night before it, each week: it is compared with the
same hour of earlier weeks. An hour is UTC's, so that a change to or from summer time puts the
profile an hour off until enough weeks are of the new time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

HOUR_S = 3600.0
WEEK_S = 168 * HOUR_S
WEEKS = 4
"""Earlier weeks that are looked at: what is older was another load."""

WEEKS_MIN = 2
"""Fewer weeks with that hour are no habit."""

SCRAPES_MIN = 10
"""Fewer scrapes with a value say nothing of an hour."""

SPREAD_MAX = 0.3
"""Median distance of the weeks from their median, as a share of it: weeks that are further apart
than this have nothing in common, for one of them may have been an incident."""


@dataclass(frozen=True, slots=True)
class Usual:
    """A signal at an hour of the week: the median of its weeks, their median absolute deviation
    from it, and how many there are."""

    median: float
    deviation: float
    weeks: int

    @property
    def holds(self) -> bool:
        """Whether enough weeks say about the same."""
        return self.weeks >= WEEKS_MIN and self.deviation <= SPREAD_MAX * abs(self.median)


def hour_start_s(t_s: float) -> float:
    """The beginning of the hour that a moment lies in."""
    return t_s // HOUR_S * HOUR_S


def earlier_hours(t_s: float) -> Iterator[tuple[float, float]]:
    """From and to of the same hour in the weeks before, the last week's first."""
    start_s = hour_start_s(t_s)
    for week in range(1, WEEKS + 1):
        from_s = start_s - week * WEEK_S
        yield from_s, from_s + HOUR_S


def hourly(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each signal's median within an hour, of those that are known often enough (NaN is not)."""
    known = {key: [value for value in of if value == value] for key, of in values.items()}
    return {key: median(of) for key, of in known.items() if len(of) >= SCRAPES_MIN}


def usual(weeks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What each signal usually is at an hour, from that hour's aggregates in earlier weeks; those
    without enough weeks that agree are left out."""
    keys = dict.fromkeys(key for week in weeks for key in week)
    found = {key: usual_of([week[key] for week in weeks if key in week]) for key in keys}
    return {key: one.median for key, one in found.items() if one.holds}


def usual_of(weeks: Sequence[float]) -> Usual:
    """The same of one signal; at least one week."""
    middle = median(weeks)
    return Usual(middle, median(abs(value - middle) for value in weeks), len(weeks))
