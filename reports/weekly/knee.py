"""The knee of a tier's own latency curve, learned from the windows of the period (guide 8.1, 8.3).
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import TypeVar

from msgspec import Struct

from kneewatch.diagnose.capacity import LearnedKnee, Range
from kneewatch.diagnose.learned.knee import (
    POINTS_KEPT,
    POINTS_MIN,
    CurveLearner,
    LoadPoint,
    step_of,
)
from kneewatch.diagnose.ranking import CAUSES
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.measures import TierPeriod
from kneewatch.reports.weekly.observed import EngineObserved, TierObserved, TierStated
from kneewatch.reports.weekly.report import BenchmarkCheck, Incident, KneeStep, TierKnee
from kneewatch.rules.library import AT_LOAD, BENCHMARK_LOAD
from kneewatch.rules.rule import WINDOW_S

TTFT_OFF, GPU_OFF = 0.3, -0.2
"""Maximum difference between production and benchmark: TTFT 30% higher, GPU activity 20 points
lower (guide 9.1 step 13)."""

TOO_FEW = (
    "too few different loads to learn the curve: it needs at least three concurrencies, the "
    "highest at least 4x the lowest"
)
SHORT_OF_CAPACITY = tuple(record.id for record in CAUSES if record.capacity)
"""Causes whose incidents show that the fleet was too small for its load."""

Item = TypeVar("Item")
NO_BENCHMARK = (
    "no benchmark set (benchmark.requests_per_s with benchmark.ttft_p99_s or benchmark.gpu_ratio)"
)


class Curve(Struct, frozen=True):
    """The learned capacity of one engine. `latency_s` is the mean time of a request at C_max, in
    seconds."""

    learned: LearnedKnee
    latency_s: float
    tokens_per_s: float


def faults(own: Sequence[Incident]) -> list[Incident]:
    """A tier's incidents whose root is no lack of capacity: what an engine serves then says nothing
    about what it can serve."""
    return [
        incident
        for incident in own
        if incident.cause not in SHORT_OF_CAPACITY and incident.severity in ("warning", "critical")
    ]


def curve(tier: TierObserved, until_s: float, faulty: Sequence[Incident] = ()) -> Curve | None:
    """The latency curve of a tier, from the windows of all its engines outside faults. None if too
    few different loads were observed."""
    learner = CurveLearner(window_s=WINDOW_S)
    healthy: list[LoadPoint] = []
    for engine in tier.now.engines:
        names = {engine.target, engine.replica}
        own = [fault for fault in faulty if not names.isdisjoint(fault.replicas)]
        healthy += [
            point
            for point in engine.points
            if not any(each.start_s <= point.t_s < each.until_s + WINDOW_S for each in own)
        ]
    chosen = thinned(healthy)
    for point in chosen:
        learner.take(point)
    learned = learner.knee(until_s, tier.stated.profile.targets)
    if learned is None:
        return None
    best = step_of(learned.c_max.expected)
    near = [point for point in chosen if step_of(point.in_flight) == best]
    return Curve(
        learned,
        latency_s=median(_latency_s(point) for point in near),
        tokens_per_s=median(point.tokens_per_s for point in near),
    )


def thinned(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """At most POINTS_KEPT points per concurrency. They are chosen evenly over time and engines."""
    by_step: dict[int, list[LoadPoint]] = {}
    for point in sorted(points, key=lambda curve_point: curve_point.t_s):
        by_step.setdefault(step_of(point.in_flight), []).append(point)
    return [point for step in by_step.values() for point in evenly(step, POINTS_KEPT)]


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, chosen at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]


def knee(tier: TierObserved, knee_curve: Curve | None, now: TierPeriod) -> TierKnee:
    """The knee section: the knee, the peak compared with it, and the comparison with the
    benchmark."""
    points = [point for engine in tier.now.engines for point in engine.points]
    learned = knee_curve.learned if knee_curve else None
    peak = max(
        (engine for engine in tier.now.engines if engine.peak_in_flight is not None),
        key=_peak,
        default=None,
    )
    c_max = learned.c_max.expected if learned else None
    usable = learned.usable_requests_per_s.expected if learned else None
    little = c_max / knee_curve.latency_s if knee_curve is not None and c_max is not None else None
    return TierKnee(
        tier=tier.id,
        steps=_steps(points),
        c_max=learned.c_max if learned else None,
        usable_requests_per_s=learned.usable_requests_per_s if learned else None,
        reached=learned.reached if learned else False,
        basis=learned.basis if learned else "",
        peak_in_flight=peak.peak_in_flight if peak else None,
        peak_requests_per_s=_served_at(peak, points),
        peak_at_s=peak.peak_at_s if peak else None,
        peak_target=peak.target if peak else "",
        position_ratio=m.over(peak.peak_in_flight if peak else None, c_max),
        little_requests_per_s=little,
        little_gap_ratio=m.over(little, usable),
        benchmark=benchmark_checks(tier.stated, now, points),
        windows=len(points),
        missing="" if learned else TOO_FEW,
    )


def benchmark_checks(
    stated: TierStated, now: TierPeriod, points: Sequence[LoadPoint]
) -> tuple[BenchmarkCheck, ...]:
    """TTFT P99 and GPU activity in production, compared with the benchmark at its load: GPU
    activity only if most windows are at it."""
    benchmark = stated.profile.benchmark
    load_per_s = benchmark.get(BENCHMARK_LOAD) or 0.0
    was: Mapping[str, float | None] = benchmark if load_per_s else {}
    low, high = (load_per_s * share for share in AT_LOAD)
    near = [point for point in points if low <= point.requests_per_s <= high]
    late = _middle_of_present([point.ttft_p99_s for point in near])
    ttft_s, was_s = late.expected if late else None, was.get("benchmark.ttft_p99_s")
    most = 2 * len(near) > len(points)
    busy = m.level(m.GPU_BUSY, serving=True)(now.whole) if most else None
    was_busy = was.get("benchmark.gpu_ratio")
    ttft_off = None if ttft_s is None or was_s is None else ttft_s / was_s - 1
    busy_off = None if busy is None or was_busy is None else busy - was_busy
    off_load = f"few windows are within 20% of {load_per_s:g} requests/s, the benchmark's load"
    return (
        _check("TTFT P99", "s", was_s, ttft_s, ttft_off, TTFT_OFF, off_load),
        _check("GPU activity while serving", "ratio", was_busy, busy, busy_off, GPU_OFF,
               m.GPU_MISSING if most else off_load),
    )  # fmt: skip


def _check(
    name: str,
    unit: str,
    benchmark: float | None,
    production: float | None,
    off: float | None,
    limit: float,
    why: str,
) -> BenchmarkCheck:
    """The comparison of one figure. `why` is the reason if production has no value."""
    state = "unknown"
    if off is not None:
        state = "warning" if (off > limit if limit > 0 else off < limit) else "ok"
    missing = NO_BENCHMARK if benchmark is None else why if production is None else ""
    return BenchmarkCheck(name, unit, benchmark, production, off, limit, state, missing)


def _steps(points: Sequence[LoadPoint]) -> tuple[KneeStep, ...]:
    by_step: dict[int, list[LoadPoint]] = {}
    for point in points:
        by_step.setdefault(step_of(point.in_flight), []).append(point)
    return tuple(
        KneeStep(
            in_flight=median(point.in_flight for point in step),
            windows=len(step),
            requests_per_s=_middle([point.requests_per_s for point in step]),
            tokens_per_s=_middle([point.tokens_per_s for point in step]),
            token_s=_middle([point.token_s for point in step]),
            ttft_p99_s=_middle_of_present([point.ttft_p99_s for point in step]),
            itl_p99_s=_middle_of_present([point.itl_p99_s for point in step]),
        )
        for _, step in sorted(by_step.items())
        if len(step) >= POINTS_MIN
    )


def _middle_of_present(values: Sequence[float | None]) -> Range | None:
    present = [value for value in values if value is not None]
    return _middle(present) if present else None


def _middle(values: Sequence[float]) -> Range:
    """The median of the values, with the lower and upper quartile as range."""
    if len(values) < 2:
        return Range(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Range(low, middle, high)


def _peak(engine: EngineObserved) -> float:
    return engine.peak_in_flight or 0.0


def _served_at(peak: EngineObserved | None, points: Sequence[LoadPoint]) -> float | None:
    """Median requests/s at about the concurrency of the peak. None if unknown."""
    if peak is None or not _peak(peak):
        return None
    step = step_of(_peak(peak))
    near = [point.requests_per_s for point in points if step_of(point.in_flight) == step]
    return median(near) if near else None


def _latency_s(point: LoadPoint) -> float:
    """Mean time of a request in seconds: time per token times tokens per request."""
    return point.token_s * point.tokens_per_s / point.requests_per_s
