"""P99 of TTFT and ITL after a change, from this server's own windows. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import exp, floor, log, sqrt
from statistics import NormalDist, mean, stdev

from msgspec import Struct

from kneewatch.collector.signals.table import ITL_BOUNDS_S, TTFT_BOUNDS_S
from kneewatch.diagnose.learned.knee import CurveLearner

WINDOWS_MIN, NEAR_RATIO, WIDEST = 8, 2.0, 10.0
"""A P99 needs so many windows with up to so many times the batch. It is unknown where the upper end
of its band would be above so many times the lower end."""

RARE = 0.025
"""The share of windows that may lie above the band, and below it."""

Z = NormalDist().inv_cdf(1 - RARE)
FIELDS = ("running", "itl_s", "itl_p99_s", "ttft_p99_s", "prefill_s", "outside_s")


class Latencies(Struct, frozen=True):
    """Mean latencies in seconds (TTFT includes the queue), and output tokens/s of one replica.

    `outside_s` is the part of TTFT in the API server and the network, from this server's windows;
    None if the prediction has none.
    """

    ttft_s: float
    itl_s: float
    tokens_per_s: float
    outside_s: float | None = None


def tails(
    curve: CurveLearner | None, speed: Latencies, *, running: float, queues: bool
) -> dict[str, float]:
    """P99 of TTFT and ITL with their bands, in seconds; none where this server has not shown it.

    The mean times the ratio of P99 to mean in windows without a queue, at about the batch that will
    run: it holds the bursts of arrivals and the spread of lengths. TTFT has no P99 if requests
    queue, because such windows do not show that tail.
    """
    numbers: dict[str, float] = {}
    itls, ttfts = ([], []) if curve is None else _ratios(curve, speed, running)
    for name, mean_s, ratios, bounds_s in (
        ("itl", speed.itl_s, itls, ITL_BOUNDS_S),
        ("ttft", speed.ttft_s, [] if queues else ttfts, TTFT_BOUNDS_S),
    ):
        if len(ratios) < WINDOWS_MIN:
            continue
        low, middle, high = (mean_s * ratio for ratio in _next_ratio(ratios))
        if high <= WIDEST * low:
            # A histogram has no more than its buckets.
            low_s = bounds_s[max(0, bisect_right(bounds_s, low) - 1)]
            high_s = bounds_s[min(len(bounds_s) - 1, bisect_left(bounds_s, high))]
            numbers[f"{name}_p99_s"] = float(f"{middle:.3g}")
            numbers[f"{name}_p99_low_s"], numbers[f"{name}_p99_high_s"] = low_s, high_s
    return numbers


def _ratios(
    curve: CurveLearner, speed: Latencies, running: float
) -> tuple[list[float], list[float]]:
    """P99 over mean of ITL and TTFT in windows with about so many running requests."""
    itls, ttfts = list[float](), list[float]()
    columns = (curve.column(name) for name in FIELDS)
    for batch, itl_s, itl_p99_s, ttft_p99_s, prefill_s, outside_s in zip(*columns, strict=True):
        # A comparison with NaN is false.
        if not running / NEAR_RATIO <= max(batch, 1.0) <= running * NEAR_RATIO:
            continue
        if prefill_s > 0 and itl_s > 0 and itl_p99_s > 0:  # without preemptions
            itls.append(itl_p99_s / itl_s)
        if ttft_p99_s > 0 and prefill_s + outside_s > 0:  # without a queue
            # As the mean is predicted: what varies outside the engine is in the band.
            beside_s = outside_s if speed.outside_s is None else speed.outside_s
            ttfts.append(ttft_p99_s / (prefill_s + beside_s))
    return itls, ttfts


def _next_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of measured ratios between the ends of a band in which the next one lies
    with 95%.

    By Student's t of the logarithms, as few windows say little of how much they vary. It is no
    narrower than what was measured, as tails are heavier.
    """
    ordered, free = sorted(map(log, ratios)), len(ratios) - 1
    # Its quantile by Abramowitz and Stegun 26.7.5.
    t = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    middle, away = mean(ordered), t * stdev(ordered) * sqrt(1 + 1 / len(ordered))
    rare = floor(RARE * len(ordered))
    low, high = min(middle - away, ordered[rare]), max(middle + away, ordered[-1 - rare])
    return exp(low), exp(middle), exp(high)
