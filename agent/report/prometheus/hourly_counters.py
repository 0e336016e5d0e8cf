"""Hourly increases of counters and histograms. The server sums them over engines, or has recorded
sums. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np

from kneewatch.agent.fleet.queries import QueryScope
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import FleetEngines
from kneewatch.agent.report.prometheus.inventory import Part as FleetPart
from kneewatch.agent.report.prometheus.queries import Query, Ranges, RowKey, Rows, Steps
from kneewatch.agent.report.series import Counted, Floats, Truths
from kneewatch.collector.scrape_history import Column
from kneewatch.dashboards.prometheus.hourly_sums import (
    SUM_STEP_S,
    SUMMED_COUNTERS,
    SUMMED_HISTOGRAMS,
)
from kneewatch.diagnose.fleet.inventory import Labels
from kneewatch.reports.weekly.observed import Grid

BUCKETS = 20
"""Assumed number of buckets of a vLLM histogram, to estimate the size of a query's answer."""

WHOLE = 0.95
"""The recorded sums of an hour are used if they cover at least this share of the tier's
engine-time."""

PART = "#"
"""Separates the name of a query from the number of a part of the fleet."""

MOMENT_S = 1e-3
"""Seconds between the end of a step and the begin of the next one, so that both can be told
apart."""

ENGINES = "engines in the recorded sums"
Text = Callable[[QueryScope, Sequence[str], float], str]


class Hours:
    """Queries the hourly increases of a fleet's counters and histograms."""

    def __init__(self, ranges: Ranges, fleet: FleetEngines, grid: Grid) -> None:
        self._ranges, self._fleet, self._grid = ranges, fleet, grid
        self._groups = len({fleet.group(engine) for engine in fleet.members})

    def read(self, running: Rows, at: Steps) -> tuple[dict[str, Rows], int]:
        """The hourly increases, by counter or part of a histogram, and the number of hours that
        were read from recorded sums.

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
        """One query per part of the fleet. `series` is the number of series per engine.

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
                series
                * (self._groups / SUM_STEP_S if kept else len(fleet.members) / fleet.scrape_s),
            )
        return by_part

    def _named(self, text: Callable[..., str]) -> dict[str, tuple[Text, int]]:
        """For each query, by name: a function that returns its PromQL, and the number of series per
        engine."""
        named: dict[str, tuple[Text, int]] = {
            key: (partial(text, key, ""), 1) for key in SUMMED_COUNTERS
        }
        for metric, part in product(SUMMED_HISTOGRAMS, ("bucket", "sum")):
            named[f"{metric}_{part}"] = (
                partial(text, metric, part), BUCKETS if part == "bucket" else 1
            )  # fmt: skip
        return named

    def _whole(self, running: Rows, at: Steps) -> Truths:
        """Mask of the hours whose recorded sums include all engines for the whole hour. Shape:
        (slots,)."""
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
            told_s = np.nan_to_num(summed.get(group, nothing)) * SUM_STEP_S
            whole &= np.abs(told_s - there_s) <= (1 - WHOLE) * there_s
        return whole

    def _there_s(self, running: Rows, at: Steps) -> Mapping[RowKey, Floats]:
        """Seconds for which engines were present in each hour, summed over the engines of a group.
        Shape of each row: (slots,)."""
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
    """The rows of each query, merged over the parts of the fleet."""
    merged: dict[str, Rows] = {}
    for name, part_rows in rows.items():
        merged.setdefault(name.partition(PART)[0], {}).update(part_rows)
    return merged


def _bucket(part: FleetPart, labels: Labels) -> RowKey:
    return part.key(labels), labels["le"]


# --- Increases as the counters of a page ----------------------------------------------------------


def counted(
    increases: Mapping[Column, Floats],
    begins_s: Floats,
    ends_s: Floats,
    restarts_s: Sequence[float] = (),
) -> Counted:
    """Counters that increase in each step as given, as two snapshots per step: at its begin and at
    its end. A counter starts at 0 again when the process restarts.

    Shape of each row of `increases`: (steps,). A step in which no counter has a value has no
    snapshots.
    """
    table = np.array(list(increases.values()), dtype=np.float64).reshape(
        len(increases), len(begins_s)
    )
    there = ~np.isnan(table).all(axis=0)
    table = table[:, there]
    ends = np.cumsum(np.nan_to_num(table), axis=1)
    begins = np.concatenate((np.zeros_like(ends[:, :1]), ends[:, :-1]), axis=1)
    times = np.column_stack((begins_s[there] + MOMENT_S, ends_s[there])).ravel()
    values = np.stack((begins, ends), axis=2).reshape(len(increases), len(times))
    for place in np.searchsorted(times, sorted(restarts_s)).tolist():
        if 0 < place < len(times):
            values[:, place:] -= values[:, place - 1 : place].copy()
    values[np.isnan(table).repeat(2, axis=1)] = np.nan
    return Counted(times, tuple(increases), values)
