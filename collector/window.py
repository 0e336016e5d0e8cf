"""Rates, histograms and gauges over a window of one engine's history. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import mul

from msgspec import Struct

from kneewatch.collector.scrape_history import History, Where


class Buckets(Struct, frozen=True):
    """A histogram's observations per second over a window. Shapes: (buckets,), cumulative.

    `lifted` is `rates_per_s` made non-decreasing, as in histogram_quantile: a scrape may read its
    buckets at slightly different moments.
    """

    bounds: tuple[float, ...]
    rates_per_s: tuple[float, ...]
    lifted: tuple[float, ...]

    @classmethod
    def of(cls, bounds: tuple[float, ...], rates_per_s: tuple[float, ...]) -> Buckets:
        """Buckets from cumulative rates that are in the order of their bounds."""
        if sorted(rates_per_s) == [*rates_per_s]:  # twice as fast as pair by pair
            return cls(bounds, rates_per_s, rates_per_s)
        return cls(bounds, rates_per_s, tuple(accumulate(rates_per_s, max)))

    def quantile(self, q: float) -> float | None:
        """The q-quantile by linear interpolation, like histogram_quantile; None if empty."""
        rates, bounds = self.lifted, self.bounds
        total = rates[-1]
        if not total > 0 or bounds[-1] != inf:
            return None
        rank = q * total
        at = bisect_left(rates, rank)
        bound = bounds[at]
        if bound == inf:
            return bounds[-2] if at else None
        if at == 0:
            if bound <= 0:
                return bound
            return bound * (rank / rates[0]) if rates[0] > 0 else None
        below_bound, below = bounds[at - 1], rates[at - 1]
        return below_bound + (bound - below_bound) * ((rank - below) / (rates[at] - below))

    def above_per_s(self, bound: float) -> float | None:
        """Observations per second above a bucket's bound; None if no bucket has this bound."""
        at = bisect_left(self.bounds, bound)
        if at == len(self.bounds) or self.bounds[at] != bound:
            return None
        return self.above_at_per_s(at)

    def above_at_per_s(self, at: int) -> float:
        """Observations per second above the bound at index `at`."""
        return max(0.0, self.rates_per_s[-1] - self.rates_per_s[at])

    def share_at_most(self, bound: float) -> float | None:
        """Share of observations up to `bound`; None without observations.

        `bound` is first rounded down to a bucket's bound.
        """
        at = bisect_right(self.bounds, bound) - 1
        if not self.rates_per_s[-1] > 0:
            return None
        return self.rates_per_s[at] / self.rates_per_s[-1] if at >= 0 else 0.0


# --- Rates, histograms and gauges over a window of one engine's history. Pure ---------------------
#
# The arithmetic is Prometheus's own (promql/functions.go at v2.42): `rate` counts resets and
# extrapolates to the window's edges, a window takes in the samples at both of its ends, and a
# gauge is what the newest scrape says. Prometheus 3 differs in two named ways: its window leaves
# out the sample at the left end, and it caps the extrapolation towards zero after the threshold
# test instead of before it.


EXTRAPOLATION_THRESHOLD = 1.1
"""A sample within 1.1 average intervals of the window's edge counts as at the edge (Prometheus)."""

LOOKBACK_S = 300.0
"""Greatest age of a gauge's newest value (Prometheus's --query.lookback-delta)."""

NEARLY = 1.000001
"""Margin for rounding: a counter whose extrapolated zero is this close to the window's start is
computed exactly."""

HALF_MS_S = 0.0005
"""Half a millisecond: Prometheus keeps whole milliseconds, and float seconds are inexact."""


class Window:
    """The scrapes in [now - range, now]. Methods return None if the window has too little data.

    `few`: only a few counters will be read, so each rate is computed on demand.
    """

    def __init__(
        self, history: History, *, now_s: float, range_s: float, few: bool = False
    ) -> None:
        self._few = few
        self.history, self.now_s, self.range_s = history, now_s, range_s
        first = bisect_left(history.times, now_s - range_s - HALF_MS_S)
        last = bisect_right(history.times, now_s) - 1
        self.frames = (
            history.frames
            if first == 0 and last == len(history.frames) - 1
            else (history.frames[first : last + 1])
        )
        self.scrapes = len(self.frames)
        fresh = last >= 0 and now_s - history.times[last] < LOOKBACK_S - HALF_MS_S
        self._newest = history.frames[last] if fresh else None
        self._buckets: dict[str, Buckets | None] = {}
        self._gauges: dict[int, Sequence[float]] = {}
        if self.scrapes > 1:
            self._prepare()
        self.rates = self._rates()
        """Rates of all counter columns; None for columns that `total_rate` must compute one by
        one."""

    def _prepare(self) -> None:
        first, last = self.frames[0], self.frames[-1]
        self._sampled_s = elapsed_s(first.t_s, last.t_s)
        self._average_s = self._sampled_s / (self.scrapes - 1)
        self._start_s = elapsed_s(self.now_s - self.range_s, first.t_s)
        self._end_s = self._edge(elapsed_s(last.t_s, self.now_s))
        self._factor = self._factor_from(self._start_s)
        self._uneven = self.history.uneven_since(first.t_s)

    def _edge(self, gap_s: float) -> float:
        near = gap_s < self._average_s * EXTRAPOLATION_THRESHOLD
        return gap_s if near else self._average_s / 2

    def _factor_from(self, start_s: float) -> float:
        """Factor from increase to rate, for a series that began `start_s` before the first scrape.

        Operations are in Prometheus's order: the last bit can decide a quantile's bucket.
        """
        reach_s = self._sampled_s + self._edge(start_s) + self._end_s
        return reach_s / self._sampled_s / self.range_s

    # ---- counters

    def _rates(self) -> list[float | None]:
        # The hot loop: a page has about three hundred counters, most of them buckets.
        if self._few or self.scrapes < 2:
            return [None] * len(self.history.counters)
        starts, ends = self.frames[0].counters, self.frames[-1].counters
        # The share of its end that a counter has at its start if it was 0 as the window began.
        start_s, factor = max(0.0, self._start_s), self._factor
        young = NEARLY * start_s / (start_s + self._sampled_s)
        rates: list[float | None] = [
            (end - start) * factor if young * end <= start else self._even_rate(start, end - start)
            for start, end in zip(starts, ends, strict=True)
        ]
        for at in self._uneven:
            rates[at] = None
        return rates

    def total_rate(self, columns: Sequence[int]) -> float | None:
        """Summed per-second rate of counter columns; columns without a rate are left out."""
        total: float | None = None
        for at in columns:
            rate = self._column_rate(at)
            if rate is not None and rate == rate:
                total = rate if total is None else total + rate
        return total

    def rate(self, metric: str, where: Where = ()) -> float | None:
        """Per-second rate of a counter, summed over its series: sum(rate(metric[range]))."""
        return self.total_rate(self.history.columns.counter_columns(metric, where))

    def buckets(self, metric: str) -> Buckets | None:
        """A histogram's bucket rates, summed over its label sets; None without data."""
        try:
            return self._buckets[metric]
        except KeyError:
            buckets = self._buckets[metric] = self._bucket_rates(metric)
            return buckets

    def _bucket_rates(self, metric: str) -> Buckets | None:
        buckets = self.history.columns.buckets_of(metric)
        bounds = buckets.bounds
        if not bounds or self.scrapes < 2:
            return None
        even = not self._uneven or self._uneven.isdisjoint(buckets.single)
        if buckets.read is not None and even and not self._few:
            return Buckets.of(bounds, buckets.read(self.rates))
        summed = [self.total_rate(group) for group in buckets.columns]
        rated = [(le, rate) for le, rate in zip(bounds, summed, strict=True) if rate is not None]
        if not rated or rated[-1][0] != inf:
            return None
        bounds, rates = zip(*rated, strict=True)
        return Buckets.of(bounds, rates)

    def _column_rate(self, at: int) -> float | None:
        if self.scrapes < 2:
            return None
        if at in self._uneven:
            return self._pointwise_rate(at)
        start = self.frames[0].counters[at]
        return self._even_rate(start, self.frames[-1].counters[at] - start)

    def _even_rate(self, start: float, increase: float) -> float:
        if increase == 0:
            return 0.0
        zero_s = self._sampled_s * (start / increase)
        if start >= 0 and zero_s < self._start_s:
            # The counter would reach zero before the window starts: extrapolate no further.
            return increase * self._factor_from(zero_s)
        return increase * self._factor

    def _pointwise_rate(self, at: int) -> float | None:
        """The rate of a series that was reset in the window or is missing from some scrapes."""
        points = [(f.t_s, f.counters[at]) for f in self.frames if f.counters[at] == f.counters[at]]
        return extrapolated_rate(points, now_s=self.now_s, range_s=self.range_s)

    def counted(self, columns: Sequence[int]) -> list[float]:
        """The newest values of counter columns; absent ones are left out."""
        if self._newest is None:
            return []
        row = self._newest.counters
        return [value for at in columns if (value := row[at]) == value]

    # ---- gauges

    def newest(self, columns: Sequence[int]) -> list[float]:
        """The newest values of gauge columns; absent ones are left out."""
        if self._newest is None:
            return []
        row = self._newest.gauges
        return [value for at in columns if (value := row[at]) == value]

    def newest_of(self, at: int) -> float | None:
        """The newest value of one gauge column; None if it is absent."""
        if self._newest is None:
            return None
        value = self._newest.gauges[at]
        return value if value == value else None

    def current(self, columns: Sequence[int]) -> int | None:
        """The one of `columns` (gauges) with the greatest newest value; None if none has a
        value."""
        if self._newest is None:
            return None
        row = self._newest.gauges
        reported = [at for at in columns if row[at] == row[at]]
        return max(reported, key=row.__getitem__, default=None)

    @cached_property
    def _gauge_columns(self) -> list[tuple[float, ...]]:
        """The values of every gauge column, oldest first; NaN where a page lacks one."""
        return list(zip(*[frame.gauges for frame in self.frames], strict=True))

    def over_time(self, at: int) -> Sequence[float]:
        """The values of a gauge column, oldest first; scrapes without a value are left out."""
        values = self._gauges.get(at)
        if values is None:
            values = self._gauge_columns[at] if self.frames else ()
            total = sum(values)
            if total != total:
                values = [value for value in values if value == value]
            self._gauges[at] = values
        return values

    @cached_property
    def _steps_s(self) -> list[float]:
        return steps_s([frame.t_s for frame in self.frames])

    def slopes(self, columns: Sequence[int]) -> list[float]:
        """Each gauge column's change per second by least squares.

        Columns with fewer than two values, and those of one moment, are left out.
        """
        slopes: list[float] = []
        for at in columns:
            values = self.over_time(at)
            if len(values) < 2:
                continue
            if values.count(values[0]) == len(values):
                slopes.append(0.0)
                continue
            away_s = self._steps_s
            if len(values) < self.scrapes:
                away_s = steps_s([f.t_s for f in self.frames if f.gauges[at] == f.gauges[at]])
            squares, mean = sum(map(mul, away_s, away_s)), sum(values) / len(values)
            if squares > 0:
                slopes.append(sum(map(mul, away_s, [value - mean for value in values])) / squares)
        return slopes


def steps_s(times_s: Sequence[float]) -> list[float]:
    """Each time minus the mean time, rounded to milliseconds as in Prometheus."""
    start_s = times_s[0]
    since_s = [round(1000 * (t_s - start_s)) / 1000 for t_s in times_s]  # faster than to 3 digits
    mean_s = sum(since_s) / len(since_s)
    return [t_s - mean_s for t_s in since_s]


def elapsed_s(from_s: float, to_s: float) -> float:
    """Seconds between two times, rounded to whole milliseconds; not rounded if below 0.5 ms."""
    return round(1000 * (to_s - from_s)) / 1000 or to_s - from_s


def extrapolated_rate(
    points: list[tuple[float, float]], *, now_s: float, range_s: float
) -> float | None:
    """`rate` of one series from its raw (time, value) points; None with fewer than two.

    Source: Prometheus v2.42 promql/functions.go, extrapolatedRate.
    """
    if len(points) < 2:
        return None
    (first_s, start), (last_s, _) = points[0], points[-1]
    increase = points[-1][1] - start
    for (_, was), (_, now) in pairwise(points):
        increase += was if now < was else 0.0
    sampled_s = elapsed_s(first_s, last_s)
    average_s = sampled_s / (len(points) - 1)
    start_s, end_s = elapsed_s(now_s - range_s, first_s), elapsed_s(last_s, now_s)
    if increase > 0 and start >= 0:
        start_s = min(start_s, sampled_s * (start / increase))
    threshold_s = average_s * EXTRAPOLATION_THRESHOLD
    reach_s = sampled_s
    for edge_s in (start_s, end_s):
        reach_s += edge_s if edge_s < threshold_s else average_s / 2
    return increase * (reach_s / sampled_s / range_s)
