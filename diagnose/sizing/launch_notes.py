"""Warnings about how a launch uses its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS, MEMORY_SHARE
from kneewatch.diagnose.catalogue.gpu_specs import NETWORKS, NODE_GPUS, Gpu
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, is_format, scheme
from kneewatch.diagnose.deployment.vllm_flags import UNKNOWN, effect_of, nearest_flag
from kneewatch.diagnose.sizing.memory.launch import LONGER, Launch
from kneewatch.diagnose.sizing.speed.performance import planned_overhead_ratio
from kneewatch.diagnose.sizing.speed.roofline_inputs import busiest_ratio
from kneewatch.rules.formatting import figure, percent

# The guide's safe range of the memory's share ends here (2.6), and tensor parallelism over PCIe is
# worth its all-reduces up to this size (5.6).
_TIGHT_UTILIZATION = 0.95
_PCIE_TENSOR_PARALLEL = 2
# Of GPUs that share the host's memory: published recipes of DGX Spark.
_SHARED_UTILIZATION = 0.85


def most_utilization(gpu: Gpu | None) -> float:
    """The largest share of a GPU's memory that leaves room for spikes, or for the host that shares
    it."""
    return _SHARED_UTILIZATION if gpu is not None and gpu.shares_host_memory else _TIGHT_UTILIZATION


def launch_doubts(launch: Launch) -> Iterator[str]:
    """What vLLM would refuse, contradictory flags, and flags that kneewatch does not know: these
    stand under the verdict."""
    yield from launch.settled
    if launch.dtype == "auto" and launch.computed_dtype == "float32" and launch.gpu is not None:
        yield (
            f"{launch.gpu.name} has no bfloat16, and vLLM refuses {launch.model.id} in float16: it "
            "takes float32, of twice the size"
        )
    if launch.auto_context and launch.max_model_len is not None:
        longest = launch.max_model_len
        yield f"{LONGEST_TOKENS} auto: vLLM takes the tokens that fit, about {longest:,}"
    own, scheme = launch.model.max_context_tokens, launch.scheme
    if own and launch.longest_tokens > own and not launch.refusal:
        yield f"{LONGEST_TOKENS} is above the model's {own:,} tokens: " + (
            f"{LONGER if launch.flag(LONGER) else 'another flag'} lets vLLM start, and answers "
            "beyond may be wrong"
            if launch.is_lengthened
            else f"vLLM refuses to start unless rope scaling, an override or {LONGER}=1 allows it"
        )
    if scheme.plugin and scheme.until and launch.version >= scheme.until:
        yield f"vLLM has no {scheme.id} weights of its own any more: pip install {scheme.plugin}"
    unknown = [flag for flag, _ in launch.other_flags if effect_of(flag.split(".")[0]) == UNKNOWN]
    if unknown:
        meant = {flag: nearest_flag(flag) for flag in unknown if launch.slack is None}
        words = [
            f"{flag} (did you mean {meant[flag]}?)" if meant.get(flag) else flag for flag in unknown
        ]
        yield f"not counted, unknown to kneewatch: {', '.join(words)}"


def hardware_notes(launch: Launch) -> Iterator[str]:
    """Warnings about how a launch uses its GPUs: utilization, PCIe, nodes, FP8."""
    gpu, stated = launch.gpu, launch.quantization
    if stated and is_format(stated) and scheme(launch.model.quantization).expert_bits == FULL_BITS:
        sized = launch.scheme.id
        yield f"{stated} names a format and not a scheme: sized as {sized}; state another"
    if launch.utilization > _TIGHT_UTILIZATION:
        yield (
            f"GPU memory utilization {figure(launch.utilization)} leaves "
            f"{percent(1 - launch.utilization)} for "
            "spikes and other processes: 0.90 to 0.95 is the safe range"
        )
    if gpu is not None:
        if gpu.shares_host_memory and launch.utilization > _SHARED_UTILIZATION:
            yield (
                f"{gpu.name} shares its memory with the host: vLLM does not start where "
                f"{percent(launch.utilization)} of it is not free; recipes use "
                f"{MEMORY_SHARE} {figure(_SHARED_UTILIZATION)}"
            )
        yield from over_pcie(gpu, launch.parallel.tensor)
        yield from over_nodes(launch, gpu)
        yield from _dtype_notes(launch, gpu)


def _dtype_notes(launch: Launch, gpu: Gpu) -> Iterator[str]:
    """What runs in another arithmetic than its own, or is not predicted."""
    native = {"fp8": gpu.fp8_flop_per_s, "fp4": gpu.fp4_flop_per_s}
    compute = launch.scheme.compute
    if native.get(compute, 1.0) is None:
        yield (
            f"{gpu.name} has no {compute.upper()} arithmetic: {launch.scheme.id} weights save "
            "memory but run at 16-bit speed"
        )
    if launch.dtype == "auto" and launch.computed_dtype == "float16":
        yield f"{gpu.name} has no bfloat16: vLLM computes in float16"
    if launch.computed_dtype == "float32":
        yield "the speed is not predicted in float32, and the overhead is that of 16 bit"


def launch_notes(launch: Launch) -> Iterator[str]:
    """Warnings about the launch, and what its prediction assumes of experts and stages."""
    yield from hardware_notes(launch)
    parallel = launch.parallel
    if launch.gpu is not None and (nodes := _nodes(launch, launch.gpu)) > 1:
        yield several_nodes(nodes)
    if parallel.experts and launch.model.experts.count:
        busiest = busiest_ratio(launch.model.experts.count, parallel.tensor * parallel.data)
        yield (
            f"the prediction assumes that the busiest GPU computes {figure(round(busiest, 2))} "
            "times the mean of the experts' tokens: more slows all"
        )
    if parallel.pipeline > 1:
        yield (
            f"with fewer requests in flight than {parallel.pipeline} pipeline stages, stages are "
            f"idle: a single request leaves {percent(1 - 1 / parallel.pipeline)} of the GPU time "
            "unused"
        )


def over_nodes(launch: Launch, gpu: Gpu) -> Iterator[str]:
    """The warning about a launch that one node does not hold; empty if one does."""
    tensor, node, nodes = launch.parallel.tensor, gpu.node_gpus, _nodes(launch, gpu)
    if nodes == 1:
        return
    crossing = "every step" if tensor <= node else "every all-reduce"
    tcp = "" if launch.network in NETWORKS[:2] else ", which TCP makes longer than predicted"
    stages = f"; or use TP {node} with pipeline stages" if 1 < node < tensor else ""
    yield (
        f"a replica is on {nodes} nodes, and {crossing} crosses {launch.network}: measure its "
        f"latency{tcp}{stages}"
    )


def _nodes(launch: Launch, gpu: Gpu) -> int:
    return ceil(launch.parallel.tensor * launch.parallel.pipeline / gpu.node_gpus)


def several_nodes(nodes: int) -> str:
    """How a replica is started on several nodes."""
    return (
        f"start it on each of the {nodes} nodes, with --nnodes {nodes} and the node's --node-rank "
        "and --master-addr, or over Ray"
    )


def over_pcie(gpu: Gpu, tensor_parallel: int) -> Iterator[str]:
    """The warning about a tensor-parallel group over PCIe; empty if NVLink connects it."""
    linked = gpu.nvlink_gpus >= min(tensor_parallel, NODE_GPUS)
    if tensor_parallel > _PCIE_TENSOR_PARALLEL and not linked and gpu.node_gpus > 1:
        lost = planned_overhead_ratio(link="pcie", tensor_parallel=tensor_parallel)
        yield (
            f"TP {tensor_parallel} runs over PCIe, where all-reduces take about {percent(lost)} "
            "of a step: use NVLink above TP 2, or benchmark it against a smaller TP"
        )
