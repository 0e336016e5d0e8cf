"""Step 9 of a plan: token budget, speculation, and prefill/decode disaggregation. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.memory.kv_reuse import (
    disaggregation_gain_s,
    link_bytes_per_s,
    transfer_s,
)
from kneewatch.diagnose.sizing.plan.instance_curve import (
    GAIN_RATIO,
    Serving,
    at,
    best_point,
    tuned,
    usable_per_s,
)
from kneewatch.diagnose.sizing.plan.plan_result import PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.workload_profile import Slo, Speculation
from kneewatch.diagnose.sizing.replicas.replica_count import (
    PrefillDecodeRatio,
    prefill_decode_ratio,
)
from kneewatch.diagnose.sizing.speed.performance import Drafting
from kneewatch.diagnose.sizing.speed.speculation import (
    best_draft_tokens,
    break_even_acceptance_ratio,
    speculative_speedup,
)

SHORT_PROMPT_TOKENS = 500
"""Shorter prompts are better prefilled where they are decoded (guide 6.5)."""

SAVING_RATIO = 0.2
"""Smallest saving of GPUs for two pools: the roofline is not more exact than that."""

_ALL_CACHED_RATIO = 1.0  # a decode pool computes no prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of step 9's decisions."""

    decision: str
    output: dict[str, Value]
    steps: tuple[Step, ...] = ()
    to_measure: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def disaggregation(pool: Pool, instance: Serving) -> Part:
    """P:D ratio, seconds to move the KV, and whether two pools need fewer GPUs."""
    colocated = "colocated prefill and decode"
    if instance.limit < 1:
        return Part(decision=colocated, output={"disaggregate": False})
    best, ratio = best_point(instance), _ratio(pool, instance)
    predicted = at(instance, best.concurrency if best else 1)
    stall_s = max(predicted.prefill_step.total_s - predicted.decode_step.total_s, 0.0)
    output: dict[str, Value] = {"prefill_stall_s": stall_s}
    steps: list[Step] = []
    if ratio is not None:
        output |= {"pd_ratio": ratio.text, "pd_gpus_exact": _gpus(ratio)}
        steps.extend(ratio.steps)
    moved, moved_output = _transfer(pool, instance, stall_s)
    worth, why = _worth(pool, instance, ratio, None if best is None else best.requests_per_s)
    return Part(
        decision="test prefill and decode in separate pools" if worth else colocated,
        output={"disaggregate": worth, **output, **moved_output},
        steps=(*steps, *moved),
        to_measure=("tokens/s of each phase alone, for the P:D ratio",) if worth else (),
        notes=(why,),
    )


def _gpus(ratio: PrefillDecodeRatio) -> float:
    return ratio.prefill_gpus_exact + ratio.decode_gpus_exact


def _ratio(pool: Pool, instance: Serving) -> PrefillDecodeRatio | None:
    """The sizes of both pools by the rates of each phase alone; None if decode alone misses its
    target."""
    profile = replace(pool.profile, slo=Slo(itl_p99_s=pool.profile.slo.itl_p99_s))
    decoding = replace(instance, pool=replace(pool, profile=profile), hit_ratio=_ALL_CACHED_RATIO)
    best = best_point(decoding)
    if best is None and profile.slo.itl_p99_s is not None:
        return None
    alone = at(decoding, best.concurrency if best else decoding.limit)
    gpus = instance.setup.parallel.gpus
    return prefill_decode_ratio(
        peak_requests_per_s=pool.peak_requests_per_s,
        input_tokens=pool.lengths.mean_input_tokens * (1 - instance.hit_ratio),
        output_tokens=pool.lengths.mean_output_tokens,
        prefill_tokens_per_s_per_gpu=at(instance, 1).prefill_tokens_per_s / gpus,
        decode_tokens_per_s_per_gpu=alone.decode_tokens_per_s / gpus,
    )


def _transfer(
    pool: Pool, instance: Serving, stall_s: float
) -> tuple[tuple[Step, ...], dict[str, Value]]:
    network, gpus = pool.profile.hosting.network, instance.setup.parallel.gpus
    if network is None:
        return (), {}
    moved = instance.memory.layout.request_bytes(pool.lengths.input_p95_tokens)
    rate = link_bytes_per_s(network)
    move_s = transfer_s(moved_bytes=moved * gpus, bandwidth_bytes_per_s=rate, links=gpus)
    gain_s = disaggregation_gain_s(stall_s=stall_s, transfer_s=move_s)
    step = Step(
        title=f"KV of a P95 prompt over {network}",
        formula="bytes on one GPU / link, each GPU its own",
        values=f"{figure(moved / 1e6)} MB / {figure(rate / 1e9)} GB/s",
        result=f"{figure(move_s * 1e3)} ms (a chunk stalls decoding for "
        f"{figure(stall_s * 1e3)} ms)",
        source="guide 6.5",
    )
    return (step,), {"kv_transfer_s": move_s, "disaggregation_gain_s": gain_s}


def _worth(
    pool: Pool, instance: Serving, ratio: PrefillDecodeRatio | None, usable: float | None
) -> tuple[bool, str]:
    if pool.lengths.mean_input_tokens < SHORT_PROMPT_TOKENS:
        return False, (
            f"prompts under {SHORT_PROMPT_TOKENS} tokens: keep prefill and decode on "
            "the same instances"
        )
    if ratio is None:
        return False, "decode misses the ITL target even without prefill: two pools would not help"
    gpus = instance.setup.parallel.gpus
    if ratio.prefill_gpus_exact < gpus:
        return False, (
            "a single prefill instance would be mostly idle: the load is too small for two pools"
        )
    if pool.profile.hosting.network is None:
        return False, (
            "no network is stated: two pools were not considered, because KV transfer "
            "time is unknown"
        )
    if usable is None:
        return True, "no concurrency of one pool meets the targets; two pools might"
    together = pool.peak_requests_per_s / usable * gpus
    compared = (
        f"{figure(_gpus(ratio))} GPUs in two pools, {figure(together)} in one (both before safety)"
    )
    return _gpus(ratio) < (1 - SAVING_RATIO) * together, compared


# --- Step 9 of a plan: token budget of a step, speculation, two pools or one. Pure. Guide 6 -------


def batching_step(pool: Pool, instance: Serving) -> tuple[PlanStep, Serving]:
    """Step 9, and the instance with the chosen batching and speculation."""
    chunk, instance = _budget(instance)
    draft, instance = _speculation(pool, instance)
    parts = (chunk, draft, disaggregation(pool, instance))
    output: dict[str, Value] = {}
    for part in parts:
        output |= part.output
    scheduler: tuple[str, ...] = ()
    if pool.profile.traffic.kind == "batch":
        scheduler = ("no user waits for the answers: keep this fleet separate from online traffic",)
    return (
        PlanStep(
            number=9,
            title="Configure batching and decode acceleration",
            decision="continuous batching; " + "; ".join(part.decision for part in parts),
            output=output,
            steps=tuple(step for part in parts for step in part.steps),
            to_measure=tuple(text for part in parts for text in part.to_measure),
            notes=(*(note for part in parts for note in part.notes), *scheduler),
            tier=pool.name,
        ),
        instance,
    )


def _budget(instance: Serving) -> tuple[Part, Serving]:
    """The token budget per step: vLLM's own, or a smaller one that serves more at the targets."""
    own, budgets = instance.setup.batched_tokens, tuned(instance)
    taken = budgets.instance.setup.batched_tokens
    steps = tuple(
        Step(
            title=f"Token budget of {tokens:,} a step",
            formula="usable RPS",
            values="at C_max by the roofline",
            result=f"{figure(usable)} requests/s",
            source="guide 6.4",
        )
        for tokens, usable in budgets.tried
    )
    decision = f"chunked prefill with vLLM's budget of {own:,} tokens"
    if taken != own:
        decision = f"--max-num-batched-tokens {taken} (default {own})"
    return (
        Part(
            decision=decision,
            output={"max_num_batched_tokens": taken},
            steps=steps,
            to_measure=("ITL P99 with long prompts arriving, at this budget",),
        ),
        budgets.instance,
    )


def _speculation(pool: Pool, instance: Serving) -> tuple[Part, Serving]:
    stated = pool.profile.speculation
    if stated is None:
        note = "speculation was not considered: no acceptance is stated"
        return Part(decision="no speculation", output={}, notes=(note,)), instance
    drafting = Drafting(
        tokens=stated.draft_tokens,
        acceptance_ratio=stated.acceptance_ratio,
        cost_ratio=stated.draft_cost_ratio,
    )
    tried = replace(instance, drafting=drafting)
    before, after = usable_per_s(instance), usable_per_s(tried)
    taken = after > before * GAIN_RATIO
    step = Step(
        title="Usable RPS with speculation",
        formula="at the targets, without and with it",
        values=f"{figure(before)}/s, {figure(after)}/s",
        result="on" if taken else "off: it gains nothing at this concurrency",
        source="roofline",
    )
    output, alone = _alone(stated)
    return (
        Part(
            decision=f"speculation with {stated.draft_tokens} tokens"
            if taken
            else "no speculation",
            output={"speculation": taken, **output},
            steps=(alone, step),
            to_measure=("acceptance on production requests: turn speculation off below 50%",),
        ),
        tried if taken else instance,
    )


def _alone(stated: Speculation) -> tuple[dict[str, Value], Step]:
    """The effect of speculation on one request in an idle instance."""
    tokens, accepted, cost = stated.draft_tokens, stated.acceptance_ratio, stated.draft_cost_ratio
    speedup = speculative_speedup(
        acceptance_ratio=accepted, draft_tokens=tokens, draft_cost_ratio=cost
    )
    output: dict[str, Value] = {
        "speculation_speedup_alone": speedup,
        "break_even_acceptance_ratio": break_even_acceptance_ratio(
            draft_tokens=tokens, draft_cost_ratio=cost
        ),
        "best_draft_tokens_alone": best_draft_tokens(
            acceptance_ratio=accepted, draft_cost_ratio=cost
        ),
    }
    step = Step(
        title="Speculation for one request",
        formula="(1 + a + ... + a^k) / (1 + k x draft cost)",
        values=f"a = {figure(accepted)}, k = {tokens}, cost {figure(cost)}",
        result=f"{figure(speedup)} times",
        source="guide 6.6; Leviathan et al. 2023",
    )
    return output, step
