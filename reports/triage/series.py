"""A signal's series as lines to draw: few points, every spike kept, broken where it is not known.
Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, isfinite, nan
from typing import NamedTuple

from kneewatch.reports.triage.view import SeriesView

COLUMNS = 200
"""A chart is a few hundred pixels wide: more would not be seen."""

BROKEN_FROM = 3.5
"""A step this many times as long as its neighbours is a gap, not a line."""


class Point(NamedTuple):
    """The least and the most value at a moment; NaN where it is not known."""

    t_s: float
    least: float
    most: float


def lines(series: SeriesView, *, since_s: float, until_s: float) -> list[list[Point]]:
    """The unbroken lines of a series between two moments."""
    low = bisect_left(series.times, since_s)
    high = bisect_right(series.times, until_s)
    times, values = series.times[low:high], series.values[low:high]
    if len(times) > 2 * COLUMNS:
        return _broken(list(_columns(times, values)))
    return _broken([Point(t, value, value) for t, value in zip(times, values, strict=False)])


def _columns(times: Sequence[float], values: Sequence[float]) -> Iterator[Point]:
    """A point for each column of equal time that holds any."""
    width_s = (times[-1] - times[0]) / COLUMNS
    whole = isfinite(sum(values))
    start = 0
    for column in range(1, COLUMNS + 1):
        end = bisect_left(times, times[0] + column * width_s) if column < COLUMNS else len(times)
        if end <= start:
            continue
        known = values[start:end]
        if not whole:
            known = [value for value in known if isfinite(value)]
        middle_s = times[(start + end - 1) // 2]
        yield Point(middle_s, min(known, default=nan), max(known, default=nan))
        start = end


def _broken(points: Sequence[Point]) -> list[list[Point]]:
    """Points as lines, broken at what is not known and at steps far longer than those around."""
    steps = [after.t_s - before.t_s for before, after in pairwise(points)]
    found: list[list[Point]] = [[]]
    for place, point in enumerate(points):
        gap = place > 0 and steps[place - 1] > BROKEN_FROM * _around(steps, place - 1)
        if (gap or not isfinite(point.most)) and found[-1]:
            found.append([])
        if isfinite(point.most):
            found[-1].append(point)
    return [line for line in found if line]


def _around(steps: Sequence[float], place: int) -> float:
    """The longer of the steps before and after one; endless where there is neither."""
    before = steps[place - 1] if place else 0.0
    after = steps[place + 1] if place + 1 < len(steps) else 0.0
    return max(before, after) or inf
