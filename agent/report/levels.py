"""An engine's gauges by the hour: time-weighted means, highest values, seconds watched.

The one home of pandas; it is imported by the report alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kneewatch.agent.report.history import Floats, Signals
from kneewatch.agent.report.scraping import gap_s, usual_step_s
from kneewatch.reports.weekly.measures import LEVELS, SERVED_ONLY
from kneewatch.reports.weekly.spans import SERVING, Level

IDLE_RUNNING = 0.5
"""With fewer requests running, on average over a window, an engine is idle (guide 9.2)."""


@dataclass(frozen=True, slots=True)
class Hours:
    """Gauges of each of some spans. Shapes: `watched_s` and `idle_s` (spans,)."""

    watched_s: Floats
    idle_s: Floats
    levels: tuple[Mapping[str, Level], ...]


def hours(signals: Signals, edges_s: Floats) -> Hours:
    """The gauges between each two neighbouring times."""
    spans = len(edges_s) - 1
    times = signals.times
    inside = (times >= edges_s[0]) & (times < edges_s[-1])
    times = times[inside]
    weight = pd.Series(_weights(times))
    slot = pd.Series(np.searchsorted(edges_s, times, side="right") - 1)
    frame = pd.DataFrame({key: signals.values[key][inside] for key in LEVELS})
    running = pd.Series(signals.values["running_avg"][inside])
    serving = running > 0
    for key in SERVED_ONLY:
        frame[key + SERVING] = frame[key].where(serving)
    order = range(spans)
    sums = frame.mul(weight, axis=0).groupby(slot).sum().reindex(order)
    seconds = frame.notna().mul(weight, axis=0).groupby(slot).sum().reindex(order)
    highs = frame.groupby(slot).max().reindex(order)
    idle = ((running < IDLE_RUNNING) & (frame["waiting"].fillna(0) < 1)) * weight
    return Hours(
        _by_span(weight, slot, spans),
        _by_span(idle, slot, spans),
        _levels(sums, seconds, highs),
    )


def _weights(times: Floats) -> Floats:
    """The seconds that each scrape stands for: until the next, or as usual before a gap."""
    usual_s, most_s = usual_step_s(times), gap_s(times)
    steps = np.diff(times, append=times[-1:] + usual_s)
    return np.asarray(np.where(steps > most_s, usual_s, steps), dtype=np.float64)


def _by_span(values: pd.Series[float], slot: pd.Series[int], spans: int) -> Floats:
    summed = values.groupby(slot).sum().reindex(range(spans), fill_value=0.0)
    return np.asarray(summed, dtype=np.float64)


def _levels(
    sums: pd.DataFrame, seconds: pd.DataFrame, highs: pd.DataFrame
) -> tuple[Mapping[str, Level], ...]:
    made: list[dict[str, Level]] = [{} for _ in range(len(sums))]
    for key in sums.columns:
        rows = zip(sums[key], seconds[key], highs[key], strict=True)
        for levels, (total, known_s, high) in zip(made, rows, strict=True):
            if known_s > 0:
                mean = float(total / known_s)
                levels[str(key)] = Level(mean, float(high), float(known_s), mean)
    return tuple(made)
