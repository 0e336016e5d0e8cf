"""How far request lengths have moved from earlier lengths, or from a stated workload. Pure.

The measure is the greatest distance between two cumulative distributions (Kolmogorov, Smirnov). For
n observations of any distribution and any buckets, the observed shares lie within sqrt(ln(2 / a) /
2n) of the true ones, with a probability of at least 1 - a (Dvoretzky, Kiefer, Wolfowitz 1956;
Massart's constant, 1990). So two samples of one distribution are further apart than the sum of
their bands with a probability below 2 a.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, isfinite, log, sqrt

from kneewatch.diagnose.lengths import ALIKE, ENDLESS, FALSE_ALARM, Departure, StatedPoint
from kneewatch.diagnose.values import Histogram


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
