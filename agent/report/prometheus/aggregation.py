"""Aggregation: counters and histograms by the hour, and the totals of a tier. I/O edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from kneewatch.agent.fleet.queries import QueryScope
from kneewatch.agent.report.engine import IDLE_RUNNING, with_eviction
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import FleetEngines, Part
from kneewatch.agent.report.prometheus.queries import Query, Ranges
from kneewatch.agent.report.prometheus.resolution import Floats, RowKey, Rows, Steps
from kneewatch.dashboards.prometheus.hourly_totals import COUNTERS, STEP_S
from kneewatch.diagnose.fleet.inventory import Labels
from kneewatch.reports.weekly.aggregation import SERVING, Level, Span, Tally
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.measures import (
    EVICTED,
    PREEMPTIONS,
    RUNNING,
    SERVED_ONLY,
    TALLIES,
    WAITING,
)

Truths = npt.NDArray[np.bool_]

BUCKETS = 20
"""Approximate number of buckets of a vLLM histogram, to estimate a query's size."""

WHOLE = 0.95
"""Recorded sums are used for an hour if they cover this share of the tier's engine-time."""

PART = "#"
"""Separates a query's name from the number of its part."""

ENGINES = "engines in the recorded sums"
Text = Callable[[QueryScope, Sequence[str], float], str]


class Hours:
    """Queries the hourly increases of a fleet's counters and histograms."""

    def __init__(self, ranges: Ranges, fleet: FleetEngines, grid: Grid) -> None:
        self._ranges, self._fleet, self._grid = ranges, fleet, grid
        self._groups = len({fleet.group(engine) for engine in fleet.members})

    def read(self, running: Rows, at: Steps) -> tuple[dict[str, Rows], int]:
        """Rows by counter or histogram part, and the number of hours read from recorded sums.

        `running` shows when each engine was present.
        """
        whole = self._whole(running, at)
        slots = self._grid.slots
        hourly: dict[str, Rows] = {name: {} for name in self._named(queries.gained)}
        for text, hours in ((queries.gained_kept, whole), (queries.gained, ~whole)):
            places = np.flatnonzero(hours)
            if len(places) == 0:
                continue
            batch: dict[str, Query] = {}
            for name, (query_text, series) in self._named(text).items():
                batch |= self.of_parts(name, query_text, series, kept=text is queries.gained_kept)
            rows = merge_parts(self._ranges.slots(batch, [slots[at] for at in places.tolist()]))
            for name, part in rows.items():
                for key, row in part.items():
                    hourly[name].setdefault(key, np.full(len(slots), np.nan))[places] = row
        return hourly, int(whole.sum())

    def of_parts(
        self, name: str, text: Text, series: int, *, kept: bool = False
    ) -> dict[str, Query]:
        """One query per part of the fleet; `series`: series per engine.

        With `kept` the queries read recorded sums instead of raw series.
        """
        fleet = self._fleet
        by_part: dict[str, Query] = {}
        for at, part in enumerate(fleet.parts):
            only = (part.kept or "") if kept else part.only
            by_part[f"{name}{PART}{at}"] = Query(
                partial(text, queries.narrowed(fleet.asking, only), part.by),
                partial(_bucket, part) if series > 1 else part.key,
                self._groups * series,
                series * (self._groups / STEP_S if kept else len(fleet.members) / fleet.scrape_s),
            )
        return by_part

    def _named(self, text: Callable[..., str]) -> dict[str, tuple[Text, int]]:
        """The text of each query, and how many series one engine has for it."""
        named: dict[str, tuple[Text, int]] = {key: (partial(text, key, ""), 1) for key in COUNTERS}
        for metric, part in product(TALLIES, ("bucket", "sum")):
            named[f"{metric}_{part}"] = (
                partial(text, metric, part), BUCKETS if part == "bucket" else 1
            )  # fmt: skip
        return named

    def _whole(self, running: Rows, at: Steps) -> Truths:
        """Hours whose recorded sums cover all engines for the whole hour. Shape: (slots,)."""
        slots = self._grid.slots
        if any(part.kept is None for part in self._fleet.parts):
            return np.zeros(len(slots), dtype=np.bool_)
        batch = self.of_parts(ENGINES, queries.engines_kept, 1, kept=True)
        summed = merge_parts(self._ranges.slots(batch, slots))[ENGINES]
        if not summed:
            return np.zeros(len(slots), dtype=np.bool_)
        nothing = np.zeros(len(slots))
        whole = np.ones(len(slots), dtype=np.bool_)
        for group, there_s in self._there_s(running, at).items():
            told_s = np.nan_to_num(summed.get(group, nothing)) * STEP_S
            whole &= np.abs(told_s - there_s) <= (1 - WHOLE) * there_s
        return whole

    def _there_s(self, running: Rows, at: Steps) -> Mapping[RowKey, Floats]:
        """Engine-seconds present in each hour, by group. Shape of each: (slots,)."""
        edges_s = np.array(self._grid.edges_s)
        slot = np.searchsorted(edges_s, at.begins_s + 1e-3, side="right") - 1
        present_s: dict[RowKey, Floats] = {}
        for engine in self._fleet.members:
            row = running.get(engine.key)
            if row is not None:
                sums = present_s.setdefault(self._fleet.group(engine), np.zeros(len(edges_s) - 1))
                np.add.at(sums, slot, ~np.isnan(row) * at.step_s)
        return present_s


def merge_parts(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows of each query, its parts merged."""
    merged: dict[str, Rows] = {}
    for name, part_rows in rows.items():
        merged.setdefault(name.partition(PART)[0], {}).update(part_rows)
    return merged


def _bucket(part: Part, labels: Labels) -> RowKey:
    return part.key(labels), float(labels["le"])


# --- Tier totals: hourly counters and histograms from the server, gauges from arrays -------------


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
        """The gauges of the engines in `keys`; gauges that no engine exports are left out."""
        nothing = np.full(at.count, np.nan)
        slot = np.searchsorted(np.array(grid.edges_s), at.begins_s + 1e-3, side="right") - 1
        values = {
            name: np.array([gauge_rows.get(key, nothing) for key in keys])
            for name, gauge_rows in rows.items()
            if name == RUNNING or any(key in gauge_rows for key in keys)
        }
        there = ~np.isnan(values[RUNNING])
        watched_s = _by_slot(np.where(there, at.step_s, 0.0), slot, len(grid.slots))
        return cls(at, slot, len(grid.slots), values, watched_s)

    def idle_s(self) -> Floats:
        """Idle seconds: running below IDLE_RUNNING, no queue. Shape: (engines, slots)."""
        waiting = self.values.get(WAITING, np.zeros_like(self.values[RUNNING]))
        idle = (self.values[RUNNING] < IDLE_RUNNING) & (np.nan_to_num(waiting) < 1)
        return _by_slot(np.where(idle, self.steps.step_s, 0.0), self.slot, self.hours)

    def levels(self, name: str, *, serving: bool = False) -> list[Level | None]:
        """A gauge per hour over all engines; None for hours without data."""
        values = self.values[name]
        if serving:
            values = np.where(self.values[RUNNING] > 0, values, np.nan)
        present = ~np.isnan(values)
        seconds = _by_slot(present * self.steps.step_s, self.slot, self.hours)
        sums = _by_slot(np.nan_to_num(values) * self.steps.step_s, self.slot, self.hours)
        highs = np.full(self.hours, -np.inf)
        np.maximum.at(highs, self.slot, np.where(present, values, -np.inf).max(axis=0))
        means = np.divide(sums, seconds, out=np.full_like(sums, -np.inf), where=seconds > 0)
        by_hour: list[Level | None] = []
        for at in range(self.hours):
            known_s = float(seconds[:, at].sum())
            by_hour.append(
                Level(
                    float(sums[:, at].sum()) / known_s,
                    float(highs[at]),
                    known_s,
                    float(means[:, at].max()),
                )
                if known_s > 0
                else None
            )
        return by_hour


def spans(
    gauges: Gauges,
    counts: Mapping[str, Floats],
    tallies: Mapping[str, Sequence[Tally | None]],
    preempted: Floats | None,
    capacity_tokens: float | None,
) -> list[Span]:
    """The hours of a tier. `preempted` (engines, slots): the worst engine sets the peak."""
    named = {name: gauges.levels(name) for name in gauges.values} | {
        name + SERVING: gauges.levels(name, serving=True)
        for name in SERVED_ONLY
        if name in gauges.values
    }
    worst = _worst_eviction(gauges, preempted)
    by_hour: list[Span] = []
    for at in range(gauges.hours):
        levels = {name: level for name, hours in named.items() if (level := hours[at])}
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
        by_hour.append(
            Span(
                counts=gained,
                tallies={name: tally for name, hours in tallies.items() if (tally := hours[at])},
                levels=levels,
            )
        )
    return by_hour


def tallies_of(buckets: Mapping[float, Floats], sums: Floats, hours: int) -> list[Tally | None]:
    """A histogram per hour with the buckets present in that hour; None without +Inf bucket."""
    bounds = sorted(buckets)
    if not bounds:
        return [None] * hours
    counts = np.array([buckets[bound] for bound in bounds])
    by_hour: list[Tally | None] = []
    for at in range(hours):
        kept = np.flatnonzero(~np.isnan(counts[:, at]))
        if len(kept) == 0 or bounds[int(kept[-1])] != math.inf:
            by_hour.append(None)
            continue
        # Prometheus extrapolates each bucket separately, so they may not be cumulative any more.
        raised = np.maximum.accumulate(counts[kept, at])
        by_hour.append(
            Tally(
                tuple(bounds[int(place)] for place in kept),
                tuple(raised.tolist()),
                float(np.nan_to_num(sums[at])),
            )
        )
    return by_hour


def added(rows: Sequence[Floats], hours: int) -> Floats:
    """The sum of the rows; NaN where no row has a value."""
    if not rows:
        return np.full(hours, np.nan)
    whole = np.array(rows)
    return np.where(np.isnan(whole).all(axis=0), np.nan, np.nansum(whole, axis=0))


def _worst_eviction(gauges: Gauges, preempted: Floats | None) -> Floats | None:
    """The highest preemption ratio of any engine per hour: preemptions/running/s."""
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
    sums = np.zeros((len(values), hours))
    np.add.at(sums.T, slot, values.T)
    return sums
