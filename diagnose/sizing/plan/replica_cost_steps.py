"""Steps 11 and 12 of a plan: instances, GPUs, nodes, cold start and cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.memory.kv_reuse import unrouted_hit_ratio
from kneewatch.diagnose.sizing.plan.plan_result import PlanStep, Sized, Value, counted, of_tier
from kneewatch.diagnose.sizing.plan.workload_profile import (
    SAFETY_BY_PREDICTABILITY,
    WorkloadProfile,
)
from kneewatch.diagnose.sizing.replicas.cold_start import (
    START_HIGH_S,
    autoscaling_lead,
    cold_start,
    storage_path,
    warm_minimum,
)
from kneewatch.diagnose.sizing.replicas.replica_count import FleetSize, size_fleet
from kneewatch.diagnose.sizing.replicas.serving_cost import (
    SECONDS_PER_HOUR,
    token_cost,
    utilization_trap,
    yearly_cost,
)
from kneewatch.diagnose.sizing.replicas.tiers import blended_utilization, saving_ratio


def safety_factor(profile: WorkloadProfile) -> float:
    """1.2 to 1.5 by the traffic's predictability; unstated counts as uncertain (guide 8.3)."""
    return SAFETY_BY_PREDICTABILITY[profile.traffic.predictability or "uncertain"]


def fleet_of(sized: Sized) -> FleetSize | None:
    """The fleet for the planned peak; None if usable RPS is unknown."""
    if sized.usable_requests_per_s is None or not sized.pool.peak_requests_per_s:
        return None
    parallel = sized.setup.parallel
    return size_fleet(
        peak_requests_per_s=sized.pool.peak_requests_per_s,
        usable_requests_per_s=sized.usable_requests_per_s,
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        safety=safety_factor(sized.pool.profile),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The results for one fleet, or for the start of its instances."""

    output: dict[str, Value]
    steps: tuple[Step, ...] = ()
    to_measure: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fleet_step(profile: WorkloadProfile, sized: Sequence[Sized]) -> PlanStep:
    """Step 11: each fleet, and their totals."""
    fleets, several = [fleet_of(tier) for tier in sized], len(sized) > 1
    sized_fleets = [fleet for fleet in fleets if fleet is not None]
    complete = len(sized_fleets) == len(fleets)
    instances, gpus = (
        sum(f.deployed_instances for f in sized_fleets),
        sum(f.gpus for f in sized_fleets),
    )
    output: dict[str, Value] = {
        "instances": instances if complete else None,
        "gpus": gpus if complete else None,
        "safety": safety_factor(profile),
    }
    parts = [_fleet(tier, fleet) for tier, fleet in zip(sized, fleets, strict=True)]
    for tier, part in zip(sized, parts, strict=True):
        prefix = f"{tier.pool.name}." if several else ""
        output |= {f"{prefix}{key}": value for key, value in part.output.items()}
    steps = [
        s for tier, p in zip(sized, parts, strict=True) for s in of_tier(tier.pool.name, p.steps)
    ]
    if several and complete:
        steps.append(_sum_step(sized, sized_fleets))
    decision = f"{counted(instances, 'instance')}, {counted(gpus, 'GPU')}"
    return PlanStep(
        number=11,
        title="Size the fleet",
        decision=decision if complete else "no fleet: usable requests/s are unknown",
        output=output,
        steps=tuple(steps),
        to_measure=tuple(dict.fromkeys(text for part in parts for text in part.to_measure)),
        notes=(*_notes(profile, sized), *(note for part in parts for note in part.notes)),
    )


def _fleet(sized: Sized, fleet: FleetSize | None) -> _Part:
    """One fleet, and the start of its instances."""
    pool, gpus_each, node = sized.pool, sized.gpus_each, sized.pool.profile.hosting.node_gpus
    label = f"{pool.name}: " if pool.name else ""
    output: dict[str, Value] = {
        "usable_requests_per_s": sized.usable_requests_per_s,
        "planned_peak_requests_per_s": pool.peak_requests_per_s,
    }
    if fleet is None:
        return _Part(output, notes=(f"{label}usable requests/s are unknown: no fleet",))
    count, nodes = fleet.deployed_instances, fleet.deployed_instances * math.ceil(gpus_each / node)
    if gpus_each <= node:
        nodes = math.ceil(count / (node // gpus_each))
    output |= {
        "instances": count,
        "data_parallel": count,
        "gpus": fleet.gpus,
        "nodes": nodes,
        "spare_instances": fleet.spare_instances,
    }
    if pool.profile.traffic.growth_ratio:
        output["gpus_before_growth"] = _gpus_before_growth(sized)
    start = _start(sized, fleet)
    to_measure = list(start.to_measure)
    if sized.usable_source != "measured":
        to_measure.append(f"{label}usable RPS: {sized.usable_source}")
    return _Part(
        output={**output, **start.output},
        steps=(*fleet.steps, *start.steps),
        to_measure=tuple(to_measure),
        notes=tuple(f"{label}{note}" for note in _hit_note(sized, fleet)),
    )


def _gpus_before_growth(sized: Sized) -> int | None:
    grown = 1 + sized.pool.profile.traffic.growth_ratio
    pool = replace(sized.pool, peak_requests_per_s=sized.pool.peak_requests_per_s / grown)
    today = fleet_of(replace(sized, pool=pool))
    return None if today is None else today.gpus


def _sum_step(sized: Sequence[Sized], fleets: Sequence[FleetSize]) -> Step:
    pairs = zip(sized, fleets, strict=True)
    return Step(
        title="GPUs of all tiers",
        formula="sum of each tier's GPUs",
        values=" + ".join(f"{fleet.gpus} ({tier.pool.name})" for tier, fleet in pairs),
        result=f"{sum(fleet.gpus for fleet in fleets)}",
        source="guide 9.5",
    )


def _notes(profile: WorkloadProfile, sized: Sequence[Sized]) -> list[str]:
    stated = profile.traffic.predictability
    notes = [f"safety {safety_factor(profile):g}: traffic is {stated}"]
    if stated is None:
        notes = ["safety 1.5: the predictability of the traffic is not set"]
    if any(tier.usable_source == "predicted" for tier in sized):
        notes.append(
            "usable requests/s are predicted, not measured: run a benchmark before you buy"
        )
    if profile.traffic.growth_ratio:
        notes.append(f"the peak includes a growth of {profile.traffic.growth_ratio:.0%}")
    return notes


def _hit_note(sized: Sized, fleet: FleetSize) -> list[str]:
    if not sized.hit_ratio or fleet.deployed_instances < 2:
        return []
    diluted = unrouted_hit_ratio(
        routed_hit_ratio=sized.hit_ratio, replicas=fleet.deployed_instances
    )
    return [
        f"route by prefix: round robin over {fleet.deployed_instances} instances may leave a hit "
        f"ratio of {diluted:.0%} where prefixes are rare"
    ]


def _start(sized: Sized, fleet: FleetSize) -> _Part:
    """Cold start, warm minimum and scale-up threshold, each if its inputs are stated."""
    cold, lead_s = _cold(sized)
    traffic, share = sized.pool.profile.traffic, sized.pool.share_ratio
    usable = sized.usable_requests_per_s
    output, steps = dict(cold.output), list(cold.steps)
    if usable is not None and traffic.lowest_requests_per_s is not None:
        warm = warm_minimum(
            lowest_requests_per_s=traffic.lowest_requests_per_s * share,
            usable_requests_per_s=usable,
        )
        output["warm_instances"] = min(warm.instances, fleet.deployed_instances)
        steps.extend(warm.steps)
    if usable is not None and traffic.rise_per_s_per_s is not None:
        lead = autoscaling_lead(
            cold_start_s=lead_s,
            growth_per_s_per_s=traffic.rise_per_s_per_s * share,
            usable_requests_per_s=usable,
            instances=fleet.deployed_instances,
        )
        output |= {"scale_up_lead_s": lead.lead_s, "scale_up_at_ratio": lead.order_at_ratio}
        steps.extend(lead.steps)
    return _Part(output, tuple(steps), cold.to_measure)


def _cold(sized: Sized) -> tuple[_Part, float]:
    """The cold start, and the seconds to plan with: the guide's longest if unknown."""
    hosting = sized.pool.profile.hosting
    if hosting.storage_path is None:
        return _Part(
            {}, to_measure=("cold start was not computed: no storage path is stated",)
        ), START_HIGH_S
    start = cold_start(
        weights_bytes=(sized.memory.weights_bytes or 0.0) * sized.gpus_each,
        path=storage_path(hosting.storage_path),
        provision_s=hosting.provision_s or 0.0,
        initialise_s=hosting.initialise_s or 0.0,
    )
    whole = hosting.provision_s is not None and hosting.initialise_s is not None
    lacks = ("provisioning and initialisation time: the cold start excludes what is not set",)
    output: dict[str, Value] = {
        "weights_transfer_s": start.transfer_high_s,
        "cold_start_s": start.total_high_s,
    }
    # A start that lacks a part must not shorten the lead.
    lead_s = start.total_high_s if whole else max(start.total_high_s, START_HIGH_S)
    return _Part(output, start.steps, () if whole else lacks), lead_s


# --- Step 12 of a plan: what the fleet costs at its average utilization. Pure. Guide 9.1, 9.2 -----


def utilization_of(sized: Sized, fleet: FleetSize) -> float | None:
    """Average load over the deployed fleet's capacity at the targets; a stated value wins."""
    stated = sized.pool.profile.traffic.utilization_ratio
    if stated is not None:
        return stated
    average, usable = sized.pool.average_requests_per_s, sized.usable_requests_per_s
    if average is None or usable is None:
        return None
    return min(average / (fleet.deployed_instances * usable), 1.0)


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of one fleet; `utilization_ratio` is None if no average is known."""

    gpus: int
    usd_per_hour: float
    usd_per_year: float
    utilization_ratio: float | None
    tokens_per_s: float
    usd_per_million_tokens: float | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def cost_step(
    profile: WorkloadProfile, sized: Sequence[Sized], *, single: Sized | None = None
) -> PlanStep:
    """Step 12: USD per year, and per million output tokens at the average utilization.

    `single` is the fleet of one model that tiers are compared with, or None.
    """
    several, output, notes = len(sized) > 1, dict[str, Value](), list[str]()
    costs = [(tier, _cost(tier)) for tier in sized]
    known_costs = [(tier, cost) for tier, cost in costs if cost is not None]
    complete = len(known_costs) == len(sized)
    priced = [(tier, cost) for tier, cost in known_costs if cost.usd_per_million_tokens is not None]
    for tier, cost in known_costs:
        prefix = f"{tier.pool.name}." if several else ""
        output[f"{prefix}usd_per_year"] = cost.usd_per_year
        output[f"{prefix}utilization_ratio"] = cost.utilization_ratio
        output[f"{prefix}usd_per_million_output_tokens"] = cost.usd_per_million_tokens
    steps = [step for tier, cost in known_costs for step in of_tier(tier.pool.name, cost.steps)]
    for tier, cost in known_costs:
        label = f"{tier.pool.name}: " if several else ""
        notes += [f"{label}{note}" for note in cost.notes]
    if several and complete:
        hourly = sum(cost.usd_per_hour for _, cost in known_costs)
        tokens = _useful_tokens_per_s(profile, known_costs) * SECONDS_PER_HOUR
        yearly = sum(cost.usd_per_year for _, cost in known_costs)
        output["usd_per_year"] = yearly
        whole = len(priced) == len(sized)
        output["usd_per_million_output_tokens"] = hourly / tokens * 1e6 if whole else None
        notes.extend(_blend(priced))
        against = _against(single, yearly)
        output |= against.output
        steps.extend(against.steps)
    return PlanStep(
        number=12,
        title="Calculate the cost",
        decision=_decision(output, complete=complete),
        output=output,
        steps=tuple(steps),
        to_measure=("average utilization over a whole week",),
        notes=(*notes, *_unknown(profile, sized, complete=complete, priced=len(priced))),
    )


def _useful_tokens_per_s(profile: WorkloadProfile, costs: Sequence[tuple[Sized, _Cost]]) -> float:
    """Output tokens/s of answers that users get: of a cascade every request ends in one answer, and
    all of them enter the first tier (guide 1.5)."""
    cascaded = profile.routing.method == "cascade"
    return sum(cost.tokens_per_s for _, cost in (costs[:1] if cascaded else costs))


def _cost(sized: Sized) -> _Cost | None:
    """The cost of one fleet; None if the fleet is unknown."""
    fleet, price = fleet_of(sized), sized.pool.usd_per_gpu_hour
    if fleet is None or sized.usable_requests_per_s is None:
        return None
    year = yearly_cost(gpus=fleet.gpus, usd_per_gpu_hour=price)
    hourly, ratio = fleet.gpus * price, utilization_of(sized, fleet)
    if not ratio:
        return _Cost(fleet.gpus, hourly, year.usd_per_year, ratio, 0.0, None, year.steps)
    outputs = sized.pool.lengths.mean_output_tokens
    full = fleet.deployed_instances * sized.usable_requests_per_s * outputs
    cost = token_cost(
        gpus=fleet.gpus, usd_per_gpu_hour=price, tokens_per_s=full, utilization_ratio=ratio
    )
    trap = utilization_trap(gpus=fleet.gpus, usd_per_gpu_hour=price, utilization_ratio=ratio)
    notes: tuple[str, ...] = ()
    if trap.trapped:
        notes = (
            f"utilization trap: at {ratio:.0%} a token costs {trap.multiple_of_full:.1f} times "
            "that of a full fleet; the same work at 70% saves "
            f"{figure(round(trap.recoverable_usd_per_year))} USD a year: scale down outside the "
            "peak, fill idle hours with batch work, or share the GPUs",
        )
    return _Cost(
        fleet.gpus,
        hourly,
        year.usd_per_year,
        ratio,
        full * ratio,
        cost.usd_per_million_tokens,
        (*year.steps, _utilization_step(sized, fleet, ratio), *cost.steps, *trap.steps),
        notes,
    )


def _utilization_step(sized: Sized, fleet: FleetSize, ratio: float) -> Step:
    average, usable = sized.pool.average_requests_per_s, sized.usable_requests_per_s
    if sized.pool.profile.traffic.utilization_ratio is not None or average is None:
        return Step("Utilization", "as stated", figure(ratio), f"{ratio:.1%}", "profile")
    return Step(
        title="Utilization",
        formula="average RPS / (instances x usable RPS)",
        values=f"{figure(average)} / ({fleet.deployed_instances} x {figure(usable or 0.0)})",
        result=f"{ratio:.1%}",
        source="guide 9.2",
    )


@dataclass(frozen=True, slots=True)
class _Against:
    """Tiers compared with a single fleet of the large model."""

    output: dict[str, Value]
    steps: tuple[Step, ...]


def _against(single: Sized | None, tiers_usd_per_year: float) -> _Against:
    whole = None if single is None else _cost(single)
    if whole is None or not whole.usd_per_year:
        return _Against({}, ())
    ratio = saving_ratio(blended_usd=tiers_usd_per_year, uniform_usd=whole.usd_per_year)
    step = Step(
        title="Saved by tiers",
        formula="1 - tiers / one fleet of the large model, a year",
        values=f"1 - {figure(tiers_usd_per_year)} / {figure(whole.usd_per_year)}",
        result=f"{ratio:.1%}",
        source="guide 1.5",
    )
    return _Against(
        {"single_fleet_usd_per_year": whole.usd_per_year, "saving_ratio": ratio}, (step,)
    )


def _blend(priced: Sequence[tuple[Sized, _Cost]]) -> list[str]:
    if len(priced) < 2:
        return []
    blend = blended_utilization(
        [(tier.pool.name, cost.gpus, cost.utilization_ratio or 0.0) for tier, cost in priced]
    )
    below = f": below 40 % {', '.join(blend.trapped)}" if blend.trapped else ""
    return [
        f"all GPUs together are at {blend.utilization_ratio:.0%}; monitor each tier "
        f"separately{below}"
    ]


def _decision(output: dict[str, Value], *, complete: bool) -> str:
    if not complete:
        return "no cost: the fleet size is unknown"
    year, per_token = output["usd_per_year"], output.get("usd_per_million_output_tokens")
    yearly = f"{figure(float(year or 0.0))} USD a year"
    if per_token is None:
        return f"{yearly}; cost per token unknown"
    return f"{yearly}, {figure(float(per_token))} USD per million output tokens"


def _unknown(
    profile: WorkloadProfile, sized: Sequence[Sized], *, complete: bool, priced: int
) -> list[str]:
    notes: list[str] = []
    if complete and priced < len(sized):
        notes.append("cost per token is unknown: set the average rate")
    if any(tier.pool.deployment.usd_per_gpu_hour is None for tier in sized):
        notes.append("the price is the catalogue default: replace it with what you pay")
    if profile.traffic.growth_ratio:
        notes.append(
            "the fleet is sized for the peak after growth; cost per token uses today's average rate"
        )
    return notes
