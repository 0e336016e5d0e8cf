"""Compares request lengths with earlier ones, and an engine's requests of the last hour with the
stated workload. Pure.

The requests of a minute are too few. So they are counted over an hour at the default window, or
since the engine was first seen, from snapshots of its counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, log, sqrt
from operator import sub

from kneewatch.collector.window import Buckets
from kneewatch.diagnose.capacity import StatedServer
from kneewatch.diagnose.lengths import (
    ALIKE,
    ENDLESS,
    FALSE_ALARM,
    RATE,
    SHIFTS,
    WORDS,
    Departure,
    LiveWorkload,
    StatedPoint,
)
from kneewatch.diagnose.values import Histogram, RequestCounts

# --- How far request lengths have moved from earlier lengths, or from a stated workload -----------
#
# The measure is the greatest distance between two cumulative distributions (Kolmogorov, Smirnov).
# For n observations of any distribution and any buckets, the observed shares lie within
# sqrt(ln(2 / a) / 2n) of the true ones, with a probability of at least 1 - a (Dvoretzky, Kiefer,
# Wolfowitz 1956; Massart's constant, 1990). So two samples of one distribution are further apart
# than the sum of their bands with a probability below 2 a.


def departure(
    points: Sequence[StatedPoint],
    now: Histogram,
    *,
    false_alarm: float = FALSE_ALARM,
    alike: float = ALIKE,
) -> Departure | None:
    """How far the histogram `now` differs from the stated points.

    None if no point is stated, or if the histogram is empty or lacks its last bucket. `alike`
    observations count as one independent observation.

    If the observations are as stated, a shift is reported as real with a probability of at most
    `false_alarm`. This is for all points and both sides together, because the band covers all
    cumulative shares at once. Observations between a stated value and the next bucket bound are not
    counted.
    """
    edges = sorted(now)
    if not points or not edges or edges[-1] != inf:
        return None
    count = now[inf]
    if not all(isfinite(candidate) for candidate in now.values()) or count <= 0:
        return None
    chance = band(count / alike, false_alarm)
    departures = [side for point in points for side in _sides(point, now, edges, chance)]
    return max(departures, key=lambda candidate: abs(candidate.shift_ratio) / candidate.least_ratio)


def _sides(
    point: StatedPoint, now: Histogram, edges: Sequence[float], chance: float
) -> tuple[Departure, Departure]:
    """The departures above and below the point.

    Only observations that are certainly beyond the point count.
    """
    count = now[inf]
    high = edges[bisect_left(edges, point.most)]
    above = 1 - now[high] / count
    # The percentile itself is not below it, and a bucket holds its own bound.
    at = bisect_left(edges, point.least) - 1
    low = edges[at] if at >= 0 else 0.0
    below = now[low] / count if at >= 0 else 0.0
    longer = max(0.0, above - (1 - point.ratio))
    shorter = max(0.0, below - point.ratio)
    return (
        Departure(longer, point, high, above, chance),
        Departure(-shorter, point, low, below, chance),
    )


def band(count: float, chance: float) -> float:
    """Half the width of a band around the cumulative shares.

    The true shares leave this band with a probability of at most `chance`.
    """
    return sqrt(log(2 / chance) / (2 * count))


# --- An engine's output lengths against stated percentiles ----------------------------------------


METRIC = "request_generation_tokens"
FEW = 150.0
"""With fewer answers than this the band is too wide, so the longest window is tested instead."""

OUTPUT_FALSE_ALARM = 1e-3
"""Upper bound on the probability that unchanged, independent answers are reported as changed."""

OUTPUTS_ALIKE = 1.0
"""Each answer counts as independent. Causes use this only if many answers end at their limit."""


def endless(stated: Sequence[StatedPoint], answers: Histogram) -> Departure | None:
    """How far the share of very long answers exceeds the stated share.

    None if nothing is stated or no request was answered.
    """
    far = [StatedPoint(point.ratio, point.least, ENDLESS * point.most) for point in stated[-1:]]
    return departure(far, answers, false_alarm=OUTPUT_FALSE_ALARM, alike=OUTPUTS_ALIKE)


# --- An engine's requests of the last hour against a stated workload ------------------------------


STEP_WINDOWS = 5.0
STEPS = 12
"""Number of intervals kept. Each is five windows; together an hour at the default window of 60
s."""

QUANTILES = (0.5, 0.95, 0.99)


class WorkloadWatch:
    """Compares one engine's requests over an hour; does nothing without a stated workload."""

    def __init__(self, stated: StatedServer, *, window_s: float) -> None:
        workload = stated.workload
        self._origin = workload.origin if workload else ""
        self._grown = workload is not None and workload.grown
        self.points = stated.points
        self._peak_per_s = _peak_per_s(stated)
        self._engines = stated.engines
        self._step_s = STEP_WINDOWS * window_s
        self._kept: deque[tuple[float, RequestCounts]] = deque(maxlen=STEPS + 1)

    def set_engines(self, engines: int) -> None:
        """Set how many engines of the page share the replica's requests."""
        self._engines = max(self._engines, engines)

    def forget(self) -> None:
        """Drop all snapshots, because the process was replaced and its counters restart at 0."""
        self._kept.clear()

    def update(self, t_s: float, now: RequestCounts | None) -> LiveWorkload | None:
        """The comparison after a scrape; None without a stated workload or an earlier snapshot."""
        if now is None or (not self.points and self._peak_per_s is None):
            return None
        if self._kept and not _follows(now, self._kept[-1][1]):
            self._kept.clear()
        if not self._kept or t_s - self._kept[-1][0] >= self._step_s:
            self._kept.append((t_s, now))
        first_s, first = self._kept[0]
        return None if first is now else self._compared(first, now, t_s - first_s)

    def _compared(self, first: RequestCounts, now: RequestCounts, span_s: float) -> LiveWorkload:
        lengths: dict[str, Departure] = {}
        live: dict[str, tuple[float | None, ...]] = {}
        for side, points in self.points.items():
            bounds = now.bounds.get(side, ())
            counts = _since(now, first, side) if bounds else ()
            length_departure = departure(points, dict(zip(bounds, counts, strict=True)))
            if length_departure is not None:
                lengths[side] = length_departure
                live[side] = tuple(_quantile(bounds, counts, q) for q in QUANTILES)
        peak_per_s = self._peak_per_s if span_s >= self._step_s and now.requests else None
        return LiveWorkload(
            self._origin,
            self._grown,
            span_s,
            lengths,
            live,
            now.requests - first.requests,
            (peak_per_s or 0.0) / self._engines * span_s,
        )


def unwatched(stated: StatedServer) -> dict[str, str]:
    """Derived signals that the stated profile is not enough for, on this server: {signal:
    reason}."""
    workload, reasons = stated.workload, dict[str, str]()
    if workload is None:
        return reasons
    for side in WORDS:
        if side not in stated.points:
            reasons[SHIFTS[side]] = f"{workload.origin} has several tiers: set model or gpu"
    if workload.peak_requests_per_s is None:
        reasons[RATE] = (
            f"{workload.origin} states no peak per tier (a batch, or tiers share the peak)"
        )
    elif stated.replicas is None:
        reasons[RATE] = f"{workload.origin} states the peak of all replicas: set replicas"
    return reasons


def _quantile(
    bounds: tuple[float, ...], counts: tuple[float, ...], quantile: float
) -> float | None:
    """A quantile of the counted lengths; None if beyond the last finite bound."""
    value = Buckets.of(bounds, counts).quantile(quantile)
    return None if value is None or value == bounds[-2] else value


def _peak_per_s(stated: StatedServer) -> float | None:
    """One replica's share of the stated peak in requests/s; None if unknown."""
    workload = stated.workload
    if workload is None or workload.peak_requests_per_s is None or stated.replicas is None:
        return None
    return workload.peak_requests_per_s / stated.replicas


def _follows(counts: RequestCounts, before: RequestCounts) -> bool:
    """Whether these counters may be later values of `before`, without a reset in between."""
    return (
        counts.bounds == before.bounds
        and counts.requests >= before.requests
        and all(gained >= 0 for side in counts.bounds for gained in _since(counts, before, side))
    )


def _since(counts: RequestCounts, before: RequestCounts, side: str) -> tuple[float, ...]:
    """Number of requests since `before`, by bound."""
    return tuple(map(sub, counts.lengths[side], before.lengths[side]))
