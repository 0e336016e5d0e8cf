"""A tier's totals by the hour: gauges of its engines, counters that the server adds up. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.prometheus.period import PeriodData
from kneewatch.agent.report.prometheus.resolution import RowKey, Rows, Steps
from kneewatch.agent.report.series import Floats
from kneewatch.agent.report.spans import GaugeSpans, gauge_spans, with_eviction
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.measures import EVICTED, PREEMPTIONS, RUNNING
from kneewatch.reports.weekly.observed import Level, Span


def gauges_of(
    grid: Grid, at: Steps, keys: Sequence[RowKey], rows: Mapping[str, Rows]
) -> GaugeSpans:
    """The hourly gauges of the engines in `keys`; gauges that no engine exports are left out."""
    nothing = np.full(at.count, np.nan)
    values = {
        name: np.array([gauge_rows.get(key, nothing) for key in keys])
        for name, gauge_rows in rows.items()
        if name == RUNNING or any(key in gauge_rows for key in keys)
    }
    return gauge_spans(
        values,
        running=values[RUNNING],
        watched=~np.isnan(values[RUNNING]),
        seconds=np.full(at.count, at.step_s),
        span_of=_hours_of(grid, at),
        spans=len(grid.slots),
    )


def _hours_of(grid: Grid, at: Steps) -> npt.NDArray[np.intp]:
    """The index of the hour that each step is in. Shape: (steps,)."""
    return np.searchsorted(np.array(grid.edges_s), at.begins_s + 1e-3, side="right") - 1


def tier_spans(
    read: PeriodData,
    keys: Sequence[RowKey],
    groups: Sequence[RowKey],
    capacity_tokens: float | None,
) -> list[Span]:
    """The hours of a tier: gauges of the engines `keys`, counters and histograms of `groups`."""
    gauges = gauges_of(read.grid, read.at, keys, read.gauges)
    counts, tallies = read.counted(groups), read.tallies(groups)
    worst = _worst_eviction(read, keys)
    by_hour: list[Span] = []
    for at, gauge_levels in enumerate(gauges.levels):
        gained = {name: float(row[at]) for name, row in counts.items() if not math.isnan(row[at])}
        levels = with_eviction(gauge_levels, gained.get(PREEMPTIONS))
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


def _worst_eviction(read: PeriodData, keys: Sequence[RowKey]) -> Floats | None:
    """The highest preemption ratio of any of the engines per hour: preemptions/running/s."""
    if not read.preempted:
        return None
    hours = len(read.grid.slots)
    highest = np.zeros(hours)
    for key in keys:
        running_s = np.zeros(hours)
        running = np.nan_to_num(read.gauges[RUNNING][key]) * read.at.step_s
        np.add.at(running_s, _hours_of(read.grid, read.at), running)
        preempted = np.nan_to_num(read.preempted.get(key, np.zeros(hours)))
        ratios = np.divide(preempted, running_s, out=np.zeros(hours), where=running_s > 0)
        highest = np.maximum(highest, ratios)
    return highest
