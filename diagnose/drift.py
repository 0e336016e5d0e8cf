"""Whether two histograms of one quantity are samples of one distribution. Pure.

The greatest distance between two cumulative shares, as Kolmogorov and Smirnov have it. A sample's
shares lie within sqrt(ln(2 / a) / 2n) of its distribution's but for a chance of a (Dvoretzky,
Kiefer, Wolfowitz 1956; Massart's constant, 1990), whatever the distribution is and wherever buckets
end: two samples of one distribution are further apart than both bands with a chance below 2 a.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log, sqrt

FALSE_ALARM = 1e-4
"""The chance that one comparison of what has not changed is called a change, at most."""

SHIFT_MIN = 0.15
"""Less than so much of the requests at another length is no other workload, however sure."""

ALIKE = 10.0
"""Requests of one session or job are alike: so many count as one that is independent."""

Buckets = Mapping[float, float]
"""Observations up to each upper edge, as Prometheus counts them; `inf` has all."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far two distributions are apart.

    `shift_ratio` is the share of the requests that lie on the other side of `edge` now, positive
    where they are longer; `chance_ratio` what chance makes of it at most.
    """

    shift_ratio: float
    edge: float
    chance_ratio: float

    @property
    def real(self) -> bool:
        """Whether it is more than chance, and enough to be another workload."""
        return abs(self.shift_ratio) > max(self.chance_ratio, SHIFT_MIN)


def drift(
    before: Buckets, now: Buckets, *, false_alarm: float = FALSE_ALARM, alike: float = ALIKE
) -> Drift | None:
    """How far `now` is from `before`; None where one of them is empty or is no histogram, or where
    their edges differ. So many observations count as one that are `alike`."""
    edges = sorted(before)
    if edges != sorted(now) or not edges or edges[-1] != inf:
        return None
    counts = before[inf], now[inf]
    if not all(isfinite(one) for one in (*before.values(), *now.values())) or min(counts) <= 0:
        return None
    shifts = [(before[edge] / counts[0] - now[edge] / counts[1], edge) for edge in edges]
    shift, edge = max(shifts, key=lambda one: abs(one[0]))
    return Drift(shift, edge, sum(_band(count / alike, false_alarm / 2) for count in counts))


def _band(count: float, chance: float) -> float:
    """How far so many observations' shares may be from the truth, but for a chance."""
    return sqrt(log(2 / chance) / (2 * count))
