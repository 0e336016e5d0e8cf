"""Steps 7 and 10 of a plan: what one instance carries, measured or predicted. Pure. Guide 8.3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kneewatch.diagnose.sizing.benchmark.operating_point import operating_point
from kneewatch.diagnose.sizing.benchmark.points import Benchmark, BenchmarkPoint
from kneewatch.diagnose.sizing.benchmark.reading import read_benchmark
from kneewatch.diagnose.sizing.benchmark.trust import littles_gap
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.plan.model import PlanStep, Point, Pool, Value
from kneewatch.diagnose.sizing.plan.speed import (
    Serving,
    at,
    best_point,
    has_target,
    keeps,
    missed,
    point,
    sweep,
)
from kneewatch.diagnose.sizing.steps import Step, figure

_STALL_RATIO = 1.5
_SOURCE = "roofline; guide 3, 8.2"
_SWEEP = (
    "a sweep over concurrency with production's own lengths (P50, P95 and P99), 500 requests or "
)
_MORE = "more a point: TTFT and ITL P50 and P99, requests/s, tokens/s, GPU utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one instance carries at the targets. `source` is measured, predicted or unknown."""

    best: Point | None
    source: str
    steps: tuple[Step, ...]
    to_measure: tuple[str, ...]
    notes: tuple[str, ...]


def measured_curve(pool: Pool, name: str, benchmarks: Mapping[str, str]) -> Curve:
    """The operating point of a benchmark that the profile names.

    Raises:
        SizingError: its text was not given, or cannot be read.
    """
    if name not in benchmarks:
        raise SizingError(f"benchmark {name!r} is named in the profile and missing", name="plan")
    table, slo = read_benchmark(benchmarks[name]), pool.profile.slo
    if not has_target(slo):
        return _untargeted(pool, table)
    found = operating_point(benchmark=table, ttft_p99_s=slo.ttft_p99_s, itl_p99_s=slo.itl_p99_s)
    notes = [*table.notes, *(flag.message for flag in found.flags)]
    if found.c_max is None:
        return Curve(
            best=None, source="measured", steps=found.steps, to_measure=(), notes=tuple(notes)
        )
    gap_steps, gap_note = _little(found.c_max, slo.ttft_p99_s)
    return Curve(
        best=_point(found.c_max),
        source="measured",
        steps=(*found.steps, *gap_steps),
        to_measure=(),
        notes=(*notes, *gap_note),
    )


def _untargeted(pool: Pool, table: Benchmark) -> Curve:
    if pool.profile.traffic.kind != "batch":
        return Curve(
            best=None,
            source="unknown",
            steps=(),
            to_measure=(),
            notes=("no target is stated: the benchmark has no C_max",),
        )
    best = max(table.points, key=lambda one: one.requests_per_s)
    step = Step(
        title="Highest throughput",
        formula="greatest requests/s of the benchmark",
        values=f"at {best.concurrency:g} in flight",
        result=f"{figure(best.requests_per_s)} requests/s",
        source="guide 1.4",
    )
    return Curve(
        best=_point(best), source="measured", steps=(step,), to_measure=(), notes=table.notes
    )


def _point(found: BenchmarkPoint) -> Point:
    return Point(
        concurrency=found.concurrency,
        requests_per_s=found.requests_per_s,
        ttft_p99_s=found.ttft_p99_s,
        itl_p99_s=found.itl_p99_s,
    )


def _little(best: BenchmarkPoint, target_s: float | None) -> tuple[tuple[Step, ...], list[str]]:
    if best.latency_mean_s is not None:
        gap = littles_gap(
            concurrency=best.concurrency,
            requests_per_s=best.requests_per_s,
            latency_s=best.latency_mean_s,
        )
    elif target_s is not None:
        gap = littles_gap(
            concurrency=best.concurrency,
            requests_per_s=best.requests_per_s,
            latency_s=target_s,
            basis="target",
        )
    else:
        return (), ["Little's law was not checked: the benchmark has no mean latency"]
    return gap.steps, [f"Little's law: {gap.meaning}"]


def predicted_curve(instance: Serving) -> Curve:
    """The roofline's curve, with what has to be measured before it is believed."""
    profile, limit = instance.pool.profile, instance.limit
    to_measure = (_SWEEP + _MORE,)
    if limit < 1:
        why = f"the KV cache holds no request of {instance.setup.longest_tokens:,} tokens"
        return Curve(best=None, source="unknown", steps=(), to_measure=to_measure, notes=(why,))
    best = best_point(instance)
    notes = ["predicted by the roofline, bursts left out: measure before buying"]
    if best is None and has_target(profile.slo):
        notes.append("by the roofline one request alone misses a target: no concurrency will do")
    elif best is None:
        notes.append("no target is stated: C_max and usable RPS are unknown")
    elif best.concurrency < limit and has_target(profile.slo):
        beyond = point(instance, best.concurrency + 1)
        notes.append(f"one more in flight: {', '.join(missed(beyond, profile.slo))}")
        if beyond.itl_p99_s > _STALL_RATIO * best.itl_p99_s:
            notes.append(
                "from there on more than 1 % of the steps carry a prompt's chunk: a smaller token "
                "budget, more GPUs an instance or two pools would move C_max"
            )
    elif best.concurrency >= limit:
        notes.append(f"memory binds: {limit} requests of P95 length are held or admitted at once")
    steps = [_sweep_step(instance, count) for count in sweep(limit)]
    if best is not None:
        steps += _best_steps(instance, best)
    return Curve(
        best=best,
        source="unknown" if best is None else "predicted",
        steps=tuple(steps),
        to_measure=to_measure,
        notes=tuple(notes),
    )


def _sweep_step(instance: Serving, count: int) -> Step:
    found = point(instance, count)
    slo = instance.pool.profile.slo
    verdict = ""
    if has_target(slo):
        verdict = ", kept" if keeps(found, slo) else ", missed"
    return Step(
        title=f"{count} in flight",
        formula="by the roofline",
        values=f"TTFT P99 {figure(found.ttft_p99_s)} s, ITL P99 {figure(found.itl_p99_s)} s",
        result=f"{figure(found.requests_per_s)} requests/s{verdict}",
        source=_SOURCE,
    )


def _best_steps(instance: Serving, best: Point) -> list[Step]:
    found, lengths = at(instance, best.concurrency), instance.pool.lengths
    step = found.decode_step
    outputs = lengths.mean_output_tokens
    return [
        Step(
            title=f"A decode step at {best.concurrency:g} in flight ({figure(found.running)} run)",
            formula="max(reading, computing) + all-reduces + kernels + host",
            values=f"max({figure(step.memory_s * 1e3)}, {figure(step.compute_s * 1e3)}) + "
            f"{figure(step.interconnect_s * 1e3)} + {figure(step.kernels_s * 1e3)} + "
            f"{figure(step.host_s * 1e3)} ms",
            result=f"{figure(step.total_s * 1e3)} ms",
            source="guide 3.3, 5.1",
        ),
        Step(
            title="Usable RPS of one instance",
            formula="in flight / (TTFT + (output tokens - 1) x ITL), means",
            values=f"{best.concurrency:g} / ({figure(found.ttft_s)} + ({figure(outputs)} - 1) x "
            f"{figure(found.itl_s)})",
            result=f"{figure(best.requests_per_s)} requests/s",
            source="Little's law; guide 8.3 step 2",
        ),
    ]


def curve_output(curve: Curve) -> dict[str, Value]:
    """C_max and usable RPS by name; None where unknown."""
    best = curve.best
    return {
        "source": curve.source,
        "c_max": None if best is None else best.concurrency,
        "usable_requests_per_s": None if best is None else best.requests_per_s,
        "ttft_p99_s": None if best is None else best.ttft_p99_s,
        "itl_p99_s": None if best is None else best.itl_p99_s,
    }


def curve_step(pool: Pool, curve: Curve, *, number: int) -> PlanStep:
    """Step 7 (baseline) or 10 (final)."""
    best = curve.best
    if best is None:
        decision = "usable RPS of one instance is not known"
    else:
        decision = (
            f"C_max {best.concurrency:g} in flight, {figure(best.requests_per_s)} requests/s of "
            f"one instance ({curve.source})"
        )
    return PlanStep(
        number=number,
        title="Benchmark one instance" if number == 7 else "Benchmark again with everything on",
        decision=decision,
        output=curve_output(curve),
        steps=curve.steps,
        to_measure=curve.to_measure,
        notes=curve.notes,
        tier=pool.name,
    )
