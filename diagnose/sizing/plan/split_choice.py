"""Steps 5 and 6 of a plan: the precision and the split over GPUs of the cheapest fleet. Pure.

Guide 4, 5 and 9.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.gpu_specs import NETWORKS
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.benchmark.operating_point import missed_targets
from kneewatch.diagnose.sizing.launch_notes import several_nodes
from kneewatch.diagnose.sizing.memory.launch_setup import (
    Setup,
    check_tensor_parallel,
    tensor_parallel_choices,
)
from kneewatch.diagnose.sizing.memory.memory_arithmetic import memory_steps
from kneewatch.diagnose.sizing.memory.planned_memory import PlannedMemory
from kneewatch.diagnose.sizing.memory.weights import Parallel, fewest_kv_heads, splits
from kneewatch.diagnose.sizing.plan.launch_steps import SAVING_RATIO, configured
from kneewatch.diagnose.sizing.plan.memory_steps import (
    four_bit_quantization,
    quantizations,
    stored_prefixes,
)
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool
from kneewatch.diagnose.sizing.plan.replica_cost_steps import fleet_for
from kneewatch.diagnose.sizing.plan.replica_curve import (
    Serving,
    at,
    best_point,
    launch,
    planned_concurrency,
    point,
    refusal,
    serving,
)
from kneewatch.diagnose.sizing.speed.performance import (
    TP_OVERHEAD_RATIO,
    planned_overhead_ratio,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, busiest_ratio
from kneewatch.diagnose.sizing.speed.slo_capacity import expert_exchange
from kneewatch.rules.formatting import percent, plural

_STAGES = (1, 2, 3, 4)
_OTHER_STAGES = (5, 6, 7, 8)
"""Pipeline stages of the widest TP degree, for a model that fits with none of `_STAGES`."""


class Trial(Struct, frozen=True):
    """A split that fits, with the settings of steps 8 and 9.

    `gpus` of the fleet for the peak; None if no concurrency meets the targets, or if there are
    none. `unmet` is the stated requirement that the replica does not keep.
    """

    setup: Setup
    gpus: int | None
    unmet: str


class Split(Struct, frozen=True, kw_only=True):
    """The chosen precision and split of the model over GPUs, and why others were rejected.

    `gpus` of its fleet for the peak; None if that is unknown.
    """

    setup: Setup
    gpus: int | None
    refused: tuple[str, ...]
    precisions: tuple[str, ...] = ()


def possible_splits(pool: Pool) -> Iterator[Parallel]:
    """The splits that the model and the node allow: engines that share their experts, then TP
    within a node with pipeline stages.

    Raises:
        SizingError: the stated tensor-parallel size is impossible for the model or the node.
    """
    node, gpu, stated = pool.profile.hosting.node_gpus, pool.gpu, pool.deployment
    linked = min(node, gpu.nvlink_gpus) if gpu.nvlink_bytes_per_s else node
    heads, kv_heads = max(pool.model.attention_heads, 1), fewest_kv_heads(pool.model)
    tensor, data, depth = stated.tensor_parallel, stated.data_parallel or 0, pool.model.depth
    pipeline = stated.pipeline_parallel or (1 if tensor else None)
    experts, several = bool(stated.expert_parallel), data > 1
    if (experts or several) and not pool.model.experts.count:
        name = "expert_parallel" if experts else "data_parallel"
        raise SizingError(f"{pool.model.id} has no routed experts", name=name)
    if tensor is not None:
        check_tensor_parallel(
            tensor_parallel=tensor, attention_heads=heads, kv_heads=kv_heads, domain_gpus=node
        )
    # A degree that does not divide the node strands GPUs.
    degrees = (
        (tensor,)
        if tensor
        else tuple(
            degree
            for degree in tensor_parallel_choices(
                attention_heads=heads, kv_heads=kv_heads, domain_gpus=linked
            )
            if node % degree == 0
        )
    )
    if pool.model.experts.count and stated.expert_parallel is not False and (pipeline or 1) == 1:
        engines = (data,) if several else () if tensor or data else (2, 4, 8)
        yield from splits(degrees, engines=engines, most_gpus=math.inf if several else linked)
    if several:
        return
    stages = [count for count in ((pipeline,) if pipeline else _STAGES) if tensor or count <= depth]
    yield from splits(degrees, stages=stages, experts=experts)
    if pipeline is None:
        deeper = [min(count, depth) for count in _OTHER_STAGES]
        yield from splits(degrees[-1:], stages=deeper, experts=experts)


def choose_split(pool: Pool, *, kv_cache_dtype: str) -> Split:
    """The precision and split of the fleet with the fewest GPUs, of all that meet the targets.

    Each that fits is predicted with the settings of steps 8 and 9. Of fleets with equally many
    GPUs, the one with the smallest replicas is taken. If none meets the targets and holds the
    stated concurrency, one that meets the targets is preferred.

    Raises:
        SizingError: nothing fits.

    Source: guide 4.5, 9.1 steps 5 and 6, 5.1 and 5.5.
    """
    named_schemes = tuple(quantizations(pool))
    trials: list[Trial] = []
    short: dict[str, list[str]] = {}
    for quantization in named_schemes:
        fitting, short[quantization] = _trials(pool, quantization, kv_cache_dtype)
        trials += fitting
    if not trials:
        held = plural(planned_concurrency(pool), "request")
        raise SizingError(
            f"{pool.model.id} does not fit on {pool.gpu.id} with {held} of "
            f"{pool.tail_tokens:,} tokens: "
            f"{'; '.join(short[named_schemes[0]])}",
            name="tensor_parallel" if pool.deployment.tensor_parallel else "gpus",
        )
    chosen = min(trials, key=_rank)
    own = chosen.setup.scheme.id
    refused = short[own] + [
        _reason(named(trial.setup.parallel), trial, named(chosen.setup.parallel), chosen)
        for trial in trials
        if trial is not chosen and trial.setup.scheme.id == own
    ]
    others = [[t for t in trials if t.setup.scheme.id == name] for name in named_schemes]
    precisions = [
        _reason(f"{best.setup.scheme.id} weights", best, own, chosen)
        for group in others
        if group and (best := min(group, key=_rank)).setup.scheme.id != own
    ]
    return Split(
        setup=chosen.setup,
        gpus=chosen.gpus,
        refused=tuple(refused),
        precisions=tuple(precisions),
    )


def _trials(pool: Pool, quantization: str, kv_cache_dtype: str) -> tuple[list[Trial], list[str]]:
    """Every split with this precision that fits, and why others do not."""
    trials: list[Trial] = []
    short: dict[str, list[str]] = {}
    for parallel in possible_splits(pool):
        if trials and parallel.pipeline in _OTHER_STAGES and not pool.deployment.pipeline_parallel:
            break
        setup = launch(pool, parallel, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        if reason := refusal(pool, setup):
            short.setdefault(reason, []).append(named(parallel))
        else:
            trials.append(_trial(pool, setup))
    return trials, [f"{', '.join(names)} rejected: {reason}" for reason, names in short.items()]


def four_bit_gpus(pool: Pool, chosen: Split, *, kv_cache_dtype: str) -> Part:
    """The part of the plan on weights in 4 bits, where their fleet has far fewer GPUs.

    It is not taken: answers in 4 bits must be tested first (guide 4.1 and 4.5).
    """
    quantization = four_bit_quantization(pool)
    if quantization is None or chosen.gpus is None:
        return Part()
    trials, _ = _trials(pool, quantization, kv_cache_dtype)
    gpus = [trial.gpus for trial in trials if trial.gpus is not None and not trial.unmet]
    fewest = min(gpus, default=chosen.gpus)
    if fewest >= (1 - SAVING_RATIO) * chosen.gpus:
        return Part()
    return Part(
        output={"four_bit_quantization": quantization, "four_bit_gpus": fewest},
        to_measure=[f"answer quality with {quantization} weights, which would take fewer GPUs"],
    )


def _rank(trial: Trial) -> tuple[float, ...]:
    parallel = trial.setup.parallel
    # Where no fleet is known, the replica with the fewest GPUs.
    return (
        trial.gpus is None,
        bool(trial.unmet),
        trial.gpus or 0,
        parallel.gpus,
        parallel.pipeline,
    )


def _reason(name: str, trial: Trial, taken: str, chosen: Trial) -> str:
    if trial.unmet and not chosen.unmet:
        return f"{name} rejected: {trial.unmet}"
    if trial.gpus is None or chosen.gpus is None:
        return f"{name} rejected: {trial.unmet or 'larger, and nothing to compare speeds by'}"
    needed = plural(trial.gpus, "GPU")
    return f"{name} rejected: {needed} for the peak, {chosen.gpus} with {taken}"


def _trial(pool: Pool, setup: Setup) -> Trial:
    replica = configured(pool, stored_prefixes(pool, serving(pool, setup))[1])
    best = best_point(replica)
    fleet = None if best is None else fleet_for(pool, best.requests_per_s, setup.parallel.gpus)
    return Trial(setup, None if fleet is None else fleet.gpus, unmet(replica, best))


def unmet(replica: Serving, best: BenchmarkPoint | None) -> str:
    """Which stated requirement the replica does not keep; empty if it keeps all.

    `best` is the replica at C_max; None if no concurrency meets the targets.
    """
    pool = replica.pool
    if best is None:
        return "; ".join(missed_targets(point(replica, 1), pool.profile.slo))
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
    pool: Pool, split: Split, before: PlannedMemory, after: PlannedMemory
) -> PlanStep:
    """Step 6: TP and PP of one replica, and the cost of the all-reduces."""
    node, replica = pool.profile.hosting.node_gpus, serving(pool, split.setup)
    parallel = split.setup.parallel
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
            "kv_concurrency_at_p95": replica.memory.concurrency.expected,
        },
        notes=list(split.refused),
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
    gpus, costs = replica.setup.parallel.gpus, replica.costs
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
