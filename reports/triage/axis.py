"""The time axis that everything on the page is drawn on. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from kneewatch.reports.triage.view import TriageView

DAY_S = 86400.0
STEPS_S = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
TICKS_MOST = 5
SHORTEST_S = 120.0
MARGIN = 1.05
AT_END = 99.0
EDGE = 6.0
"""Percent of the width in which a label would be cut off or meet the axis's end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled moment; `x` in percent of the width."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `since_s` to `until_s`, which are 0 and 100 percent of the width."""

    since_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        """How much time it shows; never nothing."""
        return max(1.0, self.until_s - self.since_s)

    def x(self, t_s: float) -> float:
        """Where a moment lies, in percent, at an end where it lies beyond."""
        return min(100.0, max(0.0, 100 * (t_s - self.since_s) / self.length_s))

    def mark(self, t_s: float) -> float | None:
        """Where a moment lies that is worth a mark; None for one at the axis's end."""
        x = self.x(t_s)
        return x if x < AT_END else None

    def spread(self, start_s: float, end_s: float | None) -> tuple[float, float]:
        """Where a stretch of time begins and how wide it is, in percent; None goes on to the
        end."""
        x = self.x(start_s)
        return x, max(0.0, self.x(self.until_s if end_s is None else end_s) - x)

    def ticks(self) -> list[Tick]:
        """Round moments, few enough for a phone: the day where one begins, else the hour."""
        step_s = next((s for s in STEPS_S if self.length_s / s <= TICKS_MOST), STEPS_S[-1])
        first = int(self.since_s // step_s) + 1
        last = int(self.until_s // step_s)
        found = [Tick(self.x(n * step_s), tick_label(n * step_s)) for n in range(first, last + 1)]
        return [tick for tick in found if EDGE <= tick.x <= 100 - EDGE]


def axis_of(view: TriageView) -> Axis:
    """The axis of a page: what was asked for, or less where less than half of it is known, so that
    what a daemon has seen since it was started can be made out."""
    known = [
        t_s
        for engine in (engine for target in view.targets for engine in target.engines)
        for t_s in (
            *(one.start_s for one in engine.intervals),
            *(series.times[0] for series in engine.series.values() if len(series.times)),
        )
    ]
    length_s = view.until_s - view.since_s
    known_s = view.until_s - min(known, default=view.since_s)
    if not 0 <= known_s < length_s / 2:
        return Axis(view.since_s, view.until_s)
    return Axis(view.until_s - min(length_s, max(SHORTEST_S, MARGIN * known_s)), view.until_s)


def tick_label(t_s: float) -> str:
    """A moment in five or six letters: 03:07, or the day at midnight."""
    moment = datetime.fromtimestamp(t_s, tz=UTC)
    if t_s % DAY_S == 0:
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M}"
