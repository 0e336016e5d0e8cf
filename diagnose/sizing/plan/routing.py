"""Step 3 of a plan: one fleet, or a tier for each kind of request or hardware. Pure. Guide 1.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.catalogue.gpus import Gpu, gpu
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.fleet.routing import (
    ROUTER_HIGH_S,
    ModelTier,
    RoutingAdvice,
    TierLoad,
    cascaded_loads,
    routed_loads,
    routing_advice,
)
from kneewatch.diagnose.sizing.fleet.workload import archetype
from kneewatch.diagnose.sizing.plan.model import (
    PlanStep,
    Pool,
    Value,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.diagnose.sizing.plan.profile import Deployment, Lengths, WorkloadProfile
from kneewatch.diagnose.sizing.plan.workload import choose_gpu
from kneewatch.diagnose.sizing.steps import Step, figure

_UNBOUND_TTFT_S = 1e9


def candidates(deployment: Deployment, gpus: Mapping[str, Gpu] | None) -> tuple[Gpu, ...]:
    """The GPUs that a deployment could have.

    Raises:
        SizingError: one that is not in the catalogue.
    """
    return tuple(gpu(name, catalogue=gpus) for name in deployment.gpus)


def pool_of(
    profile: WorkloadProfile,
    deployment: Deployment,
    lengths: Lengths,
    *,
    name: str,
    share_ratio: float,
    models: Mapping[str, Model],
    gpus: Mapping[str, Gpu] | None,
) -> Pool:
    """The fleet for a share of the traffic, on the GPU that step 2 takes.

    Raises:
        SizingError: a model or GPU that is not known.
    """
    known = models.get(deployment.model)
    wanted = archetype(profile.traffic.archetype).hardware
    return Pool(
        name=name,
        profile=profile,
        deployment=deployment,
        lengths=call_lengths(lengths, profile.session),
        model=model(deployment.model) if known is None else known,
        gpu=choose_gpu(candidates(deployment, gpus), wanted=wanted),
        share_ratio=share_ratio,
        peak_requests_per_s=planned_peak_per_s(profile) * share_ratio,
    )


def tier_loads(profile: WorkloadProfile) -> tuple[TierLoad, ...]:
    """Peak requests/s of each tier, escalated ones counted again in a cascade.

    Raises:
        SizingError: shares or escalations that cannot be.
    """
    peak = planned_peak_per_s(profile)
    if profile.routing.method == "cascade":
        return cascaded_loads(
            names=[tier.name for tier in profile.tiers],
            escalation_ratios=[tier.escalation_ratio or 0.0 for tier in profile.tiers[:-1]],
            peak_requests_per_s=peak,
        )
    shares = [ModelTier(tier.name, tier.share_ratio or 0.0, 0.0) for tier in profile.tiers]
    return routed_loads(tiers=shares, peak_requests_per_s=peak)


def simple_ratio(profile: WorkloadProfile) -> float | None:
    """Requests that need not the last tier: of the tiers, else as stated; None: not known."""
    if profile.tiers:
        last = tier_loads(profile)[-1].peak_requests_per_s
        return 1 - last / planned_peak_per_s(profile)
    return profile.routing.simple_ratio


def advice(profile: WorkloadProfile, large_gpus: int) -> RoutingAdvice:
    """Whether a small model for simple requests pays, for a large fleet of that many GPUs."""
    routing, target = profile.routing, profile.slo.ttft_p99_s
    router_s = ROUTER_HIGH_S if routing.router_s is None else routing.router_s
    return routing_advice(
        large_model_gpus=large_gpus,
        simple_share_ratio=simple_ratio(profile) or 0.0,
        small_model_acceptable=bool(routing.small_model_acceptable),
        ttft_budget_s=_UNBOUND_TTFT_S if target is None else target,
        router_s=router_s,
    )


def routing_step(
    profile: WorkloadProfile, *, large_gpus: int | None, found: RoutingAdvice | None
) -> PlanStep:
    """Step 3: tiers or one fleet. `found` is None where hardware tiers need no advice, or where
    the single fleet's size is not known."""
    method, tiers = profile.routing.method, profile.tiers
    taken = uses_tiers(profile, found)
    output: dict[str, Value] = {
        "tiers": len(tiers) if taken else 1,
        "method": method if taken else "single fleet",
        "large_model_gpus": large_gpus,
        "simple_ratio": simple_ratio(profile) if method != "hardware" else None,
    }
    notes = [] if found is None else list(found.reasons)
    if taken:
        for load in tier_loads(profile):
            output[f"{load.name}.peak_requests_per_s"] = load.peak_requests_per_s
    elif found is not None and found.worth_it:
        notes.append("tiers would pay: state each as [[tiers]] to have them sized")
    if found is None and method != "hardware" and not taken:
        notes.append("the large fleet's size is not known: routing was not weighed")
    return PlanStep(
        number=3,
        title="Decide on routing",
        decision=_decision(profile, taken=taken),
        output=output,
        steps=_steps(tier_loads(profile), profile) if taken else (),
        to_measure=_to_measure(profile, taken=taken),
        notes=(*notes, *_method_notes(profile, taken=taken)),
    )


def uses_tiers(profile: WorkloadProfile, found: RoutingAdvice | None) -> bool:
    """Whether steps 4 to 10 run for each tier: for hardware always, for models where they pay."""
    if not profile.tiers:
        return False
    return profile.routing.method == "hardware" or (found is not None and found.worth_it)


def _decision(profile: WorkloadProfile, *, taken: bool) -> str:
    if not taken:
        return "one fleet for all requests"
    names = ", ".join(tier.name for tier in profile.tiers)
    how = {
        "route": "a router deals requests to",
        "cascade": "requests climb through",
        "hardware": "requests are routed by kind to the hardware tiers",
    }
    return f"{how[profile.routing.method]} {names}; each is a fleet of its own"


def _steps(loads: Sequence[TierLoad], profile: WorkloadProfile) -> tuple[Step, ...]:
    peak = planned_peak_per_s(profile)
    what = "escalated" if profile.routing.method == "cascade" else "share"
    return tuple(
        Step(
            title=f"Peak of {load.name}",
            formula=f"planned peak x {what}",
            values=f"{figure(peak)} x {figure(load.peak_requests_per_s / peak)}",
            result=f"{figure(load.peak_requests_per_s)} requests/s",
            source="guide 1.5, 9.5",
        )
        for load in loads
    )


def _to_measure(profile: WorkloadProfile, *, taken: bool) -> tuple[str, ...]:
    wanted: list[str] = []
    if profile.routing.method == "hardware":
        return ("each tier's own curve and cold start",) if taken else ()
    if simple_ratio(profile) is None:
        wanted.append("the share of requests that a small model could answer")
    elif profile.routing.small_model_acceptable is None:
        wanted.append("the small model's quality on those requests")
    if taken:
        wanted.append("misrouted requests: quality lost, and large-model time wasted")
    return tuple(wanted)


def _method_notes(profile: WorkloadProfile, *, taken: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if not taken:
        return ()
    if profile.routing.method == "cascade" and profile.traffic.kind == "online":
        notes.append(
            "an escalated request first waits for the small model's whole answer: its TTFT is not "
            "that of the large tier"
        )
    if profile.routing.method == "hardware":
        notes.append("never round robin over unequal tiers: the slow one sets the P99 (guide 9.5)")
    if profile.routing.router_s is None and profile.routing.method == "route":
        notes.append("the router's time is not stated: taken as 20 ms")
    return tuple(notes)
