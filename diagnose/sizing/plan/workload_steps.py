"""Steps 1 to 3 of a plan: workload, GPU, and whether to route to one pool or to tiers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import Gpu, gpu
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step
from kneewatch.diagnose.sizing.plan.plan_result import (
    PlanStep,
    Pool,
    Value,
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.diagnose.sizing.plan.workload_profile import (
    ARCHETYPES,
    LOG_NORMAL_MEAN,
    TARGETS,
    Z95,
    DeploymentTable,
    TokenLengths,
    WorkloadProfile,
)
from kneewatch.rules.formatting import figure, percent

WORTH_FROM_GPUS = 8
"""Routing is worth its complexity if the large model alone needs more GPUs than this (guide
1.5)."""
TTFT_BUDGET_RATIO = 0.10
"""Share of the TTFT target that a router may use (guide 1.5)."""
ROUTER_HIGH_S = 0.020
"""Highest latency, in seconds, that a router adds per request (guide 1.5: 5-20 ms)."""

FAT_TAIL_RATIO = 3
"""A P99 length above this multiple of the P95 is a tail of its own (guide 1.1)."""

_NO_SLO = "no TTFT or ITL target is set: C_max and the fleet cannot be computed"


def workload_step(profile: WorkloadProfile) -> PlanStep:
    """Step 1: lengths, rates and targets, which all later steps use."""
    traffic, slo = profile.traffic, profile.slo
    lengths = call_lengths(profile.lengths, profile.session)
    kind, target = ARCHETYPES[traffic.archetype], TARGETS[traffic.kind]
    average, peak = average_requests_per_s(profile), planned_peak_per_s(profile)
    notes = [f"{traffic.archetype}: the bottleneck is {kind['bottleneck']}"]
    if traffic.kind == "online":
        notes[0] += f"; watch {kind['slo']}"
    if not slo.are_set and traffic.kind == "online":
        notes.append(_NO_SLO)
    elif traffic.kind == "online":
        for name, value in (("TTFT", slo.ttft_p99_s), ("ITL", slo.itl_p99_s)):
            if value is None and slo.e2e_p99_s is None:
                notes.append(f"no {name} target is set, so {name} does not limit C_max")
    for side in ("input", "output"):
        p95, p99 = (getattr(profile.lengths, f"{side}_{level}_tokens") for level in ("p95", "p99"))
        if p99 > FAT_TAIL_RATIO * p95:
            notes.append(
                f"the {side} P99 is {figure(p99 / p95)}x the P95: one request in a hundred holds "
                "far more KV cache than memory is planned for; limit it (step 13), or give long "
                "requests a pool of their own"
            )
    if average is None:
        notes.append("no average rate is set: cost per token needs it, or a utilization")
    output: dict[str, Value] = {
        "archetype": traffic.archetype,
        "kind": traffic.kind,
        "input_mean_tokens": lengths.mean_input_tokens,
        "output_mean_tokens": lengths.mean_output_tokens,
        "input_p95_tokens": lengths.input_p95_tokens,
        "output_p95_tokens": lengths.output_p95_tokens,
        "average_requests_per_s": average,
        "planned_peak_requests_per_s": peak,
        "ttft_p99_slo_s": slo.ttft_p99_s,
        "itl_p99_slo_s": slo.itl_p99_s,
        **({} if slo.e2e_p99_s is None else {"e2e_p99_slo_s": slo.e2e_p99_s}),
    }
    step = PlanStep(
        number=1,
        title="Characterize the workload",
        decision=f"optimize {target['optimize']}; run at {target['operating_point']}",
        output=output,
        to_measure=_unmeasured(profile),
        notes=notes,
    )
    _rates(step.sheet, profile)
    _means(step.sheet, profile.lengths)
    _session(step.sheet, profile)
    return step


def _rates(sheet: Sheet, profile: WorkloadProfile) -> None:
    traffic = profile.traffic
    average, planned = average_requests_per_s(profile), planned_peak_per_s(profile)
    peak = planned / (1 + traffic.growth_ratio)
    if traffic.batch_requests is not None and traffic.batch_window_s is not None:
        batch = (traffic.batch_requests, traffic.batch_window_s)
        formula, result = "{requests} / {window: s}", "{} requests/s"
        sheet.line("Rate of the batch", formula, batch, result=result, source="guide 1.4")
    elif average is not None:
        formula = "{peak RPS} / {average RPS}"
        sheet.line("Peak over average rate", formula, (peak, average), source="guide 1.3")
    if traffic.growth_ratio:
        sheet.line(
            "Planned peak",
            "{peak RPS} x (1 + {growth})",
            (peak, traffic.growth_ratio),
            result="{} requests/s",
            source="guide 1.3",
        )


def _means(sheet: Sheet, lengths: TokenLengths) -> None:
    for side in ("input", "output"):
        if getattr(lengths, f"{side}_mean_tokens") is None:
            p50, p95 = (getattr(lengths, f"{side}_{level}_tokens") for level in ("p50", "p95"))
            sheet.line(
                f"Mean {side}, estimated",
                LOG_NORMAL_MEAN,
                (p50, p95, Z95),
                result="{} tokens",
                source="mean of a log-normal distribution with this P50 and P95",
            )


def _session(sheet: Sheet, profile: WorkloadProfile) -> None:
    """What the calls of a session send and compute. Each prompt contains everything before it; with
    prefix caching, a call computes only what it adds."""
    session, first = profile.session, profile.lengths
    if session is None:
        return
    calls, added, output = session.calls, session.added_tokens, first.mean_output_tokens
    whole = "Prompt tokens of a whole session"
    for title, formula, quantities in (
        (
            "Mean input per call of a session",
            "{mean of the first} + {later calls} / 2 x ({added} + {output})",
            (first.mean_input_tokens, calls - 1, added, output),
        ),
        (
            "P95 input of a session's last call",
            "{P95 of the first} + ceil({later calls} x ({added} + {output}))",
            (first.input_p95_tokens, calls - 1, added, output),
        ),
        (
            whole,
            "{calls} x {first} + ({added} + {output}) x {calls} x ({calls} - 1) / 2",
            (calls, round(first.mean_input_tokens), added, round(output)),
        ),
        (
            f"{whole}, with prefix caching",
            "{first} + ({calls} - 1) x {added}",
            (round(first.mean_input_tokens), calls, added),
        ),
    ):
        sheet.line(title, formula, quantities, result="{} tokens", source="guide 1.2, 7.2")


def _unmeasured(profile: WorkloadProfile) -> list[str]:
    missing = [
        f"mean {side} length: estimated from a log-normal distribution"
        for side in ("input", "output")
        if getattr(profile.lengths, f"{side}_mean_tokens") is None
    ]
    if profile.traffic.predictability is None:
        missing.append("predictability of the traffic: assumed uncertain")
    if profile.traffic.lowest_requests_per_s is None and profile.traffic.kind == "online":
        missing.append("the rate of the quietest hour, for the warm minimum")
    return missing


def hardware_step(
    pools: Sequence[Pool], usd_per_year: Sequence[Mapping[str, float | None]]
) -> PlanStep:
    """Step 2: the GPU of each fleet, chosen from the available ones, with the cost of each
    candidate."""
    bottleneck = ARCHETYPES[pools[0].profile.traffic.archetype]["hardware"]
    names = ", ".join(dict.fromkeys(pool.gpu.name for pool in pools))
    step = PlanStep(
        number=2,
        title="Select the hardware",
        decision=f"{names}; this workload needs {bottleneck} most",
    )
    for pool, by_gpu in zip(pools, usd_per_year, strict=True):
        card, prefix = pool.gpu, f"{pool.name}." if len(pools) > 1 else ""
        step.output |= {
            f"{prefix}gpu": card.id,
            f"{prefix}memory_bytes": card.memory_bytes,
            f"{prefix}link": "nvlink" if card.nvlink_bytes_per_s else "pcie",
            f"{prefix}linked_gpus": card.nvlink_gpus,
            f"{prefix}usd_per_gpu_hour": pool.usd_per_gpu_hour,
        }
        label = f" for {pool.name}" if len(pools) > 1 else ""
        if any(usd is not None for usd in by_gpu.values()):
            step.sheet.text(_cheapest_step(pool, by_gpu, label))
        elif len(by_gpu) > 1:
            step.notes.append(
                f"{card.id} is the first GPU listed: a measured or stated rate is taken to be its "
                "own, and no fleets were compared"
            )
    gpus = {pool.gpu.id: pool.gpu for pool in pools}.values()
    step.notes += [f"{card.id}: {card.note}" for card in gpus if card.note]
    step.notes += [
        f"{card.id}: no NVLink: measure tensor parallelism beyond 2 before you rely on it"
        for card in gpus
        if card.nvlink_bytes_per_s is None
    ]
    if all(len(by_gpu) <= 1 for by_gpu in usd_per_year):
        step.notes.append("only one GPU is listed: no others were compared")
    if any(pool.deployment.usd_per_gpu_hour is None for pool in pools):
        step.to_measure.append("the price that you pay per GPU-hour")
    return step


def _cheapest_step(pool: Pool, usd_per_year: Mapping[str, float | None], label: str) -> Step:
    """The candidates' fleets by cost, with memory bandwidth per dollar (guide 3.5)."""
    parts: list[str] = []
    for name, usd in usd_per_year.items():
        card = gpu(name)
        hourly = replace(pool, gpu=card).usd_per_gpu_hour
        cost = "cannot meet the targets" if usd is None else f"{figure(round(usd))} USD a year"
        bandwidth = card.memory_bandwidth_bytes_per_s / 1e12 / hourly
        parts.append(f"{name} {cost} ({figure(round(bandwidth, 2))} TB/s per USD/h)")
    return Step(
        title=f"Cheapest fleet{label}",
        formula="lowest cost a year among the listed GPUs, each with the fleet that meets the "
        "targets",
        values=", ".join(parts),
        result=pool.gpu.id,
        source="guide 3.5, 9.1 step 2; catalogue of GPUs",
    )


# Step 3 of a plan: one fleet, or a tier for each kind of request or hardware. Pure. Guide 1.5.


def candidates(deployment: DeploymentTable) -> tuple[Gpu, ...]:
    """The GPUs available to a deployment.

    Raises:
        SizingError: the catalogue lacks one of them.
    """
    return tuple(gpu(name) for name in deployment.gpus)


def pool_of(
    profile: WorkloadProfile,
    deployment: DeploymentTable,
    lengths: TokenLengths,
    *,
    name: str,
    share_ratio: float,
    models: Mapping[str, Model],
) -> Pool:
    """The fleet for a share of the traffic, on the first GPU listed.

    Raises:
        SizingError: the model or a GPU is unknown.
    """
    own_model = models.get(deployment.model)
    return Pool(
        name=name,
        profile=profile,
        deployment=deployment,
        lengths=call_lengths(lengths, profile.session),
        model=model(deployment.model) if own_model is None else own_model,
        gpu=candidates(deployment)[0],
        share_ratio=share_ratio,
        peak_requests_per_s=planned_peak_per_s(profile) * share_ratio,
    )


def tier_loads(profile: WorkloadProfile) -> dict[str, float]:
    """Peak requests/s of each tier, by name.

    In a cascade, an escalated request counts in every tier that it reaches.
    """
    peak = planned_peak_per_s(profile)
    if profile.routing.method != "cascade":
        return {tier.name: peak * (tier.share_ratio or 0.0) for tier in profile.tiers}
    loads: dict[str, float] = {}
    for tier in profile.tiers:
        loads[tier.name] = peak
        peak *= tier.escalation_ratio or 0.0
    return loads


def simple_ratio(profile: WorkloadProfile) -> float | None:
    """Share of requests that do not need the last tier; None if unknown.

    Computed from the tiers if there are any, otherwise as stated.
    """
    if profile.tiers:
        return 1 - tier_loads(profile)[profile.tiers[-1].name] / planned_peak_per_s(profile)
    return profile.routing.simple_ratio


def against_tiers(profile: WorkloadProfile, large_gpus: int) -> tuple[str, ...]:
    """Why a small model for simple requests does not pay off; empty if it does.

    `large_gpus` is the number of GPUs that the large model needs alone. The decision follows the
    guide's table of fleet size, skew, quality and the router's time.
    """
    routing, ttft_s, simple = profile.routing, profile.slo.ttft_p99_s, simple_ratio(profile) or 0.0
    router_s = ROUTER_HIGH_S if routing.router_s is None else routing.router_s
    share = 0.0 if ttft_s is None else router_s / ttft_s
    few = f"the fleet without tiers has {large_gpus} GPUs; routing pays above {WORTH_FROM_GPUS}"
    late = (
        f"the router takes {percent(share)} of the TTFT budget, above {percent(TTFT_BUDGET_RATIO)}"
    )
    against = {
        few: large_gpus <= WORTH_FROM_GPUS,
        "no share of requests is known to be simple enough for a small model": simple == 0,
        "the small model's answer quality is not confirmed (small_model_acceptable)": (
            not routing.small_model_acceptable
        ),
        late: share > TTFT_BUDGET_RATIO,
    }
    return tuple(reason for reason, holds in against.items() if holds)


def routing_step(
    profile: WorkloadProfile,
    *,
    large_gpus: int | None,
    against: Sequence[str] | None,
    taken: bool = False,
) -> PlanStep:
    """Step 3: tiers, if `taken`, or one fleet.

    `against` are the reasons against tiers; None if hardware tiers need none, or if the size of the
    single fleet is unknown.
    """
    method, tiers = profile.routing.method, profile.tiers
    output: dict[str, Value] = {
        "tiers": len(tiers) if taken else 1,
        "method": method if taken else "single fleet",
        "large_model_gpus": large_gpus,
        "simple_ratio": simple_ratio(profile) if method != "hardware" else None,
    }
    notes = list(against or ())
    if against is not None and not against:
        share = percent(simple_ratio(profile) or 0.0)
        notes = [f"{share} of requests can move off the {large_gpus} GPUs of the large model"]
    if taken:
        for name, peak_per_s in tier_loads(profile).items():
            output[f"{name}.peak_requests_per_s"] = peak_per_s
    elif against is not None and not against:
        notes.append("tiers would save money: add each tier as [[tiers]] to size them")
    if against is None and method != "hardware" and not taken:
        notes.append("routing was not considered: the size of the fleet without tiers is unknown")
    step = PlanStep(
        number=3,
        title="Decide on routing",
        decision=_decision(profile, taken=taken),
        output=output,
        to_measure=_to_measure(profile, taken=taken),
        notes=[*notes, *(_method_notes(profile) if taken else ())],
    )
    if taken:
        _peaks(step.sheet, profile)
    return step


def _decision(profile: WorkloadProfile, *, taken: bool) -> str:
    if not taken:
        return "one fleet for all requests"
    names = ", ".join(tier.name for tier in profile.tiers)
    how = {
        "route": "a router sends each request to one of",
        "cascade": "requests are escalated through",
        "hardware": "requests are routed by kind to the hardware tiers",
    }
    return f"{how[profile.routing.method]} {names}; each is a fleet of its own"


def _peaks(sheet: Sheet, profile: WorkloadProfile) -> None:
    peak = planned_peak_per_s(profile)
    share = "escalated" if profile.routing.method == "cascade" else "share"
    for name, load_per_s in tier_loads(profile).items():
        sheet.line(
            f"Peak of {name}",
            f"{{planned peak}} x {{{share}}}",
            (peak, load_per_s / peak),
            result="{} requests/s",
            source="guide 1.5, 9.5",
        )


def _to_measure(profile: WorkloadProfile, *, taken: bool) -> list[str]:
    missing: list[str] = []
    if profile.routing.method == "hardware":
        return ["the benchmark and cold start of each tier"] if taken else []
    if simple_ratio(profile) is None:
        missing.append("the share of requests that a small model can answer")
    elif profile.routing.small_model_acceptable is None:
        missing.append("the small model's quality on those requests")
    if taken:
        missing.append(
            "misrouted requests: their loss of quality and the large model's wasted time"
        )
    return missing


def _method_notes(profile: WorkloadProfile) -> Iterator[str]:
    method = profile.routing.method
    if method == "cascade" and profile.traffic.kind == "online":
        yield (
            "an escalated request first waits for the small model's full answer: its TTFT is not "
            "the large tier's TTFT"
        )
    if method == "hardware":
        yield "do not use round robin over unequal tiers: the slow tier sets the P99"
    if profile.routing.router_s is None and method == "route":
        yield "the router's latency is not set: 20 ms assumed"
