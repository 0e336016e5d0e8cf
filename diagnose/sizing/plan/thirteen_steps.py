"""The guide's thirteen decisions in order, from a workload profile. Pure. Guide 9.1.

Quantization is decided before parallelism, the curve of one instance before and after the KV and
batching strategy, the fleet from the last of them. With tiers, steps 4 to 10 run for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.plan.batching import batching_step
from kneewatch.diagnose.sizing.plan.cost import cost_step
from kneewatch.diagnose.sizing.plan.curve import (
    Curve,
    curve_step,
    measured_curve,
    predicted_curve,
)
from kneewatch.diagnose.sizing.plan.fleet import fleet_of, fleet_step
from kneewatch.diagnose.sizing.plan.kv import kv_step
from kneewatch.diagnose.sizing.plan.memory import (
    chosen_kv_dtype,
    chosen_quantization,
    floor_step,
    memory_floor,
    quantization_step,
)
from kneewatch.diagnose.sizing.plan.model import Plan, PlanStep, Pool, Sized, planned_peak_per_s
from kneewatch.diagnose.sizing.plan.parallel import choose_split, parallel_step
from kneewatch.diagnose.sizing.plan.profile import WorkloadProfile
from kneewatch.diagnose.sizing.plan.routing import (
    advice,
    candidates,
    pool_of,
    routing_step,
    tier_loads,
    uses_tiers,
)
from kneewatch.diagnose.sizing.plan.speed import Serving, point, serving
from kneewatch.diagnose.sizing.plan.validation import validation_step
from kneewatch.diagnose.sizing.plan.workload import hardware_step, workload_step

__all__ = ["Plan", "PlanStep", "plan"]


def plan(
    profile: WorkloadProfile,
    *,
    models: Mapping[str, Model] | None = None,
    gpus: Mapping[str, Gpu] | None = None,
    benchmarks: Mapping[str, str] | None = None,
) -> Plan:
    """Every decision for that workload, with its arithmetic and what is still to be measured.

    `models` and `gpus` are by the names that the profile gives, beside the packaged catalogues;
    `benchmarks` are the texts of `profile.benchmark_files`.

    Raises:
        SizingError: a name that is not known, or a fleet that cannot be.
    Source: guide 9.1.
    """
    known, texts = models or {}, benchmarks or {}
    launch, lengths = profile.deployment, profile.lengths
    whole = pool_of(profile, launch, lengths, name="", share_ratio=1.0, models=known, gpus=gpus)
    by_hardware = bool(profile.tiers) and profile.routing.method == "hardware"
    # What the large model alone would take decides whether tiers are worth it.
    single = None if by_hardware else size_pool(whole, texts)
    fleet = None if single is None else fleet_of(single)
    found = None if fleet is None else advice(profile, fleet.gpus)
    tiered = uses_tiers(profile, found)
    pools = _tiers(profile, known, gpus) if tiered else (whole,)
    sized = (single,) if single and not tiered else tuple(size_pool(p, texts) for p in pools)
    large_gpus = None if fleet is None else fleet.gpus
    return Plan(
        profile=profile,
        tiers=tuple(pool.name for pool in pools) if tiered else (),
        steps=(
            workload_step(profile),
            hardware_step(pools, [candidates(pool.deployment, gpus) for pool in pools]),
            routing_step(profile, large_gpus=large_gpus, found=found),
            *(step for one in sized for step in one.steps),
            fleet_step(profile, sized),
            cost_step(profile, sized, single=single),
            validation_step(sized),
        ),
    )


def _tiers(
    profile: WorkloadProfile, models: Mapping[str, Model], gpus: Mapping[str, Gpu] | None
) -> tuple[Pool, ...]:
    """The tiers' pools; one that gets no request is no fleet."""
    peak = planned_peak_per_s(profile)
    return tuple(
        pool_of(
            profile,
            tier.deployment,
            tier.lengths,
            name=tier.name,
            share_ratio=load.peak_requests_per_s / peak,
            models=models,
            gpus=gpus,
        )
        for tier, load in zip(profile.tiers, tier_loads(profile), strict=True)
        if load.peak_requests_per_s > 0
    )


def size_pool(pool: Pool, benchmarks: Mapping[str, str]) -> Sized:
    """Steps 4 to 10 for one fleet.

    Raises:
        SizingError: nothing fits, or a benchmark is missing or unreadable.
    """
    chosen, kv = chosen_quantization(pool)[0], chosen_kv_dtype(pool)[0]
    before = memory_floor(pool, quantization=pool.model.quantization, kv_cache_dtype="auto")
    after = memory_floor(pool, quantization=chosen, kv_cache_dtype=kv)
    split = choose_split(pool, after, quantization=chosen, kv_cache_dtype=kv)
    # The baseline runs with the KV cache that vLLM takes by itself, unless one is stated.
    plain = pool.deployment.kv_cache_dtype or "auto"
    baseline = serving(pool, replace(split.setup, kv_cache_dtype=plain))
    first = _curve(pool, baseline, pool.deployment.baseline_benchmark, benchmarks)
    cached_step, cached = kv_step(pool, baseline, kv_cache_dtype=kv)
    batched_step, final = batching_step(pool, cached)
    last = _final(pool, final, first, benchmarks)
    stated = pool.deployment.usable_requests_per_s
    usable = None if last.best is None else last.best.requests_per_s
    return Sized(
        pool=pool,
        setup=final.setup,
        memory=final.memory,
        steps=(
            floor_step(pool, before),
            quantization_step(pool, before, after),
            parallel_step(pool, split, before, after),
            curve_step(pool, first, number=7),
            cached_step,
            batched_step,
            curve_step(pool, last, number=10),
        ),
        usable_requests_per_s=usable if stated is None else stated,
        usable_source=last.source if stated is None else "stated",
        point=last.best,
        quiet_ttft_s=point(final, 1).ttft_p99_s if final.limit else None,
        hit_ratio=pool.profile.prefix.hit_ratio if pool.profile.prefix else None,
    )


def _curve(pool: Pool, instance: Serving, name: str | None, benchmarks: Mapping[str, str]) -> Curve:
    if name is None:
        return predicted_curve(instance)
    return measured_curve(pool, name, benchmarks)


def _final(pool: Pool, instance: Serving, baseline: Curve, benchmarks: Mapping[str, str]) -> Curve:
    """The final benchmark, else the baseline where that was measured, else the prediction.

    A measured baseline is not multiplied by a predicted gain: what steps 8 and 9 bring counts
    once it is measured.
    """
    named = pool.deployment.final_benchmark
    if named is not None or baseline.source != "measured":
        return _curve(pool, instance, named, benchmarks)
    predicted = predicted_curve(instance)
    gain = "unknown" if predicted.best is None else f"{predicted.best.requests_per_s:.3g}"
    return replace(
        baseline,
        to_measure=predicted.to_measure,
        notes=(
            "the baseline's figures: the gain of steps 8 and 9 is not counted until it is measured",
            f"the roofline predicts {gain} requests/s of one instance with them",
        ),
    )
