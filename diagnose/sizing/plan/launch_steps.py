"""Steps 6 and 9 of a plan: parallelism; token budget, speculation and P/D pools. Pure.

Guide 5, 6 and 9.1.
"""

from __future__ import annotations

import dataclasses

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Step, gigabytes, seconds
from kneewatch.diagnose.sizing.memory.launch_setup import (
    Setup,
    check_tensor_parallel,
    tensor_parallel_choices,
)
from kneewatch.diagnose.sizing.memory.weights import Parallel, fewest_kv_heads
from kneewatch.diagnose.sizing.plan.memory_steps import Floor, planned_concurrency
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.replica_curve import (
    GAIN_RATIO,
    Serving,
    at,
    best_point,
    fits,
    launch,
    serving,
    tuned,
    usable_per_s,
)
from kneewatch.diagnose.sizing.plan.workload_profile import Slo, Speculation
from kneewatch.diagnose.sizing.replica_count import PrefillDecodeRatio, prefill_decode_ratio
from kneewatch.diagnose.sizing.speed.performance import Drafting, planned_overhead_ratio
from kneewatch.diagnose.speculation import (
    best_draft_tokens,
    break_even_acceptance_ratio,
    speculative_speedup,
)
from kneewatch.rules.formatting import figure, plural

PCIE_TENSOR_PARALLEL = 2
"""Largest TP degree to plan without NVLink (guide 9.1 step 2)."""
_MOST_STAGES = 8
_NEARLY_RATIO = 0.9


class Split(Struct, frozen=True, kw_only=True):
    """The chosen split of the model over GPUs, and why others were rejected."""

    setup: Setup
    refused: tuple[str, ...]
    keeps_targets: bool


def splits(pool: Pool) -> tuple[Parallel, ...]:
    """The splits that model and node allow, fewest GPUs first.

    Splits by TP within a node come first, then pipeline stages.

    Raises:
        SizingError: the stated tensor-parallel size is impossible for the model or the node.
    """
    node, gpu = pool.profile.hosting.node_gpus, pool.gpu
    linked = min(node, gpu.nvlink_gpus) if gpu.nvlink_bytes_per_s else PCIE_TENSOR_PARALLEL
    heads, kv_heads = max(pool.model.attention_heads, 1), fewest_kv_heads(pool.model)
    stated, pipeline = pool.deployment.tensor_parallel, pool.deployment.pipeline_parallel
    if stated is not None:
        check_tensor_parallel(
            tensor_parallel=stated, attention_heads=heads, kv_heads=kv_heads, domain_gpus=node
        )
        return (Parallel(tensor=stated, pipeline=pipeline or 1),)
    degrees = tensor_parallel_choices(
        attention_heads=heads, kv_heads=kv_heads, domain_gpus=min(linked, node)
    )
    # A degree that does not divide the node strands GPUs.
    degrees = tuple(degree for degree in degrees if node % degree == 0)
    if pipeline is not None:
        return tuple(Parallel(tensor=degree, pipeline=pipeline) for degree in degrees)
    stages = range(2, min(_MOST_STAGES, pool.model.depth) + 1)
    return (
        *(Parallel(tensor=degree) for degree in degrees),
        *(Parallel(tensor=degrees[-1], pipeline=count) for count in stages),
    )


def choose_split(pool: Pool, floor: Floor, *, quantization: str, kv_cache_dtype: str) -> Split:
    """The fewest GPUs that meet the memory floor, vLLM's own memory accounting and the targets.

    A stated concurrency must meet the targets according to the roofline. If none is stated, or if
    no split meets the targets, the split with the most throughput per GPU is chosen. If several are
    nearly equal, the smallest of them.

    Raises:
        SizingError: nothing fits.

    Source: guide 9.1 step 6, 5.1 and 5.5.
    """
    refused: list[str] = []
    fitting: list[Setup] = []
    for parallel in splits(pool):
        # Stages are for what one link domain cannot hold, not for speed.
        if fitting and parallel.pipeline > fitting[0].parallel.pipeline:
            break
        setup = launch(pool, parallel, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        why = _misfit(pool, floor, setup)
        if why:
            refused.append(f"{_name(parallel)} rejected: {why}")
        else:
            fitting.append(setup)
    if not fitting:
        raise SizingError(
            f"{pool.model.id} does not fit on {pool.gpu.id} with "
            f"{plural(planned_concurrency(pool), 'request')} of {pool.tail_tokens:,} tokens: "
            f"{'; '.join(refused)}",
            name="tensor_parallel" if pool.deployment.tensor_parallel else "gpus",
        )
    if not pool.profile.slo.are_set:
        return Split(setup=fitting[0], refused=tuple(refused), keeps_targets=True)
    return _for_targets(pool, fitting, refused)


def _misfit(pool: Pool, floor: Floor, setup: Setup) -> str:
    """Why a replica is too small; empty if it is not. A stated split may be below the memory
    floor."""
    gpus, concurrency = setup.parallel.gpus, planned_concurrency(pool)
    if gpus < floor.gpus and pool.deployment.tensor_parallel is None:
        return f"below the memory floor of {plural(floor.gpus, 'GPU')}"
    if not fits(pool, setup, concurrency=concurrency):
        return f"the KV cache would not hold {plural(concurrency, 'request')} of P95 length"
    return ""


def _for_targets(pool: Pool, fitting: list[Setup], refused: list[str]) -> Split:
    concurrency = pool.deployment.concurrency
    carried: list[tuple[float, Setup]] = []
    for setup in fitting:
        replica = tuned(serving(pool, setup))[0]
        best = best_point(replica)
        carried.append((best.requests_per_s / setup.parallel.gpus if best else 0.0, setup))
        if concurrency is None:
            continue
        if best is not None and best.concurrency >= concurrency:
            return Split(setup=setup, refused=tuple(refused), keeps_targets=True)
        reached = f"{best.concurrency:g}" if best else "0"
        refused.append(
            f"{_name(setup.parallel)} rejected: meets the targets with {reached} requests in "
            f"flight, {concurrency} are needed"
        )
    most = max(rate for rate, _ in carried)
    # Of splits that serve nearly the same per GPU, the smaller.
    chosen_rate, chosen = next(pair for pair in carried if pair[0] >= most * _NEARLY_RATIO)
    refused.extend(
        f"{_name(setup.parallel)} rejected: {figure(rate)} requests/s per GPU within the targets, "
        f"{figure(chosen_rate)} with {_name(chosen.parallel)}"
        for rate, setup in carried
        if setup is not chosen
    )
    return Split(setup=chosen, refused=tuple(refused), keeps_targets=most > 0)


def _name(parallel: Parallel) -> str:
    stages = f" x PP {parallel.pipeline}" if parallel.pipeline > 1 else ""
    return f"TP {parallel.tensor}{stages}"


def parallel_step(pool: Pool, split: Split, before: Floor, after: Floor) -> PlanStep:
    """Step 6: TP and PP of one replica, and the cost of the all-reduces."""
    setup, gpu = split.setup, pool.gpu
    parallel, replica = setup.parallel, serving(pool, setup)
    stages = parallel.pipeline
    within_domain = gpu.nvlink_bytes_per_s is not None and parallel.tensor <= gpu.nvlink_gpus
    link = "nvlink" if within_domain else "pcie"
    planned = planned_overhead_ratio(link=link, tensor_parallel=parallel.tensor)
    decode = at(replica, 1).decode_step
    step = PlanStep(
        number=6,
        title="Select the parallelism",
        decision=f"{_name(parallel)}: {plural(parallel.gpus, 'GPU')} per replica, over {link}",
        output={
            "tensor_parallel": parallel.tensor,
            "pipeline_parallel": stages,
            "gpus_per_instance": parallel.gpus,
            "instances_per_node": pool.profile.hosting.node_gpus // parallel.gpus,
            "link": link,
            "allreduce_ratio_planned": planned,
            "allreduce_ratio_predicted": decode.interconnect_s / decode.total_s,
            # The roofline deals the running requests to as many micro-batches as stages.
            "pipeline_bubble_ratio": (stages - 1) / (2 * stages - 1),
            "kv_available_bytes_per_gpu": replica.memory.available_bytes.expected,
            "kv_concurrency_at_p95": replica.memory.concurrency.expected,
        },
        steps=_parallel_steps(pool, replica, planned),
        notes=list(split.refused),
        tier=pool.name,
    )
    if parallel.tensor > 1:
        step.to_measure.append("the all-reduce share of a decode step on these nodes")
    if not split.keeps_targets:
        step.notes.append(
            "no parallelism is predicted to meet the targets: choose other GPUs or other targets"
        )
    if before.gpus > after.gpus:
        step.notes.append(
            f"quantization lowered the memory floor from {before.gpus} GPUs to {after.gpus}"
        )
    if stages > 1:
        step.notes.append(
            f"{stages} pipeline stages, because one NVLink domain is too small; idle stages cost "
            "throughput"
        )
    return step


def _parallel_steps(pool: Pool, replica: Serving, planned: float) -> list[Step]:
    setup, answer = replica.setup, replica.memory
    tensor = setup.parallel.tensor
    taken = setup.utilization * pool.gpu.memory_bytes / 1e9
    weights = (answer.weights_bytes or 0.0) / 1e9
    free = answer.available_bytes.expected / 1e9
    held = answer.concurrency.expected
    request_mb = answer.layout.request_bytes(setup.context) / 1e6
    return [
        Step(
            title="KV cache of one GPU",
            formula="utilization x memory - weights - overhead",
            values=f"{figure(taken)} - {figure(weights)} - {figure(taken - weights - free)} GB",
            result=f"{figure(free)} GB",
            source="guide 2.6; overheads fitted to vLLM's start-up logs",
        ),
        Step(
            title="Concurrent requests of P95 length",
            formula="KV cache per GPU / bytes of a request per GPU",
            values=f"{figure(free)} GB / {figure(request_mb)} MB",
            result=figure(held),
            source="guide 2.2",
        ),
        Step(
            title="Speedup of tensor parallelism",
            formula="TP x (1 - all-reduce share)",
            values=f"{tensor} x (1 - {figure(planned)})",
            result=f"{figure(tensor * (1 - planned))}x one GPU",
            source="guide 5.1, 5.6",
        ),
    ]


# --- Step 9: token budget, speculation, one pool or two (guide 6) ---------------------------------


SHORT_PROMPT_TOKENS = 500
"""Shorter prompts are better prefilled on the server that decodes them (guide 6.5)."""

SAVING_RATIO = 0.2
"""Smallest saving of GPUs that justifies two pools; the roofline is not more accurate than that."""

_ALL_CACHED_RATIO = 1.0  # a decode pool computes no prompt


def disaggregation(pool: Pool, replica: Serving) -> Part:
    """The part of the plan on P/D pools: P:D ratio, seconds to transfer the KV, and GPUs saved."""
    part = Part(decision="prefill and decode on the same replicas", output={"disaggregate": False})
    if replica.limit < 1:
        return part
    best, ratio = best_point(replica), _ratio(pool, replica)
    predicted = at(replica, best.concurrency if best else 1)
    stall_s = max(predicted.prefill_step.total_s - predicted.decode_step.total_s, 0.0)
    worth, why = _worth(pool, replica, ratio, None if best is None else best.requests_per_s)
    part.output |= {"disaggregate": worth, "prefill_stall_s": stall_s}
    if ratio is not None:
        part.output |= {"pd_ratio": ratio.text, "pd_gpus_exact": _gpus(ratio)}
        part.steps.append(ratio.step)
    part.add(_transfer(pool, replica, stall_s))
    part.notes.append(why)
    if worth:
        part.decision = "test prefill and decode in separate pools"
        part.to_measure.append("tokens/s of each phase alone, for the P:D ratio")
    return part


def _gpus(ratio: PrefillDecodeRatio) -> float:
    return ratio.prefill_gpus_exact + ratio.decode_gpus_exact


def _ratio(pool: Pool, replica: Serving) -> PrefillDecodeRatio | None:
    """The sizes of the prefill pool and the decode pool, from the rate of each phase alone.

    None if decode alone already misses its target.
    """
    profile = dataclasses.replace(pool.profile, slo=Slo(itl_p99_s=pool.profile.slo.itl_p99_s))
    decoding = replace(replica, pool=replace(pool, profile=profile), hit_ratio=_ALL_CACHED_RATIO)
    best = best_point(decoding)
    if best is None and profile.slo.itl_p99_s is not None:
        return None
    alone = at(decoding, best.concurrency if best else decoding.limit)
    gpus = replica.setup.parallel.gpus
    return prefill_decode_ratio(
        peak_requests_per_s=pool.peak_requests_per_s,
        input_tokens=pool.lengths.mean_input_tokens * (1 - replica.hit_ratio),
        output_tokens=pool.lengths.mean_output_tokens,
        prefill_tokens_per_s_per_gpu=at(replica, 1).prefill_tokens_per_s / gpus,
        decode_tokens_per_s_per_gpu=alone.decode_tokens_per_s / gpus,
    )


def _transfer(pool: Pool, replica: Serving, stall_s: float) -> Part:
    """The part of the plan on seconds to transfer a prompt's KV between the pools.

    Empty if no network is stated.
    """
    network = pool.profile.hosting.network
    if network is None:
        return Part()
    # Each GPU moves its own share.
    moved = replica.memory.layout.request_bytes(pool.lengths.input_p95_tokens)
    rate = LINK_BYTES_PER_S[network]
    move_s = moved / rate
    step = Step(
        title=f"KV of a P95 prompt over {network}",
        formula="bytes per GPU / bandwidth per GPU",
        values=f"{gigabytes(moved)} / {gigabytes(rate)}/s",
        result=f"{seconds(move_s)} (a prefill chunk stalls decode for {seconds(stall_s)})",
        source="guide 6.5",
    )
    output: dict[str, Value] = {
        "kv_transfer_s": move_s,
        "disaggregation_gain_s": stall_s - move_s,
    }
    return Part(output=output, steps=[step])


def _worth(
    pool: Pool, replica: Serving, ratio: PrefillDecodeRatio | None, usable: float | None
) -> tuple[bool, str]:
    if pool.lengths.mean_input_tokens < SHORT_PROMPT_TOKENS:
        return False, (
            f"one pool for prefill and decode: prompts are shorter than {SHORT_PROMPT_TOKENS} "
            "tokens"
        )
    if ratio is None:
        return (
            False,
            "one pool: decode misses the ITL target even without prefill, so two would not help",
        )
    gpus = replica.setup.parallel.gpus
    if ratio.prefill_gpus_exact < gpus:
        return False, (
            "one pool: the load is too small for two, a prefill replica would be mostly idle"
        )
    if pool.profile.hosting.network is None:
        return False, (
            "two pools were not considered: set hosting.network, so that the KV transfer time "
            "is known"
        )
    if usable is None:
        return True, "one pool misses the targets at any concurrency; two pools might meet them"
    together = pool.peak_requests_per_s / usable * gpus
    compared = (
        f"two pools need {figure(_gpus(ratio))} GPUs, one pool {figure(together)} (before the "
        "safety factor)"
    )
    return _gpus(ratio) < (1 - SAVING_RATIO) * together, compared


def batching_step(pool: Pool, replica: Serving) -> tuple[PlanStep, Serving]:
    """Step 9 (batching and speculation), and the replica with the chosen settings."""
    chunk, replica = _budget(replica)
    draft, replica = _speculation(pool, replica)
    parts = (chunk, draft, disaggregation(pool, replica))
    step = PlanStep(
        number=9,
        title="Configure batching and decode acceleration",
        decision="continuous batching; " + "; ".join(part.decision for part in parts),
        tier=pool.name,
    )
    for part in parts:
        step.add(part)
    if pool.profile.traffic.kind == "batch":
        step.notes.append("batch work: keep this fleet separate from online traffic")
    return step, replica


def _budget(replica: Serving) -> tuple[Part, Serving]:
    """The part of the plan on the token budget per step, and the replica with the chosen budget.

    It is vLLM's own budget, or a smaller one if that serves more within the targets.
    """
    own, (best, tried) = replica.setup.batched_tokens, tuned(replica)
    taken = best.setup.batched_tokens
    part = Part(
        decision=f"chunked prefill with vLLM's budget of {own:,} tokens",
        output={"max_num_batched_tokens": taken},
        to_measure=["ITL P99 at this budget while long prompts arrive"],
    )
    if taken != own:
        part.decision = f"--max-num-batched-tokens {taken} (default {own})"
    for tokens, usable in tried:
        title, values = f"Token budget of {tokens:,} per step", "predicted at C_max"
        result = f"{figure(usable)} requests/s"
        part.steps.append(Step(title, "usable RPS", values, result, "guide 6.4"))
    return part, best


def _speculation(pool: Pool, replica: Serving) -> tuple[Part, Serving]:
    stated = pool.profile.speculation
    if stated is None:
        note = "speculation was not considered: no acceptance ratio is set"
        return Part(decision="no speculation", notes=[note]), replica
    drafting = Drafting(
        tokens=stated.draft_tokens,
        acceptance_ratio=stated.acceptance_ratio,
        cost_ratio=stated.draft_cost_ratio,
    )
    tried = replace(replica, drafting=drafting)
    before, after = usable_per_s(replica), usable_per_s(tried)
    taken = after > before * GAIN_RATIO
    part = Part(
        decision=f"speculation with {stated.draft_tokens} tokens" if taken else "no speculation",
        output={"speculation": taken},
        to_measure=["acceptance on production requests: turn speculation off below 50%"],
    )
    part.add(_alone(stated))
    part.steps.append(
        Step(
            title="Usable RPS with speculation",
            formula="within the targets, without and with speculation",
            values=f"{figure(before)} and {figure(after)} requests/s",
            result="on" if taken else "off: no gain at this concurrency",
            source="roofline",
        )
    )
    return part, tried if taken else replica


def _alone(stated: Speculation) -> Part:
    """The part of the plan on the effect of speculation on a single request in an idle replica."""
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
        result=f"{figure(speedup)}x",
        source="guide 6.6; Leviathan et al. 2023",
    )
    return Part(output=output, steps=[step])
