"""What makes a benchmark's curve unfit, or less fit, to size from. Pure. Guide 8.2 and 8.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kneewatch.diagnose.sizing.benchmark.curve import worst_per_concurrency
from kneewatch.diagnose.sizing.benchmark.points import Benchmark, BenchmarkPoint
from kneewatch.diagnose.sizing.benchmark.trust import littles_gap
from kneewatch.diagnose.sizing.steps import figure

MIN_POINTS = 5
"""Two points on the flat part, two past the knee and the knee itself."""

MIN_REQUESTS = 500
"""So that at least five requests lie beyond a P99; aiperf and vLLM report one of any number."""

SATURATED_ELASTICITY = 0.5
"""Of the last step: RPS gained per concurrency gained (both relative). Above it, still rising."""

NOISE_RATIO = 0.05
"""Two runs of one configuration differ by this much; a smaller dip is no dip."""


@dataclass(frozen=True, slots=True)
class RedFlag:
    """Why a curve may mislead; `kind` is a stable word, `message` the numbers and what to do."""

    kind: str
    message: str


def red_flags(benchmark: Benchmark) -> tuple[RedFlag, ...]:
    """What makes the curve unfit, or less fit, to size from.

    Source: guide 8.2 (a sweep from 1 to beyond the knee, warmed up), thresholds as named above.
    """
    points = worst_per_concurrency(benchmark.points)
    return (
        *_coverage(benchmark, points),
        *_end(points),
        *_shape(points),
        *_runs(benchmark),
        *_law(points),
    )


def _coverage(benchmark: Benchmark, points: Sequence[BenchmarkPoint]) -> list[RedFlag]:
    flags: list[RedFlag] = []
    if len(points) < MIN_POINTS:
        flags.append(
            RedFlag(
                "few_points",
                f"{len(points)} measured concurrencies; a curve with its knee needs "
                f"{MIN_POINTS} or more, from 1 in flight to past saturation",
            )
        )
    if len(points) > 1 and points[0].concurrency * 4 > points[-1].concurrency:
        flags.append(
            RedFlag(
                "no_baseline",
                f"the sweep starts at {points[0].concurrency:g} in flight, too near its end at "
                f"{points[-1].concurrency:g} to show the quiet latency",
            )
        )
    if len(points) < len(benchmark.points):
        flags.append(
            RedFlag(
                "repeated_runs",
                "several runs at one concurrency: the lowest RPS and highest latencies are used",
            )
        )
    return flags


def _end(points: Sequence[BenchmarkPoint]) -> list[RedFlag]:
    """Whether throughput still rises where the sweep ends."""
    if len(points) < 2:
        return []
    before, last = points[-2], points[-1]
    rps_gain = last.requests_per_s / before.requests_per_s - 1
    load_gain = last.concurrency / before.concurrency - 1
    if rps_gain <= SATURATED_ELASTICITY * load_gain:
        return []
    return [
        RedFlag(
            "not_saturated",
            f"throughput still rises at the end: {rps_gain:+.0%} RPS for {load_gain:+.0%} "
            f"concurrency; go beyond {last.concurrency:g} in flight",
        )
    ]


def _shape(points: Sequence[BenchmarkPoint]) -> list[RedFlag]:
    flags: list[RedFlag] = []
    for before, after in pairwise(points):
        step = f"from {before.concurrency:g} to {after.concurrency:g} in flight"
        if after.requests_per_s < before.requests_per_s * (1 - NOISE_RATIO):
            flags.append(
                RedFlag(
                    "rps_falls",
                    f"RPS falls {step}: {figure(before.requests_per_s)} to "
                    f"{figure(after.requests_per_s)}: preemption past saturation, or a bad run",
                )
            )
        for name, low, high in (
            ("TTFT", before.ttft_p99_s, after.ttft_p99_s),
            ("ITL", before.itl_p99_s, after.itl_p99_s),
        ):
            if high < low * (1 - 2 * NOISE_RATIO):
                flags.append(
                    RedFlag(
                        "latency_falls",
                        f"{name} P99 falls {step}: {figure(low)} to {figure(high)} s: not warmed "
                        "up (guide: 1,000 requests first), or too few requests",
                    )
                )
    return flags


def _runs(benchmark: Benchmark) -> list[RedFlag]:
    flags: list[RedFlag] = []
    few = [p for p in benchmark.points if p.requests is not None and p.requests < MIN_REQUESTS]
    if few:
        least = min(p.requests or 0 for p in few)
        flags.append(
            RedFlag(
                "few_requests",
                f"{len(few)} of {len(benchmark.points)} runs have under {MIN_REQUESTS} requests "
                f"(fewest {least}): their P99 rests on {max(1, least // 100)} of them",
            )
        )
    failed = [p for p in benchmark.points if p.failed]
    if failed:
        flags.append(
            RedFlag(
                "failed_requests",
                f"requests failed at {', '.join(f'{p.concurrency:g}' for p in failed)} in flight: "
                "RPS and latencies count only those that succeeded",
            )
        )
    return flags


def _law(points: Sequence[BenchmarkPoint]) -> list[RedFlag]:
    """Points whose concurrency, RPS and mean latency break Little's law."""
    flags: list[RedFlag] = []
    for point in points:
        if not point.latency_mean_s:
            continue
        gap = littles_gap(
            concurrency=point.concurrency,
            requests_per_s=point.requests_per_s,
            latency_s=point.latency_mean_s,
        )
        if gap.verdict != "consistent":
            flags.append(
                RedFlag(
                    "littles_law",
                    f"at {point.concurrency:g} in flight Little's law gives "
                    f"{figure(gap.ceiling_requests_per_s)} requests/s, measured were "
                    f"{figure(point.requests_per_s)}: {gap.meaning}",
                )
            )
    return flags
