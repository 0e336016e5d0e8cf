"""Charts of signals on the triage page: the time axis, downsampled lines, and bounds. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import inf, isfinite, nan
from typing import NamedTuple

from msgspec import Struct

from kneewatch.reports.lines import moment
from kneewatch.reports.triage.view_model import TriageView
from kneewatch.rules.formatting import quantity, span
from kneewatch.rules.rule import DAY_S

STEPS_S = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
TICKS_MOST = 5
SHORTEST_S = 120.0
MARGIN = 1.05
AT_END = 99.0
EDGE = 6.0
"""Percent of the width at both ends of the axis that have no labels, because a label would be cut
off."""


class Axis(Struct, frozen=True):
    """The time axis, from `since_s` at 0% to `until_s` at 100% of the width."""

    since_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        """The length of the axis in seconds, at least 1."""
        return max(1.0, self.until_s - self.since_s)

    def x(self, t_s: float) -> float:
        """The position of a time in percent of the width, limited to the axis."""
        return min(100.0, max(0.0, 100 * (t_s - self.since_s) / self.length_s))

    def mark(self, t_s: float) -> float | None:
        """The position of a time that is marked, in percent. None at the end of the axis, where the
        mark would be hidden."""
        x = self.x(t_s)
        return x if x < AT_END else None

    def spread(self, start_s: float, end_s: float | None) -> tuple[float, float]:
        """Start and width of an interval in percent. If `end_s` is None, the interval extends to
        the end of the axis."""
        x = self.x(start_s)
        return x, max(0.0, self.x(self.until_s if end_s is None else end_s) - x)

    def ticks(
        self, label: Callable[[float], str] | None = None, *, offset_s: float = 0.0
    ) -> list[tuple[float, str]]:
        """Positions of round times in percent of the width, and their labels (`tick_label`). There
        are few enough for the width of a phone. `offset_s` is the local time minus UTC."""
        step_s = next((s for s in STEPS_S if self.length_s / s <= TICKS_MOST), STEPS_S[-1])
        first = int((self.since_s + offset_s) // step_s) + 1
        last = int((self.until_s + offset_s) // step_s)
        times_s = (number * step_s - offset_s for number in range(first, last + 1))
        ticks = [(self.x(t_s), (label or tick_label)(t_s)) for t_s in times_s]
        return [(x, words) for x, words in ticks if EDGE <= x <= 100 - EDGE]


def first_s(view: TriageView) -> float:
    """The time of the oldest data of a page, but not before the requested range."""
    times_s = [
        t_s
        for engine in (engine for target in view.targets for engine in target.engines)
        for t_s in (
            *(interval.start_s for interval in engine.intervals),
            *(engine.times[:1] if engine.series else ()),
        )
    ]
    return max(view.since_s, min(times_s, default=view.since_s))


def axis_of(view: TriageView) -> Axis:
    """The time axis of a page. It covers the requested range. If less than half of the range has
    data, the axis covers only the part with data.

    Otherwise the first minutes of a new daemon would be too narrow to read.
    """
    length_s = view.until_s - view.since_s
    known_s = view.until_s - first_s(view)
    if not 0 <= known_s < length_s / 2:
        return Axis(view.since_s, view.until_s)
    return Axis(view.until_s - min(length_s, max(SHORTEST_S, MARGIN * known_s)), view.until_s)


def tick_label(t_s: float) -> str:
    """A UTC time as a label, such as 03:07. Midnight is shown as the day, such as Nov 21."""
    moment = datetime.fromtimestamp(t_s, tz=UTC)
    if t_s % DAY_S == 0:
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M}"


# --- Series as lines: few points, every spike kept, broken where values are unknown ---------------

COLUMNS = 200
"""Number of points per chart. A chart is a few hundred pixels wide."""

BROKEN_FROM = 3.5
"""A step between points is drawn as a gap if it is this many times longer than the steps next to
it."""


class ChartPoint(NamedTuple):
    """The lowest and the highest value at a time. NaN where unknown."""

    t_s: float
    least: float
    most: float


def lines(
    times: Sequence[float], values: Sequence[float], *, since_s: float, until_s: float
) -> list[list[ChartPoint]]:
    """The lines of a series between two times. A gap in the data separates two lines."""
    low, high = bisect_left(times, since_s), bisect_right(times, until_s)
    times, values = times[low:high], values[low:high]
    if len(times) > 2 * COLUMNS:
        return _broken(list(_columns(times, values)))
    return _broken([ChartPoint(t, value, value) for t, value in zip(times, values, strict=False)])


def _columns(times: Sequence[float], values: Sequence[float]) -> Iterator[ChartPoint]:
    """Yields a point for each column that has samples. Columns have equal length in time."""
    width_s = (times[-1] - times[0]) / COLUMNS
    whole = isfinite(sum(values))
    start = 0
    for column in range(1, COLUMNS + 1):
        end = bisect_left(times, times[0] + column * width_s) if column < COLUMNS else len(times)
        if end <= start:
            continue
        chunk = values[start:end]
        if not whole:
            chunk = [value for value in chunk if isfinite(value)]
        middle_s = times[(start + end - 1) // 2]
        yield ChartPoint(middle_s, min(chunk, default=nan), max(chunk, default=nan))
        start = end


def _broken(points: Sequence[ChartPoint]) -> list[list[ChartPoint]]:
    """Split points into lines at unknown values and at gaps."""
    steps = [after.t_s - before.t_s for before, after in pairwise(points)]
    lines: list[list[ChartPoint]] = [[]]
    for place, point in enumerate(points):
        gap = place > 0 and steps[place - 1] > BROKEN_FROM * _around(steps, place - 1)
        if (gap or not isfinite(point.most)) and lines[-1]:
            lines.append([])
        if isfinite(point.most):
            lines[-1].append(point)
    return [line for line in lines if line]


def _around(steps: Sequence[float], place: int) -> float:
    """The longer of the two steps next to `place`. Infinite if there are none."""
    before = steps[place - 1] if place else 0.0
    after = steps[place + 1] if place + 1 < len(steps) else 0.0
    return max(before, after) or inf


# --- Charts of signals with their bounds: geometry and words, without markup ----------------------


WIDE = 1000.0
TALL = 100.0
"""Height of a chart's drawing in units. The page stretches the drawing to its size."""

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
HEADROOM = 1.04
NOTHING = 1e-12
"""Values below this are rounding errors of zero. They do not determine the scale."""


Bound = tuple[float, str]
"""A bound to draw, and its name."""


class Chart(Struct, frozen=True):
    """The geometry of a chart. `line` and `area` are paths in WIDE by TALL units; everything else
    is in percent.

    `bounds` have the distance from the top, the words and the short words. `held` is the start and
    width of the time in which the cause or finding was active.
    """

    title: str
    desc: str
    line: str
    area: str
    bounds: tuple[tuple[float, str, str], ...]
    held: tuple[float, float] | None
    moment_x: float | None
    last: tuple[float, float]
    top: str


def chart(
    key: str,
    times: Sequence[float],
    values: Sequence[float],
    axis: Axis,
    *,
    bounds: Sequence[Bound] = (),
    held: tuple[float, float | None] | None = None,
    moment_s: float,
) -> Chart | None:
    """The chart of a signal. None if the signal has no value in the time of the axis."""
    drawn = lines(times, values, since_s=axis.since_s, until_s=axis.until_s)
    if not drawn:
        return None
    least = min(point.least for line in drawn for point in line)
    most = max(point.most for line in drawn for point in line)
    bounds = [bound for bound in bounds if math.isfinite(bound[0])]
    low = 0.0 - ceiling(-min(least, *(value for value, _ in bounds), 0.0))
    top = ceiling(HEADROOM * max(most, *(value for value, _ in bounds), 0.0), of=key)
    scale = _Scale(axis, low, top if top > low else low + 1.0)
    paths = [scale.paths(line) for line in drawn]
    now = _newest(times, values, axis, moment_s)
    return Chart(
        title=key,
        desc=_words(key, axis, (least, most), now, bounds, moment_s),
        line=" ".join(line for line, _ in paths),
        area=" ".join(area for _, area in paths),
        bounds=tuple(
            (scale.y_percent(value), f"{name} {stated}", stated)
            for value, name in bounds
            for stated in (quantity(key, value, stated=True),)
        ),
        held=None if held is None else axis.spread(*held),
        moment_x=axis.mark(moment_s),
        last=(axis.x(now[0]), scale.y_percent(now[1])),
        top=quantity(key, scale.top) if top > low else "",
    )


def ceiling(value: float, *, of: str = "") -> float:
    """The smallest round number that is at least `value`. For a ratio of at most 1 it is 1."""
    if value <= NOTHING:
        return 0.0
    if of.endswith(("_ratio", "_share")) and 0.5 < value <= HEADROOM:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in ROUND if step * power >= value * (1 - 1e-9)), value)


class _Scale:
    """Converts times and values to positions in a chart whose values range from `low` to `top`."""

    def __init__(self, axis: Axis, low: float, top: float) -> None:
        self.top = top
        self._since_s, self._per_s = axis.since_s, WIDE / axis.length_s
        self._per_unit = TALL / (top - low)
        self._base = f"{self._y(max(low, 0.0)):.1f}"

    def paths(self, line: Sequence[ChartPoint]) -> tuple[str, str]:
        """The path of a line (a dot for a single point), and the path of the area below the
        line."""
        path = "M" + "L".join(self._at(point) for point in line)
        first, last = self._x(line[0].t_s), self._x(line[-1].t_s)
        area = f"{path}L{last:.0f},{self._base}L{first:.0f},{self._base}Z"
        return (f"{path}h0" if len(line) == 1 else path), area

    def y_percent(self, value: float) -> float:
        """The position of a value in percent of the height, from the top."""
        return 100 * self._y(value) / TALL

    def _at(self, point: ChartPoint) -> str:
        t_s, least, most = point
        x = f"{self._x(t_s):.0f}"
        if least == most:
            return f"{x},{self._y(most):.1f}"
        return f"{x},{self._y(most):.1f}L{x},{self._y(least):.1f}"

    def _x(self, t_s: float) -> float:
        return (t_s - self._since_s) * self._per_s

    def _y(self, value: float) -> float:
        return (self.top - value) * self._per_unit


def _newest(
    times: Sequence[float], values: Sequence[float], axis: Axis, moment_s: float
) -> tuple[float, float]:
    """The newest known value at or before a time, with its time; if there is none, the first value
    after it. It is a value of the series and not a column's, which covers many scrapes."""
    visible = [
        (t_s, value)
        for t_s, value in zip(times, values, strict=False)
        if axis.since_s <= t_s <= axis.until_s and isfinite(value)
    ]
    return next((each for each in reversed(visible) if each[0] <= moment_s), visible[0])


def _words(
    key: str,
    axis: Axis,
    ends: tuple[float, float],
    now: tuple[float, float],
    bounds: Sequence[Bound],
    moment_s: float,
) -> str:
    """A text that describes the chart for screen readers."""
    least, most = (quantity(key, end) for end in ends)
    facts = [
        f"From {least} to {most} in {span(axis.length_s)} to {moment(axis.until_s, moment_s)}",
        f"{quantity(key, now[1])} at {moment(now[0], moment_s)}",
        *(f"{name} {quantity(key, value, stated=True)}" for value, name in bounds),
    ]
    return "; ".join(facts) + "."
