"""Histograms added up: exact on the bounds that all have, quantiles as Prometheus has them."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.window import Buckets
from kneewatch.reports.weekly.observed import NO_TALLY, Tally, added

EDGES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, math.inf)


def tally(edges: tuple[float, ...], values: list[float]) -> Tally:
    """The histogram of some values."""
    counts = tuple(float(sum(value <= edge for value in values)) for edge in edges)
    return Tally(edges, counts, math.fsum(values))


values_of = st.lists(st.floats(min_value=0.01, max_value=9.0), min_size=1, max_size=60)
edges_of = st.sets(st.sampled_from(EDGES[:-1]), min_size=1).map(
    lambda some: (*sorted(some), math.inf)
)


@given(st.lists(values_of, min_size=1, max_size=6))
def test_a_sum_is_the_histogram_of_all(parts: list[list[float]]) -> None:
    together = added(tally(EDGES, part) for part in parts)
    whole = tally(EDGES, [value for part in parts for value in part])
    assert together.counts == whole.counts
    assert together.sum == pytest.approx(whole.sum)
    for q in (0.5, 0.95, 0.99):
        assert together.quantile(q) == Buckets.of(EDGES, whole.counts).quantile(q)


@given(edges_of, edges_of, values_of, values_of)
def test_different_buckets_meet_on_those_that_both_have(
    edges: tuple[float, ...], others: tuple[float, ...], values: list[float], more: list[float]
) -> None:
    together = added([tally(edges, values), tally(others, more)])
    common = tuple(sorted(set(edges) & set(others)))
    assert together.bounds == common
    assert together.counts == tally(common, values + more).counts
    assert list(together.counts) == list(accumulate(together.counts, max))


def test_the_percentile_of_a_week_is_no_mean_of_percentiles() -> None:
    quiet, loud = tally(EDGES, [0.05] * 990), tally(EDGES, [4.0] * 10)
    p99 = [latency.quantile(0.99) or 0.0 for latency in (quiet, loud)]
    together = added([quiet, loud]).quantile(0.99)
    assert together == pytest.approx(0.1)
    assert together != pytest.approx(sum(p99) / 2)


def test_nothing_observed_says_nothing() -> None:
    assert added([]) == NO_TALLY
    assert added([tally(EDGES, []), NO_TALLY]).quantile(0.5) is None
    assert NO_TALLY.mean is None


@pytest.mark.parametrize(
    ("target", "kept", "bound"),
    [(1.0, 3.0, 1.0), (2.0, 3.0, 1.0), (3.0, 4.0, 2.5), (0.1, 1.0, 0.1)],
)
def test_a_target_is_judged_at_the_bound_below(target: float, kept: float, bound: float) -> None:
    assert tally(EDGES, [0.05, 0.3, 0.9, 2.0, 4.0]).within(target) == (kept, bound)


def test_a_target_below_the_first_bucket_keeps_nothing() -> None:
    assert tally(EDGES, [0.05]).within(0.05) is None
