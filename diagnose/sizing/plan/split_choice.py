"""Steps 5, 6 and 9 of a plan: the precision and the split over GPUs of the cheapest fleet; token
budget, speculation and P/D pools. Pure.

Guide 4, 5, 6 and 9.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import STEP_TOKENS
from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S, NETWORKS
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Step, seconds
from kneewatch.diagnose.sizing.launch_notes import several_nodes
from kneewatch.diagnose.sizing.memory.launch import (
    Launch,
    tensor_parallel_choices,
)
from kneewatch.diagnose.sizing.memory.memory_arithmetic import PlannedMemory, memory_steps
from kneewatch.diagnose.sizing.memory.weights import Parallel, fewest_kv_heads, splits
from kneewatch.diagnose.sizing.plan.memory_steps import (
    chosen_kv_dtype,
    four_bit_quantization,
    quantizations,
    stored_prefixes,
)
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool
from kneewatch.diagnose.sizing.plan.replica_curve import (
    GAIN_RATIO,
    Serving,
    Sized,
    at,
    best_point,
    planned_concurrency,
    point,
    predicted_misses,
    refusal,
    replica_launch,
    serving,
    tuned,
    usable_per_s,
)
from kneewatch.diagnose.sizing.plan.workload_profile import Speculation
from kneewatch.diagnose.sizing.speed.performance import (
    TP_OVERHEAD_RATIO,
    Drafting,
    planned_overhead_ratio,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, busiest_ratio
from kneewatch.diagnose.sizing.speed.slo_capacity import expert_exchange
from kneewatch.diagnose.speculation import reached_ratio, tokens_per_pass
from kneewatch.rules.formatting import figure, percent, plural

# --- Speculative decoding in a plan ---------------------------------------------------------------


def speculative_speedup(
    *, acceptance_ratio: float, draft_tokens: int, draft_cost_ratio: float
) -> float:
    """Speed divided by the speed without speculation, while bandwidth is the limit; below 1
    speculation makes output slower.

    `draft_cost_ratio` is one draft step divided by one target step: the ratio of the parameters
    that each reads; about 0 for n-grams.

    Source: guide 6.6.
    """
    tokens = tokens_per_pass(acceptance_ratio=acceptance_ratio, draft_tokens=draft_tokens)
    return tokens / (1 + draft_tokens * draft_cost_ratio)


def break_even_acceptance_ratio(*, draft_tokens: int, draft_cost_ratio: float) -> float | None:
    """The acceptance at which speculation neither helps nor hurts; None if it always hurts.

    Source: guide 6.6 (acceptance is the critical variable).
    """

    def speedup(ratio: float) -> float:
        return speculative_speedup(
            acceptance_ratio=ratio, draft_tokens=draft_tokens, draft_cost_ratio=draft_cost_ratio
        )

    return reached_ratio(speedup, 1.0) if speedup(1.0) >= 1 else None


_MOST_DRAFT_TOKENS = 16


def best_draft_tokens(*, acceptance_ratio: float, draft_cost_ratio: float) -> int:
    """Drafted tokens per pass with the highest speedup; 0 if no number gives a speedup."""
    return max(
        range(_MOST_DRAFT_TOKENS + 1),
        key=lambda count: speculative_speedup(
            acceptance_ratio=acceptance_ratio,
            draft_tokens=count,
            draft_cost_ratio=draft_cost_ratio,
        ),
    )


SAVING_RATIO = 0.2
"""Smallest saving of GPUs that justifies two pools; the roofline is not more accurate than that."""


def transfer(pool: Pool, replica: Serving) -> Part:
    """The part of the plan on what pools for prefill and decode would spare and cost a request: a
    prefill chunk's stall and, if a network is stated, the transfer of a prompt's KV cache."""
    if replica.limit < 1:
        return Part()
    best = best_point(replica)
    predicted = at(replica, best.concurrency if best else 1)
    stall_s = max(predicted.prefill_step.total_s - predicted.decode_step.total_s, 0.0)
    part = Part(output={"prefill_stall_s": stall_s})
    network = pool.profile.hosting.network
    if network is None:
        return part
    move_s = part.sheet.line(
        f"KV of a P95 prompt over {network}",
        "{KV cache per GPU:GB} / {bandwidth per GPU:GB/s}",
        # Each GPU moves its own share.
        (
            replica.memory.layout.request_bytes(pool.lengths.input_p95_tokens),
            LINK_BYTES_PER_S[network],
        ),
        result=f"{{:s}} (a prefill chunk stalls decode for {seconds(stall_s)})",
        source="guide 6.5",
    )
    part.output |= {"kv_transfer_s": move_s, "disaggregation_gain_s": stall_s - move_s}
    return part


def configured(pool: Pool, replica: Serving) -> tuple[Serving, tuple[Part, ...]]:
    """The replica with the token budget and the speculation that step 9 chooses, and why."""
    chunk, replica = _budget(replica)
    draft, replica = _speculation(pool, replica)
    return replica, (chunk, draft)


def batching_step(pool: Pool, replica: Serving, chosen: Sequence[Part]) -> PlanStep:
    """Step 9 (batching and speculation): what was chosen for the replica."""
    decided = [part.decision for part in chosen] + [f"{pool.phase} alone"] * bool(pool.phase)
    step = PlanStep(
        number=9,
        title="Configure batching and decode acceleration",
        decision="; ".join(("continuous batching", *decided)),
        tier=pool.name,
    )
    for part in chosen:
        step.add(part)
    step.output["disaggregate"] = bool(pool.phase)
    if not pool.phase:
        step.add(transfer(pool, replica))
    step.notes += _priorities(pool)
    return step


def _priorities(pool: Pool) -> list[str]:
    """How requests that may wait, or that are long, can let others go first (guide 1.4, 6.2)."""
    later = "--scheduling-policy priority serves requests with a lower `priority` value first"
    if pool.profile.traffic.kind == "batch":
        return [f"batch work: a fleet of its own, or one with online traffic where {later}"]
    mixed = pool.lengths.are_mixed
    return [f"short and long prompts share this fleet: {later}"] if mixed else []


def _budget(replica: Serving) -> tuple[Part, Serving]:
    """The part of the plan on the token budget per step, and the replica with the chosen budget.

    It is vLLM's own budget, or a smaller one if that serves more within the targets.
    """
    own, (best, tried) = replica.launch.batched_tokens, tuned(replica)
    taken = best.launch.batched_tokens
    part = Part(
        decision=f"chunked prefill with vLLM's budget of {own:,} tokens",
        output={"max_num_batched_tokens": taken},
        to_measure=["ITL P99 at this budget while long prompts arrive"],
    )
    if "max_num_batched_tokens" in replica.pool.deployment.flags:
        part.decision = f"chunked prefill with {own:,} tokens, as set"
    if taken != own:
        part.decision = f"{STEP_TOKENS} {taken} (default {own})"
    for tokens, usable in tried:
        title, values = f"Token budget of {tokens:,} per step", "predicted at C_max"
        result = f"{figure(usable)} requests/s"
        part.sheet.text(Step(title, "usable RPS", values, result, "guide 6.4"))
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
    part.sheet.text(
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
    part = Part()
    passed = "(1 - {a}^({k} + 1)) / (1 - {a})" if accepted < 1 else "{a} x ({k} + 1)"
    speedup = part.sheet.line(
        "Speculation for one request",
        f"{passed} / (1 + {{k}} x {{draft cost}})",
        (accepted, tokens, cost),
        result="{}x",
        source="guide 6.6; Leviathan et al. 2023",
    )
    part.output = {
        "speculation_speedup_alone": speedup,
        "break_even_acceptance_ratio": break_even_acceptance_ratio(
            draft_tokens=tokens, draft_cost_ratio=cost
        ),
        "best_draft_tokens_alone": best_draft_tokens(
            acceptance_ratio=accepted, draft_cost_ratio=cost
        ),
    }
    return part


# --- Steps 5 and 6 of a plan ----------------------------------------------------------------------


_STAGES = (1, 2, 3, 4)
_OTHER_STAGES = (5, 6, 7, 8)
"""Pipeline stages of the widest TP degree, for a model that fits with none of `_STAGES`."""


def possible_splits(pool: Pool) -> Iterator[Parallel]:
    """The splits that the model and the node allow: engines that share their experts, then TP
    within a node with pipeline stages.

    Raises:
        SizingError: the stated tensor-parallel size is impossible for the model or the node.
    """
    node, gpu, stated = pool.profile.hosting.node_gpus, pool.gpu, pool.deployment.flags
    linked = min(node, gpu.nvlink_gpus) if gpu.nvlink_bytes_per_s else node
    heads, kv_heads = max(pool.model.attention_heads, 1), fewest_kv_heads(pool.model)
    tensor, data, depth = stated.get("tp"), stated.get("dp", 0), pool.model.depth
    pipeline = stated.get("pp") or (1 if tensor else None)
    experts, several = stated.get("expert_parallel"), data > 1
    if (experts or several) and not pool.model.experts.count:
        name = "expert_parallel" if experts else "data_parallel"
        raise SizingError(f"{pool.model.id} has no routed experts", name=name)
    choices = tensor_parallel_choices(
        attention_heads=heads, kv_heads=kv_heads, domain_gpus=node if tensor else linked
    )
    if tensor and tensor not in choices:
        raise SizingError(
            f"tensor_parallel is {tensor}: it must split {heads} attention heads and {kv_heads} KV "
            f"heads on a node of {node} GPUs",
            name="tensor_parallel",
            choices=[str(choice) for choice in choices],
        )
    # A degree that does not divide the node strands GPUs.
    degrees = (tensor,) if tensor else [to for to in choices if node % to == 0]
    degrees = [to for to in degrees if not max(to, pool.peer_tensor) % min(to, pool.peer_tensor)]
    if pool.model.experts.count and experts is not False and (pipeline or 1) == 1:
        engines = (data,) if several else () if tensor or data else (2, 4, 8)
        yield from splits(degrees, engines=engines, most_gpus=math.inf if several else linked)
    if several:
        return
    stages = [count for count in ((pipeline,) if pipeline else _STAGES) if tensor or count <= depth]
    yield from splits(degrees, stages=stages, experts=bool(experts))
    if pipeline is None:
        deeper = [min(count, depth) for count in _OTHER_STAGES]
        yield from splits(degrees[-1:], stages=deeper, experts=bool(experts))


def choose_split(pool: Pool) -> tuple[Sized, Mapping[int, Sequence[str]]]:
    """The precision and split of the fleet with the fewest GPUs, of all that meet the targets, and
    why others were rejected: notes by the number of their step.

    Each that fits is predicted with the settings of steps 8 and 9. Of fleets with equally many
    GPUs, the one with the smallest and simplest replicas is taken. If none meets the targets and
    holds the stated concurrency, one that meets the targets is preferred.

    Raises:
        SizingError: nothing fits.

    Source: guide 4.5, 9.1 steps 5 and 6, 5.1 and 5.5.
    """
    tried = {quantization: _trials(pool, quantization) for quantization in quantizations(pool)}
    trials = [trial for fitting, _ in tried.values() for trial in fitting]
    if not trials:
        held, (_, short) = plural(planned_concurrency(pool), "request"), next(iter(tried.values()))
        raise SizingError(
            f"{pool.model.id} does not fit on {pool.gpu.id} with {held} of "
            f"{pool.tail_tokens:,} tokens: "
            f"{'; '.join(short)}",
            name="tensor_parallel" if "tp" in pool.deployment.flags else "gpus",
        )
    chosen = min(trials, key=_rank)
    alike, short = tried[chosen.scheme_id]
    splits = [
        _reason(named(trial.parallel), trial, named(chosen.parallel), chosen)
        for trial in alike
        if trial is not chosen
    ]
    precisions = [
        _reason(f"{quantization} weights", min(fitting, key=_rank), chosen.scheme_id, chosen)
        for quantization, (fitting, _) in tried.items()
        if fitting and quantization != chosen.scheme_id
    ]
    return chosen, {5: precisions, 6: [*short, *splits]}


def _trials(pool: Pool, quantization: str) -> tuple[list[Sized], list[str]]:
    """Every split with this precision that fits, and why others do not."""
    trials: list[Sized] = []
    short: dict[str, list[str]] = {}
    kv_cache_dtype = chosen_kv_dtype(pool)[0]
    for parallel in possible_splits(pool):
        if trials and parallel.pipeline in _OTHER_STAGES and "pp" not in pool.deployment.flags:
            break
        launch = replica_launch(
            pool, parallel, quantization=quantization, kv_cache_dtype=kv_cache_dtype
        )
        if reason := refusal(pool, launch):
            short.setdefault(reason, []).append(named(parallel))
        else:
            trials.append(_trial(pool, launch))
    return trials, [f"{', '.join(names)} rejected: {reason}" for reason, names in short.items()]


def four_bit_gpus(pool: Pool, chosen: Sized) -> Part:
    """The part of the plan on weights in 4 bits, where their fleet has far fewer GPUs.

    It is not taken: answers in 4 bits must be tested first (guide 4.1 and 4.5).
    """
    quantization = four_bit_quantization(pool)
    if quantization is None or chosen.fleet is None:
        return Part()
    trials, _ = _trials(pool, quantization)
    gpus = [trial.fleet.gpus for trial in trials if trial.fleet is not None and not trial.unmet]
    fewest = min(gpus, default=chosen.fleet.gpus)
    if fewest >= (1 - SAVING_RATIO) * chosen.fleet.gpus:
        return Part()
    return Part(
        output={"four_bit_quantization": quantization, "four_bit_gpus": fewest},
        to_measure=[f"answer quality with {quantization} weights, which would take fewer GPUs"],
    )


def _rank(trial: Sized) -> tuple[float, ...]:
    # Where no fleet is known, the replica with the fewest GPUs.
    return (
        trial.fleet is None,
        bool(trial.unmet),
        0 if trial.fleet is None else trial.fleet.gpus,
        trial.parallel.gpus,
        trial.parallel.pipeline,
        trial.parallel.data,
        trial.parallel.experts,
    )


def _reason(name: str, trial: Sized, taken: str, chosen: Sized) -> str:
    if trial.unmet and not chosen.unmet:
        return f"{name} rejected: {trial.unmet}"
    if trial.fleet is None or chosen.fleet is None:
        return f"{name} rejected: {trial.unmet or 'larger, and nothing to compare speeds by'}"
    if trial.fleet.gpus == chosen.fleet.gpus:
        return f"{name} rejected: as many GPUs as {taken}, whose replicas are smaller or simpler"
    needed = plural(trial.fleet.gpus, "GPU")
    return f"{name} rejected: {needed} for the peak, {chosen.fleet.gpus} with {taken}"


def _trial(pool: Pool, launch: Launch) -> Sized:
    replica, parts = configured(pool, stored_prefixes(pool, serving(pool, launch))[1])
    best = best_point(replica)
    return Sized(
        replica=replica,
        parts=parts,
        point=best,
        unmet=unmet(replica, best),
        usable_requests_per_s=None if best is None else best.requests_per_s,
    )


def unmet(replica: Serving, best: BenchmarkPoint | None) -> str:
    """Which stated requirement the replica does not keep; empty if it keeps all.

    `best` is the replica at C_max; None if no concurrency meets the targets.
    """
    pool = replica.pool
    if best is None:
        return "; ".join(predicted_misses(replica, point(replica, 1)))
    wanted = pool.deployment.concurrency
    if wanted is None or best.concurrency >= wanted or not pool.profile.slo.are_set:
        return ""
    return f"meets the targets with {best.concurrency:g} requests in flight, {wanted} are needed"


def named(parallel: Parallel) -> str:
    """The split in the field's words."""
    stages = f" x PP {parallel.pipeline}" if parallel.pipeline > 1 else ""
    stages += f" x DP {parallel.data}" if parallel.data > 1 else ""
    return f"TP {parallel.tensor}{stages}{' with expert parallelism' if parallel.experts else ''}"


def parallel_step(
    pool: Pool,
    launch: Launch,
    before: PlannedMemory,
    after: PlannedMemory,
    notes: Sequence[str],
) -> PlanStep:
    """Step 6: TP and PP of one replica, and the cost of the all-reduces."""
    node, replica = pool.profile.hosting.node_gpus, serving(pool, launch)
    parallel = launch.parallel
    stages, decode = parallel.pipeline, at(replica, 1).decode_step
    link, planned = replica.costs.link.lower(), None
    if link in TP_OVERHEAD_RATIO:
        planned = planned_overhead_ratio(link=link, tensor_parallel=parallel.tensor)
    bubble_ratio = (stages - 1) / (stages * DEFAULT.microbatches_per_stage + stages - 1)
    nodes = math.ceil(parallel.gpus / node)
    network = pool.profile.hosting.network or NETWORKS[0]
    between = f" in each of {nodes} nodes, {network} between them" if nodes > 1 else ""
    where = f"over {link}{between}"
    step = PlanStep(
        number=6,
        title="Select the parallelism",
        decision=f"{named(parallel)}: {plural(parallel.gpus, 'GPU')} per replica, {where}",
        output={
            "tensor_parallel": parallel.tensor,
            "pipeline_parallel": stages,
            "gpus_per_instance": parallel.gpus,
            **({"instances_per_node": node // parallel.gpus} if nodes == 1 else {}),
            "nodes_per_instance": nodes,
            "link": link,
            "allreduce_ratio_planned": planned,
            "allreduce_ratio_predicted": decode.interconnect_s / decode.total_s,
            "pipeline_bubble_ratio": bubble_ratio,
            "kv_available_bytes_per_gpu": replica.memory.available_bytes.expected,
            "kv_concurrency_at_p95": replica.memory.held.expected,
        },
        notes=list(notes),
        tier=pool.name,
    )
    step.sheet.text(*memory_steps(replica.memory))
    lost = decode.interconnect_s / decode.total_s if planned is None else planned
    step.sheet.line(
        "Speedup of tensor parallelism",
        "{TP} x (1 - {all-reduce share})",
        (parallel.tensor, lost),
        result="{}x one GPU",
        source="guide 5.1; roofline" if planned is None else "guide 5.1, 5.6",
    )
    if parallel.tensor > 1:
        step.to_measure.append("the all-reduce share of a decode step on these nodes")
    if parallel.experts:
        step.add(_experts(pool, replica))
    if nodes > 1:
        step.notes.append(several_nodes(nodes))
        step.to_measure.append(f"bandwidth and latency of {network} between a replica's nodes")
    floor, published = after.gpus(), before.gpus()
    if parallel.gpus < floor:
        step.notes.append(
            f"vLLM's own accounting fits in fewer GPUs than the memory floor of {floor}"
        )
    if published > floor:
        step.notes.append(f"quantization lowered the memory floor from {published} GPUs to {floor}")
    if stages > 1:
        step.to_measure.append(
            "throughput with these pipeline stages: one published pair of runs is behind their "
            "predicted idle share"
        )
    return step


def _experts(pool: Pool, replica: Serving) -> Part:
    """The part of the plan on expert parallelism: its imbalance, and its share of the TTFT."""
    gpus, costs = replica.launch.parallel.gpus, replica.costs
    part = Part(
        to_measure=["how unevenly production tokens use the experts: the busiest GPU sets the pace"]
    )
    exchange_s = expert_exchange(
        part.sheet,
        pool.model,
        costs,
        tokens=pool.lengths.input_p99_tokens,
        gpus=gpus,
        of="of a P99 prompt",
    )
    part.output = {
        "expert_exchange_s": exchange_s,
        "busiest_gpu_load": busiest_ratio(pool.model.experts.count, gpus),
    }
    if target_s := pool.profile.slo.ttft_p99_s:
        part.notes.append(
            f"the experts' all-to-all takes {percent(exchange_s / target_s)} of the TTFT target"
        )
    return part
