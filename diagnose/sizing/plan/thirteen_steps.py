"""The guide's thirteen decisions in order, made for a workload profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import SPECULATION
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.lengths import SHORT_PROMPT_TOKENS
from kneewatch.diagnose.sizing.arithmetic import seconds
from kneewatch.diagnose.sizing.benchmark.latency_curve import GPU_SHORTFALL_LIMIT, TTFT_EXCESS_LIMIT
from kneewatch.diagnose.sizing.launch_command import sized_command
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.plan.memory_steps import (
    floor_step,
    kv_step,
    memory_floor,
    quantization_step,
)
from kneewatch.diagnose.sizing.plan.plan_result import (
    CONNECTOR,
    Part,
    Plan,
    PlanStep,
    Pool,
    planned_peak_per_s,
)
from kneewatch.diagnose.sizing.plan.replica_cost_steps import (
    cost_step,
    fleet_step,
)
from kneewatch.diagnose.sizing.plan.replica_curve import (
    ReplicaCurve,
    Serving,
    Sized,
    at,
    curve_step,
    measured_curve,
    point,
    predicted_curve,
    replica_launch,
    serving,
)
from kneewatch.diagnose.sizing.plan.split_choice import (
    SAVING_RATIO,
    batching_step,
    choose_split,
    four_bit_gpus,
    parallel_step,
    unmet,
)
from kneewatch.diagnose.sizing.plan.workload_profile import Slo, TokenLengths, WorkloadProfile
from kneewatch.diagnose.sizing.plan.workload_steps import (
    ROUTER_HIGH_S,
    against_tiers,
    candidates,
    hardware_step,
    pool_of,
    routing_step,
    tier_loads,
    workload_step,
)
from kneewatch.diagnose.sizing.replica_count import (
    circuit_breaker,
    input_limit,
    prefill_decode_ratio,
    ratio_text,
)
from kneewatch.rules.formatting import figure, number

_SOURCE = "guide 9.1 step 13"
_CONNECTOR = f""" {CONNECTOR} '{{"kv_connector":"NixlConnector","kv_role":"kv_both"}}'"""


def validation_step(sized: Sequence[Sized]) -> PlanStep:
    """Step 13: limits for the first week, in this plan's values, and the guardrails."""
    step = PlanStep(
        number=13,
        title="Deploy and validate",
        decision="size again from step 1 if the first week crosses a limit below",
        to_measure=[
            "TTFT P99, ITL P99, GPU utilization, prefix hits and evictions of the first week"
        ],
    )
    for replica in sized:
        name = replica.pool.name if len(sized) > 1 else ""
        for part in (_limits(replica), _guardrails(replica)):
            if name:
                part.notes = [f"{name}: {note}" for note in part.notes]
            step.add(part, tier=replica.pool.name, prefix=f"{name}." if name else "")
    step.notes = list(dict.fromkeys(step.notes))
    return step


def _limits(sized: Sized) -> Part:
    part = Part()
    best, gpu_ratio = sized.point, sized.pool.deployment.benchmark_gpu_ratio
    if best is not None and sized.pool.phase != "decode" and _has_users(sized.pool):
        part.output["resize_above_ttft_p99_s"] = part.sheet.line(
            "Re-size above TTFT P99 of",
            "{TTFT P99 of step 10:s} x (1 + {excess})",
            (best.ttft_p99_s, TTFT_EXCESS_LIMIT),
            result=f"{{:s}} at {figure(best.requests_per_s)} requests/s per replica",
            source=_SOURCE,
        )
        if sized.usable_source != "measured":
            part.notes.append("the TTFT limit is predicted: replace it with a benchmark's")
    if gpu_ratio is None:
        part.to_measure.append("GPU utilization of the benchmark at C_max")
    else:
        part.output["benchmark_gpu_ratio"] = gpu_ratio
        part.output["resize_below_gpu_ratio"] = part.sheet.line(
            "Re-size below GPU utilization of",
            "max({GPU utilization of the benchmark at equal RPS:%} - {shortfall:%}, 0)",
            (gpu_ratio, GPU_SHORTFALL_LIMIT),
            result="{:%}",
            source=_SOURCE,
        )
    fleet = sized.fleet
    if fleet is not None:
        per_instance = sized.pool.peak_requests_per_s / fleet.deployed_instances
        part.output["expected_peak_requests_per_s_per_instance"] = per_instance
        part.output["expected_utilization_ratio"] = sized.utilization_ratio
    return part


def _guardrails(sized: Sized) -> Part:
    pool, lengths = sized.pool, sized.pool.lengths
    longest = sized.replica.launch.longest_tokens
    part = Part()
    limit = input_limit(
        part.sheet,
        p95_input_tokens=lengths.input_p95_tokens,
        p99_input_tokens=lengths.input_p99_tokens,
        max_model_len=max(longest - lengths.output_p99_tokens, 1),
    )
    part.output = {"max_model_len": longest, "max_input_tokens": limit}
    if pool.phase != "prefill":  # whose answers are one token, whatever the request's
        part.output["max_output_tokens"] = max(longest - limit, lengths.output_p99_tokens)
        part.output["p99_output_slot_s"] = _slot_s(sized)
    part.output["launch"] = sized_command(_launch(sized)) + (_CONNECTOR if pool.phase else "")
    drafts = pool.profile.speculation
    if drafts is not None and sized.decided(9)["speculation"]:
        part.notes.append(
            f"the launch lacks the draft: add {SPECULATION} with its model and "
            f"num_speculative_tokens {drafts.draft_tokens}"
            + (", EAGLE and MTP to the prefill servers too" if pool.phase else "")
        )
    if pool.phase == "decode":
        return part
    # The prefill of a P99 prompt in an idle replica.
    quiet_s = point(sized.replica, 1).ttft_p99_s if sized.replica.limit else 0.0
    slo, best, served_per_s = pool.profile.slo, sized.point, sized.capacity_per_s
    target, of = slo.ttft_p99_s, "TTFT target"
    if slo.e2e_p99_s is not None and best is not None and best.latency_p99_s is not None:
        left_s = quiet_s + slo.e2e_p99_s - best.latency_p99_s
        if target is None or left_s < target:
            target, of = left_s, "what the E2E target leaves for TTFT"
    if target is None or served_per_s is None:
        lacks = "was computed: set a TTFT target and the inputs of the fleet"
        part.notes.append(f"no queue limit{f' {lacks}' if _has_users(pool) else ': a batch waits'}")
        return part
    try:
        low, high = circuit_breaker(
            part.sheet,
            ttft_target_s=target,
            arrivals_per_s=pool.peak_requests_per_s,
            served_per_s=served_per_s,
            quiet_ttft_s=quiet_s,
            of=of,
        )
    except SizingError as error:
        part.notes.append(f"no queue limit: {error}")
        return part
    part.output |= {"queue_limit_low": low, "queue_limit_high": high}
    return part


def _has_users(pool: Pool) -> bool:
    """Whether somebody waits for the first token."""
    return pool.profile.traffic.kind == "online" or pool.profile.slo.are_set


def _slot_s(sized: Sized) -> float | None:
    """Seconds that a P99 answer takes at C_max; None if unknown.

    At the predicted mean ITL, as in the latency of whole requests. Of a benchmark only ITL P99 is
    known, which bounds it.
    """
    best, tokens = sized.point, sized.pool.lengths.output_p99_tokens
    if best is None:
        return None
    is_measured = sized.usable_source == "measured"
    return tokens * (best.itl_p99_s if is_measured else at(sized.replica, best.concurrency).itl_s)


def _launch(sized: Sized) -> Launch:
    """The launch of a replica as it was planned. C_max bounds what runs at once."""
    launch, best = sized.replica.launch, None if sized.pool.phase == "prefill" else sized.point
    return replace(
        launch,
        max_num_seqs=launch.max_num_seqs
        if best is None
        else math.ceil(best.concurrency / launch.parallel.data),
        max_num_batched_tokens=launch.batched_tokens,
    )


# --- The thirteen decisions in order (guide 9.1) --------------------------------------------------
#
# Quantization is decided before parallelism, the curve of one replica before and after the KV
# and batching strategy, the fleet from the last of them. With tiers, steps 4 to 10 run for each.


def plan(
    profile: WorkloadProfile,
    *,
    models: Mapping[str, Model] | None = None,
    benchmarks: Mapping[str, str] | None = None,
) -> Plan:
    """Every decision for this workload, with its arithmetic and what must still be measured.

    `models` are additional models by the names that the profile uses. `benchmarks` are the texts of
    `profile.benchmark_files`.

    Raises:
        SizingError: a name is unknown, or nothing fits.

    Source: guide 9.1.
    """
    models_by_id, texts = models or {}, benchmarks or {}
    launch, lengths = profile.deployment, profile.lengths
    whole = pool_of(profile, launch, lengths, name="", share_ratio=1.0, models=models_by_id)
    by_hardware = bool(profile.tiers) and profile.routing.method == "hardware"
    # What the large model alone would take decides whether tiers are worth it.
    single = None
    try:
        single = cheapest(whole, texts)
    except SizingError:
        if not by_hardware:
            raise
    large_gpus = None if single is None or single.fleet is None else single.fleet.gpus
    against = None if large_gpus is None or by_hardware else against_tiers(profile, large_gpus)
    tiered = by_hardware or (bool(profile.tiers) and against == ())
    phased = [] if single is None else [in_phases(single, texts)]
    alone = [fleet for fleets, _ in phased for fleet in fleets]
    if tiered:
        tiers = [in_phases(cheapest(p, texts), texts) for p in _tiers(profile, models_by_id)]
        if not _are_same_requests(profile):
            against, alone = ("not compared: [lengths] are not those of all tiers together",), []
        elif dearer := _dearer(alone, [fleet for fleets, _ in tiers for fleet in fleets]):
            against, tiered = (dearer,), by_hardware
        phased = tiers if tiered else phased
    sized = tuple(each for fleets, _ in phased for each in fleets)
    pools = tuple(each.pool for each in sized)
    return Plan(
        profile=profile,
        tiers=tuple(pool.name for pool in pools) if tiered or len(pools) > 1 else (),
        unmet=(
            *_escalated(profile, sized),
            *(
                f"{each.pool.name}: {each.unmet}" if each.pool.name else each.unmet
                for each in sized
                if each.unmet
            ),
        ),
        steps=(
            workload_step(profile),
            hardware_step(pools, [each.usd_per_year_by_gpu for each in sized]),
            routing_step(profile, large_gpus=large_gpus, against=against, taken=tiered),
            *(step for replica in sized for step in replica.steps),
            fleet_step(profile, sized, phases=[compared for _, compared in phased if compared]),
            cost_step(profile, sized, single=_usd_per_year(alone if tiered else [single])),
            validation_step(sized),
        ),
    )


def _are_same_requests(profile: WorkloadProfile) -> bool:
    """Whether the requests of all tiers together are as long as those that one fleet would get."""
    loads, peak = tier_loads(profile), planned_peak_per_s(profile)
    together = math.fsum(
        loads[tier.name] / peak * tier.lengths.mean_input_tokens for tier in profile.tiers
    )
    is_near = abs(together / profile.lengths.mean_input_tokens - 1) <= SAVING_RATIO
    return is_near or profile.routing.method == "cascade"


def _usd_per_year(fleets: Sequence[Sized | None]) -> float | None:
    """What fleets cost together; None if one is not known or misses a requirement."""
    yearly = [None if each is None or each.unmet else each.usd_per_year for each in fleets]
    return math.fsum(usd for usd in yearly if usd) if yearly and all(yearly) else None


def _dearer(alone: Sequence[Sized], tiers: Sequence[Sized]) -> str | None:
    """Why tiers do not pay; None if they do, or if a fleet is not known."""
    alone_usd, tiers_usd = _usd_per_year(alone), _usd_per_year(tiers)
    if alone_usd is None or tiers_usd is None or alone_usd > tiers_usd:
        return None
    return f"tiers would cost {figure(tiers_usd)} USD a year, one fleet costs {figure(alone_usd)}"


def _escalated(profile: WorkloadProfile, sized: Sequence[Sized]) -> Iterator[str]:
    """What an escalated request waits for its first token, where that is above the target."""
    target_s, points = profile.slo.ttft_p99_s, [each.point for each in sized]
    if profile.routing.method != "cascade" or len(sized) < 2 or target_s is None:
        return
    if profile.traffic.kind != "online":
        return
    waited_s = 0.0
    for each, best in zip(sized[:-1], points[:-1], strict=True):
        if best is None:
            return
        waited_s += best.ttft_p99_s + each.pool.lengths.output_p99_tokens * best.itl_p99_s
    last = points[-1]
    if last is not None and waited_s + last.ttft_p99_s > target_s:
        yield (
            f"escalated requests have TTFT P99 {seconds(waited_s + last.ttft_p99_s)}, above the "
            f"target of {seconds(target_s)}: they wait for the whole answers of earlier tiers"
        )


def cheapest(pool: Pool, benchmarks: Mapping[str, str]) -> Sized:
    """The fleet with the lowest cost per year within the targets, over the candidate GPUs.

    In two cases the first GPU listed is kept: if rates are measured or stated, because these apply
    to one GPU only; and if no candidate's fleet is known.

    Raises:
        SizingError: nothing fits, or a benchmark is missing or unreadable.

    Source: guide 3.5 and 9.1 step 2 (cost for the targets, not the fastest GPU).
    """
    cards, stated = candidates(pool.deployment), pool.deployment
    measured = pool.usable_requests_per_s or stated.baseline_benchmark or stated.final_benchmark
    usd_per_year: dict[str, float | None] = dict.fromkeys(card.id for card in cards)
    if len(cards) == 1 or measured:
        return size_pool(*choose_split(pool), usd_per_year, benchmarks)
    splits: dict[str, tuple[Sized, Mapping[int, Sequence[str]]]] = {}
    refused: SizingError | None = None
    for card in cards:
        try:
            splits[card.id] = choose_split(replace(pool, gpu=card))
            usd_per_year[card.id] = splits[card.id][0].usd_per_year
        except SizingError as error:
            refused = error
    if not splits and refused is not None:
        raise refused
    priced = {name: usd for name, usd in usd_per_year.items() if usd is not None}

    def rank(name: str) -> tuple[object, ...]:
        return bool(splits[name][0].unmet), priced[name], name != pool.gpu.id

    best = min(priced, key=rank, default=pool.gpu.id)
    chosen = splits.get(best) or next(iter(splits.values()))
    return size_pool(*chosen, usd_per_year, benchmarks)


def in_phases(together: Sized, benchmarks: Mapping[str, str]) -> tuple[tuple[Sized, ...], str]:
    """The fleet; or pools for prefill and decode, and what both cost, where the pools cost far less
    within the targets and the network between them is stated.

    Each pool has the GPU and the split that are cheapest for its phase. The comparison is added to
    step 9 of the fleet.

    Source: guide 6.5.
    """
    pool, network = together.pool, together.pool.profile.hosting.network
    part = Part(decision="prefill and decode on the same replicas")
    part.output = dict.fromkeys(("pd_ratio", "pd_gpus_exact", "pd_gpus_deployed"))
    pools = _phases(together, benchmarks)
    if isinstance(pools, str):
        part.notes.append(f"one pool for prefill and decode: {pools}")
    else:
        apart = math.fsum(each.usd_per_year or math.inf for each in pools)
        alone = together.usd_per_year or math.inf
        moved = f"the KV cache of a P99 prompt takes {seconds(_moved_s(*pools))} over {network}"
        if network is None:
            moved = "set hosting.network to size them: the KV transfer time is unknown"
        compared = (
            f"two pools for prefill and decode cost {figure(apart)} USD a year, one pool "
            f"{together.unmet or figure(alone)}; {moved}"
        )
        if len({each.pool.gpu.architecture for each in pools}) > 1:
            compared += "; set the same --attention-backend on both: vLLM refuses KV from another"
        is_far_less = bool(together.unmet) or apart < (1 - SAVING_RATIO) * alone
        if is_far_less and network is not None:
            return pools, compared
        part.add(_ratio(pool, *pools))
        part.notes.append(compared)
        if is_far_less:
            part.decision = "test prefill and decode in separate pools"
            part.output["disaggregate"] = True
            part.to_measure.append("tokens/s of each phase alone, for the P:D ratio")
    step = next(step for step in together.steps if step.number == 9)
    step.decision += f"; {part.decision}"
    step.add(part)
    return (together,), ""


def _phases(together: Sized, benchmarks: Mapping[str, str]) -> tuple[Sized, Sized] | str:
    """Pools for prefill and decode that keep the targets, or why there are none."""
    pool = together.pool
    if why := _undivided(pool):
        return why
    try:
        prefill = cheapest(_prefill_pool(pool, _sent_s(together.replica, pool)), benchmarks)
        decode = cheapest(_decode_pool(pool, prefill), benchmarks)
    except SizingError as error:
        return str(error)
    for each in (prefill, decode):
        if each.unmet or each.fleet is None:
            return f"{each.pool.phase} alone misses a target: {each.unmet}"
    first_s = math.inf if prefill.point is None else prefill.point.ttft_p99_s
    moved_s, target_s = _moved_s(prefill, decode), pool.profile.slo.ttft_p99_s or 0.0
    if first_s + moved_s > target_s:
        return f"with {seconds(moved_s)} for the KV cache of a P99 prompt two miss the TTFT target"
    return prefill, decode


def _sent_s(replica: Serving, pool: Pool) -> float:
    """Seconds in which each GPU sends its part of the KV cache of a P99 prompt; 0 where the network
    is unknown."""
    network = pool.profile.hosting.network
    if network is None:
        return 0.0
    sent_bytes = replica.memory.layout.request_bytes(pool.lengths.input_p99_tokens)
    return sent_bytes / LINK_BYTES_PER_S[network]


def _moved_s(prefill: Sized, decode: Sized) -> float:
    """Seconds from one pool to the other: the smaller side's network cards carry all of it."""
    sizes = [each.replica.launch.parallel.tensor for each in (prefill, decode)]
    return sizes[0] / min(sizes) * _sent_s(prefill.replica, prefill.pool)


def _ratio(pool: Pool, prefill: Sized, decode: Sized) -> Part:
    """The part of the plan on the GPUs of two pools."""
    rates = [
        (each.usable_requests_per_s or math.inf) / each.parallel.gpus for each in (prefill, decode)
    ]
    fleets = [each.fleet.gpus for each in (prefill, decode) if each.fleet is not None]
    part = Part()
    ratio = prefill_decode_ratio(
        part.sheet,
        peak_requests_per_s=pool.peak_requests_per_s,
        input_tokens=pool.lengths.mean_input_tokens,
        output_tokens=pool.lengths.mean_output_tokens,
        prefill_tokens_per_s_per_gpu=rates[0] * pool.lengths.mean_input_tokens,
        decode_tokens_per_s_per_gpu=rates[1] * pool.lengths.mean_output_tokens,
    )
    part.output = {
        "pd_ratio": ratio_text(ratio),
        "pd_gpus_exact": math.fsum(pool.peak_requests_per_s / rate for rate in rates),
        "pd_gpus_deployed": sum(fleets),
    }
    return part


def _undivided(pool: Pool) -> str:
    """Why pools for prefill and decode cannot serve this fleet's requests; empty if they can."""
    slo, stated = pool.profile.slo, pool.deployment
    measured = pool.usable_requests_per_s or stated.baseline_benchmark or stated.final_benchmark
    reasons = {
        "tiers of a cascade are not divided": pool.profile.routing.method == "cascade",
        f"prompts are shorter than {SHORT_PROMPT_TOKENS} tokens": pool.lengths.mean_input_tokens
        < SHORT_PROMPT_TOKENS,
        "two are compared where TTFT and ITL have targets": None in (slo.ttft_p99_s, slo.itl_p99_s),
        "vLLM's decode servers have no pipeline stages": stated.flags.get("pp", 1) > 1,
        "rates are stated or measured of servers that do both": bool(measured),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _prefill_pool(pool: Pool, sent_s: float) -> Pool:
    """The servers that compute prompts: each answers with one token. To send the KV cache of a P99
    prompt takes `sent_s` of the TTFT target."""
    left_s = max((pool.profile.slo.ttft_p99_s or 0.0) - sent_s, 1e-3)
    session = pool.profile.session
    if session is not None:
        # The KV cache of an answer stays with the decode server: the next call computes its tokens.
        added = session.added_tokens + round(pool.lengths.mean_output_tokens)
        session = replace(session, added_tokens=added)
    profile = replace(pool.profile, slo=Slo(ttft_p99_s=left_s), speculation=None, session=session)
    lengths = replace(
        pool.lengths,
        output_p50_tokens=1,
        output_p95_tokens=1,
        output_p99_tokens=1,
        output_mean_tokens=1,
    )
    return _of_phase(pool, profile, lengths, "prefill")


def _decode_pool(pool: Pool, prefill: Sized) -> Pool:
    """The servers that generate all tokens but the first, with the KV cache that prefill sends.

    vLLM takes it only from GPUs of the same vendor and the same checkpoint with the same KV dtype,
    and where one TP degree divides the other (nixl/metadata.py and kv_connector/utils.py of 0.32).
    """
    slo, first = pool.profile.slo, prefill.point
    left_s = slo.e2e_p99_s
    if left_s is not None and first is not None:
        left_s = max(left_s - first.ttft_p99_s, 1e-3)
    profile = replace(
        pool.profile,
        slo=Slo(itl_p99_s=slo.itl_p99_s, e2e_p99_s=left_s),
        prefix=None,
        session=None,
    )
    mean = max(pool.lengths.mean_output_tokens - 1, 1)
    lengths = replace(pool.lengths, output_mean_tokens=mean)
    kept, vendor = prefill.replica.launch, prefill.pool.gpu.vendor
    deployment = replace(
        pool.deployment,
        gpus=tuple(card.id for card in candidates(pool.deployment) if card.vendor == vendor),
        flags=pool.deployment.flags
        | {"kv_cache_dtype": kept.kv_cache_dtype, "quantization": prefill.scheme_id},
    )
    pool = replace(pool, deployment=deployment, peer_tensor=kept.parallel.tensor)
    return _of_phase(pool, profile, lengths, "decode")


def _of_phase(pool: Pool, profile: WorkloadProfile, lengths: TokenLengths, phase: str) -> Pool:
    # vLLM's decode servers have no pipeline stages, and are sent none by pull.
    deployment = replace(pool.deployment, flags=pool.deployment.flags | {"pp": 1})
    if phase == "prefill":
        deployment = replace(deployment, concurrency=None)
    return replace(
        pool,
        name=f"{pool.name}-{phase}" if pool.name else phase,
        profile=profile,
        deployment=deployment,
        lengths=lengths,
        phase=phase,
    )


def _behind_router(profile: WorkloadProfile) -> WorkloadProfile:
    """The profile whose TTFT and E2E targets are what the router leaves of them."""
    slo, routing = profile.slo, profile.routing
    if routing.method != "route":
        return profile
    router_s = ROUTER_HIGH_S if routing.router_s is None else routing.router_s
    left = {
        name: None if target_s is None else max(target_s - router_s, 0.0)
        for name, target_s in (("ttft_p99_s", slo.ttft_p99_s), ("e2e_p99_s", slo.e2e_p99_s))
    }
    return replace(profile, slo=replace(slo, **left))


def _tiers(profile: WorkloadProfile, models: Mapping[str, Model]) -> tuple[Pool, ...]:
    """The pools of the tiers; tiers that get no requests are left out."""
    peak, routed = planned_peak_per_s(profile), _behind_router(profile)
    return tuple(
        pool_of(
            routed,
            tier,
            tier.lengths,
            name=tier.name,
            share_ratio=load_per_s / peak,
            models=models,
        )
        for tier, load_per_s in zip(profile.tiers, tier_loads(profile).values(), strict=True)
        if load_per_s > 0
    )


def size_pool(
    chosen: Sized,
    notes: Mapping[int, Sequence[str]],
    usd_per_year: Mapping[str, float | None],
    benchmarks: Mapping[str, str],
) -> Sized:
    """Steps 4 to 10 for one fleet, with the chosen split and the notes on it by step.

    Raises:
        SizingError: a benchmark is missing or unreadable.
    """
    final, pool = chosen.replica, chosen.replica.pool
    kv, scheme_id = final.launch.kv_cache_dtype, chosen.scheme_id
    before = memory_floor(pool, quantization=pool.model.quantization, kv_cache_dtype="auto")
    after = memory_floor(pool, quantization=scheme_id, kv_cache_dtype=kv)
    quantized = quantization_step(pool, scheme_id, before, after)
    quantized.notes += notes[5]
    quantized.add(four_bit_gpus(pool, chosen))
    launch = replica_launch(pool, chosen.parallel, quantization=scheme_id, kv_cache_dtype=kv)
    # The baseline runs with the KV cache that vLLM takes by itself, unless one is stated.
    plain = pool.deployment.flags.get("kv_cache_dtype", "auto")
    baseline = serving(pool, replace(launch, kv_cache_dtype=plain))
    first = _curve(pool, baseline, pool.deployment.baseline_benchmark, benchmarks)
    last = _final(pool, final, first, benchmarks)
    stated = pool.usable_requests_per_s
    usable = None if last.best is None else last.best.requests_per_s
    return replace(
        chosen,
        usd_per_year_by_gpu=usd_per_year,
        steps=(
            floor_step(pool, before),
            quantized,
            parallel_step(pool, launch, before, after, notes[6]),
            curve_step(pool, first, number=7),
            kv_step(pool, baseline, kv_cache_dtype=kv),
            batching_step(pool, final, chosen.parts),
            curve_step(pool, last, number=10),
        ),
        usable_requests_per_s=usable if stated is None else stated,
        usable_source=last.source if stated is None else "stated",
        point=last.best,
        unmet=_unmet(last, final),
    )


def _unmet(curve: ReplicaCurve, replica: Serving) -> str:
    pool = replica.pool
    if curve.best is None and pool.profile.slo.are_set:
        if pool.usable_requests_per_s is not None:
            return ""
        if curve.source == "measured":
            return "the targets, at any measured concurrency"
    return unmet(replica, curve.best)


def _curve(
    pool: Pool, replica: Serving, name: str | None, benchmarks: Mapping[str, str]
) -> ReplicaCurve:
    if name is None:
        return predicted_curve(replica)
    return measured_curve(pool, name, benchmarks)


def _final(
    pool: Pool, replica: Serving, baseline: ReplicaCurve, benchmarks: Mapping[str, str]
) -> ReplicaCurve:
    """The final benchmark; otherwise a measured baseline; otherwise the prediction.

    A measured baseline is not multiplied by predicted gains: steps 8 and 9 count only when
    measured.
    """
    named = pool.deployment.final_benchmark
    if named is not None or baseline.source != "measured":
        return _curve(pool, replica, named, benchmarks)
    predicted = predicted_curve(replica)
    gain = "unknown" if predicted.best is None else number(predicted.best.requests_per_s)
    notes = [
        "figures of the baseline: gains of steps 8 and 9 count once they are measured",
        f"predicted with them: {gain} requests/s per replica",
    ]
    part = Part(sheet=baseline.part.sheet, to_measure=predicted.part.to_measure, notes=notes)
    return replace(baseline, part=part)
