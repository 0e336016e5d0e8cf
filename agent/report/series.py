"""The data of an engine over time as numpy arrays: signals, gaps, load points, counter increases
and time spans. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.scrape_history import Column
from kneewatch.dashboards.prometheus.rule_group import SUMMED_COUNTERS, SUMMED_HISTOGRAMS
from kneewatch.diagnose.learned.knee import (
    IN_FLIGHT_MIN,
    POINTS_KEPT,
    LoadPoint,
    point_of,
    step_of,
)
from kneewatch.reports.weekly.knee import evenly
from kneewatch.reports.weekly.measures import (
    COMPLETED,
    COMPUTED,
    EVICTED,
    FAILED,
    LEVELS,
    PREEMPTIONS,
    RUNNING,
    SERVED_ONLY,
    WAITING,
)
from kneewatch.reports.weekly.observed import SERVING, Level, Span, Tally
from kneewatch.rules.rule import MINUTE_S

Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]
NO_TIMES: Floats = np.empty(0)

SERVED_SIGNALS = (
    "completed_per_s",
    "generation_tokens_per_s",
    "e2e_mean_s",
    "output_tokens_mean",
)
"""Signals that a window needs to become a point."""

POINT_SIGNALS = ("running_avg", "waiting_avg", *SERVED_SIGNALS, "ttft_p99_s", "itl_p99_s")
"""Signals of the curve."""

GAP_SCRAPES = 3.0
GAP_LEAST_S = 30.0
"""Minimum length of a gap in seconds. Two scrapes have a gap between them if they are further apart
than max(GAP_SCRAPES intervals, GAP_LEAST_S)."""


class Signals(Struct, frozen=True):
    """Signals at each scrape, oldest first.

    Shapes: `times` and each array of `values` (scrapes,). NaN if unknown. If `step_s` is not 0, the
    values are means over this many seconds after their time.
    """

    times: Floats
    values: dict[str, Floats]
    step_s: float = 0.0


def in_order(times: Floats) -> Truths:
    """Mask of the scrapes that are newer than all scrapes before them. It is false for scrapes
    after the clock was set back."""
    if len(times) == 0:
        return np.empty(0, dtype=np.bool_)
    newest = np.maximum.accumulate(times)
    return np.concatenate(([True], times[1:] > newest[:-1]))


def usual_step_s(times: Floats) -> float:
    """The median scrape interval in seconds; 0 with fewer than two scrapes."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def gap_s(times: Floats) -> float:
    """Scrapes that are further apart than this many seconds have a gap between them."""
    return max(GAP_SCRAPES * usual_step_s(times), GAP_LEAST_S)


def runs(holds: Truths, *, bridged: int = 1) -> list[npt.NDArray[np.intp]]:
    """Runs of true values, as arrays of indices. Two runs are merged if they are at most `bridged`
    apart.

    Shape: `holds` (scrapes,) or (steps,).
    """
    places = np.flatnonzero(holds)
    apart = np.flatnonzero(np.diff(places) > bridged) + 1
    return np.split(places, apart) if len(places) else []


# --- Windows of an engine at the loads that it had: the points of its latency curve ---------------


def peak(signals: Signals, *, window_s: float) -> tuple[float | None, float | None]:
    """The P99 of requests in flight over the windows of an engine, and the time of the maximum.
    None if unknown."""
    rows = _last_of_each_window(signals, window_s)
    load = _load(signals)[rows]
    present = np.flatnonzero(~np.isnan(load))
    if len(present) == 0:
        return None, None
    highest = present[int(np.argmax(load[present]))]
    return float(np.quantile(load[present], 0.99)), float(signals.times[rows][highest])


def points(signals: Signals, *, window_s: float) -> list[LoadPoint]:
    """Windows that show latency under load: for each concurrency at most POINTS_KEPT of them,
    evenly spaced."""
    rows = _last_of_each_window(signals, window_s)
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


def _last_of_each_window(signals: Signals, window_s: float) -> npt.NDArray[np.intp]:
    """Indices of the last scrape of each window. Only these are used, so that no observation counts
    twice."""
    windows = signals.times // window_s
    return np.flatnonzero(np.append(windows[1:] != windows[:-1], True)[: len(windows)])


def arrived(begun: Floats, queued: Floats) -> Floats:
    """The requests that arrived in each step: those that began, and the growth of the queue.
    Shapes: `begun` (steps,), `queued` at the edges of the steps (steps + 1,)."""
    return np.maximum(begun + np.diff(queued), 0.0)


def _load(signals: Signals) -> Floats:
    return signals.values["running_avg"] + np.nan_to_num(signals.values["waiting_avg"])


def _point(signals: Signals, row: int, window_s: float) -> LoadPoint | None:
    values = {
        key: None if np.isnan(value := signals.values[key][row]) else float(value)
        for key in POINT_SIGNALS
    }
    return point_of(float(signals.times[row]), values, window_s)


# --- Counter increases over restarts and gaps -----------------------------------------------------


BY_SOURCE = "prompt_tokens_by_source"
LOCAL = ("source", "local_compute")
FAILED_REASONS = ("error", "abort")
NO_BOUNDS = ("", "sum", "count")

Part = tuple[str, str]
"""A metric and a part of it: "" for a counter; for a histogram "sum", "count" or a bucket's upper
bound."""


class Counted(Struct, frozen=True):
    """Counters in consecutive snapshots. Equal `columns` are the same object.

    Shapes: `times` (snapshots,), `values` (columns, snapshots). NaN if a page lacks a column.
    """

    times: Floats
    columns: tuple[Column, ...]
    values: Floats


class Increases:
    """How much the counters of an engine increased, summed over the label sets of each metric.
    Restarts and gaps are taken into account."""

    def __init__(self, counted: Iterable[Counted], *, restarts_s: Sequence[float]) -> None:
        parts = list(counted)
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = in_order(times)
        self.times: Floats = times[keep]
        anew = np.searchsorted(self.times, np.asarray(sorted(restarts_s), dtype=np.float64))
        self._anew: npt.NDArray[np.int64] = np.unique(anew[anew < len(self.times)])
        self._gained: dict[Part, Floats] = {}
        self._covered: dict[Part, Truths] = {}
        """Only for parts that some page lacks: a mask of the steps between snapshots for which the
        part has data."""
        for column, whole in _joined(parts, len(times)).items():
            values = whole[keep]
            gained, covered = self._of(values), self._covered_steps(values)
            for part in _parts(column):
                before = self._gained.get(part)
                self._gained[part] = gained if before is None else before + gained
                if covered is not None:
                    self._covered[part] = covered & self._covered.get(part, np.True_)

    def _covered_steps(self, values: Floats) -> Truths | None:
        """A mask of the steps between snapshots for which a column has data: from its first to
        its last page, except gaps in which the process was replaced. None if it has data for all
        steps."""
        present = np.flatnonzero(~np.isnan(values))
        if len(present) in (0, len(values)):
            return None
        covered = np.zeros(max(len(values) - 1, 0), dtype=np.bool_)
        covered[max(present[0] - 1, 0) : present[-1]] = True
        anew = set(self._anew.tolist())
        for first, last in zip(present[:-1].tolist(), present[1:].tolist(), strict=True):
            if last - first > 1 and (
                values[last] < values[first] or anew.intersection(range(first + 1, last + 1))
            ):
                covered[first:last] = False
        return covered

    def _of(self, values: Floats) -> Floats:
        """How much a column has increased since the first snapshot. Shape: (snapshots,)."""
        present = np.flatnonzero(~np.isnan(values))
        if len(present) < 2 and (len(present) == 0 or present[0] == 0):
            return np.zeros(len(values))
        # A series that appears while the engine is watched started at 0.
        first = 0.0 if present[0] > 0 else values[present[0]]
        seen = values[present]
        steps = np.diff(seen, prepend=first)
        anew = np.zeros(len(values), dtype=np.bool_)
        anew[self._anew] = True
        fresh = np.diff(np.cumsum(anew)[present], prepend=0) > 0
        fresh[0] = False
        back = (steps < 0) | fresh
        steps[back] = seen[back]
        gained = np.cumsum(steps)
        if len(present) == len(values):
            return gained
        # Linear between two pages that have the column; 0 before the first.
        begun = max(present[0] - 1, 0)
        at = (
            self.times[present]
            if present[0] == 0
            else np.append(self.times[begun], self.times[present])
        )
        rose = gained if present[0] == 0 else np.append(0.0, gained)
        return np.interp(self.times, at, rose)

    def between(self, part: Part, edges_s: Floats) -> Floats | None:
        """How much a counter increased between consecutive edges. None if the part never existed.
        Shape: (edges - 1,)."""
        gained = self._gained.get(part)
        if gained is None:
            return None
        return np.diff(np.interp(edges_s, self.times, gained))

    def covered(self, edges_s: Floats, *, gap_s: float) -> Floats:
        """Seconds between consecutive edges for which the counters have data. Gaps in which the
        process was replaced do not count. Shape: (edges - 1,)."""
        if len(self.times) < 2:
            return np.zeros(len(edges_s) - 1)
        steps = np.diff(self.times)
        anew = self._anew[self._anew > 0] - 1
        lost = anew[steps[anew] > gap_s]
        steps[lost] = 0.0
        return np.diff(np.interp(edges_s, self.times, np.append(0.0, np.cumsum(steps))))

    def tallies(self, metric: str, edges_s: Floats) -> list[Tally | None]:
        """The observations of a histogram between consecutive edges. None if the histogram did not
        exist, or lacks the bucket of all observations.

        vLLM's versions have different buckets. Only buckets that were present for the whole
        interval are used.
        """
        parts = sorted(
            (part for part in self._gained if part[0] == metric and part[1] not in NO_BOUNDS),
            key=lambda part: float(part[1]),
        )
        if not parts or float(parts[-1][1]) != math.inf:
            return [None] * (len(edges_s) - 1)
        bounds = tuple(float(part) for _, part in parts)
        rows = [self.between(part, edges_s) for part in parts]
        # A server extrapolates each bucket on its own, so its sums may not be cumulative any more.
        counts = np.maximum.accumulate([row for row in rows if row is not None]).T
        total = self.between((metric, "sum"), edges_s)
        sums = np.zeros(len(counts)) if total is None else total
        lacking = self._lacking(parts, edges_s)
        by_slot: list[Tally | None] = []
        for at, (row, observed) in enumerate(zip(counts.tolist(), sums.tolist(), strict=True)):
            lacks = {place for place, missing in lacking.items() if missing[at]}
            by_slot.append(_without(Tally(bounds, tuple(row), observed), lacks))
        return by_slot

    def _lacking(self, parts: Sequence[Part], edges_s: Floats) -> dict[int, Truths]:
        """Masks of the intervals in which some page lacks a bucket, by the index of the bucket.
        Buckets that no page lacks are left out."""
        steps = np.diff(self.times)
        # All buckets of a histogram appear together, so +Inf (the last) shows when it existed.
        whole = self._covered.get(parts[-1], np.ones(len(steps), dtype=np.bool_))
        by_place: dict[int, Truths] = {}
        for place, part in enumerate(parts):
            covered = self._covered.get(part)
            if covered is not None:
                lost_s = np.append(0.0, np.cumsum(steps * (whole & ~covered)))
                by_place[place] = np.diff(np.interp(edges_s, self.times, lost_s)) > 0
        return by_place


def _without(tally: Tally, lacks: Collection[int]) -> Tally:
    """A histogram without the buckets at the indices `lacks`."""
    if not lacks:
        return tally
    kept = [place for place in range(len(tally.bounds)) if place not in lacks]
    return Tally(
        tuple(tally.bounds[place] for place in kept),
        tuple(tally.counts[place] for place in kept),
        tally.sum,
    )


def _parts(column: Column) -> list[Part]:
    """The totals of the report to which the counter of a column is added."""
    if column.metric == BY_SOURCE:
        return [(COMPUTED, "")] if LOCAL in column.labels else []
    parts: list[Part] = [(column.metric, column.part)]
    reasons = [value for name, value in column.labels if name == "finished_reason"]
    if column.metric == COMPLETED and reasons and reasons[0] in FAILED_REASONS:
        parts.append((FAILED, ""))
    return parts


def _joined(parts: Sequence[Counted], rows: int) -> dict[Column, Floats]:
    """Each column over the times of all parts. NaN if a page lacks the column."""
    joined: dict[Column, Floats] = {}
    at = 0
    for part in parts:
        for column, values in zip(part.columns, part.values, strict=True):
            whole = joined.get(column)
            if whole is None:
                whole = joined[column] = np.full(rows, np.nan)
            whole[at : at + len(values)] = values
        at += len(part.times)
    return joined


MOMENT_S = 1e-3
"""Seconds between the end of a step and the begin of the next one, so that both can be told
apart."""


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


# --- Gauges, increases and histograms between two times -------------------------------------------


IDLE_RUNNING = 0.5
"""An engine is idle in a window if on average fewer requests than this are running (guide 9.2)."""

METRICS = (*dict.fromkeys(metric for metric, _ in SUMMED_COUNTERS.values()), *SUMMED_HISTOGRAMS)
PARTS = tuple(SUMMED_COUNTERS)


def signal_spans(signals: Signals, edges_s: Floats) -> list[Span]:
    """The gauges of one engine between consecutive edges. Each value is weighted by the seconds for
    which it is valid."""
    inside = (signals.times >= edges_s[0]) & (signals.times < edges_s[-1])
    times = signals.times[inside]
    values = {key: signals.values[key][inside] for key in LEVELS}
    running = signals.values["running_avg"][inside]
    for key in SERVED_ONLY:
        values[key + SERVING] = np.where(running > 0, values[key], np.nan)
    seconds = signals.step_s * np.ones(len(times)) if signals.step_s else _weights_s(times)
    spans = len(edges_s) - 1
    levels: tuple[dict[str, Level], ...] = tuple({} for _ in range(spans))
    watched_s, idle_s = np.zeros(spans), np.zeros(spans)
    if len(times):
        span_of = np.searchsorted(edges_s, times, side="right") - 1
        idle = (running < IDLE_RUNNING) & (np.nan_to_num(values[WAITING]) < 1)
        frame = pd.DataFrame(values)
        weights_s = np.column_stack((frame.notna(), np.ones(len(times)), idle)) * seconds[:, None]
        sums = (frame * seconds[:, None]).groupby(span_of).sum()
        known_s = pd.DataFrame(weights_s).groupby(span_of).sum()
        highs = frame.groupby(span_of).max()
        filled, weights_s = sums.index.to_numpy(), known_s.to_numpy()
        watched_s[filled], idle_s[filled] = weights_s[:, -2], weights_s[:, -1]
        for at, key in enumerate(values):
            for span, total, whole_s, high in zip(
                filled.tolist(),
                sums[key].tolist(),
                weights_s[:, at].tolist(),
                highs[key].tolist(),
                strict=True,
            ):
                if whole_s > 0:
                    mean = total / whole_s
                    levels[span][key] = Level(mean, high, whole_s, mean)
    return [
        Span(watched_s=watched, idle_s=idle, levels=own)
        for watched, idle, own in zip(watched_s.tolist(), idle_s.tolist(), levels, strict=True)
    ]


def _weights_s(times: Floats) -> Floats:
    """Seconds for which the values of each scrape are valid: until the next scrape. Before a gap:
    the usual scrape interval."""
    usual_s, longest_s = usual_step_s(times), gap_s(times)
    steps = np.diff(times, append=times[-1:] + usual_s)
    return np.asarray(np.where(steps > longest_s, usual_s, steps), dtype=np.float64)


def spans_of(signals: Signals, increases: Increases, edges_s: Floats) -> list[Span]:
    """The gauges, counters and histograms of one engine between consecutive edges."""
    covered = increases.covered(edges_s, gap_s=gap_s(signals.times) + MINUTE_S).tolist()
    return [
        replace(
            gauges,
            engine_s=covered_s,
            clock_s=covered_s,
            counts=counted.counts if covered_s else {},
            tallies=counted.tallies if covered_s else {},
            levels=with_eviction(gauges.levels, counted.counts.get(PREEMPTIONS)),
        )
        for gauges, counted, covered_s in zip(
            signal_spans(signals, edges_s), counter_spans(increases, edges_s), covered, strict=True
        )
    ]


def counter_spans(increases: Increases, edges_s: Floats) -> list[Span]:
    """Counters and histograms between consecutive edges, without gauges and seconds."""
    counts = {
        part: gained.tolist()
        for part in PARTS
        if (gained := increases.between((part, ""), edges_s)) is not None
    }
    tallies = {metric: increases.tallies(metric, edges_s) for metric in SUMMED_HISTOGRAMS}
    return [
        Span(
            counts={part: gained[at] for part, gained in counts.items()},
            tallies={
                metric: tally
                for metric, by_span in tallies.items()
                if (tally := by_span[at]) is not None
            },
        )
        for at in range(len(edges_s) - 1)
    ]


def with_eviction(levels: Mapping[str, Level], preemptions: float | None) -> dict[str, Level]:
    """The levels with the preemption ratio added: preemptions per second and running request."""
    result, running = dict(levels), levels.get(RUNNING)
    running_s = running.mean * running.known_s if running is not None else 0.0
    if preemptions is not None and running_s > 0:
        ratio = preemptions / running_s
        result[EVICTED] = Level(ratio, ratio, running_s, ratio)
    return result
