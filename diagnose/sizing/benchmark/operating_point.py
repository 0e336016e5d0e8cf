"""The operating point: how much one instance may carry without breaking its targets. Pure.

Guide 8.3. Only measured points count: between two of them nothing is interpolated, and beyond the
last nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, positive
from kneewatch.diagnose.sizing.arithmetic import Step, figure, seconds
from kneewatch.diagnose.sizing.benchmark.latency_curve import (
    Knee,
    RedFlag,
    knee,
    red_flags,
    worst_per_concurrency,
)
from kneewatch.diagnose.sizing.benchmark.points import Benchmark, BenchmarkPoint

BRACKET_RATIO = 1.25
"""The next measured point may lie this far above C_max before measuring between is worth it."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What one instance carries at the targets.

    `c_max` is the measured point with the highest concurrency that keeps them; None where none
    does. `first_miss` is the next measured point, which breaks them: the true limit lies between.
    None where every point keeps them: then C_max is a lower bound. `missed` says which target
    breaks there. `peak_requests_per_s` is the most the curve reached at any latency.
    """

    c_max: BenchmarkPoint | None
    first_miss: BenchmarkPoint | None
    missed: tuple[str, ...]
    knee: Knee
    peak_requests_per_s: float
    flags: tuple[RedFlag, ...]
    steps: tuple[Step, ...]

    @property
    def usable_requests_per_s(self) -> float | None:
        """Requests per second of one instance at C_max; None where no point keeps the targets."""
        return None if self.c_max is None else self.c_max.requests_per_s

    @property
    def is_lower_bound(self) -> bool:
        """Whether every measured point keeps the targets, so that C_max may be higher."""
        return self.c_max is not None and self.first_miss is None


def operating_point(
    *, benchmark: Benchmark, ttft_p99_s: float | None, itl_p99_s: float | None
) -> OperatingPoint:
    """C_max and usable requests per second at the targets (seconds; None: no target).

    The run of measured points from the first that keeps both targets to the last before one that
    breaks them. A higher point that keeps them again is noise, and flagged.

    Raises:
        SizingError: no target is stated, or one is not positive.
    Source: guide 8.3, steps 1 and 2.
    """
    if ttft_p99_s is None and itl_p99_s is None:
        raise SizingError("C_max needs a TTFT P99 or ITL P99 target", name="ttft_slo")
    for name, target in (("ttft_slo", ttft_p99_s), ("itl_slo", itl_p99_s)):
        if target is not None:
            positive(name, target)
    points = worst_per_concurrency(benchmark.points)
    misses = [missed_targets(p, ttft_p99_s=ttft_p99_s, itl_p99_s=itl_p99_s) for p in points]
    start = next((i for i, missed in enumerate(misses) if not missed), None)
    bend = knee(points)
    peak = max(p.requests_per_s for p in points)
    if start is None:
        flag = RedFlag("none_meet", f"no measured concurrency meets the targets ({misses[0][0]})")
        flags = (flag, *red_flags(benchmark))
        return OperatingPoint(None, points[0], misses[0], bend, peak, flags, bend.steps)
    end = next((i for i in range(start, len(points)) if misses[i]), len(points))
    best, miss = points[end - 1], points[end] if end < len(points) else None
    load_flags = [
        *_point_flags(points, misses, start=start, end=end),
        *_place_flags(points[start:end], bend),
    ]
    return OperatingPoint(
        c_max=best,
        first_miss=miss,
        missed=misses[end] if miss else (),
        knee=bend,
        peak_requests_per_s=peak,
        flags=(*load_flags, *red_flags(benchmark)),
        steps=(*bend.steps, *_steps(best, ttft_p99_s=ttft_p99_s, itl_p99_s=itl_p99_s)),
    )


def missed_targets(
    point: BenchmarkPoint, *, ttft_p99_s: float | None, itl_p99_s: float | None
) -> tuple[str, ...]:
    """The targets that a point breaks, with its numbers; at the target exactly is kept."""
    pairs = (("TTFT", point.ttft_p99_s, ttft_p99_s), ("ITL", point.itl_p99_s, itl_p99_s))
    return tuple(
        f"{name} P99 {seconds(measured)} at {point.concurrency:g} in flight, target "
        f"{seconds(target)}"
        for name, measured, target in pairs
        if target is not None and measured > target
    )


def _steps(
    best: BenchmarkPoint, *, ttft_p99_s: float | None, itl_p99_s: float | None
) -> list[Step]:
    kept = [
        f"{name} {seconds(measured)} <= {seconds(target)}"
        for name, measured, target in (
            ("TTFT", best.ttft_p99_s, ttft_p99_s),
            ("ITL", best.itl_p99_s, itl_p99_s),
        )
        if target is not None
    ]
    return [
        Step(
            title="C_max",
            formula="highest measured concurrency with P99 within the targets",
            values=", ".join(kept),
            result=f"{best.concurrency:g} in flight",
            source="guide 8.3 step 1",
        ),
        Step(
            title="Usable RPS of one instance",
            formula="requests/s measured at C_max",
            values=f"at {best.concurrency:g} in flight",
            result=f"{figure(best.requests_per_s)} requests/s",
            source="guide 8.3 step 2",
        ),
    ]


def _point_flags(
    points: Sequence[BenchmarkPoint],
    misses: Sequence[tuple[str, ...]],
    *,
    start: int,
    end: int,
) -> Iterator[RedFlag]:
    """What the row of hits and misses says: cold start, no miss at all, a wide gap, noise."""
    first, best = points[start], points[end - 1]
    if start > 0:
        yield RedFlag(
            "cold_start",
            f"{misses[0][0]}, while {first.concurrency:g} in flight meets the targets: check "
            "that the "
            "server was warmed up",
        )
    if end == len(points):
        yield RedFlag(
            "all_meet",
            f"all points from {first.concurrency:g} in flight meet the targets: C_max is "
            f"{best.concurrency:g} or more, measure higher concurrencies",
        )
        return
    miss = points[end].concurrency
    if miss > BRACKET_RATIO * best.concurrency:
        yield RedFlag(
            "wide_bracket",
            f"C_max is between {best.concurrency:g} (used here) and {miss:g}: measure in between",
        )
    later = zip(points[end:], misses[end:], strict=True)
    again = [point.concurrency for point, missed in later if not missed]
    if again:
        yield RedFlag(
            "meets_again",
            f"{again[-1]:g} in flight meets the targets although {miss:g} misses them: the "
            "results are noisy; repeat both runs",
        )


def _place_flags(points: Sequence[BenchmarkPoint], bend: Knee) -> Iterator[RedFlag]:
    """Whether C_max, the last of the points, is a good place on the curve."""
    best, top = points[-1], max(points, key=lambda p: p.requests_per_s)
    if bend.past is not None and best.concurrency >= bend.past.concurrency:
        yield RedFlag(
            "past_knee",
            f"C_max ({best.concurrency:g} in flight) is past the knee (after "
            f"{bend.safe.concurrency:g}), where a little more load costs much latency",
        )
    if top.requests_per_s > best.requests_per_s:
        yield RedFlag(
            "more_at_less",
            f"{top.concurrency:g} in flight served {figure(top.requests_per_s)} requests/s, "
            "more than "
            f"C_max ({figure(best.requests_per_s)}): limit concurrency to {top.concurrency:g}",
        )
