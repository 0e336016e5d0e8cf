"""A histogram over a window: quantiles and shares as Prometheus has them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from operator import gt
from typing import NamedTuple


class Buckets(NamedTuple):
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
        total, last = rates[-1], len(rates) - 1
        if not total > 0 or last < 1 or bounds[-1] != math.inf:
            return None
        rank = q * total
        at = bisect_left(rates, rank)
        if at >= last:
            return bounds[-2]
        if at == 0:
            if bounds[0] <= 0:
                return bounds[0]
            return bounds[0] * (rank / rates[0]) if rates[0] > 0 else None
        below_bound, below = bounds[at - 1], rates[at - 1]
        return below_bound + (bounds[at] - below_bound) * ((rank - below) / (rates[at] - below))

    def above_per_s(self, bound: float) -> float | None:
        """Observations per second above a bucket's bound; None where no bucket has it."""
        at = bisect_left(self.bounds, bound)
        if at == len(self.bounds) or self.bounds[at] != bound:
            return None
        return max(0.0, self.rates_per_s[-1] - self.rates_per_s[at])

    def share_at_most(self, bound: float) -> float | None:
        """Share of observations up to the greatest bucket bound that is at most `bound`."""
        at = bisect_right(self.bounds, bound) - 1
        if not self.rates_per_s[-1] > 0:
            return None
        return self.rates_per_s[at] / self.rates_per_s[-1] if at >= 0 else 0.0
