"""What an engine looks like at an hour of the week: medians over the weeks before. Pure.

Monday's first hour is slower than the quiet night before it, each week: it is compared with the
same hour of earlier weeks. An hour is UTC's, so that a change to or from summer time puts the
profile an hour off until enough weeks are of the new time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from kneewatch.rules.rule import HOUR_S, WEEK_S

WEEKS = 4
"""Number of earlier weeks used. Older weeks had a different load."""

WEEKS_MIN = 2
"""Fewest weeks that must have data for the same hour."""

SCRAPES_MIN = 10
"""Fewest scrapes with a value that an hour must have."""

SPREAD_MAX = 0.3
"""Largest median absolute deviation of the weeks, relative to their median.

If the weeks differ more, one of them may have had an incident.
"""


def hour_start_s(t_s: float) -> float:
    """Start of the hour that contains `t_s`, in unix seconds."""
    return t_s // HOUR_S * HOUR_S


def earlier_hours(t_s: float) -> Iterator[tuple[float, float]]:
    """Start and end of the same hour in earlier weeks, newest first."""
    start_s = hour_start_s(t_s)
    for week in range(1, WEEKS + 1):
        from_s = start_s - week * WEEK_S
        yield from_s, from_s + HOUR_S


def hourly(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each signal's median within an hour. NaN is ignored; signals with too few values are left
    out."""
    finite = {key: [value for value in of if value == value] for key, of in values.items()}
    return {key: median(of) for key, of in finite.items() if len(of) >= SCRAPES_MIN}


def usual(weeks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each signal's usual value at an hour, learned from the same hour in earlier weeks.

    Signals are left out if too few weeks have data or the weeks do not agree.
    """
    keys = dict.fromkeys(key for week in weeks for key in week)
    by_signal = {key: _usual([week[key] for week in weeks if key in week]) for key in keys}
    return {key: value for key, value in by_signal.items() if value is not None}


def _usual(weeks: Sequence[float]) -> float | None:
    """The median of the weeks; None if they are few or differ."""
    middle = median(weeks)
    deviation = median(abs(value - middle) for value in weeks)
    agree = len(weeks) >= WEEKS_MIN and deviation <= SPREAD_MAX * abs(middle)
    return middle if agree else None
