"""Sweeps at several tensor-parallel degrees: like against like, no more than was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.capacity import FAR_BELOW, BenchmarkPoint, DegreeComparison
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark
from kneewatch.diagnose.sizing.benchmark.operating_point import Sweeps, compared, degrees_of
from kneewatch.diagnose.sizing.serving_cost import scaling
from kneewatch.rules.facts import NO_TARGETS, Targets
from tests.diagnose.sweeps import LOADS, sweep

TTFT_S = 1.5
"""Kept at 64 requests in flight a GPU, where a made-up sweep gives most, and missed at 80."""

GAINS = st.floats(0.2, 5.0)
PER_GPU = st.floats(10.0, 5000.0)


def held(
    *sweeps: Sweeps, tensor_parallel: int = 4, ttft_s: float | None = TTFT_S
) -> DegreeComparison:
    """A degree against the smaller ones."""
    unit, degrees = degrees_of(together(*sweeps), Targets(ttft_s))
    return compared(unit, degrees, tensor_parallel)


def together(*sweeps: Sweeps) -> Sweeps:
    return {degree: benchmark for each in sweeps for degree, benchmark in each.items()}


def changed(swept: Sweeps, **of_each: float) -> Sweeps:
    """The sweep with each point's values times a factor."""
    ((degree, benchmark),) = swept.items()
    points = tuple(
        replace(point, **{key: getattr(point, key) * factor for key, factor in of_each.items()})
        for point in benchmark.points
    )
    return {degree: Benchmark(points)}


def table(*rows: tuple[float, float, float]) -> Benchmark:
    """Points of concurrency, tokens a second and TTFT P99 (s), 200 tokens a request."""
    return Benchmark(
        tuple(
            BenchmarkPoint(c, tokens / 200, s, 0.03, output_tokens_per_s=tokens)
            for c, tokens, s in rows
        )
    )


@pytest.mark.parametrize("ttft_s", [None, TTFT_S], ids=["no target", "TTFT P99 1.5 s"])
def test_a_degree_is_held_against_a_gpu_of_the_smaller_one(ttft_s: float | None) -> None:
    """2,000 tokens/s on 4 GPUs against 1,000 on one: a half."""
    comparison = held(sweep(1, 1000), sweep(4, 500), ttft_s=ttft_s)
    assert comparison.share_ratio == pytest.approx(0.5)
    assert (comparison.unit, comparison.far_below, comparison.why) == ("tokens", True, "")
    assert comparison.wide is not None
    assert comparison.wide.point is not None
    assert comparison.wide.point.concurrency == 4 * 64


def test_of_several_smaller_degrees_the_best_counts() -> None:
    comparison = held(sweep(1, 700), sweep(2, 900), sweep(4, 500), sweep(8, 100))
    assert comparison.narrow is not None
    assert comparison.narrow.tensor_parallel == 2


@pytest.mark.parametrize(
    ("comparison", "why"),
    [
        pytest.param(held(sweep(1, 900)), "no sweep of TP 4", id="not measured"),
        pytest.param(held(sweep(4, 100), sweep(8, 900)), "no sweep below TP 4", id="no smaller"),
        pytest.param(
            held(sweep(1, 900), sweep(4, 100), ttft_s=0.1), "TP 4 misses a target",
            id="it keeps no target",
        ),
        pytest.param(
            held(changed(sweep(1, 900), ttft_p99_s=20.0), sweep(4, 100)),
            "TP 1 misses a target at its lowest load: TTFT P99", id="the smaller one keeps none",
        ),
        pytest.param(
            held(sweep(1, 900, tokens_per_request=100), sweep(4, 100)), "200 output tokens",
            id="unlike requests",
        ),
        pytest.param(
            held(sweep(1, 900), sweep(4, 100, loads=(0.25, 2, 8, 16))),
            "TP 4 was measured up to 16 requests in flight per GPU",
            id="the sweep went on rising where it ended",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_says_why(comparison: DegreeComparison, why: str) -> None:
    assert (comparison.share_ratio, comparison.far_below) == (None, False)
    assert why in comparison.why


def test_a_gap_at_the_limit_proves_nothing() -> None:
    """Between 64 and 256 in flight TP 4 may carry 900 a GPU: nobody measured it."""
    narrow = {1: table((8, 500, 0.2), (64, 1000, 1.0), (80, 1000, 2.4))}
    wide = {4: table((64, 1600, 0.5), (256, 3600, 2.4))}
    comparison = held(narrow, wide)
    assert (comparison.share_ratio, comparison.far_below) == (0.4, False)
    assert "measure in between" in comparison.why
    closer = {4: table((64, 1600, 0.5), (80, 1700, 2.4))}
    assert held(narrow, closer).far_below


def test_one_load_each_is_enough_where_it_is_as_many_a_gpu() -> None:
    single, four = {1: table((64, 1000, 1.0))}, {4: table((256, 2000, 1.0))}
    assert held(single, four, ttft_s=None).share_ratio == 0.5
    same = {4: table((64, 2000, 1.0))}
    assert held(single, same, ttft_s=None).share_ratio is None


def test_requests_count_where_a_sweep_says_no_tokens() -> None:
    comparison = held(sweep(1, 1000, tokens_per_request=None), sweep(4, 500))
    assert comparison.unit == "requests"
    assert comparison.share_ratio == pytest.approx(0.5)


def test_one_gpu_has_nothing_smaller_and_lacks_nothing() -> None:
    assert held(sweep(1, 10), sweep(4, 500), tensor_parallel=1) == DegreeComparison("tokens")


def test_a_target_that_cannot_be_is_refused() -> None:
    with pytest.raises(SizingError):
        held(sweep(1, 1000), ttft_s=-1.0)


@given(PER_GPU, PER_GPU, GAINS)
def test_another_scale_of_the_same_sweeps_says_the_same(
    narrow: float, wide: float, factor: float
) -> None:
    comparison = held(sweep(1, narrow), sweep(4, wide))
    scaled = held(
        *(
            changed(swept, output_tokens_per_s=factor, requests_per_s=factor)
            for swept in (sweep(1, narrow), sweep(4, wide))
        )
    )
    assert scaled.share_ratio == pytest.approx(comparison.share_ratio)
    assert comparison.share_ratio == pytest.approx(wide / narrow)


@given(PER_GPU, PER_GPU, st.floats(1.0, 10.0))
def test_more_of_the_wide_split_is_never_worse(narrow: float, wide: float, more: float) -> None:
    less, better = (
        held(sweep(1, narrow), sweep(4, tokens_per_s)) for tokens_per_s in (wide, wide * more)
    )
    assert less.far_below or not better.far_below
    assert less.share_ratio is not None
    assert better.share_ratio is not None
    assert better.share_ratio >= less.share_ratio * (1 - 1e-9)


@given(
    PER_GPU,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([None, TTFT_S, 0.5]),
    st.integers(1, len(LOADS)),
)
def test_degrees_that_give_a_gpu_the_same_are_never_told(
    per_gpu: float, narrow: int, wide: int, ttft_s: float | None, loads: int
) -> None:
    """However short either sweep was: what was not measured is not held against it."""
    comparison = held(
        sweep(narrow, per_gpu),
        sweep(wide, per_gpu, loads=LOADS[:loads]),
        tensor_parallel=wide,
        ttft_s=ttft_s,
    )
    assert not comparison.far_below
    assert comparison.share_ratio is None or comparison.share_ratio >= FAR_BELOW


def test_the_cheapest_degree_gives_most_a_gpu_within_the_targets() -> None:
    """3 USD / (1,000 x 3,600) x 1e6 = 0.833; TP 2 keeps no target, however much it gives."""
    late = changed(sweep(2, 5000), ttft_p99_s=20.0)
    by_degree = scaling(
        together(sweep(4, 500), late, sweep(1, 1000)),
        Targets(TTFT_S), usd_per_gpu_hour=3.0,
    )  # fmt: skip
    assert [row.degree.tensor_parallel for row in by_degree.rows] == [1, 2, 4]
    assert [row.usd_per_million_tokens for row in by_degree.rows] == [
        pytest.approx(0.8333, abs=1e-4), None, pytest.approx(1.6667, abs=1e-4),
    ]  # fmt: skip
    assert [row.efficiency_ratio for row in by_degree.rows] == [1.0, None, pytest.approx(0.5)]
    assert by_degree.cheapest == 1
    assert any("TP 4 has 50% less" in note for note in by_degree.notes)
    assert any("TP 2 misses a target at its lowest load" in note for note in by_degree.notes)


def test_no_price_and_no_degree_are_not_made_up() -> None:
    by_degree = scaling(
        together(sweep(1, 1000), sweep(4, 500)), Targets(0.1), usd_per_gpu_hour=None
    )
    assert by_degree.cheapest is None
    assert all(row.efficiency_ratio is None for row in by_degree.rows)
    no_tokens = sweep(1, 1000, tokens_per_request=None)
    (row,) = scaling(no_tokens, NO_TARGETS, usd_per_gpu_hour=3.0).rows
    assert row.usd_per_million_tokens is None
