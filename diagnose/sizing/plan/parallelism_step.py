"""Step 6 of a plan: the fewest GPUs that one instance can be split over. Pure. Guide 5, 9.1."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import FullAttention, SlidingAttention
from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.plan.instance_curve import (
    Serving,
    at,
    best_point,
    fits,
    has_target,
    launch,
    serving,
    tuned,
)
from kneewatch.diagnose.sizing.plan.memory_steps import Floor, planned_concurrency
from kneewatch.diagnose.sizing.plan.plan_result import PlanStep, Pool, counted
from kneewatch.diagnose.sizing.speed.model_parallelism import (
    check_tensor_parallel,
    pipeline_bubble_ratio,
    planned_overhead_ratio,
    replicas_per_node,
    tensor_parallel_choices,
)

PCIE_TENSOR_PARALLEL = 2
"""Largest TP to plan without NVLink (guide 9.1 step 2)."""
_MOST_STAGES = 8
_NEARLY_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The chosen split, and the reasons against others."""

    setup: Setup
    refused: tuple[str, ...]
    keeps_targets: bool


def splits(pool: Pool) -> tuple[Parallel, ...]:
    """The splits that model and node allow, fewest GPUs first: TP within a node, then pipeline
    stages.

    Raises:
        SizingError: the stated tensor parallel size is impossible for the model or the node.
    """
    node, gpu = pool.profile.hosting.node_gpus, pool.gpu
    linked = min(node, gpu.nvlink_gpus) if gpu.nvlink_bytes_per_s else PCIE_TENSOR_PARALLEL
    kinds = [part.kind for part in pool.model.layers]
    kv_heads = min(
        (k.kv_heads for k in kinds if isinstance(k, FullAttention | SlidingAttention)), default=1
    )
    heads = max(pool.model.attention_heads, 1)
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
    """The fewest GPUs that meet the memory floor, vLLM's own accounting and the targets.

    A stated concurrency must meet the targets by the roofline. Without one, or if no split meets
    them, the split that serves most per GPU is chosen, the smaller of nearly equal ones.

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
            refused.append(f"{_name(parallel)}: {why}")
        else:
            fitting.append(setup)
    if not fitting:
        raise SizingError(
            f"no split of {pool.model.id} over {pool.gpu.id} holds {planned_concurrency(pool)} "
            f"requests of {pool.tail_tokens:,} tokens: {'; '.join(refused)}",
            name="tensor_parallel" if pool.deployment.tensor_parallel else "gpus",
        )
    if not has_target(pool.profile.slo):
        return Split(setup=fitting[0], refused=tuple(refused), keeps_targets=True)
    return _for_targets(pool, fitting, refused)


def _misfit(pool: Pool, floor: Floor, setup: Setup) -> str:
    """Why an instance is too small; empty if it is not. A stated split may be below the floor."""
    gpus, concurrency = setup.parallel.gpus, planned_concurrency(pool)
    if gpus < floor.gpus and pool.deployment.tensor_parallel is None:
        return f"below the floor of {counted(floor.gpus, 'GPU')}"
    if not fits(pool, setup, concurrency=concurrency):
        return f"vLLM would not hold {concurrency} requests of P95 length"
    return ""


def _for_targets(pool: Pool, fitting: list[Setup], refused: list[str]) -> Split:
    concurrency = pool.deployment.concurrency
    carried: list[tuple[float, Setup]] = []
    for setup in fitting:
        instance = tuned(serving(pool, setup)).instance
        best = best_point(instance)
        carried.append((best.requests_per_s / setup.parallel.gpus if best else 0.0, setup))
        if concurrency is None:
            continue
        if best is not None and best.concurrency >= concurrency:
            return Split(setup=setup, refused=tuple(refused), keeps_targets=True)
        reached = f"{best.concurrency:g}" if best else "not one"
        refused.append(
            f"{_name(setup.parallel)}: {reached} of {concurrency} in flight meet the targets"
        )
    most = max(rate for rate, _ in carried)
    chosen = next(setup for rate, setup in carried if rate >= most * _NEARLY_RATIO)
    refused.extend(
        f"{_name(setup.parallel)}: {figure(rate)} requests/s per GPU at the targets, against "
        f"{figure(most)}"
        for rate, setup in carried
        if setup is not chosen
    )
    return Split(setup=chosen, refused=tuple(refused), keeps_targets=most > 0)


def _name(parallel: Parallel) -> str:
    stages = f" x PP {parallel.pipeline}" if parallel.pipeline > 1 else ""
    return f"TP {parallel.tensor}{stages}"


def parallel_step(pool: Pool, split: Split, before: Floor, after: Floor) -> PlanStep:
    """Step 6: TP and PP of one instance, and the cost of the all-reduces."""
    setup, gpu = split.setup, pool.gpu
    parallel, instance = setup.parallel, serving(pool, setup)
    within_domain = gpu.nvlink_bytes_per_s is not None and parallel.tensor <= gpu.nvlink_gpus
    link = "nvlink" if within_domain else "pcie"
    planned = planned_overhead_ratio(link=link, tensor_parallel=parallel.tensor)
    stage = at(instance, 1).decode_step
    per_node = replicas_per_node(
        node_gpus=pool.profile.hosting.node_gpus, gpus_per_replica=parallel.gpus
    )
    # As many micro-batches as stages: what the roofline deals the running requests to.
    bubble = pipeline_bubble_ratio(stages=parallel.pipeline, micro_batches=parallel.pipeline)
    return PlanStep(
        number=6,
        title="Select the parallelism",
        decision=f"{_name(parallel)}: {counted(parallel.gpus, 'GPU')} per instance, over {link}",
        output={
            "tensor_parallel": parallel.tensor,
            "pipeline_parallel": parallel.pipeline,
            "gpus_per_instance": parallel.gpus,
            "instances_per_node": per_node,
            "link": link,
            "allreduce_ratio_planned": planned,
            "allreduce_ratio_predicted": stage.interconnect_s / stage.total_s,
            "pipeline_bubble_ratio": bubble,
            "kv_available_bytes_per_gpu": instance.memory.available_bytes.expected,
            "kv_concurrency_at_p95": instance.memory.concurrency.expected,
        },
        steps=_steps(pool, instance, planned),
        to_measure=("all-reduce share of a decode step on these nodes",)
        if parallel.tensor > 1
        else (),
        notes=_notes(split, before, after),
        tier=pool.name,
    )


def _notes(split: Split, before: Floor, after: Floor) -> tuple[str, ...]:
    notes, stages = list(split.refused), split.setup.parallel.pipeline
    if not split.keeps_targets:
        notes.append(
            "the roofline predicts that no split meets the targets: choose other "
            "hardware or targets"
        )
    if before.gpus > after.gpus:
        notes.append(
            f"chosen before quantization, the floor would have been {before.gpus} GPUs, not "
            f"{after.gpus}"
        )
    if stages > 1:
        notes.append(
            f"{stages} stages: one NVLink domain is too small, and pipeline bubbles cost throughput"
        )
    return tuple(notes)


def _steps(pool: Pool, instance: Serving, planned: float) -> tuple[Step, ...]:
    setup, answer = instance.setup, instance.memory
    tensor = setup.parallel.tensor
    taken = setup.utilization * pool.gpu.memory_bytes / 1e9
    weights = (answer.weights_bytes or 0.0) / 1e9
    free = answer.available_bytes.expected / 1e9
    held = answer.concurrency.expected
    request_mb = answer.layout.request_bytes(setup.context) / 1e6
    return (
        Step(
            title="KV cache of one GPU",
            formula="utilization x memory - weights - overhead",
            values=f"{figure(taken)} - {figure(weights)} - {figure(taken - weights - free)} GB",
            result=f"{figure(free)} GB",
            source="guide 2.6; overheads fitted to vLLM's start-up logs",
        ),
        Step(
            title="Requests of P95 length held",
            formula="KV cache / bytes of one request on a GPU",
            values=f"{figure(free)} GB / {figure(request_mb)} MB",
            result=figure(held),
            source="guide 2.2",
        ),
        Step(
            title="Speed-up of tensor parallelism",
            formula="TP x (1 - share of all-reduces)",
            values=f"{tensor} x (1 - {figure(planned)})",
            result=f"{figure(tensor * (1 - planned))}x one GPU",
            source="guide 5.1, 5.6",
        ),
    )
