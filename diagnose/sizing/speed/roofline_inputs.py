"""The roofline's inputs: what one GPU reads and computes, its MFU, MBU and ridge point. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, log, sqrt
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S, NODE_GPUS, Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, scheme
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, seconds
from kneewatch.diagnose.sizing.memory.kv_cache import index_bytes
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.overhead import kind_of
from kneewatch.diagnose.sizing.memory.weights import attention_parameters
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import figure


class Efficiency(Struct, frozen=True, kw_only=True):
    """Shares of the peaks that a step reaches, and times that no peak explains.

    Shares:

    - `mfu_ratio`: of the compute peak, in matrix products.
    - `expert_mfu_ratio`: of `expert_flop_per_s`, in routed experts.
    - `attention_mfu_ratio`: of the 16-bit compute peak, in attention.
    - `mbu_ratio`: of the memory bandwidth.
    - `link_ratio`: of the bandwidth between GPUs; `pcie_ratio`: of PCIe.

    Seconds:

    - `allreduce_latency_s`: fixed cost of one all-reduce over NVLink, or of passing data to the
      next stage. Other links add their own (`link_latency_s`).
    - `expert_s`: per routed expert and layer that a step uses, besides reading the expert.
    - `layer_s`: between the kernels of one layer.
    - `expert_layer_s`: additionally in a layer with routed experts: router, permutation,
      combination.
    - `sequence_s`: per sequence of the batch: sampling, block tables, detokenization.
    - `host_s`: scheduling and input preparation of a step.
    - `nodes_s`: additionally where the GPUs are on several nodes: Ray takes inputs and results of
      a step to and from each, and steps do not overlap. One pair of runs is behind it (Qwen2.5-72B,
      TP 8: 14.8 ms with a second node as PP 2, 10.0 without).
    - `prompt_step_s`: additionally in a step with prompt tokens, which no full CUDA graph covers.
    - `request_s`: in the API server, which parses requests one after another; `prompt_token_s`:
      additionally for each token of the prompt. The next request of a client comes later by it,
      while others finish: their prompts then wait for each other.

    - `expert_row_passes`: times that the hidden state of a routed token is read or written around
      the experts' products. Tensor parallelism does not split it. AIConfigurator's measurements of
      vLLM 0.24's layers have 4 to 7 on GPUs from L40S to B200, and no gain of FP8 over 16 bit on
      Hopper.

    Factors:

    - `decode_factor`: measured divided by predicted time of steps without prompts.
    - `prefill_factor`: measured divided by predicted time of the prompts in a step.
    - `stated`: the shares that `with_shares` set.

    - `eager_ratio`: the CPU's time to launch a layer's kernels one by one (about a dozen, and 20
      more with routed experts, at 20 to 25 us each), divided by the GPU's time between those of a
      CUDA graph. GPT-2 on an H200 (12 layers) takes 4.8 ms a step without graphs and 1.3 with
      them, Qwen3-30B-A3B on four RTX 4090D (48) 33.9 and 10.0; under WSL a launch takes four times
      as long.

    - `microbatches_per_stage`: equal micro-batches that would leave a pipeline's stages idle for as
      long as vLLM's unequal ones do. One published pair of runs is behind it: gpt-oss-120b on two
      H100 makes 5,338 tokens/s with PP 2 and 7,649 with TP 2.

    The ratios can be measured on a live server. The defaults are those of an H100: `on_gpu` has
    those of others. Single servers differ: with prompts of 1,000 tokens or more, mfu_ratio on H100
    ranges from 0.33 (Qwen3-14B, vLLM 0.11) to 0.6 (Qwen3.5-9B, vLLM 0.17), and a fit to each model
    would only repeat its noise.
    """

    mfu_ratio: float = 0.365
    expert_mfu_ratio: float = 0.24
    attention_mfu_ratio: float = 0.58
    mbu_ratio: float = 0.95
    link_ratio: float = 0.27
    pcie_ratio: float = 0.6
    allreduce_latency_s: float = 2.6e-6
    expert_s: float = 0.5e-6
    expert_row_passes: float = 5.0
    layer_s: float = 24e-6
    expert_layer_s: float = 40e-6
    sequence_s: float = 10e-6
    host_s: float = 1.4e-3
    nodes_s: float = 4.8e-3
    prompt_step_s: float = 16e-3
    request_s: float = 4.4e-3
    prompt_token_s: float = 1.8e-6
    eager_ratio: float = 11.0
    microbatches_per_stage: float = 1.5
    decode_factor: float = 1.0
    prefill_factor: float = 1.0
    stated: tuple[str, ...] = ()


def with_shares(
    base: Efficiency, *, mfu_ratio: float | None = None, mbu_ratio: float | None = None
) -> Efficiency:
    """`base` with a measured share of the compute peak, of the bandwidth, or of both.

    The measured share of the compute peak is a mean of all kernels, so it is also used for
    attention and for routed experts.
    """
    by_name: dict[str, float | None]
    by_name = dict.fromkeys(("mfu_ratio", "expert_mfu_ratio", "attention_mfu_ratio"), mfu_ratio)
    by_name["mbu_ratio"] = mbu_ratio
    stated = {name: ratio for name, ratio in by_name.items() if ratio is not None}
    return replace(base, stated=(*base.stated, *stated), **stated)


DEFAULT: Final = Efficiency()

_H100_FLOP_PER_S = 989e12
# Products reach more of a lower peak: about 0.55 on A100 and GB10, and a tenth less than H100's on
# MI300X. Routed experts do not: on A100 they reach what they do on H100.
_REACH_POWER, _MOST_REACH = 0.43, 0.55
# GeForce adds in 32 bit at half of its tensor cores' rate, so that all products come nearer to it.
_HALVED_REACH = 0.9
# vLLM on MI300X reads at 3.7 of 5.3 TB/s (three dense models at 32 requests).
_AMD_MBU_RATIO = 0.7


@lru_cache(maxsize=256)
def on_gpu(gpu: Gpu | None, base: Efficiency = DEFAULT) -> Efficiency:
    """The efficiency on this GPU: which share of the compute peak products reach depends on how
    high that is."""
    if gpu is None:
        return base
    if gpu.vendor == "amd":
        base = replace(base, mbu_ratio=min(base.mbu_ratio, _AMD_MBU_RATIO))
    reach = base.mfu_ratio * (_H100_FLOP_PER_S / gpu.bf16_flop_per_s) ** _REACH_POWER
    reach = round(min(reach, max(_MOST_REACH, base.mfu_ratio)), 3)
    shares = [reach, base.expert_mfu_ratio, base.attention_mfu_ratio]
    if gpu.accumulates_at_half_rate:
        shares = [min(2 * share, _HALVED_REACH) for share in shares]
    names = ("mfu_ratio", "expert_mfu_ratio", "attention_mfu_ratio")
    return replace(base, **dict(zip(names, shares, strict=True)))


_MEASURED: Final = packaged_tables("diagnose.sizing.speed", "measured.toml")


def measured_class(launch: Launch) -> tuple[str, str]:
    """The class of published benchmarks that this launch is like; for `few` also what few share."""
    gpu_id = "h100-sxm" if launch.gpu is None else launch.gpu.id
    if launch.enforce_eager:
        return "few", "without CUDA graphs"
    if launch.parallel.tensor > NODE_GPUS:
        return "few", "over several nodes"
    if launch.parallel.experts and launch.model.experts.count:
        return "experts", ""
    if kind_of(launch.model) not in _MEASURED["kinds"]:
        return "few", "of models with such attention"
    gpus: Mapping[str, Sequence[str]] = _MEASURED["gpus"]
    classes = (name for name, measured in gpus.items() if gpu_id in measured)
    return next(((name, "") for name in classes), ("few", f"on {gpu_id}"))


def measured_ratios(launch: Launch) -> Mapping[str, tuple[float, float]]:
    """Range of measured over predicted speed for launches like this, by figure."""
    ratios: Mapping[str, tuple[float, float]] = _MEASURED[measured_class(launch)[0]]
    return ratios


def accuracy(launch: Launch) -> str:
    """How far published benchmarks like this launch were from the prediction, in words."""
    bands = measured_ratios(launch).items()
    ratios = ", ".join(f"{name} {low:g} to {high:g}x" for name, (low, high) in bands)
    name, few = measured_class(launch)
    like = "" if few else f" {_MEASURED['like'][name]}"
    wider = f"; few were {few}, so the range is the widest of all" if few else ""
    return f"9 of 10 published benchmarks{like} measured {ratios} the prediction{wider}"


def safe_targets(targets: Targets, launch: Launch) -> Targets:
    """The mean latencies that may be predicted so that the targets are met in 19 of 20
    benchmarks."""
    ttft_s, itl_s, ratios = targets.ttft_p99_s, targets.itl_p99_s, measured_ratios(launch)
    return Targets(
        None if ttft_s is None else ttft_s / ratios["TTFT"][1],
        None if itl_s is None else itl_s / ratios["ITL"][1],
    )


def margins(targets: Targets, launch: Launch) -> str:
    """Up to which prediction each target counts as met, in words."""
    safe = safe_targets(targets, launch)
    beside = targets.beside(safe.ttft_p99_s or 0.0, safe.itl_p99_s or 0.0)
    return ", ".join(
        f"{name} predicted up to {seconds(safe_s)} for a target of {seconds(target_s)}"
        for name, safe_s, target_s in beside
    )


SOURCE: Final = "fitted to published benchmarks of vLLM on A100, H100 and H200"


# What one GPU of a model copy reads and computes: the roofline's inputs, worked out once. Pure.
#
# Source: guide chapters 3 and 5; text 001, 4.2 to 4.8; layer kinds as in `catalogue.layers`.


SPARSE_TOPK_TOKENS = 2048
"""Tokens that a layer with an indexer attends to (DeepSeek-V3.2 configuration, index_topk)."""
_SPARSE_HEADS = 64
"""Heads that the sparse kernels compute at least (FlashMLA: rows of one tile)."""
_INDEX_SPEEDUP = 2
"""The indexer computes in FP8, twice as fast as the attention in 16 bit."""
ACTIVATION_BYTES = 2.0
_STREAM_LAYERS = 2.0
"""Kernels of DeepSeek V4 beside those of a layer, in layers: latent attention, half of one, and
residual streams, whose two mixes a layer took 36 to 42 us on eight H100 (vLLM 0.31)."""
_NVLINK_DIRECTIONS = 2


class AttentionWindow(Struct, frozen=True):
    """Layers that attend to at most `tokens` tokens; bytes and FLOP are per attended token and
    GPU. `is_padded`: shorter contexts are computed like full windows."""

    tokens: int
    kv_bytes_per_token: float
    flop_per_pair: float
    is_padded: bool = False

    def computed(self, context_tokens: float) -> float:
        """FLOP of one query at a mean context."""
        seen = self.tokens if self.is_padded else min(context_tokens, self.tokens)
        return self.flop_per_pair * seen


def touched_ratio(token_ratio: float, tokens: float) -> float:
    """The share of the experts that a step's tokens use, where a token uses `token_ratio`.

    Experts are not equally popular: their shares of the tokens are spread like an exponential, so
    rare experts stay unused longer than if each token drew them evenly.
    """
    return 1 - (1 - token_ratio) / (1 + token_ratio * max(tokens - 1, 0.0))


def busiest_ratio(experts: int, gpus: int) -> float:
    """The busiest GPU's load, divided by the mean, where each has its own part of the experts.

    With shares spread like an exponential, the load of a part varies by sqrt(parts / experts); the
    largest of n is about sqrt(2 ln n) deviations above the mean.
    """
    return 1 + sqrt(2 * log(gpus) * gpus / experts) if experts else 1.0


def busiest_reads(spread: float, touched: float) -> float:
    """The experts that a step uses on the busiest GPU, divided by the mean.

    Few tokens use few of the experts that a GPU has, so their number varies; it is never above all
    of them. The largest of n lies sqrt(2 ln n) deviations above the mean, as in `busiest_ratio`.
    """
    return min(1 + sqrt(spread * (1 - touched) / touched), 1 / touched) if spread else 1.0


class Costs(Struct, frozen=True, kw_only=True):
    """What one copy of a model on `gpus` GPUs costs, per GPU of one tensor-parallel group.

    Bytes and FLOP are sums over all pipeline stages. A pair is one query token and one token that
    it attends to.
    """

    weights_bytes: float
    """Read at every step: all weights except routed experts, towers and the embedding table."""
    experts_bytes: float
    """Bytes of all routed experts; a batch reads only the experts that its tokens use."""
    experts: int
    """Routed experts of all layers. Tensor parallelism splits each, so every GPU has a part of
    each."""
    expert_layers: int
    """Number of layers with routed experts."""
    expert_spread: float
    """How unevenly whole experts lie on the GPUs (`busiest_reads`); 0 where each GPU has a part of
    all."""
    touched_ratio: float
    """Share of the experts that one token uses; of expert parallelism one of each engine."""
    kv_bytes_per_token: float
    """Read per token of context and step, in layers without a window."""
    flop_per_pair: float
    prefill_flop_per_pair: float
    windows: tuple[AttentionWindow, ...]
    state_bytes: float
    """Recurrent state that a sequence reads and writes per step."""
    body_flop_per_token: float
    experts_flop_per_token: float
    """The routed experts' part of `body_flop_per_token`."""
    head_flop_per_token: float
    flop_per_s: float
    attention_flop_per_s: float
    expert_flop_per_s: float
    """Peak of the routed experts' kernels: FP4's, or that of 16 bit, also for FP8 weights, whose
    grouped products in blocks are no faster."""
    expert_kernel_ratio: float
    """Speed of the routed experts' kernels, divided by that of other formats' kernels."""
    prompt_layer_ratio: float
    """Share of the layers that all tokens of a prompt pass through."""
    routed_rows: int
    """Routed copies of one token in all layers."""
    bandwidth_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    """Between GPUs, in one direction."""
    link_latency_s: float
    """Of an all-reduce, beside that over NVLink."""
    token_exchange_s: float
    """To send a token to the experts of other data-parallel engines and back, at full bandwidth."""
    nodes: int
    layers: float
    """Of an attention and an MLP each: a layer of Nemotron-H has one of the two and is a half."""
    added_layers: float
    """Kernels beside those of `layers`, in layers: an indexer is one, and latent attention half of
    one, as it has two batched products and a concatenation more. DeepSeek V4 adds its streams."""
    hidden_size: int
    has_graphs: bool
    """Whether steps without prompts are CUDA graphs."""
    tensor_parallel: int
    pipeline_parallel: int
    steps_ahead: float = 0.0
    """Steps that a prompt waits for because they are scheduled while one runs."""

    @property
    def gpus(self) -> int:
        """GPUs of the copy."""
        return self.tensor_parallel * self.pipeline_parallel


def costs(launch: Launch) -> Costs:
    """What a step of this launch reads and computes on one GPU.

    Weights in a format that the GPU cannot compute in are unpacked and computed in 16 bit. Decode
    context parallel ranks share the tokens that a step reads, except in windows. The traffic
    between these ranks is left out.

    Raises:
        SizingError: the scheme is unknown, or the launch's GPU or parameters are.

    Source: guide 3.3, 3.4 and 5.1; text 001, 4.2 and 4.3; text 003, Q4.
    """
    model, gpu, parallel, network = launch.model, launch.gpu, launch.parallel, launch.network
    parameters, tensor_parallel = model.parameters, parallel.tensor
    if gpu is None:
        raise SizingError("set the GPU: speed cannot be predicted without it", name="gpu")
    if parameters is None:
        raise SizingError(
            f"{model.id}: the number of parameters is unknown, so no speed can be predicted; give "
            "the path of its config.json",
            name="model",
        )
    if launch.computed_dtype == "float32":
        raise SizingError("speed is not predicted in float32", name="dtype")
    stored = scheme(launch.quantization or model.quantization)
    # Other formats are computed in 16 bit.
    narrow = {
        "fp8": gpu.fp8_flop_per_s,
        "fp4": gpu.fp4_flop_per_s,
        "int8": gpu.int8_op_per_s,
    }
    narrow_flop_per_s = narrow.get(stored.compute)
    linear_bits = stored.linear_bits
    attention_bits = stored.attention_bits_of(mixture=bool(model.experts.count))
    head = parameters.head or parameters.embedding
    kinds = _kinds(model, tensor_parallel, launch.kv_format.element_bytes)
    link, link_bytes_per_s, link_latency_s = _link(gpu, tensor_parallel, network)
    skipped = kinds.skipped_layers if launch.version >= _SKIPS_SHARED_LAYERS else 0
    attention = attention_parameters(model, parameters, tensor_parallel)
    experts = model.experts
    token_ratio = experts.per_token / experts.count if experts.count else 0.0
    # Experts are spread over the GPUs of all engines, and compute the tokens of all.
    engines = parallel.data if parallel.experts else 1
    ranks = tensor_parallel * engines
    routed = parameters.experts / tensor_parallel
    computed, spread = routed, 0.0
    if parallel.experts and experts.count:
        computed *= busiest_ratio(experts.count, ranks)
        spread = 2 * log(ranks) * ranks / experts.count
    exchanged = experts.layers * experts.per_token * model.hidden_size * (1 - 1 / ranks)
    exchanged_bytes = 2 * ACTIVATION_BYTES * exchanged / tensor_parallel if engines > 1 else 0.0
    dense = attention + parameters.mlp / tensor_parallel + parameters.small
    mixers = sum(part.count for part in model.layers)
    halved = kind_of(model) == "recurrent" and mixers < model.depth
    return Costs(
        weights_bytes=(
            attention * attention_bits
            + parameters.mlp / tensor_parallel * linear_bits
            + (parameters.small + head / tensor_parallel) * FULL_BITS
        )
        / 8,
        experts_bytes=routed / engines * stored.expert_bits / 8,
        experts=experts.count * experts.layers // engines,
        expert_layers=experts.layers if experts.count else 0,
        expert_spread=spread,
        touched_ratio=touched_ratio(token_ratio, engines),
        kv_bytes_per_token=kinds.kv_bytes_per_token / launch.decode_context_parallel,
        flop_per_pair=kinds.flop_per_pair,
        prefill_flop_per_pair=kinds.prefill_flop_per_pair,
        windows=kinds.windows,
        state_bytes=kinds.state_bytes,
        body_flop_per_token=2 * (dense + computed * token_ratio) + kinds.state_flop,
        experts_flop_per_token=2 * computed * token_ratio,
        head_flop_per_token=2 * head / tensor_parallel,
        flop_per_s=narrow_flop_per_s or gpu.bf16_flop_per_s,
        attention_flop_per_s=gpu.bf16_flop_per_s,
        expert_flop_per_s=(stored.compute == "fp4" and gpu.fp4_flop_per_s) or gpu.bf16_flop_per_s,
        expert_kernel_ratio=1.0 if gpu.fp4_flop_per_s else stored.unpacking_ratio,
        prompt_layer_ratio=1 - skipped / model.depth,
        routed_rows=experts.layers * experts.per_token if experts.count else 0,
        bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        link=link,
        link_bytes_per_s=link_bytes_per_s,
        link_latency_s=link_latency_s,
        token_exchange_s=exchanged_bytes / _link(gpu, ranks, network)[1],
        nodes=ceil(tensor_parallel * parallel.pipeline / gpu.node_gpus),
        layers=model.depth / 2 if halved else model.depth,
        added_layers=kinds.added_layers,
        hidden_size=model.hidden_size,
        has_graphs=not launch.enforce_eager,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=parallel.pipeline,
        steps_ahead=_AHEAD if launch.version >= _STEPS_OVERLAP and parallel.pipeline == 1 else 0.0,
    )


# Seconds of NCCL's ring with short messages (its tuning table, protocol LL): of an all-reduce, and
# of each hop over PCIe and over NVLink. A hop between nodes is measured, not from that table: vLLM
# with Qwen2.5-72B, TP 16 on two nodes of 8 H100 takes 29.1 ms a step, and TP 8 takes 10.0; SGLang
# with DeepSeek-R1 on such nodes takes 23.2; Qwen3-VL-32B on four GB10 (RoCE) 52.
_NCCL_S, _PCIE_HOP_S, _NVLINK_HOP_S, _NODE_HOP_S = 6.6e-6, 1.0e-6, 0.6e-6, 21e-6


_HOST_BYTES_PER_S = 100e9
"""What GeForce cards, whose drivers let no GPU read another's memory, pass through the host's in
all: half of what 8 channels of DDR4-3200 do, as each byte is written and read. Qwen3.8-27B on eight
RTX 4090: prompts of 1,024 tokens show 7.5 GB/s a card, 0.6 of its part."""


def _link(gpu: Gpu, gpus: int, network: str) -> tuple[str, float, float]:
    """The link of a group's all-reduces, its bytes/s, and seconds beside those over NVLink.

    Nodes are linked by one card per GPU.
    """
    node = gpu.node_gpus
    linked = gpu.nvlink_bytes_per_s is not None and gpu.nvlink_gpus >= min(gpus, NODE_GPUS)
    within_per_s = (gpu.nvlink_bytes_per_s or 0.0) / _NVLINK_DIRECTIONS
    hop_s = _NVLINK_HOP_S
    if not linked:
        within_per_s, hop_s = gpu.pcie_bytes_per_s, _PCIE_HOP_S
        if "GeForce" in gpu.name:
            within_per_s = min(within_per_s, _HOST_BYTES_PER_S / gpus)
    if gpus <= node and linked:
        return "NVLink", within_per_s, 0.0
    # Hosts with more than 8 GPUs on PCIe exist.
    nodes = ceil(gpus / node) if linked or node == 1 else 1
    if nodes == 1:
        return "PCIe", within_per_s, _NCCL_S + 2 * (gpus - 1) * hop_s
    latency_s = _NCCL_S + 2 * ((gpus - nodes) * hop_s + nodes * _NODE_HOP_S)
    return network, min(within_per_s, node * LINK_BYTES_PER_S[network]), latency_s


_STEPS_OVERLAP, _AHEAD = (0, 14, 0), 0.75
"""The vLLM version from which a step is scheduled while another runs (async scheduling), and how
much of it a prompt waits: Qwen3-14B on L40S and L4 all, Qwen3.5-9B on H100 with 0.17 half."""
_SKIPS_SHARED_LAYERS = (0, 31, 0)
"""The vLLM version from which prompts skip the layers that read the states of an earlier one."""


class _Kinds(Struct):
    """Sums over the layers of a model, on one GPU."""

    kv_bytes_per_token: float = 0.0
    flop_per_pair: float = 0.0
    prefill_flop_per_pair: float = 0.0
    windows: tuple[AttentionWindow, ...] = ()
    state_bytes: float = 0.0
    state_flop: float = 0.0
    added_layers: float = 0.0
    skipped_layers: int = 0
    """Layers behind the last one with states of its own: only a prompt's last tokens need them."""


def _kinds(model: Model, tensor_parallel: int, kv_bytes: float) -> _Kinds:
    sums = _Kinds()
    heads = model.attention_heads / tensor_parallel
    for layers in model.layers:
        kind, count = layers.kind, layers.count
        match kind:
            case FullAttention():
                size = count * (kind.key_dim + kind.value_dim)
                sums.kv_bytes_per_token += -(-kind.kv_heads // tensor_parallel) * size * kv_bytes
                sums.flop_per_pair += 2 * heads * size
                sums.prefill_flop_per_pair += 2 * heads * size
            case SlidingAttention():
                size = count * (kind.key_dim + kind.value_dim)
                kept = -(-kind.kv_heads // tensor_parallel) * size * kv_bytes
                sums.windows += (AttentionWindow(kind.window_tokens, kept, 2 * heads * size),)
            case LatentAttention():
                _add_latent(sums, kind, count=count, heads=heads, kv_bytes=kv_bytes)
            case CompressedAttention():
                _add_compressed(sums, kind, count=count, heads=heads)
            case SlidingStates():
                # What a compressor has not finished is read once per vector, which is little.
                if kind.vector_dim:
                    sums.added_layers += _STREAM_LAYERS * count
                    flop = 4 * max(heads, _SPARSE_HEADS) * count * kind.vector_dim
                    kept = float(count * kind.vector_bytes)
                    sums.windows += (AttentionWindow(kind.window_tokens, kept, flop),)
            case _:
                elements = count * kind.state_elements / tensor_parallel
                tail = count * kind.conv_elements / tensor_parallel
                # Read and written at every step; the update is a product, a decay and a sum
                # for each element, and as much to read it out.
                sums.state_bytes += 2 * (elements * kind.state_bytes_per_element + tail * kv_bytes)
                sums.state_flop += 6 * elements
    return sums


def _add_compressed(sums: _Kinds, kind: CompressedAttention, *, count: int, heads: float) -> None:
    if kind.vector_dim:
        sums.skipped_layers = kind.readers - 1
    # A pair is one query and one token, of which several share a vector.
    count *= kind.readers
    sums.added_layers += 0 if kind.vector_dim else count
    kept = count * kind.vector_bytes / kind.tokens_per_vector
    flop = 4 * max(heads, _SPARSE_HEADS) * count * kind.vector_dim / kind.tokens_per_vector
    # Every rank computes all heads of an indexer.
    flop += 2 * count * kind.index_width / kind.tokens_per_vector / _INDEX_SPEEDUP
    if kind.chosen_vectors:
        tokens = kind.chosen_vectors * kind.tokens_per_vector
        sums.windows += (AttentionWindow(tokens, kept, flop),)
        return
    sums.kv_bytes_per_token += kept
    sums.flop_per_pair += flop
    sums.prefill_flop_per_pair += flop


def _add_latent(
    sums: _Kinds, kind: LatentAttention, *, count: int, heads: float, kv_bytes: float
) -> None:
    # Decode attends in the compressed space. Prefill attends with real heads, whose key and
    # value width is a quarter of the latent one in every published model.
    latent, rope = kind.latent_dim, kind.rope_dim
    kept = count * (latent + rope) * kv_bytes
    sums.added_layers += count / 2
    decode_flop = 2 * heads * count * (2 * latent + rope)
    if kind.is_sparse:
        padded_flop = decode_flop * max(_SPARSE_HEADS / heads, 1.0)
        sums.windows += (AttentionWindow(SPARSE_TOPK_TOKENS, kept, padded_flop, is_padded=True),)
        sums.kv_bytes_per_token += count * index_bytes(kind)
        # Every rank computes all heads of the indexer over the whole context.
        index_flop = 2 * count * kind.index_heads * kind.index_dim / _INDEX_SPEEDUP
        sums.added_layers += count if kind.index_dim else 0
        sums.flop_per_pair += index_flop
        sums.prefill_flop_per_pair += index_flop
        return
    sums.kv_bytes_per_token += kept
    sums.flop_per_pair += decode_flop
    sums.prefill_flop_per_pair += 2 * heads * count * (latent / 2 + rope)


# --- The arithmetic intensity of decode steps, and the ridge of the roofline ----------------------


class Intensity(Struct, frozen=True):
    """The limit of a launch's decode steps at one batch, compute or bandwidth.

    `batch_at_ridge` is None if reading the KV cache keeps decode below the ridge at any batch.
    """

    ridge_flop_per_byte: float
    decode_flop_per_byte: float
    batch_at_ridge: float | None
    steps: tuple[Step, ...]


def decode_bytes(costs: Costs, *, context_tokens: float, sequences: float) -> tuple[float, float]:
    """Bytes that a decode step reads: weights once for all sequences, and the KV cache of each."""
    read = costs.kv_bytes_per_token * context_tokens + costs.state_bytes
    read += sum(min(w.tokens, context_tokens) * w.kv_bytes_per_token for w in costs.windows)
    touched_bytes = costs.experts_bytes * touched_ratio(costs.touched_ratio, sequences)
    return costs.weights_bytes + touched_bytes, read


def intensity_of(costs: Costs, *, context_tokens: float, sequences: float) -> Intensity:
    """The arithmetic intensity of one decode step on one GPU.

    The step has `sequences` requests of `context_tokens` each. The intensity is two FLOP per
    parameter and request, divided by the bytes of weights and KV cache read. The FLOP of attention
    itself are left out, as in the guide. `batch_at_ridge` assumes that every expert is read.

    Source: guide 3.1 to 3.4; text 003 (about 295 requests on an H100).
    """
    sheet = Sheet("guide 3.1 to 3.4")
    token_flop = costs.body_flop_per_token + costs.head_flop_per_token
    weights_bytes, read = decode_bytes(costs, context_tokens=context_tokens, sequences=sequences)
    ridge = sheet.line(
        "Ridge of the roofline",
        "{FLOP/s:e9} / {bandwidth:TB/s}",
        (costs.flop_per_s, costs.bandwidth_bytes_per_s),
        result="{} FLOP per byte",
    )
    left = token_flop - ridge * read
    batch = ridge * (costs.weights_bytes + costs.experts_bytes) / left if left > 0 else None

    def meaning(flop_per_byte: float) -> str:
        if flop_per_byte >= ridge:
            return f"{figure(flop_per_byte)} FLOP per byte: decode is bound by compute"
        until = (
            "at any batch size with this context"
            if batch is None
            else f"up to a batch of {figure(ceil(batch))} requests"
        )
        return f"{figure(flop_per_byte)} FLOP per byte: decode is bound by memory bandwidth {until}"

    decode_flop_per_byte = sheet.line(
        "Arithmetic intensity of a decode step",
        "2 x {parameters:e9} x {batch} / ({weights:GB} + {batch} x {KV cache per request:GB})",
        (token_flop / 2, sequences, weights_bytes, read),
        result=meaning,
    )
    return Intensity(ridge, decode_flop_per_byte, batch, sheet.steps)
