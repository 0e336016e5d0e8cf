"""Rates, histograms and gauges over a window of one engine's history. Pure.

The arithmetic is Prometheus's own (promql/functions.go at v2.42): `rate` counts resets and
extrapolates to the window's edges, a window takes in the samples at both of its ends, and a gauge
is what the newest scrape says. Prometheus 3 differs in two named ways: its window leaves out the
sample at the left end, and it caps the extrapolation towards zero after the threshold test
instead of before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import gt

from kneewatch.collector.history import Column, Frame, History, Where

EXTRAPOLATION_THRESHOLD = 1.1
"""A sample within 1.1 average intervals of the window's edge counts as reaching it (Prometheus)."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's observations per second over a window. Shapes: (buckets,), cumulative.

    `lifted` is `rates_per_s` made non-decreasing, as histogram_quantile does: buckets of one scrape
    may belong to different moments.
    """

    bounds: tuple[float, ...]
    rates_per_s: tuple[float, ...]
    lifted: tuple[float, ...]

    @classmethod
    def of(cls, bounds: tuple[float, ...], rates_per_s: tuple[float, ...]) -> Buckets:
        """Buckets from cumulative rates in the order of their bounds."""
        if any(map(gt, rates_per_s, rates_per_s[1:])):
            return cls(bounds, rates_per_s, tuple(accumulate(rates_per_s, max)))
        return cls(bounds, rates_per_s, rates_per_s)

    def quantile(self, q: float) -> float | None:
        """The q-quantile by linear interpolation, as histogram_quantile has it; None when empty."""
        rates, bounds = self.lifted, self.bounds
        if len(rates) < 2 or bounds[-1] != math.inf or not rates[-1] > 0:
            return None
        rank = q * rates[-1]
        at = min(bisect_left(rates, rank), len(rates) - 1)
        if at == len(rates) - 1:
            return bounds[-2]
        if at == 0:
            return bounds[0] if bounds[0] <= 0 else bounds[0] * rank / rates[0]
        below_bound, below = bounds[at - 1], rates[at - 1]
        return below_bound + (bounds[at] - below_bound) * (rank - below) / (rates[at] - below)

    def above_per_s(self, bound: float) -> float:
        """Observations per second above the smallest bucket bound that is at least `bound`."""
        at = min(bisect_left(self.bounds, bound), len(self.bounds) - 1)
        return max(0.0, self.rates_per_s[-1] - self.rates_per_s[at])

    def share_at_most(self, bound: float) -> float | None:
        """Share of observations up to the greatest bucket bound that is at most `bound`."""
        at = bisect_right(self.bounds, bound) - 1
        if not self.rates_per_s[-1] > 0:
            return None
        return self.rates_per_s[at] / self.rates_per_s[-1] if at >= 0 else 0.0


class Window:
    """The scrapes in [now - range, now]. Every answer is None when the window cannot give it."""

    def __init__(self, history: History, *, now_s: float, range_s: float) -> None:
        self.history, self.now_s, self.range_s = history, now_s, range_s
        first = bisect_left(history.times, now_s - range_s)
        last = bisect_right(history.times, now_s) - 1
        self.frames = (
            history.frames
            if first == 0 and last == len(history.frames) - 1
            else (history.frames[first : last + 1])
        )
        self.scrapes = len(self.frames)
        self._memo: dict[tuple[str, Where], float | None] = {}
        self._buckets: dict[str, Buckets | None] = {}
        if self.scrapes > 1:
            self._prepare()

    def _prepare(self) -> None:
        first, last = self.frames[0], self.frames[-1]
        self._sampled_s = last.t_s - first.t_s
        self._start_s = first.t_s - (self.now_s - self.range_s)
        self._average_s = self._sampled_s / (self.scrapes - 1)
        self._end_s = self._edge(self.now_s - last.t_s)
        self._factor = (self._sampled_s + self._edge(self._start_s) + self._end_s) / (
            self._sampled_s * self.range_s
        )
        absent = self.history.absent_until
        self._gappy: frozenset[int] = frozenset(
            index for index, t_s in absent.items() if t_s >= first.t_s
        )

    def _edge(self, gap_s: float) -> float:
        near = gap_s < self._average_s * EXTRAPOLATION_THRESHOLD
        return gap_s if near else self._average_s / 2

    # ---- counters

    def rate(self, metric: str, where: Where = ()) -> float | None:
        """Per-second rate of a counter, summed over its series: sum(rate(metric[range]))."""
        key = (metric, where)
        if key not in self._memo:
            self._memo[key] = self._summed(self._counter_columns(metric, where))
        return self._memo[key]

    def part_rate(self, metric: str, part: str) -> float | None:
        """Per-second rate of a histogram's sum or count."""
        key = (metric, (("__part__", part),))
        if key not in self._memo:
            columns = self.history.counters.by_metric.get(metric, ())
            self._memo[key] = self._summed(at for column, at in columns if column.part == part)
        return self._memo[key]

    def buckets(self, metric: str) -> Buckets | None:
        """A histogram's bucket rates, summed over its label sets; None without data."""
        if metric not in self._buckets:
            self._buckets[metric] = self._bucket_rates(metric)
        return self._buckets[metric]

    def _counter_columns(self, metric: str, where: Where) -> Iterator[int]:
        for column, at in self.history.counters.by_metric.get(metric, ()):
            if carries(column, where):
                yield at

    def _summed(self, columns: Iterator[int]) -> float | None:
        total: float | None = None
        for at in columns:
            rate = self._column_rate(at)
            if rate is not None and rate == rate:
                total = rate if total is None else total + rate
        return total

    def _bucket_rates(self, metric: str) -> Buckets | None:
        bounds, columns = self.history.buckets_of(metric)
        if not bounds or self.scrapes < 2:
            return None
        if self.part_rate(metric, "count") == 0 and not self._gappy:
            return Buckets(bounds, (0.0,) * len(bounds), (0.0,) * len(bounds))
        rate = self._column_rate
        rates = tuple(
            rate(group[0]) or 0.0 if len(group) == 1 else self._summed(iter(group)) or 0.0
            for group in columns
        )
        return Buckets.of(bounds, rates)

    def _column_rate(self, at: int) -> float | None:
        if self.scrapes < 2:
            return None
        if at in self._gappy:
            return self._gappy_rate(at)
        first, last = self.frames[0], self.frames[-1]
        start = first.counters[at]
        increase = last.counters[at] + last.offsets[at] - start - first.offsets[at]
        if increase == 0:
            return 0.0
        if increase > 0 and start >= 0 and self._sampled_s * start < self._start_s * increase:
            # The counter would reach zero before the window starts: extrapolate no further.
            edge_s = self._edge(self._sampled_s * start / increase)
            return (
                increase
                * (self._sampled_s + edge_s + self._end_s)
                / (self._sampled_s * self.range_s)
            )
        return increase * self._factor

    def _gappy_rate(self, at: int) -> float | None:
        """The same for a series that some scrapes of the window lack."""
        points = [(f.t_s, f.counters[at]) for f in self.frames if f.counters[at] == f.counters[at]]
        return extrapolated_rate(points, now_s=self.now_s, range_s=self.range_s)

    # ---- gauges

    def gauge(self, metric: str, where: Where = ()) -> float | None:
        """The newest scrape's value, summed over series: sum(metric)."""
        if not self.frames:
            return None
        total: float | None = None
        row = self.frames[-1].gauges
        for column, at in self.history.gauges.by_metric.get(metric, ()):
            value = row[at]
            if value == value and carries(column, where):
                total = value if total is None else total + value
        return total

    def gauge_points(self, metric: str, where: Where = ()) -> list[tuple[float, float]]:
        """(time, value summed over series) of a gauge, oldest first, scrapes without it left
        out."""
        columns = [
            at
            for column, at in self.history.gauges.by_metric.get(metric, ())
            if carries(column, where)
        ]
        if len(columns) == 1:
            at = columns[0]
            return [(f.t_s, f.gauges[at]) for f in self.frames if f.gauges[at] == f.gauges[at]]
        return [point for frame in self.frames if (point := _sum_at(frame, columns)) is not None]

    def newest_labels(self, metric: str) -> dict[str, str] | None:
        """Labels of an info metric's current series: the one with the greatest value."""
        best: tuple[float, Column] | None = None
        if not self.frames:
            return None
        row = self.frames[-1].gauges
        for column, at in self.history.gauges.by_metric.get(metric, ()):
            value = row[at]
            if value == value and (best is None or value > best[0]):
                best = (value, column)
        return dict(best[1].labels) if best else None

    def recent_series(self, metric: str) -> float | None:
        """How many series of a timestamp-valued gauge point into the window: their changes."""
        if not self.frames:
            return None
        row, since_s = self.frames[-1].gauges, self.now_s - self.range_s
        columns = self.history.gauges.by_metric.get(metric)
        return None if columns is None else float(sum(row[at] > since_s for _, at in columns))


def carries(column: Column, where: Where) -> bool:
    """Whether a series carries all the labels asked for."""
    return not where or all(pair in column.labels for pair in where)


def _sum_at(frame: Frame, columns: list[int]) -> tuple[float, float] | None:
    values = [value for at in columns if (value := frame.gauges[at]) == value]
    return (frame.t_s, sum(values)) if values else None


def extrapolated_rate(
    points: list[tuple[float, float]], *, now_s: float, range_s: float
) -> float | None:
    """`rate` of raw (time, value) points of one series; None with fewer than two.

    Source: Prometheus v2.42 promql/functions.go, extrapolatedRate.
    """
    if len(points) < 2:
        return None
    (first_s, start), (last_s, _) = points[0], points[-1]
    increase = points[-1][1] - start
    for (_, was), (_, now) in pairwise(points):
        increase += was if now < was else 0.0
    sampled_s = last_s - first_s
    average_s = sampled_s / (len(points) - 1)
    start_s, end_s = first_s - (now_s - range_s), now_s - last_s
    if increase > 0 and start >= 0:
        start_s = min(start_s, sampled_s * start / increase)
    threshold_s = average_s * EXTRAPOLATION_THRESHOLD
    reach_s = sampled_s
    for edge_s in (start_s, end_s):
        reach_s += edge_s if edge_s < threshold_s else average_s / 2
    return increase * reach_s / (sampled_s * range_s)
