"""The operating point: knee, C_max, usable RPS, Little's law, and the guide's chapters 8.1-8.4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.benchmark.latency_curve import (
    Benchmark,
    knee,
    littles_gap,
    ordered,
    red_flags,
)
from kneewatch.diagnose.sizing.benchmark.operating_point import OperatingPoint, operating_point
from kneewatch.rules.facts import Targets


def at(
    concurrency: float,
    requests_per_s: float,
    ttft_p99_s: float,
    itl_p99_s: float = 0.02,
    *,
    ttft_p50_s: float | None = None,
) -> BenchmarkPoint:
    return BenchmarkPoint(
        concurrency, requests_per_s, ttft_p99_s, itl_p99_s, ttft_p50_s=ttft_p50_s, origin="test"
    )


GUIDE = ordered(
    [
        at(1, 0.5, 0.25, ttft_p50_s=0.20),
        at(8, 3.6, 0.30, ttft_p50_s=0.22),
        at(16, 6.4, 0.42, ttft_p50_s=0.30),
        at(32, 9.8, 0.90, ttft_p50_s=0.55),
        at(48, 12.0, 1.95, ttft_p50_s=0.9),
        at(56, 13.5, 2.6, ttft_p50_s=0.95),
        at(64, 15.0, 5.0, ttft_p50_s=1.2),
        at(96, 17.5, 9.0, ttft_p50_s=4.0),
        at(128, 18.0, 14.0, ttft_p50_s=8.0),
    ]
)
"""Figure 8.2's numbers (48 in flight, 2 s, 12 of a peak of 18 RPS) on a curve shaped as 8.1's."""

NO_MEDIANS = Benchmark(tuple(replace(p, ttft_p50_s=None) for p in GUIDE.points))


def best_point(
    benchmark: Benchmark, *, ttft_p99_s: float | None = 2.0, itl_p99_s: float | None = None
) -> OperatingPoint:
    return operating_point(benchmark, Targets(ttft_p99_s, itl_p99_s))


def kinds(point: OperatingPoint) -> set[str]:
    return {flag.kind for flag in point.flags}


def test_figure_8_2_c_max_is_48_and_12_rps_are_usable_of_a_peak_of_18() -> None:
    point = best_point(GUIDE)
    assert point.c_max is not None
    assert point.c_max.concurrency == 48
    assert point.usable_requests_per_s == 12
    assert point.peak_requests_per_s == 18
    assert point.first_miss is not None
    assert point.first_miss.concurrency == 56
    assert point.missed == ("TTFT P99 2.6 s at 56 in flight, above the target of 2 s",)
    assert not point.is_lower_bound
    assert kinds(point) == {"littles_law_unchecked"}
    assert [step.result for step in point.steps[-2:]] == ["48 in flight", "12 requests/s"]


def test_the_binding_target_may_be_itl() -> None:
    points = [replace(p, itl_p99_s=0.01 * (i + 1)) for i, p in enumerate(GUIDE.points)]
    point = best_point(ordered(points), itl_p99_s=0.03)
    assert point.c_max is not None
    assert point.c_max.concurrency == 16
    assert point.missed == ("ITL P99 40 ms at 32 in flight, above the target of 30 ms",)
    alone = best_point(ordered(points), ttft_p99_s=None, itl_p99_s=0.03)
    assert alone.c_max == point.c_max


def test_a_target_that_is_met_exactly_is_met() -> None:
    point = best_point(GUIDE, ttft_p99_s=1.95)
    assert point.c_max is not None
    assert point.c_max.concurrency == 48


def test_nothing_is_interpolated_or_extrapolated() -> None:
    point = best_point(ordered([at(8, 4, 0.5), at(64, 15, 2.5)]))
    assert point.usable_requests_per_s == 4
    assert "wide_bracket" in kinds(point)
    every = best_point(ordered(GUIDE.points[:5]))
    assert (every.usable_requests_per_s, every.is_lower_bound) == (12, True)
    assert "all_meet" in kinds(every)


def test_no_point_meets() -> None:
    point = best_point(GUIDE, ttft_p99_s=0.1)
    assert point.c_max is None
    assert point.usable_requests_per_s is None
    assert "none_meet" in kinds(point)


def test_a_point_that_meets_again_beyond_a_miss_is_noise() -> None:
    points = [at(8, 4, 0.5), at(16, 7, 2.3), at(32, 10, 1.9), at(64, 12, 6), at(128, 12, 20)]
    point = best_point(ordered(points))
    assert point.usable_requests_per_s == 4
    assert {"meets_again", "latency_falls"} <= kinds(point)


def test_a_cold_first_point_does_not_hide_the_rest() -> None:
    points = [at(1, 0.4, 9.0), *GUIDE.points[1:]]
    point = best_point(ordered([replace(p, ttft_p50_s=None) for p in points]))
    assert point.usable_requests_per_s == 12
    assert "cold_start" in kinds(point)


@pytest.mark.parametrize("targets", [(None, None), (0, None), (-1, None), (2, 0)])
def test_a_target_is_needed_and_positive(targets: tuple[float | None, float | None]) -> None:
    with pytest.raises(SizingError) as raised:
        best_point(GUIDE, ttft_p99_s=targets[0], itl_p99_s=targets[1])
    assert raised.value.name in ("ttft_slo", "itl_slo")


def test_8_1_the_knee_is_where_p99_of_ttft_leaves_p50() -> None:
    """P99/P50 is 1.25 when quiet and 2.7 at 56 (2.2 at 48): more than twice the quiet ratio."""
    bend = knee(GUIDE.points)
    assert bend.past is not None
    assert (bend.safe.concurrency, bend.past.concurrency) == (48, 56)
    assert bend.basis == "TTFT P99 rises faster than P50"


def test_8_1_the_quietest_tail_before_is_what_counts() -> None:
    """A cold first point with P99/P50 of 4 does not hide that the tail goes from 1.2 to 3."""
    points = [
        at(1, 1, 0.8, ttft_p50_s=0.2),
        at(8, 6, 0.3, ttft_p50_s=0.25),
        at(16, 9, 0.9, ttft_p50_s=0.3),
    ]
    bend = knee(points)
    assert bend.past is not None
    assert (bend.past.concurrency, bend.basis) == (16, "TTFT P99 rises faster than P50")


def test_half_the_gain_at_the_end_counts_as_saturated() -> None:
    points = [at(1, 1, 1), at(8, 4, 2), at(16, 6, 2)]
    assert "not_saturated" not in flags(points), "+50 % RPS for +100 % concurrency"


def test_8_1_without_medians_the_knee_is_where_latency_outruns_throughput() -> None:
    """RPS / TTFT: 2, 12, 15.2, 10.9, 6.2: to 32 in flight TTFT doubles and RPS gains half."""
    bend = knee(NO_MEDIANS.points)
    assert bend.past is not None
    assert (bend.safe.concurrency, bend.past.concurrency) == (16, 32)
    assert bend.basis == "latency grows faster than throughput"
    assert "past_knee" in kinds(best_point(NO_MEDIANS))


def test_8_1_a_sweep_that_stops_early_has_no_knee() -> None:
    bend = knee(NO_MEDIANS.points[:3])
    assert bend.past is None
    assert bend.basis == "not reached"


def flags(points: list[BenchmarkPoint]) -> dict[str, str]:
    return {flag.kind: flag.message for flag in red_flags(ordered(points))}


@pytest.mark.parametrize(
    ("points", "kind", "words"),
    [
        pytest.param([at(1, 1, 1), at(8, 2, 2)], "few_points", "only 2", id="8.2: a sweep"),
        pytest.param([at(32, 1, 1), at(64, 2, 2)], "no_baseline", "starts at 32", id="8.2: from 1"),
        pytest.param(
            [at(1, 1, 1), at(8, 2, 2), at(16, 4, 2)], "not_saturated", "+100% RPS for +100%",
            id="8.2: beyond the knee",
        ),
        pytest.param(
            [at(1, 1, 1), at(8, 2, 2), at(16, 1.5, 2)], "rps_falls", "2 to 1.5", id="RPS falls"
        ),
        pytest.param(
            [at(1, 1, 3), at(8, 2, 2)], "latency_falls", "1,000 requests first",
            id="8.2: warm up with 1,000 requests",
        ),
        pytest.param(
            [at(1, 1, 3, 0.05), at(8, 2, 3, 0.01)], "latency_falls", "ITL P99 falls", id="ITL falls"
        ),
        pytest.param([at(1, 1, 3), at(1, 2, 2)], "repeated_runs", "lowest RPS", id="repeats"),
        pytest.param(
            [replace(at(1, 1, 3), requests=96)], "few_requests", "rests on the slowest 1",
            id="P99 of 96 requests is the slowest one",
        ),
        pytest.param([replace(at(7, 1, 3), failed=2)], "failed_requests", "at 7 in", id="failed"),
        pytest.param(
            [replace(at(48, 12, 2), latency_mean_s=1.0)], "littles_law", "Little's law gives 48",
            id="8.3: Little's gap over 2",
        ),
    ],
)  # fmt: skip
def test_red_flags(points: list[BenchmarkPoint], kind: str, words: str) -> None:
    assert words in flags(points)[kind]


def test_a_sound_curve_has_no_flag() -> None:
    points = [
        replace(p, requests=1000, failed=0, latency_mean_s=p.concurrency / p.requests_per_s)
        for p in GUIDE.points
    ]
    assert flags(points) == {}


def test_of_repeated_runs_the_worse_counts() -> None:
    points = [at(8, 4, 0.5), at(48, 12, 1.9), at(48, 11, 1.8, 0.03), at(64, 13, 5)]
    point = best_point(ordered(points))
    assert point.c_max is not None
    assert (point.usable_requests_per_s, point.c_max.itl_p99_s) == (11, 0.03)


def test_more_at_less_concurrency_is_said() -> None:
    points = [at(1, 1, 0.2), at(8, 6, 0.5), at(16, 5, 0.9), at(64, 5, 5)]
    assert "more_at_less" in kinds(best_point(ordered(points)))


# --- Little's law, 8.3 and 8.4


def test_8_3_the_guides_ceiling_and_gap() -> None:
    """48 / 2 s = 24 requests/s, twice the 12 measured: the guide proceeds, so 2 is within."""
    sheet = Sheet()
    gap = littles_gap(sheet, concurrency=48, requests_per_s=12, latency_s=2, is_target=True)
    assert gap[:2] == (2, "consistent")
    assert [step.line() for step in sheet.steps] == [
        "Little's ceiling: concurrency / TTFT target = 48 / 2 s = 24 requests/s",
        "Little's gap: ceiling / measured = 24 / 12 = 2 (consistent)",
    ]


def test_8_3_the_gap_is_decode_time_not_overhead() -> None:
    """Erratum. 48 in flight at 12/s live 4 s each; with that as average latency there is no gap.

    The guide's 2 s is the TTFT target at P99, not an average and not the whole life: 200 output
    tokens at 15 ms are 3 s more.
    """
    mean_life_s = 48 / 12
    assert mean_life_s == 4
    gap = littles_gap(Sheet(), concurrency=48, requests_per_s=12, latency_s=mean_life_s)
    assert gap[0] == 1


def test_8_3_the_guides_limit_rejects_sound_benchmarks_with_long_outputs() -> None:
    """Erratum. 3,000 tokens at 20 ms after 1 s: 61 s each, so 48 in flight are 0.79/s."""
    served = 48 / 61
    ratio, verdict, meaning = littles_gap(
        Sheet(), concurrency=48, requests_per_s=served, latency_s=2, is_target=True
    )
    assert ratio == pytest.approx(30.5)
    assert verdict == "mismatch"
    assert "decode time" in meaning
    by_life = littles_gap(Sheet(), concurrency=48, requests_per_s=served, latency_s=61)
    assert by_life[1] == "consistent"


@pytest.mark.parametrize(
    ("latency_s", "verdict", "words"),
    [
        pytest.param(4.0, "consistent", "is consistent", id="48 / 4 = 12"),
        pytest.param(3.0, "consistent", "only 75%", id="a quarter was not in flight"),
        pytest.param(2.0, "consistent", "only 50%", id="exactly 2 is within"),
        pytest.param(1.9, "mismatch", "was not reached", id="over 2: fix the benchmark"),
        pytest.param(4.6, "impossible", "contradict", id="more served than in flight"),
    ],
)
def test_little_with_the_mean_latency(latency_s: float, verdict: str, words: str) -> None:
    _, *told = littles_gap(Sheet(), concurrency=48, requests_per_s=12, latency_s=latency_s)
    assert told[0] == verdict
    assert words in told[1]


def test_a_gap_below_1_against_a_target_is_harmless() -> None:
    gap = littles_gap(Sheet(), concurrency=48, requests_per_s=48, latency_s=2, is_target=True)
    assert gap[:2] == (0.5, "consistent")


@pytest.mark.parametrize(
    ("concurrency", "output_tokens_per_s", "ttft_ms", "tpot_ms", "output_tokens", "expected"),
    [
        pytest.param(4, 453.04, 49.0, 8.31, 216.9, 1.04, id="gpt-oss-120b/h100.md#L475"),
        pytest.param(4, 645.55, 37.51, 5.75, 216.9, 1.05, id="gpt-oss-120b/h100.md#L599"),
        pytest.param(1, 132.86, 59.01, 7.28, 220.6, 1.00, id="qwen3-8b/h100-latency.md#L617"),
        pytest.param(2, 257.19, 63.78, 7.37, 220.6, 1.02, id="qwen3-8b/h100-latency.md#L643"),
        pytest.param(4, 496.88, 64.0, 7.38, 220.6, 1.05, id="qwen3-8b/h100-latency.md#L669"),
        pytest.param(8, 917.28, 74.57, 7.71, 220.6, 1.09, id="qwen3-8b/h100-latency.md#L695"),
        pytest.param(96, 2145.85, 98.72, 28.88, 281.4, 1.54, id="qwen3.5-9b/h100-latency.md#L170"),
        pytest.param(512, 5202.94, 1604.23, 15.12, 281.4, 4.74, id="qwen3.5-9b/h100.md#L117"),
    ],
)
def test_little_on_real_vllm_benchmarks(
    concurrency: int,
    output_tokens_per_s: float,
    ttft_ms: float,
    tpot_ms: float,
    output_tokens: float,
    expected: float,
) -> None:
    """gpustack's performance lab, @47277d79. With means the gap of a sound run is near 1.

    The last one's TPOT misses reasoning tokens: its own mean latency is 24.11 s, not 5.84.
    """
    latency_s = (ttft_ms + tpot_ms * (output_tokens - 1)) / 1000
    served = output_tokens_per_s / output_tokens
    ratio, verdict, _ = littles_gap(
        Sheet(), concurrency=concurrency, requests_per_s=served, latency_s=latency_s
    )
    assert ratio == pytest.approx(expected, abs=0.005)
    assert verdict == ("mismatch" if expected > 2 else "consistent")
    if expected > 2:
        whole = littles_gap(Sheet(), concurrency=512, requests_per_s=served, latency_s=24.11)
        assert whole[0] == pytest.approx(1.15, abs=0.005)


@pytest.mark.parametrize("name", ["concurrency", "requests_per_s", "latency_s"])
def test_little_refuses_nonsense(name: str) -> None:
    numbers = {"concurrency": 1.0, "requests_per_s": 1.0, "latency_s": 1.0} | {name: 0.0}
    with pytest.raises(SizingError) as raised:
        littles_gap(
            Sheet(),
            concurrency=numbers["concurrency"],
            requests_per_s=numbers["requests_per_s"],
            latency_s=numbers["latency_s"],
        )
    assert raised.value.name == name


# --- properties

POINTS = st.lists(
    st.builds(
        at,
        st.integers(1, 512).map(float),
        st.floats(0.1, 500),
        st.floats(0.01, 60),
        st.floats(0.001, 2),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda p: p.concurrency,
)


@given(POINTS, st.floats(0.01, 60), st.floats(0.001, 2))
def test_c_max_is_measured_and_keeps_the_targets(
    points: list[BenchmarkPoint], ttft_s: float, itl_s: float
) -> None:
    point = best_point(ordered(points), ttft_p99_s=ttft_s, itl_p99_s=itl_s)
    if point.c_max is None:
        assert all(p.ttft_p99_s > ttft_s or p.itl_p99_s > itl_s for p in points)
        return
    assert point.c_max.concurrency in {p.concurrency for p in points}
    assert point.c_max.ttft_p99_s <= ttft_s
    assert point.c_max.itl_p99_s <= itl_s


@given(POINTS, st.floats(0.01, 60), st.floats(0, 60))
def test_a_looser_target_never_lowers_c_max_on_a_monotone_curve(
    points: list[BenchmarkPoint], ttft_s: float, more_s: float
) -> None:
    latencies = sorted(p.ttft_p99_s for p in points)
    curve = ordered(points).points
    rising = Benchmark(
        tuple(replace(p, ttft_p99_s=s) for p, s in zip(curve, latencies, strict=True))
    )
    tight, loose = (
        best_point(rising, ttft_p99_s=ttft_s),
        best_point(rising, ttft_p99_s=ttft_s + more_s),
    )
    if tight.c_max is not None:
        assert loose.c_max is not None
        assert loose.c_max.concurrency >= tight.c_max.concurrency


@given(st.floats(1, 1e4), st.floats(0.01, 1e3))
def test_littles_law_is_an_identity(concurrency: float, latency_s: float) -> None:
    served = concurrency / latency_s
    gap = littles_gap(Sheet(), concurrency=concurrency, requests_per_s=served, latency_s=latency_s)
    assert gap[0] == pytest.approx(1)


def test_without_mean_latencies_medians_and_tokens_check_littles_law() -> None:
    def flags(concurrency: float) -> set[str]:
        point = BenchmarkPoint(
            concurrency=concurrency,
            requests_per_s=10.0,
            ttft_p99_s=0.9,
            itl_p99_s=0.03,
            ttft_p50_s=0.4,
            itl_p50_s=0.016,
            output_tokens_per_s=1010.0,
        )
        return kinds(operating_point(ordered([point]), Targets(1.0)))

    # 0.4 s + 100 x 0.016 s hold 20 requests in flight at 10 requests/s.
    assert "littles_law" not in flags(20.0)
    assert "littles_law" in flags(96.0)
