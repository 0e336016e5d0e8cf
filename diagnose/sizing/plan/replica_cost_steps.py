"""Steps 11 and 12 of a plan: replicas, GPUs, nodes, cold start and cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from kneewatch.diagnose.sizing.arithmetic import Sheet, Step
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.replica_curve import Sized
from kneewatch.diagnose.sizing.plan.workload_profile import WorkloadProfile
from kneewatch.diagnose.sizing.replica_count import (
    START_HIGH_S,
    STORAGE_PATHS,
    FleetSize,
    cold_start,
    scale_up_ratio,
    warm_minimum,
)
from kneewatch.diagnose.sizing.serving_cost import (
    HOURS_PER_YEAR,
    SECONDS_PER_HOUR,
    TRAP_RATIO,
    token_cost,
    usd_per_million_tokens,
    utilization_trap,
    yearly_cost,
)
from kneewatch.rules.formatting import figure, percent, plural


def fleet_step(
    profile: WorkloadProfile, sized: Sequence[Sized], *, phases: Sequence[str] = ()
) -> PlanStep:
    """Step 11: each fleet, and the totals of all fleets.

    `phases` say what pools for prefill and decode cost beside a fleet of both.
    """
    fleets, several = [tier.fleet for tier in sized], len(sized) > 1
    sized_fleets = [fleet for fleet in fleets if fleet is not None]
    complete = len(sized_fleets) == len(fleets)
    instances = sum(fleet.deployed_instances for fleet in sized_fleets)
    gpus = sum(fleet.gpus for fleet in sized_fleets)
    step = PlanStep(
        number=11,
        title="Size the fleet",
        decision="no fleet: usable requests/s are unknown",
        output={"instances": None, "gpus": None, "safety": profile.safety},
        notes=[*_notes(profile, sized), *phases],
    )
    if any(each.pool.phase for each in sized):
        step.to_measure.append("tokens/s of each phase alone, and the KV transfer between them")
    if complete:
        step.decision = f"{plural(instances, 'replica')}, {plural(gpus, 'GPU')}"
        if any(each.pool.phase for each in sized):
            counts = zip(sized, sized_fleets, strict=True)
            step.decision += " in pools: " + ", ".join(
                f"{each.pool.name} {fleet.deployed_instances:,} x "
                f"{plural(each.parallel.gpus, 'GPU')}"
                for each, fleet in counts
            )
        step.output |= {"instances": instances, "gpus": gpus}
        step.decision += "".join(map(_to_test_first, sized))
    for tier, fleet in zip(sized, fleets, strict=True):
        prefix = f"{tier.pool.name}." if several else ""
        step.add(_fleet(tier, fleet), tier=tier.pool.name, prefix=prefix)
    return step


def _to_test_first(sized: Sized) -> str:
    """What far fewer GPUs are predicted for: weights in 4 bits, separate pools; else empty."""
    precision, batching = sized.decided(5), sized.decided(9)
    of = f" of {sized.pool.name}" if sized.pool.name else ""
    fewer: list[str] = []
    if four_bit := precision.get("four_bit_gpus"):
        fewer.append(
            f"{precision['four_bit_quantization']} weights{of} are predicted to take "
            f"{figure(float(four_bit))} GPUs: test their answers first"
        )
    if batching.get("disaggregate") and not sized.pool.phase:
        fewer.append(
            f"two pools{of} for prefill and decode are predicted to take "
            f"{figure(float(batching['pd_gpus_deployed'] or 0))} GPUs: test them first"
        )
    return f" ({'; '.join(fewer)})" if fewer else ""


def _fleet(sized: Sized, fleet: FleetSize | None) -> Part:
    """The part of the plan on one fleet and on how its replicas start."""
    pool, gpus_each, node = sized.pool, sized.parallel.gpus, sized.pool.profile.hosting.node_gpus
    label = f"{pool.name}: " if pool.name else ""
    part = Part(
        output={
            "usable_requests_per_s": sized.usable_requests_per_s,
            "planned_peak_requests_per_s": pool.peak_requests_per_s,
        }
    )
    if fleet is None:
        part.notes.append(f"{label}no fleet: usable requests/s are unknown")
        return part
    count, nodes = fleet.deployed_instances, fleet.deployed_instances * math.ceil(gpus_each / node)
    if gpus_each <= node:
        nodes = math.ceil(count / (node // gpus_each))
    part.output |= {
        "instances": count,
        "data_parallel": count,
        "gpus": fleet.gpus,
        "nodes": nodes,
        "spare_instances": count - fleet.instances,
    }
    if growth := pool.profile.traffic.growth_ratio:
        today = replace(pool, peak_requests_per_s=pool.peak_requests_per_s / (1 + growth))
        before = today.fleet(sized.usable_requests_per_s, gpus_each)
        part.output["gpus_before_growth"] = None if before is None else before.gpus
    pool.fleet(sized.usable_requests_per_s, gpus_each, part.sheet)
    part.add(_start(sized, fleet))
    if sized.usable_source != "measured":
        part.to_measure.append(
            f"{label}usable RPS of one replica: it is {sized.usable_source}, not measured"
        )
    shared = pool.profile.session or pool.profile.prefix
    if shared is not None and shared.hit_ratio and count > 1:
        part.notes.append(
            f"{label}route by prefix: with round robin over {count} replicas the hit ratio may "
            f"fall to {percent(shared.hit_ratio / count)} if prefixes are rare"
        )
    return part


def _notes(profile: WorkloadProfile, sized: Sequence[Sized]) -> list[str]:
    stated = profile.traffic.predictability
    why = "traffic.predictability is not set" if stated is None else f"the traffic is {stated}"
    if profile.lengths.are_mixed:
        why = "prompt lengths vary: the P95 is far above the median"
    notes = [f"safety factor {profile.safety:g}, because {why}"]
    if any(tier.usable_source == "predicted" for tier in sized):
        notes.append(
            "usable requests/s are predicted, not measured: run a benchmark before you buy"
        )
    if profile.traffic.growth_ratio:
        notes.append(f"the planned peak includes {percent(profile.traffic.growth_ratio)} growth")
    return notes


def _start(sized: Sized, fleet: FleetSize) -> Part:
    """The part of the plan on cold start, warm minimum and scale-up threshold.

    Each is computed only if its inputs are stated.
    """
    part, lead_s = _cold(sized)
    traffic, share = sized.pool.profile.traffic, sized.pool.share_ratio
    usable = sized.usable_requests_per_s
    if usable is not None and traffic.lowest_requests_per_s is not None:
        warm = warm_minimum(
            part.sheet,
            lowest_requests_per_s=traffic.lowest_requests_per_s * share,
            usable_requests_per_s=usable,
        )
        part.output["warm_instances"] = min(warm, fleet.deployed_instances)
    if usable is not None and traffic.rise_per_s_per_s is not None:
        ratio = scale_up_ratio(
            part.sheet,
            cold_start_s=lead_s,
            growth_per_s_per_s=traffic.rise_per_s_per_s * share,
            usable_requests_per_s=usable,
            instances=fleet.deployed_instances,
        )
        part.output |= {"scale_up_lead_s": lead_s, "scale_up_at_ratio": ratio}
    return part


def _cold(sized: Sized) -> tuple[Part, float]:
    """The part of the plan on the cold start, and the seconds to plan with.

    If the cold start is unknown, these are the guide's longest.
    """
    hosting, own = sized.pool.profile.hosting, sized.pool.deployment
    provision_s = hosting.provision_s if own.provision_s is None else own.provision_s
    initialise_s = hosting.initialise_s if own.initialise_s is None else own.initialise_s
    if hosting.storage_path is None:
        lacks = "cold start: it was not computed, because hosting.storage_path is not set"
        return Part(to_measure=[lacks]), START_HIGH_S
    weights_bytes = (sized.replica.memory.weights_bytes or 0.0) * sized.parallel.gpus
    part = Part()
    start_s = cold_start(
        part.sheet,
        weights_bytes=weights_bytes,
        path=hosting.storage_path,
        provision_s=provision_s or 0.0,
        initialise_s=initialise_s or 0.0,
    )
    transfer_s = weights_bytes / STORAGE_PATHS[hosting.storage_path]["low_bytes_per_s"]
    part.output = {"weights_transfer_s": transfer_s, "cold_start_s": start_s}
    if provision_s is not None and initialise_s is not None:
        return part, start_s
    part.to_measure.append(
        "provisioning and initialization time: the cold start excludes what is not set"
    )
    # A cold start of which a part is unknown must not shorten the lead.
    return part, max(start_s, START_HIGH_S)


# --- Step 12: the fleet's cost at its average utilization (guide 9.1, 9.2) ------------------------


def cost_step(
    profile: WorkloadProfile, sized: Sequence[Sized], *, single: float | None = None
) -> PlanStep:
    """Step 12: USD per year, and USD per million output tokens at the average utilization.

    `single`: USD per year of one fleet for all requests, if these are compared with it.
    """
    several = len(sized) > 1
    complete = all(tier.fleet is not None for tier in sized)
    whole = complete and all(tier.utilization_ratio for tier in sized)
    step = PlanStep(
        number=12,
        title="Calculate the cost",
        to_measure=["average utilization over a whole week"],
    )
    for tier in sized:
        name, part = tier.pool.name, _cost(tier)
        if several:
            part.notes = [f"{name}: {note}" for note in part.notes]
        step.add(part, tier=name, prefix=f"{name}." if several else "")
    if several and complete:
        # In a cascade all requests enter the first tier, and each ends in one answer.
        answering = sized[:1] if profile.routing.method == "cascade" else sized
        tokens_per_s = sum(_full_tokens_per_s(t) * (t.utilization_ratio or 0.0) for t in answering)
        usd_per_year = sum(tier.usd_per_year or 0.0 for tier in sized)
        step.output["usd_per_year"] = usd_per_year
        step.output["usd_per_million_output_tokens"] = (
            usd_per_million_tokens(usd_per_year / HOURS_PER_YEAR, tokens_per_s) if whole else None
        )
        step.notes += _blend(sized)
        step.add(_saved_by_tiers(single, usd_per_year))
    if complete and (window_s := profile.traffic.batch_window_s):
        yearly = sum(tier.usd_per_year or 0.0 for tier in sized)
        step.output["usd_per_batch"] = yearly / HOURS_PER_YEAR * window_s / SECONDS_PER_HOUR
    step.decision = _decision(step.output, complete=complete)
    if complete and not whole:
        step.notes.append("cost per token is unknown: set traffic.average_requests_per_s")
    if any(tier.pool.deployment.usd_per_gpu_hour is None for tier in sized):
        step.notes.append("the GPU price is the catalogue's: set usd_per_gpu_hour to what you pay")
    if profile.traffic.growth_ratio:
        step.notes.append(
            "the fleet is sized for the peak after growth; cost per token uses today's average rate"
        )
    return step


def _full_tokens_per_s(sized: Sized) -> float:
    """Output tokens/s of the fleet at full load."""
    return (sized.capacity_per_s or 0.0) * sized.pool.lengths.mean_output_tokens


def _cost(sized: Sized) -> Part:
    """The part of the plan on the cost of one fleet; empty if the fleet is unknown."""
    fleet, price, ratio = sized.fleet, sized.pool.usd_per_gpu_hour, sized.utilization_ratio
    part = Part()
    if fleet is None:
        return part
    _price(part.sheet, sized.pool)
    usd_per_year = yearly_cost(part.sheet, gpus=fleet.gpus, usd_per_gpu_hour=price)
    part.output = {
        "usd_per_year": usd_per_year,
        "utilization_ratio": ratio,
        "usd_per_million_output_tokens": None,
    }
    if ratio:
        _utilization(part.sheet, sized, fleet, ratio)
        if not sized.pool.phase:  # it takes both phases to make an answer
            part.output["usd_per_million_output_tokens"] = token_cost(
                part.sheet,
                gpus=fleet.gpus,
                usd_per_gpu_hour=price,
                tokens_per_s=_full_tokens_per_s(sized),
                utilization_ratio=ratio,
            )
        multiple, saved = utilization_trap(part.sheet, usd_per_year, ratio)
        if ratio < TRAP_RATIO:
            part.notes.append(
                f"utilization trap: at {percent(ratio)} a token costs "
                f"{multiple:.1f}x that of a full fleet; the same work at 70% would "
                f"save {figure(round(saved))} USD a year: scale down "
                "outside the peak, fill idle hours with batch work, or share the GPUs"
            )
    return part


def _price(sheet: Sheet, pool: Pool) -> None:
    """The price of a GPU-hour with power and the rest of the node, where these are stated."""
    hosting, watts = pool.profile.hosting, pool.profile.hosting.watts_per_gpu
    if not (hosting.usd_per_kwh or hosting.usd_per_node_hour):
        return
    power, node = (pool.gpu_kilowatts, hosting.usd_per_kwh), hosting.usd_per_node_hour
    sheet.line(
        "Price of a GPU-hour",
        "{GPU} + {kW} x {USD per kWh} + {USD of the node} / {its GPUs}",
        (pool.gpu_price, *power, node, hosting.node_gpus),
        result="{} USD",
        source="text 003, stage 4" + ("" if watts else "; highest power of the GPU's sheet"),
    )


def _utilization(sheet: Sheet, sized: Sized, fleet: FleetSize, ratio: float) -> None:
    average, usable = sized.pool.average_requests_per_s, sized.usable_requests_per_s
    if sized.pool.profile.traffic.utilization_ratio is not None or average is None:
        sheet.text(Step("Utilization", "as stated", figure(ratio), percent(ratio), "profile"))
        return
    sheet.line(
        "Utilization",
        "min({average RPS} / ({replicas} x {usable RPS}), 1)",
        (average, fleet.deployed_instances, usable or 0.0),
        result="{:%}",
        source="guide 9.2",
    )


def _saved_by_tiers(single: float | None, usd_per_year: float) -> Part:
    """The part of the plan that compares several fleets with a single one; empty without it."""
    part = Part()
    if not single:
        return part
    ratio = part.sheet.line(
        "Saved over one fleet",
        "1 - {yearly cost of these fleets} / {of one fleet}",
        (usd_per_year, single),
        result="{:%}",
        source="guide 1.5",
    )
    part.output = {"single_fleet_usd_per_year": single, "saving_ratio": ratio}
    return part


def _blend(sized: Sequence[Sized]) -> list[str]:
    """A note that a mean utilization over all tiers hides idle tiers; empty for a single tier.

    Guide 9.5.
    """
    used = [
        (tier.pool.name, tier.fleet.gpus, tier.utilization_ratio)
        for tier in sized
        if tier.fleet is not None and tier.utilization_ratio
    ]
    if len(used) < 2:
        return []
    blend = math.fsum(gpus * ratio for _, gpus, ratio in used) / sum(gpus for _, gpus, _ in used)
    trapped = [name for name, _, ratio in used if ratio < TRAP_RATIO]
    below = f"; below 40%: {', '.join(trapped)}" if trapped else ""
    return [
        f"mean utilization of all tiers is {percent(blend)}; monitor each tier separately{below}"
    ]


def _decision(output: dict[str, Value], *, complete: bool) -> str:
    if not complete:
        return "no cost: the fleet size is unknown"
    year, per_token = output["usd_per_year"], output.get("usd_per_million_output_tokens")
    yearly = f"{figure(float(year or 0.0))} USD a year"
    if batch := output.get("usd_per_batch"):
        yearly = f"{figure(float(batch))} USD a batch ({yearly} where its GPUs are kept)"
    if per_token is None:
        return f"{yearly}, cost per token unknown"
    return f"{yearly}, {figure(float(per_token))} USD per million output tokens"
