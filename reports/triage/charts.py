"""Small charts of signals with their bounds: geometry and words; the markup is the template's.
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.reports.triage.axis import Axis
from kneewatch.reports.triage.series import Point, lines
from kneewatch.reports.triage.view import SeriesView
from kneewatch.reports.words import moment, quantity, span

WIDE = 1000.0
TALL = 100.0
"""Units of a chart's inside, which is stretched to the room there is."""

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
HEADROOM = 1.04
NOTHING = 1e-12
"""No scale is made for less than this: it is what arithmetic leaves of a zero."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound to draw: its value, and what it is called."""

    value: float
    name: str = "bound"


@dataclass(frozen=True, slots=True)
class DrawnBound:
    """A bound in a chart: `y` in percent of the height, from the top."""

    y: float
    words: str
    short: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as drawn. `line` and `area` are paths in WIDE by TALL; `x` and `y` are percent.

    `held` is the stretch in which the cause held: where it begins and how wide it is.
    """

    title: str
    desc: str
    line: str
    area: str
    bounds: tuple[DrawnBound, ...]
    held: tuple[float, float] | None
    moment_x: float | None
    last: tuple[float, float]
    top: str


def chart(
    key: str,
    series: SeriesView | None,
    axis: Axis,
    *,
    bounds: Sequence[Bound] = (),
    held: tuple[float, float | None] | None = None,
    moment_s: float,
) -> Chart | None:
    """A signal's chart; None where nothing is known of it in that time."""
    if series is None:
        return None
    drawn = lines(series, since_s=axis.since_s, until_s=axis.until_s)
    if not drawn:
        return None
    least = min(point.least for line in drawn for point in line)
    most = max(point.most for line in drawn for point in line)
    bounds = [bound for bound in bounds if math.isfinite(bound.value)]
    low = 0.0 - ceiling(-min(least, *(bound.value for bound in bounds), 0.0))
    top = ceiling(HEADROOM * max(most, *(bound.value for bound in bounds), 0.0), of=key)
    scale = _Scale(axis, low, top if top > low else low + 1.0)
    paths = [scale.paths(line) for line in drawn]
    now = _at(drawn, moment_s)
    return Chart(
        title=key,
        desc=_words(key, axis, (least, most), now, bounds, moment_s),
        line=" ".join(line for line, _ in paths),
        area=" ".join(area for _, area in paths),
        bounds=tuple(_drawn(key, bound, scale) for bound in bounds),
        held=None if held is None else axis.spread(*held),
        moment_x=axis.mark(moment_s),
        last=(axis.x(now.t_s), scale.y_percent(now.most)),
        top=quantity(key, scale.top) if top > low else "",
    )


def ceiling(value: float, *, of: str = "") -> float:
    """The next round number; a ratio that is at most 1 ends there."""
    if value <= NOTHING:
        return 0.0
    if of.endswith(("_ratio", "_share")) and 0.5 < value <= HEADROOM:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in ROUND if step * power >= value * (1 - 1e-9)), value)


class _Scale:
    """Where moments and values lie in a chart from `low` to `top`."""

    def __init__(self, axis: Axis, low: float, top: float) -> None:
        self.top = top
        self._since_s, self._per_s = axis.since_s, WIDE / axis.length_s
        self._per_unit = TALL / (top - low)
        self._base = f"{self._y(max(low, 0.0)):.1f}"

    def paths(self, line: Sequence[Point]) -> tuple[str, str]:
        """A line, which is a dot where it has one point, and what lies under it."""
        path = "M" + "L".join(self._at(point) for point in line)
        first, last = self._x(line[0].t_s), self._x(line[-1].t_s)
        area = f"{path}L{last:.0f},{self._base}L{first:.0f},{self._base}Z"
        return (f"{path}h0" if len(line) == 1 else path), area

    def y_percent(self, value: float) -> float:
        """A value's height in percent, from the top."""
        return 100 * self._y(value) / TALL

    def _at(self, point: Point) -> str:
        t_s, least, most = point
        x = f"{self._x(t_s):.0f}"
        if least == most:
            return f"{x},{self._y(most):.1f}"
        return f"{x},{self._y(most):.1f}L{x},{self._y(least):.1f}"

    def _x(self, t_s: float) -> float:
        return (t_s - self._since_s) * self._per_s

    def _y(self, value: float) -> float:
        return (self.top - value) * self._per_unit


def _drawn(key: str, bound: Bound, scale: _Scale) -> DrawnBound:
    told = quantity(key, bound.value)
    return DrawnBound(
        scale.y_percent(bound.value), f"{bound.name} {told}", told.removesuffix(" a second")
    )


def _at(drawn: Sequence[Sequence[Point]], moment_s: float) -> Point:
    """The newest known point at a moment, or the first one after it."""
    before = [line for line in drawn if line[0].t_s <= moment_s]
    if not before:
        return drawn[0][0]
    return next(point for point in reversed(before[-1]) if point.t_s <= moment_s)


def _words(
    key: str,
    axis: Axis,
    ends: tuple[float, float],
    now: Point,
    bounds: Sequence[Bound],
    moment_s: float,
) -> str:
    """The chart for those who do not see it."""
    least, most = (quantity(key, end) for end in ends)
    said = [
        f"From {least} to {most} in {span(axis.length_s)} to {moment(axis.until_s, moment_s)}",
        f"{quantity(key, now.most)} at {moment(now.t_s, moment_s)}",
        *(f"{bound.name} {quantity(key, bound.value)}" for bound in bounds),
    ]
    return "; ".join(said) + "."
