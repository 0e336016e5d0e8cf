"""Counters, gauges and histograms of engines, summed over time and engines. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from kneewatch.collector.window import Buckets


@dataclass(frozen=True, slots=True)
class Tally:
    """Increase of a histogram. Shapes: `bounds` and `counts` (buckets,), the counts cumulative,
    the last bound +Inf. `sum` is that of the observed values."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """All observations."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """The mean observation (exact, unlike quantiles); None without observations."""
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, q: float) -> float | None:
        """The q-quantile by Prometheus's interpolation; None without observations."""
        return Buckets.of(self.bounds, self.counts).quantile(q) if self.counts else None

    def within(self, bound: float) -> tuple[float, float] | None:
        """Observations up to the greatest bucket bound that is at most `bound`, and that bound;
        None where the first bucket is above it."""
        kept = [at for at, edge in enumerate(self.bounds) if edge <= bound]
        return (self.counts[kept[-1]], self.bounds[kept[-1]]) if kept else None


NOTHING = Tally((), (), 0.0)


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum of histograms; if their bounds differ, on the bounds that all have."""
    filled = [tally for tally in tallies if tally.count > 0]
    if not filled:
        return NOTHING
    by_bounds: dict[tuple[float, ...], list[Tally]] = {}
    for tally in filled:
        by_bounds.setdefault(tally.bounds, []).append(tally)
    sums = [Tally(bounds, _summed(same), 0.0) for bounds, same in by_bounds.items()]
    total = math.fsum(tally.sum for tally in filled)
    if len(sums) == 1:
        return Tally(sums[0].bounds, sums[0].counts, total)
    common = set[float].intersection(*(set(tally.bounds) for tally in sums))
    bounds = tuple(sorted(common))
    counts = _summed([_on(tally, bounds) for tally in sums])
    return Tally(bounds, counts, total)


def _on(tally: Tally, bounds: Sequence[float]) -> Tally:
    by_bound = dict(zip(tally.bounds, tally.counts, strict=True))
    return Tally(tuple(bounds), tuple(by_bound[bound] for bound in bounds), tally.sum)


def _summed(tallies: Sequence[Tally]) -> tuple[float, ...]:
    counts = tallies[0].counts
    for tally in tallies[1:]:
        counts = tuple(map(add, counts, tally.counts))
    return counts


# --- What engines showed over some time: counters, histograms, gauges -----------------------------


SERVING = "|serving"
"""Suffix of levels that only cover the time in which requests ran."""


@dataclass(frozen=True, slots=True)
class Level:
    """A gauge over a span: time-weighted mean, highest value, seconds in which it was known.

    `top` is the highest mean of one engine over one hour: a tier's mean hides its hottest engine.
    For a ratio `known_s` is its denominator.
    """

    mean: float
    high: float
    known_s: float
    top: float


@dataclass(frozen=True, slots=True)
class Span:
    """What engines showed over some time.

    `engine_s`: engine-seconds that the counters cover; `clock_s`: seconds in which at least one
    engine was covered; `watched_s` and `idle_s`: engine-seconds that were scraped, and those of
    them without load. `counts` are increases of counters, `tallies`
    of histograms, `levels` gauges.
    """

    engine_s: float = 0.0
    clock_s: float = 0.0
    watched_s: float = 0.0
    idle_s: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    tallies: Mapping[str, Tally] = field(default_factory=dict[str, Tally])
    levels: Mapping[str, Level] = field(default_factory=dict[str, Level])
