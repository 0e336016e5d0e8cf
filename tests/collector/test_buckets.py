"""Quantiles and shares of a histogram's bucket rates."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.window import Buckets

INF = math.inf
RATES = st.lists(st.floats(0, 1e6), min_size=2, max_size=8)
QUANTILES = st.floats(0.001, 1.0)


@st.composite
def buckets(draw: st.DrawFn) -> Buckets:
    """Any buckets with observations; their rates need not ascend, as in a torn scrape."""
    rates = [*draw(RATES), draw(st.floats(1e-3, 1e6))]
    steps = draw(st.lists(st.floats(0.01, 10), min_size=len(rates) - 1, max_size=len(rates) - 1))
    bounds = [sum(steps[: at + 1]) for at in range(len(steps))]
    return Buckets.of((*bounds, INF), tuple(rates))


@given(histogram=buckets(), low=QUANTILES, high=QUANTILES)
def test_a_higher_quantile_is_never_lower(histogram: Buckets, low: float, high: float) -> None:
    low, high = sorted((low, high))
    below, above = histogram.quantile(low), histogram.quantile(high)
    assert below is not None
    assert above is not None
    assert below <= above * (1 + 1e-12)


@given(histogram=buckets(), q=QUANTILES)
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(histogram: Buckets, q: float) -> None:
    lifted = [max(histogram.rates_per_s[: at + 1]) for at in range(len(histogram.rates_per_s))]
    at = min(bisect_left(lifted, q * lifted[-1]), len(lifted) - 1)
    value = histogram.quantile(q)
    assert value is not None
    if at == len(lifted) - 1:
        assert value == histogram.bounds[-2], "beyond the last finite bound nothing is known"
    else:
        low = histogram.bounds[at - 1] if at else 0.0
        assert low * (1 - 1e-12) <= value <= histogram.bounds[at] * (1 + 1e-12)


@given(histogram=buckets(), factor=st.floats(0.01, 100), q=QUANTILES)
def test_a_quantile_does_not_depend_on_how_many_there_were(
    histogram: Buckets, factor: float, q: float
) -> None:
    scaled = Buckets.of(histogram.bounds, tuple(factor * rate for rate in histogram.rates_per_s))
    total = max(histogram.rates_per_s)
    edge = any(math.isclose(rate, q * total, rel_tol=1e-9) for rate in histogram.rates_per_s)
    if not edge:
        assert scaled.quantile(q) == pytest.approx(histogram.quantile(q), rel=1e-6, abs=1e-9)


EVEN = Buckets.of((1.0, 2.0, 4.0, INF), (2.0, 4.0, 6.0, 8.0))


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        pytest.param(0.25, 1.0, id="rank 2 of 8: the first bucket's end"),
        pytest.param(0.125, 0.5, id="rank 1: half of the first bucket, from zero"),
        pytest.param(0.375, 1.5, id="rank 3: half of the second"),
        pytest.param(0.625, 3.0, id="rank 5: half of the third, which is wider"),
        pytest.param(0.99, 4.0, id="in the last: the greatest finite bound"),
    ],
)
def test_quantiles_worked_by_hand(q: float, expected: float) -> None:
    assert EVEN.quantile(q) == pytest.approx(expected)


@pytest.mark.parametrize(
    "histogram",
    [
        pytest.param(Buckets.of((1.0, INF), (0.0, 0.0)), id="no observation"),
        pytest.param(Buckets.of((INF,), (3.0,)), id="only the bucket of all"),
        pytest.param(Buckets.of((1.0, 2.0), (1.0, 3.0)), id="no bucket of all"),
    ],
)
def test_without_observations_or_bounds_there_is_no_quantile(histogram: Buckets) -> None:
    assert histogram.quantile(0.5) is None
    assert histogram.quantile(0.99) is None


@pytest.mark.parametrize(
    ("bound", "share"),
    [
        pytest.param(0.5, 0.0, id="below the first bound"),
        pytest.param(1.0, 0.25, id="a bound"),
        pytest.param(1.9, 0.25, id="between two: the lower, which is sure"),
        pytest.param(2.0, 0.5, id="the next bound"),
        pytest.param(100.0, 0.75, id="above all finite bounds"),
        pytest.param(INF, 1.0, id="all"),
    ],
)
def test_share_at_most(bound: float, share: float) -> None:
    assert EVEN.share_at_most(bound) == pytest.approx(share)


def test_the_share_of_nothing_is_unknown() -> None:
    assert Buckets.of((1.0, INF), (0.0, 0.0)).share_at_most(1.0) is None


@pytest.mark.parametrize(
    ("bound", "per_s"),
    [
        pytest.param(1.0, 6.0, id="8 less 2"),
        pytest.param(4.0, 2.0, id="8 less 6"),
        pytest.param(INF, 0.0, id="nothing is above infinity"),
        pytest.param(1.5, None, id="no bucket ends there"),
        pytest.param(100.0, None, id="beyond the finite bounds"),
    ],
)
def test_above_per_s(bound: float, per_s: float | None) -> None:
    assert EVEN.above_per_s(bound) == per_s


@given(histogram=buckets())
def test_what_is_above_a_bound_is_never_negative(histogram: Buckets) -> None:
    above = [histogram.above_per_s(bound) for bound in histogram.bounds]
    assert all(per_s is not None and 0 <= per_s <= max(histogram.rates_per_s) for per_s in above)
