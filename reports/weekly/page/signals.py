"""Signals in an incident's time as small charts and as a table. Geometry and words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.reports.triage.charts import ceiling
from kneewatch.reports.weekly.figures import Line
from kneewatch.reports.weekly.page.paths import path
from kneewatch.reports.words import quantity

WIDE, TALL = 300.0, 60.0
"""Units of a chart's inside, which is stretched to the room there is."""

LEAST_WIDTH = 0.5
TABLE_ROWS = 24
LATE = "ttft_p99_s"


class Reach:
    """Where moments lie, in percent."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.since_s, self.until_s = since_s, max(until_s, since_s + 1.0)

    def x(self, t_s: float) -> float:
        """A moment's place, at an end where it lies beyond."""
        return min(100.0, max(0.0, 100 * (t_s - self.since_s) / (self.until_s - self.since_s)))

    def spread(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Where a stretch begins and how wide it is: wide enough to be seen."""
        x, end = self.x(start_s), self.x(end_s)
        width = max(LEAST_WIDTH, end - x)
        return min(x, 100.0 - width), width


@dataclass(frozen=True, slots=True)
class SmallChart:
    """A signal in the incident's time: its path, its bound's height, its highest value."""

    signal: str
    top: str
    line: str
    bound_y: float | None
    bound: str
    desc: str


def small_chart(line: Line, reach: Reach, budget_s: float | None) -> SmallChart | None:
    """A signal's chart, with the budget where it is one of TTFT; None where nothing is known."""
    known = [v for v in line.values if v is not None and math.isfinite(v)]
    if not known:
        return None
    bound = budget_s if line.signal == LATE else None
    top = ceiling(max(*known, bound or 0.0, 0.0), of=line.signal) or 1.0
    points = [
        None if value is None or not math.isfinite(value)
        else (reach.x(t_s) * WIDE / 100, TALL - TALL * max(0.0, value) / top)
        for t_s, value in zip(line.times_s, line.values, strict=False)
    ]  # fmt: skip
    least, most = quantity(line.signal, min(known)), quantity(line.signal, max(known))
    words = "" if bound is None else f"budget {quantity(line.signal, bound)}"
    return SmallChart(
        line.signal,
        quantity(line.signal, top),
        path(points),
        None if bound is None else TALL - TALL * bound / top,
        words,
        f"From {least} to {most}{f'; {words}' if words else ''}.",
    )


def table(lines: Sequence[Line]) -> list[tuple[float, tuple[str, ...]]]:
    """Signals by moment, few enough rows to read: every so many moments one."""
    by_time = [dict(zip(line.times_s, line.values, strict=False)) for line in lines]
    moments = sorted({t_s for line in lines for t_s in line.times_s})
    each = max(1, math.ceil(len(moments) / TABLE_ROWS))
    told = list(zip((line.signal for line in lines), by_time, strict=True))
    return [
        (t_s, tuple(quantity(signal, values.get(t_s)) for signal, values in told))
        for t_s in moments[::each]
    ]
