"""What engines showed between two times: gauges, counter increases and histograms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from kneewatch.agent.report.increases import BY_SOURCE, Increases
from kneewatch.agent.report.series import Floats, Signals, Truths, gap_s, usual_step_s
from kneewatch.reports.weekly.aggregation import SERVING, Level, Span
from kneewatch.reports.weekly.measures import (
    COMPUTED,
    COUNTS,
    EVICTED,
    FAILED,
    LEVELS,
    PREEMPTIONS,
    RUNNING,
    SERVED_ONLY,
    TALLIES,
    WAITING,
)

IDLE_RUNNING = 0.5
"""With fewer requests running, on average over a window, an engine is idle (guide 9.2)."""

MINUTE_S = 60.0
METRICS = (*COUNTS, *TALLIES, BY_SOURCE)
PARTS = (*COUNTS, COMPUTED, FAILED)


@dataclass(frozen=True, slots=True)
class GaugeSpans:
    """The gauges of some engines over consecutive spans of time.

    Shapes: `watched_s` and `idle_s` (engines, spans); `levels` (spans,), over all engines.
    """

    watched_s: Floats
    idle_s: Floats
    levels: tuple[dict[str, Level], ...]


def gauge_spans(
    values: Mapping[str, Floats],
    *,
    running: Floats,
    watched: Truths,
    seconds: Floats,
    span_of: npt.NDArray[np.intp],
    spans: int,
) -> GaugeSpans:
    """Gauges over spans of time, weighted with the seconds that each value stands for.

    Shapes: each of `values`, `running` (requests running on average) and `watched` (engines,
    times), NaN where unknown; `seconds` and `span_of`, the span that each time is in, (times,).
    """
    engines = len(running)
    groups = (np.arange(engines)[:, None] * spans + span_of).ravel()
    weight_s = pd.Series(np.tile(seconds, engines))
    frame = pd.DataFrame({key: rows.ravel() for key, rows in values.items()})
    serving = pd.Series(running.ravel() > 0)
    for key in SERVED_ONLY:
        if key in frame:
            frame[key + SERVING] = frame[key].where(serving)
    by_group = range(engines * spans)
    sums = frame.mul(weight_s, axis=0).groupby(groups).sum().reindex(by_group, fill_value=0.0)
    known_s = (
        frame.notna().mul(weight_s, axis=0).groupby(groups).sum().reindex(by_group, fill_value=0.0)
    )
    highs = frame.groupby(groups).max().reindex(by_group)

    def total_s(holds: Truths) -> Floats:
        summed = (weight_s * holds.ravel()).groupby(groups).sum()
        return np.asarray(summed.reindex(by_group, fill_value=0.0)).reshape(engines, spans)

    waiting = values.get(WAITING, np.zeros_like(running))
    levels: list[dict[str, Level]] = [{} for _ in range(spans)]
    for key in frame.columns:
        columns = (
            np.asarray(table[key]).reshape(engines, spans) for table in (sums, known_s, highs)
        )
        for at, level in enumerate(_levels(*columns)):
            if level is not None:
                levels[at][str(key)] = level
    return GaugeSpans(
        total_s(watched),
        total_s((running < IDLE_RUNNING) & (np.nan_to_num(waiting) < 1)),
        tuple(levels),
    )


def _levels(sums: Floats, known_s: Floats, highs: Floats) -> list[Level | None]:
    """A gauge over all engines in each span; None where it is unknown. Shapes: (engines, spans)."""
    means = np.divide(sums, known_s, out=np.full_like(sums, -np.inf), where=known_s > 0)
    totals, seconds = sums.sum(axis=0).tolist(), known_s.sum(axis=0).tolist()
    tops = means.max(axis=0).tolist()
    return [
        Level(total / all_s, float(np.nanmax(high)), all_s, top) if all_s > 0 else None
        for total, all_s, high, top in zip(totals, seconds, highs.T, tops, strict=True)
    ]


def signal_spans(signals: Signals, edges_s: Floats) -> GaugeSpans:
    """One engine's gauges between consecutive edges, from its scrapes."""
    inside = (signals.times >= edges_s[0]) & (signals.times < edges_s[-1])
    times = signals.times[inside]
    return gauge_spans(
        {key: signals.values[key][inside][None] for key in LEVELS},
        running=signals.values["running_avg"][inside][None],
        watched=np.ones((1, len(times)), dtype=np.bool_),
        seconds=_weights_s(times),
        span_of=np.searchsorted(edges_s, times, side="right") - 1,
        spans=len(edges_s) - 1,
    )


def _weights_s(times: Floats) -> Floats:
    """The seconds that each scrape stands for: until the next one, or as usual before a gap."""
    usual_s, longest_s = usual_step_s(times), gap_s(times)
    steps = np.diff(times, append=times[-1:] + usual_s)
    return np.asarray(np.where(steps > longest_s, usual_s, steps), dtype=np.float64)


def spans_of(signals: Signals, increases: Increases, edges_s: Floats) -> list[Span]:
    """What one engine showed between consecutive edges."""
    gauges = signal_spans(signals, edges_s)
    covered = increases.covered(edges_s, gap_s=gap_s(signals.times) + MINUTE_S).tolist()
    counts = {
        part: gained.tolist()
        for part in PARTS
        if (gained := increases.between((part, ""), edges_s)) is not None
    }
    tallies = {metric: increases.tallies(metric, edges_s) for metric in TALLIES}
    return [
        Span(
            engine_s=covered[at],
            clock_s=covered[at],
            watched_s=float(gauges.watched_s[0, at]),
            idle_s=float(gauges.idle_s[0, at]),
            counts={part: gained[at] for part, gained in counts.items()} if covered[at] else {},
            tallies={
                metric: tally
                for metric, by_span in tallies.items()
                if covered[at] and (tally := by_span[at]) is not None
            },
            levels=with_eviction(
                gauges.levels[at], counts[PREEMPTIONS][at] if PREEMPTIONS in counts else None
            ),
        )
        for at in range(len(edges_s) - 1)
    ]


def with_eviction(levels: Mapping[str, Level], preemptions: float | None) -> dict[str, Level]:
    """The levels with the preemption ratio: preemptions per running request and second."""
    result, running = dict(levels), levels.get(RUNNING)
    running_s = running.mean * running.known_s if running is not None else 0.0
    if preemptions is not None and running_s > 0:
        ratio = preemptions / running_s
        result[EVICTED] = Level(ratio, ratio, running_s, ratio)
    return result
