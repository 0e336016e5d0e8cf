"""A tier's engines added up: hours of counters and histograms from the server, gauges from arrays.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.engine import with_eviction
from kneewatch.agent.report.levels import IDLE_RUNNING
from kneewatch.agent.report.prometheus.resolution import Floats, RowKey, Rows, Steps
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.measures import (
    EVICTED,
    PREEMPTIONS,
    RUNNING,
    SERVED_ONLY,
    WAITING,
)
from kneewatch.reports.weekly.spans import SERVING, Level, Span
from kneewatch.reports.weekly.tally import Tally

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Gauges:
    """A tier's gauges by engine and step. Shapes: each of `values` (engines, steps), NaN where
    unknown; `slot` (steps,), the hour that each step is in; `watched_s` (engines, slots)."""

    steps: Steps
    slot: Places
    hours: int
    values: Mapping[str, Floats]
    watched_s: Floats

    @classmethod
    def of(cls, grid: Grid, at: Steps, keys: Sequence[RowKey], rows: Mapping[str, Rows]) -> Gauges:
        """The gauges of some engines; those that nobody has are left out."""
        nothing = np.full(at.count, np.nan)
        slot = np.searchsorted(np.array(grid.edges_s), at.begins_s + 1e-3, side="right") - 1
        values = {
            name: np.array([found.get(key, nothing) for key in keys])
            for name, found in rows.items()
            if name == RUNNING or any(key in found for key in keys)
        }
        there = ~np.isnan(values[RUNNING])
        watched_s = _by_slot(np.where(there, at.step_s, 0.0), slot, len(grid.slots))
        return cls(at, slot, len(grid.slots), values, watched_s)

    def idle_s(self) -> Floats:
        """Seconds with hardly a request. Shape: (engines, slots)."""
        waiting = self.values.get(WAITING, np.zeros_like(self.values[RUNNING]))
        idle = (self.values[RUNNING] < IDLE_RUNNING) & (np.nan_to_num(waiting) < 1)
        return _by_slot(np.where(idle, self.steps.step_s, 0.0), self.slot, self.hours)

    def levels(self, name: str, *, serving: bool = False) -> list[Level | None]:
        """A gauge of each hour over the engines."""
        values = self.values[name]
        if serving:
            values = np.where(self.values[RUNNING] > 0, values, np.nan)
        known = ~np.isnan(values)
        seconds = _by_slot(known * self.steps.step_s, self.slot, self.hours)
        sums = _by_slot(np.nan_to_num(values) * self.steps.step_s, self.slot, self.hours)
        highs = np.full(self.hours, -np.inf)
        np.maximum.at(highs, self.slot, np.where(known, values, -np.inf).max(axis=0))
        each = np.divide(sums, seconds, out=np.full_like(sums, -np.inf), where=seconds > 0)
        made: list[Level | None] = []
        for at in range(self.hours):
            known_s = float(seconds[:, at].sum())
            made.append(
                Level(
                    float(sums[:, at].sum()) / known_s,
                    float(highs[at]),
                    known_s,
                    float(each[:, at].max()),
                )
                if known_s > 0
                else None
            )
        return made


def spans(
    gauges: Gauges,
    counts: Mapping[str, Floats],
    tallies: Mapping[str, Sequence[Tally | None]],
    preempted: Floats | None,
    capacity_tokens: float | None,
) -> list[Span]:
    """The hours of a tier. `preempted` is by engine and hour: the worst engine's is told."""
    named = {name: gauges.levels(name) for name in gauges.values} | {
        name + SERVING: gauges.levels(name, serving=True)
        for name in SERVED_ONLY
        if name in gauges.values
    }
    worst = _worst_eviction(gauges, preempted)
    made: list[Span] = []
    for at in range(gauges.hours):
        levels = {name: level for name, found in named.items() if (level := found[at])}
        gained = {name: float(row[at]) for name, row in counts.items() if not math.isnan(row[at])}
        levels = with_eviction(levels, gained.get(PREEMPTIONS))
        if EVICTED in levels and worst is not None:
            mean = levels[EVICTED]
            top = max(mean.top, float(worst[at]))
            levels[EVICTED] = Level(mean.mean, top, mean.known_s, top)
        if capacity_tokens is not None and levels:
            levels["kv_capacity_tokens"] = Level(
                capacity_tokens, capacity_tokens, 1.0, capacity_tokens
            )
        made.append(
            Span(
                counts=gained,
                tallies={name: tally for name, found in tallies.items() if (tally := found[at])},
                levels=levels,
            )
        )
    return made


def tallies_of(buckets: Mapping[float, Floats], sums: Floats, hours: int) -> list[Tally | None]:
    """A histogram of each hour, on the buckets that were there then; None where it was not."""
    bounds = sorted(buckets)
    if not bounds:
        return [None] * hours
    counts = np.array([buckets[bound] for bound in bounds])
    made: list[Tally | None] = []
    for at in range(hours):
        kept = np.flatnonzero(~np.isnan(counts[:, at]))
        if len(kept) == 0 or bounds[int(kept[-1])] != math.inf:
            made.append(None)
            continue
        # Each bucket is extrapolated by itself: they are made cumulative again.
        raised = np.maximum.accumulate(counts[kept, at])
        made.append(
            Tally(
                tuple(bounds[int(place)] for place in kept),
                tuple(raised.tolist()),
                float(np.nan_to_num(sums[at])),
            )
        )
    return made


def added(rows: Sequence[Floats], hours: int) -> Floats:
    """Rows added up; NaN where none has a value."""
    if not rows:
        return np.full(hours, np.nan)
    whole = np.array(rows)
    return np.where(np.isnan(whole).all(axis=0), np.nan, np.nansum(whole, axis=0))


def _worst_eviction(gauges: Gauges, preempted: Floats | None) -> Floats | None:
    """The highest hourly ratio of one engine: preemptions over running requests and seconds."""
    if preempted is None:
        return None
    running = np.nan_to_num(gauges.values[RUNNING]) * gauges.steps.step_s
    running_s = _by_slot(running, gauges.slot, gauges.hours)
    ratios = np.divide(
        np.nan_to_num(preempted), running_s, out=np.zeros_like(running_s), where=running_s > 0
    )
    highest: Floats = ratios.max(axis=0)
    return highest


def _by_slot(values: Floats, slot: Places, hours: int) -> Floats:
    made = np.zeros((len(values), hours))
    np.add.at(made.T, slot, values.T)
    return made
