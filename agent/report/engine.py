"""One engine over a period: hourly levels, load windows and incidents, as the report shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kneewatch.agent.report.history import (
    BY_SOURCE,
    Floats,
    History,
    Increases,
    Signals,
    gap_s,
    usual_step_s,
)
from kneewatch.agent.store.records import StoredEngine
from kneewatch.collector.signals.vllm import TTFT
from kneewatch.diagnose.learned.knee import (
    IN_FLIGHT_MIN,
    POINT_SIGNALS,
    POINTS_KEPT,
    SERVED_SIGNALS,
    Point,
    point_of,
    step_of,
)
from kneewatch.reports.weekly.aggregation import SERVING, Level, Span
from kneewatch.reports.weekly.hours import HOUR_S, Grid
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
)
from kneewatch.reports.weekly.observed import EngineObserved, Episode, EpisodeObserved, InFlight
from kneewatch.rules.rule import WINDOW_S

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


# --- An engine's windows at all loads that it had: the points of its own curve, thinned evenly ----


def in_flight(signals: Signals, *, window_s: float) -> InFlight | None:
    """Requests in flight over the engine's windows; None where that is not known."""
    rows = _one_a_window(signals, window_s)
    load = _load(signals)[rows]
    present = np.flatnonzero(~np.isnan(load))
    if len(present) == 0:
        return None
    highest = present[int(np.argmax(load[present]))]
    return InFlight(
        p99=float(np.quantile(load[present], 0.99)),
        highest=float(load[highest]),
        highest_at_s=float(signals.times[rows][highest]),
    )


def points(signals: Signals, *, window_s: float) -> list[Point]:
    """Windows that say something about latency under load, of each concurrency as many as a curve
    keeps, evenly over the time."""
    rows = _one_a_window(signals, window_s)
    load = _load(signals)
    useful = load[rows] >= IN_FLIGHT_MIN
    for key in SERVED_SIGNALS:
        useful &= signals.values[key][rows] > 0
    by_step: dict[int, list[int]] = {}
    for row in rows[useful].tolist():
        by_step.setdefault(step_of(float(load[row])), []).append(row)
    chosen = sorted(row for step in by_step.values() for row in evenly(step, POINTS_KEPT))
    points = (_point(signals, row, window_s) for row in chosen)
    return [point for point in points if point is not None]


def evenly(rows: list[int], most: int) -> list[int]:
    """At most so many of them, evenly spaced."""
    if len(rows) <= most:
        return rows
    return [rows[at * len(rows) // most] for at in range(most)]


def _one_a_window(signals: Signals, window_s: float) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The last scrape of each window: no observation counts twice."""
    windows = signals.times // window_s
    return np.flatnonzero(np.append(windows[1:] != windows[:-1], True)[: len(windows)])


def _load(signals: Signals) -> Floats:
    return signals.values["running_avg"] + np.nan_to_num(signals.values["waiting_avg"])


def _point(signals: Signals, row: int, window_s: float) -> Point | None:
    values = {
        key: None if np.isnan(value := signals.values[key][row]) else float(value)
        for key in POINT_SIGNALS
    }
    return point_of(float(signals.times[row]), values, window_s)


# --- One engine of the history over a period, and its incidents, as the report takes them ---------


MARGIN_S = 120.0
"""Counters are kept once a minute: those around the period's bounds are needed as well."""

MINUTE_S = 60.0
AROUND_S = 600.0
"""Before and after an incident its signals are shown for so long."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running")
SHOWN_MOST = 4
CITED_MOST = 2
"""Signals shown of an incident: what its cause cites first, then the usual ones."""

METRICS = (*COUNTS, *TALLIES, BY_SOURCE)
PARTS = (*COUNTS, COMPUTED, FAILED)
NOTHING_READ = "every signal"


@dataclass(frozen=True, slots=True)
class EngineHistory:
    """An engine's numbers over a period."""

    engine: StoredEngine
    grid: Grid
    signals: Signals
    increases: Increases
    window_s: float = WINDOW_S

    @classmethod
    def read(
        cls, history: History, engine: StoredEngine, grid: Grid, window_s: float
    ) -> EngineHistory:
        """Reads them."""
        span = {"from_s": grid.from_s - MARGIN_S, "to_s": grid.to_s + MARGIN_S}
        keys = tuple(dict.fromkeys((*LEVELS, *POINT_SIGNALS)))
        changes = history.configs(engine.id, **span)
        increases = Increases(
            history.counter_arrays(engine.id, METRICS, **span),
            restarts_s=[change.t_s for change in changes if change.restart],
        )
        signals = history.signal_arrays(engine.id, keys, from_s=grid.from_s, to_s=grid.to_s)
        return cls(engine, grid, signals, increases, window_s)

    def observed(
        self, config: Mapping[str, str], unknown: Mapping[str, str], *, curve: bool
    ) -> EngineObserved:
        """The engine over the period; with `curve` its windows too."""
        engine, signals = self.engine, self.signals
        return EngineObserved(
            target=engine.target,
            engine=engine.engine,
            replica=engine.replica,
            first_s=max(engine.first_s, self.grid.from_s),
            last_s=min(engine.last_s, self.grid.to_s),
            spans=self.spans(np.array(self.grid.edges_s)),
            minutes=self._minutes(),
            points=points(signals, window_s=self.window_s) if curve else (),
            in_flight=in_flight(signals, window_s=self.window_s) if curve else None,
            config=config,
            unknown=unknown,
        )

    def spans(self, edges_s: Floats) -> list[Span]:
        """What it showed between each two neighbouring times."""
        return spans_of(self.signals, self.increases, edges_s)

    def _minutes(self) -> list[float]:
        """Requests that began in each minute; NaN where the counters do not tell."""
        edges_s = np.arange(self.grid.from_s, self.grid.to_s + MINUTE_S, MINUTE_S)
        begun = self.increases.between((TTFT, "count"), edges_s)
        if begun is None:
            return []
        covered = self.increases.covered(edges_s, gap_s=0.0)
        rates: list[float] = np.where(covered > 0.5 * MINUTE_S, begun, np.nan).tolist()
        return rates

    def episode(
        self,
        history: History,
        episode: Episode,
        document: Mapping[str, Any] | None,
        tier: str,
    ) -> EpisodeObserved:
        """An incident with what was counted and seen around it."""
        start_s, until_s = episode.start_s, max(episode.until_s, episode.start_s + 1.0)
        hour_before, during = self.spans(np.array([start_s - HOUR_S, start_s, until_s]))
        seen = history.signal_arrays(
            self.engine.id,
            shown(episode, document),
            from_s=max(start_s - AROUND_S, self.grid.from_s),
            to_s=min(until_s + AROUND_S, self.grid.to_s),
        )
        return EpisodeObserved(
            tier=tier,
            target=self.engine.target,
            engine=self.engine.engine,
            episode=episode,
            document=document,
            during=during,
            hour_before=hour_before,
            series={
                key: (seen.times.tolist(), values.tolist()) for key, values in seen.values.items()
            },
        )


def spans_of(signals: Signals, increases: Increases, edges_s: Floats) -> list[Span]:
    """What an engine showed between each two neighbouring times."""
    levels = hours(signals, edges_s)
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
            watched_s=float(levels.watched_s[at]),
            idle_s=float(levels.idle_s[at]),
            counts={part: gained[at] for part, gained in counts.items()} if covered[at] else {},
            tallies={
                metric: tally
                for metric, by_slot in tallies.items()
                if covered[at] and (tally := by_slot[at]) is not None
            },
            levels=with_eviction(
                levels.levels[at], counts[PREEMPTIONS][at] if PREEMPTIONS in counts else None
            ),
        )
        for at in range(len(edges_s) - 1)
    ]


def shown(episode: Episode, document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The signals to show: TTFT always, for it tells who was late."""
    causes: Sequence[Mapping[str, Any]] = document["causes"] if document else ()
    cited = [
        str(item["signal"])
        for cause in causes
        if cause["id"] == episode.cause and episode.kind != "cascade"
        for item in cause["evidence"][:CITED_MOST]
    ]
    return tuple(dict.fromkeys((SHOWN[0], *cited, *SHOWN)))[:SHOWN_MOST]


def with_eviction(levels: Mapping[str, Level], preempted: float | None) -> dict[str, Level]:
    """The levels with preemptions over running requests and seconds."""
    result, running = dict(levels), levels.get(RUNNING)
    running_s = running.mean * running.known_s if running is not None else 0.0
    if preempted is not None and running_s > 0:
        ratio = preempted / running_s
        result[EVICTED] = Level(ratio, ratio, running_s, ratio)
    return result


def unknown_of(document: Mapping[str, Any] | None) -> dict[str, str]:
    """Signals that a diagnosis could not have, and why."""
    lines: Sequence[str] = document["unknown"] if document else ()
    pairs = (line.partition(": ") for line in lines)
    return {key: why for key, _, why in pairs if why and key != NOTHING_READ}
