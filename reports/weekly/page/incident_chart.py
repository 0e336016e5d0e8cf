"""Draws an incident over time: stages, causes and signals. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kneewatch.reports.triage.charts import Axis, ceiling
from kneewatch.reports.weekly.figures import Line
from kneewatch.reports.weekly.page.formatting import Calendar, health
from kneewatch.reports.weekly.page.svg import path
from kneewatch.reports.weekly.report import CauseSpan, Incident, StageSpan
from kneewatch.rules.formatting import cut, quantity

WIDE, TALL = 300.0, 60.0
"""Width and height of a chart in SVG units. It is stretched to the available space."""

LEAST_WIDTH = 0.5
TABLE_ROWS = 24
LATE = "ttft_p99_s"


class SmallChart(Struct, frozen=True):
    """A signal during the incident, drawn. `line` is its path and `top` its highest value.
    `bound_y` is the height of its bound, None without one."""

    signal: str
    top: str
    line: str
    bound_y: float | None
    bound: str
    desc: str


def small_chart(line: Line, axis: Axis, budget_s: float | None) -> SmallChart | None:
    """The chart of a signal. If the signal is a TTFT, the chart includes the target. None without
    data."""
    finite = [v for v in line.values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    bound = budget_s if line.signal == LATE else None
    top = ceiling(max(*finite, bound or 0.0, 0.0), of=line.signal) or 1.0
    points = [
        None if value is None or not math.isfinite(value)
        else (axis.x(t_s) * WIDE / 100, TALL - TALL * max(0.0, value) / top)
        for t_s, value in zip(line.times_s, line.values, strict=False)
    ]  # fmt: skip
    least, most = quantity(line.signal, min(finite)), quantity(line.signal, max(finite))
    words = "" if bound is None else f"target {quantity(line.signal, bound, stated=True)}"
    return SmallChart(
        line.signal,
        quantity(line.signal, top),
        path(points),
        None if bound is None else TALL - TALL * bound / top,
        words,
        f"From {least} to {most}{f'; {words}' if words else ''}.",
    )


def table(lines: Sequence[Line]) -> list[tuple[float, tuple[str, ...]]]:
    """The signals as rows of a table, sorted by time. There are only as many rows as people can
    read."""
    by_time = [dict(zip(line.times_s, line.values, strict=False)) for line in lines]
    moments = sorted({t_s for line in lines for t_s in line.times_s})
    stride = max(1, math.ceil(len(moments) / TABLE_ROWS))
    columns = list(zip((line.signal for line in lines), by_time, strict=True))
    return [
        (t_s, tuple(quantity(signal, values.get(t_s)) for signal, values in columns))
        for t_s in moments[::stride]
    ]


# --- Timeline of an incident: stages as steps, causes as bars, signals ---------------------------


STAGES = 4
STEP_PX, CAUSE_PX, TOP_PX = 17, 22, 34
LABEL_FROM, LABEL_AT_DESK = 18.0, 9.5
"""Minimum width in percent at which a step shows its name: on a phone, and on a desktop."""

LABEL_MOST = 28
"""Maximum length of a name in the drawing, in characters. The tables contain the full names."""

MIDDLE = 50.0
STEPS_S = (30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800)
TICKS_MOST = 5
EDGE = 6.0


class Step(Struct, frozen=True):
    """A stage in the timeline. `x` and `width` are in percent, `y` and `height` in pixels."""

    x: float
    width: float
    y: float
    height: float
    severity: str
    label: str
    labelled: bool


class Bar(Struct, frozen=True):
    """An interval of a cause. The name of the cause is above its `first` interval. The name starts
    at `text_x`, or ends there if `left` is true."""

    x: float
    width: float
    y: float
    severity: str
    label: str
    first: bool
    text_x: float
    left: bool


class Mark(Struct, frozen=True):
    """A marked time in the timeline. `after`: the label is to the right of the mark."""

    x: float
    y: float
    words: str
    after: bool


class Strip(Struct, frozen=True):
    """A drawn incident. `ground_px` is the base line of the steps and `height_px` the height, both
    in pixels."""

    steps: tuple[Step, ...]
    causes: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    ground_px: int
    height_px: int
    charts: tuple[SmallChart, ...]
    held: tuple[float, float]
    signals: tuple[str, ...]
    thinned: bool
    rows: tuple[tuple[float, tuple[str, ...]], ...]
    desc: str


def strip(incident: Incident, calendar: Calendar) -> Strip:
    """The timeline of an incident, including some time before and after the incident."""
    end_s = incident.until_s
    times = [t_s for line in incident.lines for t_s in line.times_s]
    margin_s = 0.05 * (end_s - incident.start_s)
    since_s = min([incident.start_s - margin_s, *times])
    axis = Axis(since_s, max([end_s + margin_s, since_s + 1.0, *times]))
    ground = TOP_PX + STAGES * STEP_PX if incident.stages else 4
    lanes = len({span.id for span in incident.causes})
    shown = [
        chart for line in incident.lines if (chart := small_chart(line, axis, incident.budget_s))
    ]
    return Strip(
        steps=tuple(_step(span, incident, axis, ground) for span in incident.stages),
        causes=tuple(_bars(incident, axis, ground)),
        marks=tuple(_marks(incident, axis)) if incident.stages else (),
        ticks=tuple(_ticks(axis, calendar)),
        ground_px=ground,
        height_px=ground + CAUSE_PX * lanes + 22,
        charts=tuple(shown),
        held=_spread(axis, incident.start_s, end_s),
        signals=tuple(line.signal for line in incident.lines),
        thinned=len(set(times)) > TABLE_ROWS,
        rows=tuple(table(incident.lines)),
        desc=_alternative_text(incident, calendar),
    )


def _spread(axis: Axis, start_s: float, end_s: float) -> tuple[float, float]:
    """Position and width of an interval in percent. The width is at least the smallest
    visible one."""
    x, width = axis.spread(start_s, end_s)
    width = max(LEAST_WIDTH, width)
    return min(x, 100.0 - width), width


def _placed(span: StageSpan | CauseSpan, incident: Incident, axis: Axis) -> tuple[float, float]:
    """Position and width of a stage or cause in percent. An open interval ends at the time at which
    the incident was last observed."""
    end_s = incident.last_s if span.end_s is None else span.end_s
    return _spread(axis, span.start_s, end_s)


def _step(span: StageSpan, incident: Incident, axis: Axis, ground: int) -> Step:
    x, width = _placed(span, incident, axis)
    height = STEP_PX * max(0.25, min(span.number, STAGES))
    label, labelled = cut(f"{span.number} {span.name}", LABEL_MOST), width >= LABEL_AT_DESK
    return Step(x, width, ground - height, height, health(span.severity), label, labelled)


def _bars(incident: Incident, axis: Axis, ground: int) -> Iterator[Bar]:
    """The bars of the causes. Each cause has its own lane; lanes are sorted by start."""
    lanes: dict[str, int] = {}
    for span in incident.causes:
        first = span.id not in lanes
        lane = lanes.setdefault(span.id, len(lanes))
        x, width = _placed(span, incident, axis)
        text_x = x if x <= MIDDLE else x + width
        yield Bar(
            x, width, ground + 18 + CAUSE_PX * lane, health(span.severity),
            cut(span.id, LABEL_MOST), first, text_x, left=x > MIDDLE,
        )  # fmt: skip


def _marks(incident: Incident, axis: Axis) -> list[Mark]:
    moments = (
        (incident.stage2_s, "preemption starts"),
        (incident.late_s, "TTFT P99 over target"),
    )
    marks: list[Mark] = []
    for row, (t_s, words) in enumerate(moments):
        if t_s is not None:
            x = axis.x(t_s)
            marks.append(Mark(x, 11.0 + 15 * row, words, x < MIDDLE))
    return marks


def _ticks(axis: Axis, calendar: Calendar) -> list[tuple[float, str]]:
    step_s = next((s for s in STEPS_S if axis.length_s / s <= TICKS_MOST), STEPS_S[-1])
    # Ticks are at round local times; a zone's offset may include half an hour.
    offset = calendar.local(axis.since_s).utcoffset()
    offset_s = 0.0 if offset is None else offset.total_seconds()
    first = math.ceil((axis.since_s + offset_s) / step_s)
    last = math.floor((axis.until_s + offset_s) / step_s)
    moments = (at * step_s - offset_s for at in range(first, last + 1))
    label = calendar.day if step_s >= 86400 else calendar.clock
    return [
        (axis.x(t_s), calendar.clock(t_s, seconds=True) if step_s < 60 else label(t_s))
        for t_s in moments
        if EDGE <= axis.x(t_s) <= 100 - EDGE
    ]


def _alternative_text(incident: Incident, calendar: Calendar) -> str:
    begun = [(span.start_s, f"stage {span.number} ({span.name})") for span in incident.stages]
    begun += [(span.start_s, span.id) for span in incident.causes]
    spans = [
        f"{name} from {calendar.clock(start_s, seconds=True)}"
        for start_s, name in sorted(begun, key=lambda span: span[0])
    ]
    return f"{incident.title}: {'; '.join(spans)}." if spans else incident.title
