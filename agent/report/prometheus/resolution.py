"""How finely a period is read from a metrics system, by its length and the size of the fleet. Pure.

Every hour is read as a whole; what lies inside an hour is read in steps that divide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kneewatch.agent.report.series import Floats
from kneewatch.reports.weekly.hours import HOUR_S, Grid, Slot

RowKey = tuple[Any, ...]
"""What a row of an answer is called: values of labels."""

Rows = dict[RowKey, Floats]

STEPS_S = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, HOUR_S)
VALUES_MOST = 400_000
"""So many values of one signal, of all engines together, are read: more would take minutes."""

SCRAPES_A_STEP = 2.0
"""A counter's increase needs two scrapes in its window."""

WINDOW_SCRAPES = 4.0
SHORT_S = 6 * HOUR_S
"""Periods from this length on begin and end with a full hour, shorter ones with a full minute."""

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Moments at equal distances. Each value is of the `step_s` before its moment."""

    first_s: float
    step_s: float
    count: int

    @property
    def last_s(self) -> float:
        """The last moment."""
        return self.first_s + (self.count - 1) * self.step_s

    @property
    def begins_s(self) -> Floats:
        """When each step begins. Shape: (count,)."""
        return self.first_s + self.step_s * np.arange(-1.0, self.count - 1)


@dataclass(frozen=True, slots=True)
class Resolution:
    """`scrape_s` is how often series are scraped, `step_s` how finely gauges are read, `begun_s`
    how finely arrivals, `window_s` the window of what is a rate."""

    scrape_s: float
    step_s: float
    begun_s: float
    window_s: float


def unit_s(span_s: float) -> float:
    """What a period of a length begins and ends on multiples of."""
    return HOUR_S if span_s >= SHORT_S else MINUTE_S


def resolution(grid: Grid, *, engines: int, scrape_s: float, window_s: float) -> Resolution:
    """How finely to read a period."""
    least_s = SCRAPES_A_STEP * scrape_s
    wanted_s = max(least_s, (grid.to_s - grid.from_s) * engines / VALUES_MOST)
    return Resolution(
        scrape_s=scrape_s,
        step_s=_fitting(grid, wanted_s),
        begun_s=_fitting(grid, least_s),
        window_s=max(window_s, WINDOW_SCRAPES * scrape_s),
    )


def _fitting(grid: Grid, wanted_s: float) -> float:
    """The finest step that is no finer than wanted and of which all hours are multiples."""
    fits = [
        step_s for step_s in STEPS_S if all(edge_s % step_s == 0 for edge_s in grid.edges_s)
    ] or [STEPS_S[0]]  # fmt: skip
    return next((step_s for step_s in fits if step_s >= wanted_s), fits[-1])


def steps(grid: Grid, step_s: float) -> Steps:
    """All steps of a period."""
    return Steps(grid.from_s + step_s, step_s, max(1, int((grid.to_s - grid.from_s) // step_s)))


def hour_runs(slots: Sequence[Slot]) -> list[Steps]:
    """Hours in order, neighbours of equal length together: the first and the last may be cut
    short, some may be left out."""
    runs: list[Steps] = []
    for slot in slots:
        length_s = slot.end_s - slot.start_s
        last = runs[-1] if runs else None
        if last and (last.step_s, last.last_s) == (length_s, slot.start_s):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Steps(slot.end_s, length_s, 1))
    return runs
