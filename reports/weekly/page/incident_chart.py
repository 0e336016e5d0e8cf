"""An incident over time: the axis, the places of its stages and causes, and its signals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kneewatch.reports.triage.charts import Axis, Chart, chart
from kneewatch.reports.weekly.figures import Line
from kneewatch.reports.weekly.page.formatting import MIDNIGHT, Calendar
from kneewatch.reports.weekly.report import CauseSpan, Incident, StageSpan
from kneewatch.rules.formatting import quantity

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


def ticks(axis: Axis, calendar: Calendar) -> list[tuple[float, str]]:
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
