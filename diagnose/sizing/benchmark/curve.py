"""The latency-throughput curve of a benchmark and its knee. Pure. Guide 8.1 and 8.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from kneewatch.diagnose.sizing.benchmark.points import BenchmarkPoint
from kneewatch.diagnose.sizing.steps import Step, figure

TAIL_RATIO = 2.0
"""P99/P50 of TTFT against the quietest point: at twice, the tail leaves (as in rules.library)."""


@dataclass(frozen=True, slots=True)
class Knee:
    """Where latency begins to rise faster than throughput: between `safe` and `past`.

    `past` is None where the sweep ended before the knee. `basis` says how it was seen.
    """

    safe: BenchmarkPoint
    past: BenchmarkPoint | None
    basis: str
    steps: tuple[Step, ...]


def worst_per_concurrency(points: Sequence[BenchmarkPoint]) -> tuple[BenchmarkPoint, ...]:
    """One point per concurrency: of repeated runs, the lowest RPS and the highest latencies."""
    worst: list[BenchmarkPoint] = []
    for _, group in groupby(sorted(points, key=lambda p: p.concurrency), lambda p: p.concurrency):
        runs = list(group)
        slowest = max(runs, key=lambda p: p.ttft_p99_s)
        worst.append(
            replace(
                slowest,
                requests_per_s=min(p.requests_per_s for p in runs),
                itl_p99_s=max(p.itl_p99_s for p in runs),
            )
        )
    return tuple(worst)


def knee(points: Sequence[BenchmarkPoint]) -> Knee:
    """The knee of the curve, as the region between two measured points.

    With medians: the first point whose P99/P50 of TTFT is `TAIL_RATIO` times the lowest one before
    it, which the guide trusts more than throughput. Without: the point where requests/s over TTFT
    P99 is highest; beyond it latency grows by a larger factor than throughput (Kleinrock's power).

    Source: guide 8.1, 8.2; Kleinrock 1979, "Power and deterministic rules of thumb".
    """
    by_tail = _tail_knee(points)
    return by_tail if by_tail is not None else _power_knee(points)


def _tail_knee(points: Sequence[BenchmarkPoint]) -> Knee | None:
    if any(not p.ttft_p50_s for p in points):
        return None
    tails = [p.ttft_p99_s / (p.ttft_p50_s or 1.0) for p in points]
    lowest = tails[0]
    for (safe, past), tail in zip(pairwise(points), tails[1:], strict=True):
        if tail >= TAIL_RATIO * lowest:
            step = Step(
                title=f"Knee, between {safe.concurrency:g} and {past.concurrency:g} in flight",
                formula="(TTFT P99 / P50) / lowest (TTFT P99 / P50) before it",
                values=f"({figure(past.ttft_p99_s)} / {figure(past.ttft_p50_s or 0.0)}) "
                f"/ {figure(lowest)}",
                result=f"{figure(tail / lowest)} (knee from {figure(TAIL_RATIO)})",
                source="guide 8.1",
            )
            return Knee(safe, past, "P99 of TTFT leaves P50", (step,))
        lowest = min(lowest, tail)
    return None


def _power(point: BenchmarkPoint) -> float:
    return point.requests_per_s / point.ttft_p99_s


def _power_knee(points: Sequence[BenchmarkPoint]) -> Knee:
    best = max(range(len(points)), key=lambda i: _power(points[i]))
    safe, past = points[best], points[best + 1] if best + 1 < len(points) else None
    step = Step(
        title=f"Knee, at {safe.concurrency:g} in flight",
        formula="requests/s / TTFT P99, highest",
        values=f"{figure(safe.requests_per_s)} / {figure(safe.ttft_p99_s)}",
        result=f"{figure(_power(safe))} per s²"
        + ("" if past is None else f" (then {figure(_power(past))})"),
        source="guide 8.1; Kleinrock 1979",
    )
    basis = "latency rises faster than throughput" if past else "not reached"
    return Knee(safe, past, basis, (step,))
