"""Charts: the week by hour, the knee, sparklines, levels of the heat map, incidents. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import isnan, log10

from markupsafe import Markup
from msgspec import Struct

from kneewatch.diagnose.capacity import Range
from kneewatch.reports.triage.charts import Axis, Chart, chart
from kneewatch.reports.weekly.figures import Line, Spark
from kneewatch.reports.weekly.page.formatting import MIDNIGHT, Calendar, with_unit
from kneewatch.reports.weekly.report import (
    CauseSpan,
    Hour,
    Incident,
    KneeStep,
    StageSpan,
    TierKnee,
    TierSlo,
    WeekdayHour,
)
from kneewatch.rules.formatting import duration, number, quantity, stated_duration
from kneewatch.rules.rule import HOUR_S

# --- SVG paths, and charts with axes --------------------------------------------------------------


Point = tuple[float, float]


def path(points: Iterable[Point | None], *, decimals: int = 0) -> str:
    """The path of a line. A None makes a gap; an isolated point becomes a dot."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return "".join(run_path(run, decimals=decimals) for run in runs if run)


def run_path(run: Sequence[Point], *, decimals: int, closed: bool = False) -> str:
    """The path of one line in relative coordinates. Rounding errors do not accumulate."""
    scale = 10**decimals
    steps = [(round(x * scale), round(y * scale)) for x, y in run]
    first, rest = steps[0], steps[1:]
    parts = [f"M{_short(first[0], scale)} {_short(first[1], scale)}"]
    if not rest:
        return parts[0] + "h0"
    at = first
    for place, step in enumerate(rest):
        x, y = (_short(step[axis] - at[axis], scale) for axis in (0, 1))
        parts.append(f"{'l' if place == 0 else _between(x)}{x}{_between(y)}{y}")
        at = step
    return "".join(parts) + ("z" if closed else "")


def _between(number: str) -> str:
    """The separator before a number. A minus sign needs none."""
    return "" if number.startswith("-") else " "


def _short(steps: int, scale: int) -> str:
    """The shortest decimal number for a number of steps, each of size 1/`scale`."""
    if steps % scale == 0:
        return str(steps // scale)
    return (
        f"{steps / scale:g}".replace("0.", ".", 1) if abs(steps) < scale else f"{steps / scale:g}"
    )


# --- Charts with axes: colours, widths and dashes are the stylesheet's ----------------------------


WIDTH, HEIGHT = 360, 190
"""Width and height of a chart in SVG units. On a phone, a unit is about one pixel."""

LEFT, RIGHT, TOP, BOTTOM = 0.145, 0.985, 0.93, 0.13
"""The edges of the axes, as shares of the width and of the height from the bottom."""

CENTRED, BELOW, ABOVE = 2.9, 8.4, -2.6
"""The distance in units from a place down to the baseline of the text at, below or above it: half
the height of DejaVu Sans at 11 px, the stylesheet's size, and half a line to either side."""

PATH = Markup('<path class="{}" d="{}"/>')
TEXT = Markup('<text{}{} x="{:g}" y="{:g}">{}</text>')
Edges = tuple[float, float]

Ticks = list[tuple[float, str]]
"""Labelled positions on an axis."""


class Pen:
    """Draws between axes that cover `x` and `y`. `role` is the CSS class of what is drawn. Areas
    are behind lines, and both behind texts."""

    def __init__(self, x: Edges, y: Edges, *, log: bool) -> None:
        self._scale: Callable[[float], float] = log10 if log else float
        self._x, self._y = x, (self._scale(y[0]), self._scale(y[1]))
        self._areas, self._lines, self._texts = list[Markup](), list[Markup](), list[Markup]()

    @property
    def drawn(self) -> Markup:
        """The content of an SVG element of WIDTH by HEIGHT units."""
        return Markup("").join((*self._areas, *self._lines, *self._texts))

    def line(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a line through points. A NaN makes a gap."""
        points = zip(x, y, strict=True)
        self._line((None if isnan(b) else _place(self._across(a), self._up(b)) for a, b in points),
                   role)  # fmt: skip

    def area(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a filled outline."""
        points = zip(x, y, strict=True)
        self._area([_place(self._across(a), self._up(b)) for a, b in points], role)

    def upright(self, x: float, height: float, role: str) -> None:
        """Draw a vertical line from the bottom to `height`, a share of the chart's height."""
        self._line([_place(self._across(x), share) for share in (0, height)], role)

    def column(self, low: float, high: float, role: str) -> None:
        """Fill the interval from `low` to `high` on the x axis, over the whole height."""
        low, high = self._across(low), self._across(high)
        self._area([_place(low, 0), _place(high, 0), _place(high, 1), _place(low, 1)], role)

    def words(self, x: float, height: float, words: str, *, left: bool, role: str) -> None:
        """Write text to the left or right of `x`, at `height`, a share of the chart's height."""
        self._text(_place(self._across(x), height), ABOVE, words, "end" if left else "", role)

    def scales(self, x_ticks: Ticks, y_ticks: Ticks) -> None:
        """Draw the grid, the horizontal axis, and the labels of both axes."""
        for value, words in y_ticks:
            up = self._up(value)
            self._line([_place(0, up), _place(1, up)], "grid")
            self._text(_place(-0.02, up), CENTRED, words, "end")
        self._line([_place(0, 0), _place(1, 0)], "axis")
        for value, words in x_ticks:
            self._text(_place(self._across(value), -0.03), BELOW, words, "middle")

    def _across(self, x: float) -> float:
        return (x - self._x[0]) / (self._x[1] - self._x[0])

    def _up(self, y: float) -> float:
        return (self._scale(y) - self._y[0]) / (self._y[1] - self._y[0])

    def _line(self, points: Iterable[Point | None], role: str) -> None:
        self._lines.append(PATH.format(role, path(points, decimals=1)))

    def _area(self, outline: Sequence[Point], role: str) -> None:
        points = outline[:-1] if outline[-1] == outline[0] else outline
        self._areas.append(PATH.format(role, run_path(points, decimals=1, closed=True)))

    def _text(self, at: Point, down: float, words: str, anchor: str, role: str = "") -> None:
        given = {"class": role, "text-anchor": anchor}
        marks = [f' {name}="{value}"' if value else "" for name, value in given.items()]
        self._texts.append(
            TEXT.format(*map(Markup, marks), round(at[0], 1), round(at[1] + down, 1), words)
        )


def _place(across: float, up: float) -> Point:
    """The units of a place that is given in shares of the axes' width and height."""
    return WIDTH * (LEFT + across * (RIGHT - LEFT)), HEIGHT * (1 - BOTTOM - up * (TOP - BOTTOM))


def draw(
    paint: Callable[[Pen], None],
    *,
    x: Edges,
    y: Edges,
    x_ticks: Ticks,
    y_ticks: Ticks,
    log: bool = False,
) -> Markup:
    """Draw a chart with `paint`. Returns the content of an SVG element of WIDTH by HEIGHT units."""
    pen = Pen(x, y, log=log)
    pen.scales(x_ticks, y_ticks)
    paint(pen)
    return pen.drawn


# --- Sparklines -----------------------------------------------------------------------------------


WIDE, TALL = 164, 28
"""Width and height of a sparkline in SVG units. It is stretched to the available space."""

HEADROOM = 1.05


class SparkLine(Struct, frozen=True):
    """A drawn sparkline: its path, its target band (top and height; None without bounds), and its
    text alternative."""

    path: str
    band: tuple[float, float] | None
    desc: str


def spark_line(spark: Spark, *, low: float | None, high: float | None) -> SparkLine | None:
    """A sparkline of a figure over the period. Its scale starts at 0. None without data."""
    values = [value for value in spark.values if value is not None and math.isfinite(value)]
    if not values:
        return None
    bounds = [bound for bound in (low, high) if bound is not None and math.isfinite(bound)]
    least, most = min(0.0, *values), HEADROOM * max(*values, *bounds, 0.0)
    per_unit = TALL / (most - least) if most > least else 0.0
    per_step = WIDE / max(1, len(spark.values) - 1)
    points = [
        None if value is None or not math.isfinite(value)
        else (place * per_step, TALL - (value - least) * per_unit)
        for place, value in enumerate(spark.values)
    ]  # fmt: skip
    band = None
    if bounds:
        top = 0.0 if high is None else TALL - (high - least) * per_unit
        bottom = TALL if low is None else TALL - (low - least) * per_unit
        band = (top, bottom - top) if bottom > top else None
    desc = f"From {with_unit(min(values), spark.unit)} to {with_unit(max(values), spark.unit)}."
    return SparkLine(path(points), band, desc)


# --- Heat map of the week: the burn rate of the error budget by hour -----------------------------


LEVELS: tuple[tuple[str, float, str, int], ...] = (
    ("heat-0", 0.0, "no late requests", 2),
    ("heat-1", 1.0, "up to 1x the budget", 5),
    ("heat-2", 6.0, "up to 6x", 8),
    ("heat-3", 14.4, "up to 14.4x", 10),
    ("heat-4", math.inf, "above 14.4x", 12),
)
"""For each level: the CSS class, the upper end of the burn rate, the legend, and the side of the
square.

The size of a square shows the burn rate to people who cannot distinguish the colours. A square is
drawn as a short line that is as thick as it is long; the stylesheet contains the sides.

Above 14.4, a month's budget is used up within two days; above 6, within five.
"""

SILENT, UNSEEN = ("heat-none", 2), ("heat-unseen", 12)


def heat_level(cell: WeekdayHour) -> tuple[str, int]:
    """The CSS class and the side of an hour's square."""
    if cell.burn is None:
        return SILENT if cell.requests is not None and cell.requests <= 0 else UNSEEN
    return next((name, side) for name, top, _, side in LEVELS if cell.burn <= top)


def heat_words(cell: WeekdayHour) -> str:
    """An hour in the table: its burn rate, - without requests, ? if unknown."""
    if cell.burn is None:
        return "-" if heat_level(cell) == SILENT else "?"
    return number(cell.burn)


# --- The week by hour, and the knee ---------------------------------------------------------------


NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
LOG_STEPS, LOG_TICKS_MOST, POWERS_MOST = (1.0, 2.0, 5.0), 6, 20
NAN = math.nan
DAY_TICKS_MOST = 7
WIDE_ENOUGH, NUDGE = 0.55, 0.008
"""Position (0-1) from which the label of a mark is to its left, and the distance of the label."""


class Plot(Struct, frozen=True):
    """A drawn chart: its title, its SVG and its text alternative. `bound`: whether it shows a
    target."""

    name: str
    inside: Markup
    desc: str
    bound: bool = False


def latency_by_hour(
    hours: Sequence[Hour], calendar: Calendar, budget_s: float | None
) -> Plot | None:
    """A chart of TTFT P99 and P50 by hour, on a log scale. None without data."""
    worst = [_positive(hour.ttft_p99_s) for hour in hours]
    finite = [value for value in worst if not math.isnan(value)]
    if not finite:
        return None
    middle = [_positive(hour.ttft_p50_s) for hour in hours]
    values = [*finite, *(v for v in middle if not math.isnan(v)), *([budget_s] if budget_s else [])]
    ticks = log_ticks(min(values), max(values), duration)

    def paint(pen: Pen) -> None:
        times = _middles(hours)
        if budget_s:
            pen.line(_ends(hours), (budget_s, budget_s), "bound")
        pen.line(times, middle, "p50")
        pen.line(times, worst, "p99")

    summary = f"P99 from {duration(min(finite))} to {duration(max(finite))}"
    late = "" if budget_s is None else f"; target {stated_duration(budget_s)}"
    days = _days(hours, calendar)
    edges = (ticks[0][0], ticks[-1][0])
    inside = draw(paint, x=_ends(hours), y=edges, x_ticks=days, y_ticks=ticks, log=True)
    return Plot("TTFT by hour", inside, f"{summary}{late}.", bound=budget_s is not None)


def requests_by_hour(hours: Sequence[Hour], calendar: Calendar) -> Plot | None:
    """A chart of requests by hour. None without data."""
    requests = [hour.requests for hour in hours if hour.requests is not None]
    if not requests or max(requests) <= 0:
        return None
    ticks = linear_ticks(max(requests), number)

    def paint(pen: Pen) -> None:
        for x, y in _areas(hours):
            pen.area(x, y, "bars")

    inside = draw(paint, x=_ends(hours), y=(0.0, max(ticks[-1][0], max(requests))),
                  x_ticks=_days(hours, calendar), y_ticks=ticks)  # fmt: skip
    least, most = number(min(requests)), number(max(requests))
    return Plot("Requests by hour", inside, f"From {least} to {most}.")


def knee_latency(knee: TierKnee) -> Plot | None:
    """A chart of TTFT P99 of one engine by requests in flight. If TTFT is unknown, it shows the
    time per token."""
    late = [(step, step.ttft_p99_s) for step in knee.steps if step.ttft_p99_s is not None]
    if late:
        return _against_load(knee, late, duration, "TTFT P99")
    steps = [(step, step.token_s) for step in knee.steps]
    return _against_load(knee, steps, duration, "Time per token")


def _against_load(
    knee: TierKnee,
    points: Sequence[tuple[KneeStep, Range]],
    words: Callable[[float], str],
    name: str,
) -> Plot | None:
    """A chart of a figure by concurrency, with its spread. C_max and the peak are marked."""
    if not points:
        return None
    loads = [step.in_flight for step, _ in points]
    marks = [*([knee.c_max.high] if knee.c_max else []), knee.peak_in_flight or 0.0]
    x_ticks = linear_ticks(max(*loads, *marks), number)
    y_ticks = linear_ticks(max(value.high for _, value in points), words)
    right = max(*loads, *marks) * 1.04

    def paint(pen: Pen) -> None:
        _marks(pen, knee, right)
        pen.area(
            [*loads, *reversed(loads)],
            [*(value.low for _, value in points), *(value.high for _, value in reversed(points))],
            "area",
        )
        pen.line(loads, [value.expected for _, value in points], "p99")

    inside = draw(paint, x=(0.0, right), y=(0.0, y_ticks[-1][0]), y_ticks=y_ticks,
                  x_ticks=[tick for tick in x_ticks if tick[0] <= right])  # fmt: skip
    first, last = points[0][1].expected, points[-1][1].expected
    c_max = "" if knee.c_max is None else f" C_max is {number(knee.c_max.expected)}."
    return Plot(
        name,
        inside,
        f"{name} against requests in flight: {words(first)} at {number(loads[0])}, "
        f"{words(last)} at {number(loads[-1])}.{c_max}",
    )


def _marks(pen: Pen, knee: TierKnee, right: float) -> None:
    """Mark the knee with its uncertainty, and the peak of the week."""
    if knee.c_max is not None:
        at = knee.c_max.expected
        pen.column(knee.c_max.low, knee.c_max.high, "cmax-band")
        pen.upright(at, 1.0, "cmax")
        _words(pen, at, 1.02, f"C_max {number(at)}", "cmax-words", right)
    if knee.peak_in_flight is not None:
        at = knee.peak_in_flight
        pen.upright(at, 0.88, "peak")
        _words(pen, at, 0.9, f"peak {number(at)}", "peak-words", right)


def _words(pen: Pen, at: float, height: float, words: str, role: str, right: float) -> None:
    """Label a mark, on the side on which there is space."""
    left = at > WIDE_ENOUGH * right
    pen.words(at + (-NUDGE if left else NUDGE) * right, height, words, left=left, role=role)


def linear_ticks(most: float, words: Callable[[float], str]) -> Ticks:
    """Ticks at round values, from 0 to at least `most`."""
    if not most > 0:
        return [(0.0, words(0.0)), (1.0, words(1.0))]
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in NICE if nice * power >= rough * (1 - 1e-9))
    count = math.ceil(most / step - 1e-9)
    at = (step * place for place in range(count + 1))
    return [(value, "0" if value == 0 else words(value)) for value in at]


def log_ticks(least: float, most: float, words: Callable[[float], str]) -> Ticks:
    """Ticks at round values of a log scale, from at most `least` to above `most`."""
    power = math.floor(math.log10(least)) - 1
    grid = [step * 10.0 ** (power + at) for at in range(POWERS_MOST) for step in LOG_STEPS]
    first = max(at for at, value in enumerate(grid) if value <= least)
    last = min((at for at, value in enumerate(grid) if value > most), default=len(grid) - 1)
    stride = max(1, math.ceil((last - first) / LOG_TICKS_MOST))
    return [(value, words(value)) for value in (*grid[first:last:stride], grid[last])]


def _days(hours: Sequence[Hour], calendar: Calendar) -> Ticks:
    """A tick with the name of each day. It is at noon, because labels are centred below their
    tick."""
    noons = [hour.start_s for hour in hours if hour.hour == 12]
    stride = max(1, math.ceil(len(noons) / DAY_TICKS_MOST))
    shown = noons[::stride]
    if not shown:
        some = [hour.start_s for hour in hours[:: max(1, len(hours) // 4)]]
        return [(t_s, calendar.clock(t_s)) for t_s in some]
    return [(t_s, " ".join(calendar.day(t_s).split(" ")[:2])) for t_s in shown]


def _ends(hours: Sequence[Hour]) -> Edges:
    return hours[0].start_s, hours[-1].start_s + HOUR_S


def _middles(hours: Sequence[Hour]) -> list[float]:
    return [hour.start_s + HOUR_S / 2 for hour in hours]


def _areas(hours: Sequence[Hour]) -> list[tuple[list[float], list[float]]]:
    """Outlines of the areas below the known values. There is one per run of known values."""
    outlines: list[tuple[list[float], list[float]]] = []
    groups = groupby(zip(_middles(hours), hours, strict=True), lambda at: at[1].requests is None)
    for unknown, run in groups:
        if unknown:
            continue
        points = [(t_s, hour.requests or 0.0) for t_s, hour in run]
        x = [points[0][0], *(t_s for t_s, _ in points), points[-1][0]]
        outlines.append((x, [0.0, *(value for _, value in points), 0.0]))
    return outlines


def _positive(value: float | None) -> float:
    """The value if it is positive, else NaN, which a log scale draws as a gap."""
    return value if value is not None and math.isfinite(value) and value > 0 else NAN


# --- All charts of a tier -------------------------------------------------------------------------


TTFT = "ttft"


def charts(slo: TierSlo, knee: TierKnee, calendar: Calendar) -> dict[str, Plot | None]:
    """The charts of a tier that have axes, by name; None without data."""
    served = [(step, step.tokens_per_s) for step in knee.steps]
    return {
        "latency": latency_by_hour(slo.hours, calendar, budget_s(slo)),
        "requests": requests_by_hour(slo.hours, calendar),
        "knee_tokens": _against_load(knee, served, number, "Tokens/s"),
        "knee_latency": knee_latency(knee),
    }


def budget_s(slo: TierSlo) -> float | None:
    """The TTFT P99 target in seconds; None if not set."""
    return next((latency.budget_s for latency in slo.latencies if latency.name == TTFT), None)


# --- An incident over time: the axis, the places of its stages and causes, its signals ------------


LEAST_WIDTH = 0.5
TABLE_ROWS = 24
LATE = "ttft_p99_s"


def axis_of(incident: Incident) -> Axis:
    """The time axis of an incident: the times of its signals, and some time before and after."""
    times = [t_s for line in incident.lines for t_s in line.times_s]
    margin_s = 0.05 * incident.lasted_s
    since_s = min([incident.start_s - margin_s, *times])
    return Axis(since_s, max([incident.until_s + margin_s, since_s + 1.0, *times]))


def placed(
    axis: Axis, incident: Incident, span: StageSpan | CauseSpan | None = None
) -> tuple[float, float]:
    """Position and width of a stage, a cause or the whole incident in percent. The width is at
    least the smallest visible one. An open interval ends when the incident was last observed."""
    of = span or incident
    x, width = axis.spread(of.start_s, incident.until_s if of.end_s is None else of.end_s)
    width = max(LEAST_WIDTH, width)
    return min(x, 100.0 - width), width


def signal_chart(line: Line, incident: Incident, axis: Axis) -> Chart | None:
    """The chart of a signal during the incident, with the target for the TTFT. None without
    data."""
    bound = incident.budget_s if line.signal == LATE else None
    return chart(
        line.signal,
        line.times_s,
        [math.nan if value is None else value for value in line.values],
        axis,
        bounds=[] if bound is None else [(bound, "target")],
        held=(incident.start_s, incident.until_s),
        moment_s=axis.until_s,
    )


def signal_rows(lines: Sequence[Line]) -> list[tuple[float, list[str]]]:
    """The signals as rows of a table, sorted by time. There are only as many rows as people can
    read."""
    by_time = [dict(zip(line.times_s, line.values, strict=False)) for line in lines]
    moments = sorted({t_s for line in lines for t_s in line.times_s})
    stride = max(1, math.ceil(len(moments) / TABLE_ROWS))
    columns = list(zip((line.signal for line in lines), by_time, strict=True))
    return [
        (t_s, [quantity(signal, values.get(t_s)) for signal, values in columns])
        for t_s in moments[::stride]
    ]


def time_ticks(axis: Axis, calendar: Calendar) -> list[tuple[float, str]]:
    """Labelled round times in the report's time zone, as positions in percent."""
    # A zone's offset may include half an hour.
    offset = calendar.local(axis.since_s).utcoffset()

    def label(t_s: float) -> str:
        at_midnight = calendar.local(t_s).time() == MIDNIGHT
        return calendar.day(t_s) if at_midnight else calendar.clock(t_s)

    return axis.ticks(label, offset_s=0.0 if offset is None else offset.total_seconds())


def alternative_text(incident: Incident, calendar: Calendar) -> str:
    """A text that describes the drawing for screen readers."""
    begun = [(span.start_s, f"stage {span.number} ({span.name})") for span in incident.stages]
    begun += [(span.start_s, span.id) for span in incident.causes]
    spans = [
        f"{name} from {calendar.clock(start_s, seconds=True)}"
        for start_s, name in sorted(begun, key=lambda span: span[0])
    ]
    return f"{incident.title}: {'; '.join(spans)}." if spans else incident.title
