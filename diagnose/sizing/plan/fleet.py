"""Step 11 of a plan: instances, GPUs and nodes, and how they start. Pure. Guide 8.3, 9.2, 9.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.sizing.fleet.cold_start import (
    START_HIGH_S,
    autoscaling_lead,
    cold_start,
    storage_path,
    warm_minimum,
)
from kneewatch.diagnose.sizing.fleet.fleet import FleetSize, size_fleet
from kneewatch.diagnose.sizing.memory.prefix import unrouted_hit_ratio
from kneewatch.diagnose.sizing.plan.model import PlanStep, Sized, Value, counted, of_tier
from kneewatch.diagnose.sizing.plan.profile import WorkloadProfile
from kneewatch.diagnose.sizing.plan.profile_keys import SAFETY_BY_PREDICTABILITY
from kneewatch.diagnose.sizing.steps import Step


def safety_factor(profile: WorkloadProfile) -> float:
    """1.2 to 1.5 by how predictable the traffic is; unstated is uncertain (guide 8.3)."""
    return SAFETY_BY_PREDICTABILITY[profile.traffic.predictability or "uncertain"]


def fleet_of(sized: Sized) -> FleetSize | None:
    """The fleet for the planned peak; None where usable RPS is not known."""
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
    """What is known of one fleet, or of how its instances start."""

    output: dict[str, Value]
    steps: tuple[Step, ...] = ()
    to_measure: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fleet_step(profile: WorkloadProfile, sized: Sequence[Sized]) -> PlanStep:
    """Step 11: every fleet, and all of them together."""
    fleets, several = [fleet_of(one) for one in sized], len(sized) > 1
    known = [fleet for fleet in fleets if fleet is not None]
    complete = len(known) == len(fleets)
    instances, gpus = sum(f.deployed_instances for f in known), sum(f.gpus for f in known)
    output: dict[str, Value] = {
        "instances": instances if complete else None,
        "gpus": gpus if complete else None,
        "safety": safety_factor(profile),
    }
    parts = [_fleet(one, fleet) for one, fleet in zip(sized, fleets, strict=True)]
    for one, part in zip(sized, parts, strict=True):
        prefix = f"{one.pool.name}." if several else ""
        output |= {f"{prefix}{key}": value for key, value in part.output.items()}
    steps = [
        s for one, p in zip(sized, parts, strict=True) for s in of_tier(one.pool.name, p.steps)
    ]
    if several and complete:
        steps.append(_sum_step(sized, known))
    decision = f"{counted(instances, 'instance')}, {counted(gpus, 'GPU')}"
    return PlanStep(
        number=11,
        title="Size the fleet",
        decision=decision if complete else "no fleet: usable RPS is not known",
        output=output,
        steps=tuple(steps),
        to_measure=tuple(dict.fromkeys(wanted for part in parts for wanted in part.to_measure)),
        notes=(*_notes(profile, sized), *(note for part in parts for note in part.notes)),
    )


def _fleet(sized: Sized, fleet: FleetSize | None) -> _Part:
    """One fleet, and how its instances start."""
    pool, each, node = sized.pool, sized.gpus_each, sized.pool.profile.hosting.node_gpus
    label = f"{pool.name}: " if pool.name else ""
    output: dict[str, Value] = {
        "usable_requests_per_s": sized.usable_requests_per_s,
        "planned_peak_requests_per_s": pool.peak_requests_per_s,
    }
    if fleet is None:
        return _Part(output, notes=(f"{label}usable RPS is not known: no fleet",))
    count, nodes = fleet.deployed_instances, fleet.deployed_instances * math.ceil(each / node)
    if each <= node:
        nodes = math.ceil(count / (node // each))
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
        values=" + ".join(f"{fleet.gpus} ({one.pool.name})" for one, fleet in pairs),
        result=f"{sum(fleet.gpus for fleet in fleets)}",
        source="guide 9.5",
    )


def _notes(profile: WorkloadProfile, sized: Sequence[Sized]) -> list[str]:
    stated = profile.traffic.predictability
    notes = [f"safety {safety_factor(profile):g}: traffic is {stated}"]
    if stated is None:
        notes = ["safety 1.5: how predictable the traffic is was not stated"]
    if any(one.usable_source == "predicted" for one in sized):
        notes.append("usable RPS is predicted, not measured: don't buy on it")
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
        f"ratio of {diluted:.0%} where prefixes are rare (guide 7.3)"
    ]


def _start(sized: Sized, fleet: FleetSize) -> _Part:
    """Cold start, the warm minimum and when to scale up, each where its inputs are stated."""
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
    """The cold start, and the seconds to plan with: the guide's longest where it is not known."""
    hosting = sized.pool.profile.hosting
    if hosting.storage_path is None:
        return _Part({}, to_measure=("cold start: no storage path is stated",)), START_HIGH_S
    start = cold_start(
        weights_bytes=(sized.memory.weights_bytes or 0.0) * sized.gpus_each,
        path=storage_path(hosting.storage_path),
        provision_s=hosting.provision_s or 0.0,
        initialise_s=hosting.initialise_s or 0.0,
    )
    whole = hosting.provision_s is not None and hosting.initialise_s is not None
    lacks = ("provisioning and initialisation: the cold start lacks what is not stated",)
    output: dict[str, Value] = {
        "weights_transfer_s": start.transfer_high_s,
        "cold_start_s": start.total_high_s,
    }
    # A start that lacks a part must not shorten the lead.
    lead_s = start.total_high_s if whole else max(start.total_high_s, START_HIGH_S)
    return _Part(output, start.steps, () if whole else lacks), lead_s
