"""The memory budget of one GPU: overhead, KV cache, and the fewest GPUs for a load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    MXFP8_PAGE_BYTES,
    CompressedAttention,
    LatentAttention,
    Layers,
    SlidingStates,
)
from kneewatch.diagnose.sizing.memory.kv_cache import KvLayout, KvSettings, kv_layout
from kneewatch.diagnose.sizing.memory.kv_formats import KvFormat, kv_format
from kneewatch.diagnose.sizing.memory.launch_setup import GRAPHS_TAKEN, V1, Setup, Version, check
from kneewatch.diagnose.sizing.memory.weights import (
    Parallel,
    Weights,
    adapter_bytes,
    draft_bytes,
    draft_layers,
    weights_per_gpu,
)

_LOGIT_BYTES = 4
# The sampler's peak, in copies of the logits of a full batch in float32: sort, softmax, masks.
_SAMPLER_COPIES = 9.75
# From 0.18 a kernel replaces the sort; logged residuals of H100 and H200 halve.
_KERNEL_SAMPLER: Version = (0, 18, 0)
_KERNEL_SAMPLER_COPIES = 4.3
# A100 with 0.9 to 0.17 and 2,048 batched tokens: 0.5 to 0.8 GiB in all on the logged rows.
_AMPERE_COPIES = 2.6
# Contexts and communicators by tensor-parallel size, as logged ("non-torch").
_NON_TORCH_GIB = {1: 0.13, 2: 0.55, 4: 0.65, 8: 1.0}
# The same on A100 and on cards without NVLink.
_SMALL_NON_TORCH_GIB = {1: 0.13, 2: 0.27, 4: 0.28, 8: 0.5}
# From 0.18, all-reduce workspaces on NVLink: Llama-70B TP4 4.2 GiB, R1 TP8 6 GiB in all.
_WORKSPACE_GIB_PER_RANK = 0.5
# ROCm logs 8 to 11 GiB at TP8.
_ROCM_GIB_PER_RANK = 0.6
# Encoder profiling of vision models: 0.1 to 0.9 GiB in V1.
_ENCODER_GIB = 0.3
# CUDA graphs, estimated and taken from the KV budget since 0.20: dense 0.3 to 1.5 GiB logged, a
# mixture over expert-parallel ranks 5, over data-parallel ones too 33 (GB300) and some 60 (B200).
# None of the logs with more than 2 GiB is from before Blackwell.
_GRAPHS_GIB = (1.0, 2.0)
# Of few batch sizes they take half: 0.26 GiB logged at 2 seats, 0.61 at 8, of mixtures.
_MOST_SIZES = 51
_EXPERT_GRAPHS_GIB = (5.0, 33.0)
_DATA_EXPERT_GRAPHS_GIB = (33.0, 60.0)
_BAND_GIB = 1.5
# On GPUs of capability 12 and on those without a log the overhead came out up to 4 GiB higher.
_UNMEASURED_BAND_GIB = 4.5
_MEASURED_ARCHITECTURES = ("ampere", "hopper", "cdna3")
# Where CPU and GPU have one memory, vLLM counts what the host allocates while it starts: 7 to 14
# GiB on three start-ups of GB10.
_SHARED_HOST_GIB = 7.0
# DeepSeek V4's four residual streams in float32, in copies: 3 GiB for 4,096 tokens and 8 GiB for
# 16,384 on the two logged start-ups.
_STREAM_COPIES = 4 * 7
# NVFP4 checkpoints keep some layers in 8 or 16 bit, or quantize attention too: logged weights are
# up to 9% above computed, and the attention of a mixture may be in 4 bit.
_MIXED_PRECISION_RATIO = 0.09
# A sparse-attention indexer keeps a workspace of five contexts of 16-bit latent rows
# (vllm/v1/attention/backends/mla/indexer.py and flashmla_sparse.py, 0.32).
_INDEX_WORKSPACE_BYTES_PER_TOKEN = 5 * 576 * 2
# V0 up to 0.7 charged every communicator to the first rank: 3.6 GiB at TP 2, 7.2 at TP 8.
_V0_CHARGED: Version = (0, 8, 0)
_V0_GIB_PER_RANK = 0.9
_V0_WHOLE_PROMPT_TOKENS = 32_768


ACTIVATION_RATIO = 0.20
"""Activations divided by weight bytes, with FlashAttention (guide 2.3)."""
FRAMEWORK_LOW_RATIO, FRAMEWORK_HIGH_RATIO = 0.05, 0.10
"""Share of a GPU's memory that the serving framework uses (guide 2.4)."""
HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO = 0.30, 0.50
"""Headroom to add to the calculated memory before deploying, as a share (guide 2.6)."""


class Overhead(Struct, frozen=True):
    """Overhead in bytes on one GPU: the expected parts, and lower and upper bounds of their sum."""

    activation_bytes: float
    framework_bytes: float
    graphs_bytes: float
    low_bytes: float
    high_bytes: float

    @property
    def expected_bytes(self) -> float:
        """The sum of the parts."""
        return self.activation_bytes + self.framework_bytes + self.graphs_bytes


def overhead_of(setup: Setup, weights_bytes: float, gpu: Gpu) -> Overhead:
    """GPU memory used beside weights and KV cache, by the launch's overhead model.

    If it was measured on the running server, the measured value, which is then also both bounds.
    """
    guide = setup.overhead == "guide"
    predicted = _guide_overhead(weights_bytes, gpu) if guide else _fitted_overhead(setup, gpu)
    excess_bytes = setup.overhead_excess_bytes
    if excess_bytes is None:
        return predicted
    shown_bytes = predicted.expected_bytes + excess_bytes
    return replace(
        predicted,
        framework_bytes=predicted.framework_bytes + excess_bytes,
        low_bytes=shown_bytes,
        high_bytes=shown_bytes,
    )


def _guide_overhead(weights_bytes: float, gpu: Gpu) -> Overhead:
    """Overhead by the guide's planning figures: 20% of the weights, 5 to 10% of memory (2.3,
    2.4)."""
    activation = ACTIVATION_RATIO * weights_bytes
    return Overhead(
        activation_bytes=activation,
        framework_bytes=0.075 * gpu.memory_bytes,
        graphs_bytes=0.0,
        low_bytes=activation + FRAMEWORK_LOW_RATIO * gpu.memory_bytes,
        high_bytes=activation + FRAMEWORK_HIGH_RATIO * gpu.memory_bytes,
    )


def _fitted_overhead(setup: Setup, gpu: Gpu) -> Overhead:
    """The overhead, fitted to logged start-ups of this version on such a GPU.

    The lower bound is 1.5 GiB below the expected value, but at least half of the expected value.
    The upper bound is 1.5 GiB above it, with the largest size that CUDA graphs may have.
    """
    activation = _activation_bytes(setup, gpu)
    framework = _framework_bytes(gpu, setup.parallel.tensor, setup.version)
    if setup.model.multimodal and setup.version >= V1:
        activation += _ENCODER_GIB * GIB
    graphs, graphs_high = _graphs_bytes(setup, gpu)
    shared = _SHARED_HOST_GIB * GIB if gpu.shares_host_memory else 0.0
    framework += shared
    expected = activation + framework + graphs
    above = (_BAND_GIB if is_measured(gpu) else _UNMEASURED_BAND_GIB) * GIB + shared
    return Overhead(
        activation_bytes=activation,
        framework_bytes=framework,
        graphs_bytes=graphs,
        low_bytes=expected - min(_BAND_GIB * GIB + shared, expected / 2),
        high_bytes=activation + framework + graphs_high + above,
    )


def is_measured(gpu: Gpu) -> bool:
    """Whether the overhead was fitted to logged start-ups on GPUs of this class."""
    data_centre = gpu.architecture == "blackwell" and gpu.segment == "data-centre"
    return gpu.architecture in _MEASURED_ARCHITECTURES or (
        data_centre and (gpu.compute_capability or "").startswith("10.")
    )


def _activation_bytes(setup: Setup, gpu: Gpu) -> float:
    """The sampler's peak or the widest layer's activations, whichever is larger."""
    model, copies = setup.model, _SAMPLER_COPIES
    if setup.version >= _KERNEL_SAMPLER:
        copies = _KERNEL_SAMPLER_COPIES
    elif setup.version >= V1 and gpu.architecture == "ampere":
        copies = _AMPERE_COPIES
    sampler = copies * setup.seqs * model.vocab_size * _LOGIT_BYTES
    latent = [part.kind for part in model.layers if isinstance(part.kind, LatentAttention)]
    tokens = setup.batched_tokens
    # V0 profiled whole prompts at once, and chunked only contexts beyond 32,768 tokens; latent
    # attention could not be chunked at first.
    chunked = setup.longest_tokens > _V0_WHOLE_PROMPT_TOKENS
    if setup.version < V1 and (not chunked or (setup.version < _V0_CHARGED and latent)):
        tokens = max(tokens, setup.longest_tokens)
    # Gate, up and their product, and three rows of the hidden state, in 16 bit.
    inner_elements = 3 * model.intermediate_size / setup.parallel.tensor
    if setup.version >= V1:
        inner_elements = max(inner_elements, _expert_elements(setup))
    row_elements = inner_elements + 3 * model.hidden_size
    workspace = 0
    if latent and latent[0].index_dim:
        workspace = _INDEX_WORKSPACE_BYTES_PER_TOKEN * setup.longest_tokens
    if any(isinstance(part.kind, SlidingStates) for part in model.layers):
        workspace += _STREAM_COPIES * _LOGIT_BYTES * tokens * model.hidden_size
    return max(sampler, tokens * row_elements * 2) + workspace


def _expert_elements(setup: Setup) -> float:
    """Elements per token of the buffers between the two matrices of a layer's routed experts.

    Source: `workspace_shapes` of vllm/model_executor/layers/fused_moe (0.32).
    """
    model, parallel = setup.model, setup.parallel
    width = model.expert_width / (1 if parallel.experts else parallel.tensor)
    return model.experts.per_token * (max(2 * width, model.hidden_size) + width)


def _framework_bytes(gpu: Gpu, tensor_parallel: int, version: Version) -> float:
    large = gpu.nvlink_bytes_per_s is not None and gpu.architecture != "ampere"
    table = _NON_TORCH_GIB if large else _SMALL_NON_TORCH_GIB
    taken = table[max(size for size in table if size <= tensor_parallel)]
    if version < _V0_CHARGED and tensor_parallel > 1:
        taken = _V0_GIB_PER_RANK * tensor_parallel
    if gpu.vendor == "amd":
        taken = max(taken, _ROCM_GIB_PER_RANK * tensor_parallel)
    if version >= _KERNEL_SAMPLER and tensor_parallel > 1 and large:
        # No log shows more than eight ranks: a node's workspaces are its own.
        ranks = min(tensor_parallel, 8)
        taken = max(taken, _NON_TORCH_GIB[1] + _WORKSPACE_GIB_PER_RANK * ranks)
    return taken * GIB


def _graphs_bytes(setup: Setup, gpu: Gpu) -> tuple[float, float]:
    """Bytes that CUDA graphs take from the KV budget: expected, and at most."""
    if setup.version < GRAPHS_TAKEN or setup.enforce_eager:
        return 0.0, 0.0
    expected, most = _GRAPHS_GIB
    expected *= (1 + _captured_sizes(setup) / _MOST_SIZES) / 2
    if setup.model.experts.count and setup.parallel.experts and gpu.architecture == "blackwell":
        wide = setup.parallel.data > 1
        expected, most = _DATA_EXPERT_GRAPHS_GIB if wide else _EXPERT_GRAPHS_GIB
    return expected * GIB, most * GIB


def _captured_sizes(setup: Setup) -> int:
    """How many batch sizes vLLM captures CUDA graphs for: 1, 2, 4, every 8 to 256, every 16 to 512.

    The largest is twice the tokens of a decode step with all seats taken.

    Source: vllm/config/vllm.py, `_set_cudagraph_sizes` (0.32).
    """
    drafted = 0 if setup.draft is None else setup.draft.tokens
    largest = min(2 * setup.seqs * (1 + drafted), 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return sum(size <= largest for size in sizes)


# --- The memory budget of one GPU, its KV cache, and the fewest GPUs for a load -------------------


class Range(Struct, frozen=True):
    """An expected value with its lower and upper bounds."""

    low: float
    expected: float
    high: float

    def map(self, function: Callable[[float], float]) -> Range:
        """Applies an increasing function to the expected value and to both bounds."""
        return Range(function(self.low), function(self.expected), function(self.high))


class Memory(Struct, frozen=True):
    """The memory of one GPU.

    - `weights`, `overhead`: None if the KV bytes were stated.
    - `weights_bytes`: everything that vLLM logs as loaded: the model, `adapter_bytes` and
      `draft_bytes`.
    - `logged_tokens`: what this vLLM version logs as "GPU KV cache size".
    - `held_tokens`: tokens that the cache can hold if every request has the context's length.
    - `concurrency`: the number of such requests.
    """

    setup: Setup
    layout: KvLayout
    weights: Weights | None
    weights_bytes: float | None
    overhead: Overhead | None
    available_bytes: Range
    logged_tokens: Range
    held_tokens: Range
    concurrency: Range
    adapter_bytes: float = 0.0
    draft_bytes: float = 0.0

    @property
    def holds_one(self) -> bool:
        """Whether one request of the longest allowed length fits beside vLLM's own block.

        If not, newer versions refuse to start. Older versions start, and such a request waits
        forever.
        """
        blocks = self.layout.blocks(self.available_bytes.expected)
        return blocks > self.layout.request_blocks(self.setup.longest_tokens)

    @property
    def longest_that_fits(self) -> int:
        """Tokens of the longest request that fits beside vLLM's own block; 0 if none fits."""
        blocks = self.layout.blocks(self.available_bytes.expected)
        low, high = 0, self.setup.longest_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.layout.request_blocks(middle) < blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def fits(self, concurrency: float = 1.0) -> bool:
        """Whether vLLM starts and holds this many requests of the context's length."""
        return self.holds_one and self.concurrency.expected >= concurrency


# A search asks for the same layout on every GPU.
_layout_of = lru_cache(maxsize=1024)(kv_layout)


def kv_layout_of(setup: Setup) -> KvLayout:
    """The block layout of the launch's KV cache.

    Raises:
        SizingError: the dtype is unknown, heads cannot be split, or vLLM cannot combine the layers;
            the message names the setting.
    """
    try:
        return _laid_out(setup)
    except SizingError as error:
        if error.name != "hybrid_pool" or not setup.hybrid_pool:
            raise
        if not setup.defaults.hybrid_pool:
            raise SizingError(
                f"{error}, and this version has no shared pool of them; 0.9.2 and later do",
                name="vllm_version",
            ) from error
        if setup.draft is not None:
            raise SizingError(
                f"the layers of the draft {setup.draft.model.id} have no page in common with those "
                f"of {setup.model.id}",
                name="draft_model",
            ) from error
        raise


def _laid_out(setup: Setup) -> KvLayout:
    taken = setup.defaults
    layers, drafted = setup.model.layers, 0
    if setup.draft is not None:
        layers = (*layers, *draft_layers(setup.draft, setup.parallel))
        drafted = setup.draft.tokens
    return _layout_of(
        _in_records_of(setup.gpu, layers),
        KvSettings(
            tensor_parallel=setup.parallel.tensor,
            pipeline_parallel=setup.parallel.pipeline,
            decode_context_parallel=setup.decode_context_parallel,
            kv_format=kv_format(setup.kv_cache_dtype),
            block_tokens=setup.block_tokens,
            in_flight_tokens=setup.batched_tokens
            * taken.batches_in_flight(setup.parallel.pipeline),
            hybrid_pool=setup.hybrid_pool and taken.hybrid_pool,
            padded_latent=taken.padded_latent,
            indexed_format=indexed_format(setup),
            state_blocks=setup.state_blocks + drafted,
            draft_tokens=drafted,
            latent_hybrid_tokens=taken.latent_hybrid_tokens,
        ),
    )


def _in_records_of(gpu: Gpu | None, layers: Sequence[Layers]) -> tuple[Layers, ...]:
    """The layers, with MXFP8 vectors if this GPU's kernels store them."""
    if gpu is None or not (gpu.compute_capability or "").startswith("10."):
        return tuple(layers)
    return tuple(
        Layers(
            replace(part.kind, vector_bytes=part.kind.mxfp8_bytes, page_bytes=MXFP8_PAGE_BYTES),
            part.count,
        )
        if isinstance(part.kind, CompressedAttention | SlidingStates) and part.kind.mxfp8_bytes
        else part
        for part in layers
    )


def indexed_format(setup: Setup) -> KvFormat | None:
    """The packed format of latent vectors in an FP8 cache, for models with an indexer.

    Kernels of Hopper and of workstation Blackwell (capability 12) store this format; the latter
    store nothing else. None if latent vectors have the cache's own format: on data-centre Blackwell
    and AMD, and on Hopper in caches of other types than FP8.

    Source: vllm/platforms/cuda.py, vllm/model_executor/layers/attention/mla_attention.py and
    vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py (0.32).
    """
    gpu, kept = setup.gpu, kv_format(setup.kv_cache_dtype).id
    packs = kept.startswith("fp8")
    if gpu is not None and gpu.vendor != "nvidia":
        return None
    if gpu is not None and gpu.architecture == "blackwell":
        packs = (gpu.compute_capability or "").startswith("12.") and (packs or kept == "auto")
    return kv_format("fp8_ds_mla") if packs else None


# Measured on MI300X with vLLM 0.13 to 0.18, one GPU: 17 % for Ministral-3-14B, 27 % for
# Qwen3-VL-30B-A3B and Llama-4-Maverick in 16 bit; 0.13.1 loaded Qwen3-VL without a second copy.
_SECOND_COPY_VERSIONS = ((0, 13, 0), (0, 19, 0))
_SECOND_COPY_RATIO = 0.27


def second_copy_ratio(setup: Setup) -> float:
    """Extra memory for loading weights on this GPU and version, divided by the weights.

    The largest measured ratio; 0 for GPUs and versions without a measurement.
    """
    first, after = _SECOND_COPY_VERSIONS
    amd = setup.gpu is not None and setup.gpu.vendor == "amd"
    if not amd or setup.weights_bytes is not None or not first <= setup.version < after:
        return 0.0
    return _SECOND_COPY_RATIO if setup.parallel.tensor == 1 else 0.0


def memory(setup: Setup) -> Memory:
    """The memory of the launch's fullest GPU.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    check(setup)
    layout = kv_layout_of(setup)
    weights, weights_bytes, overhead = None, setup.weights_bytes, None
    parallel, adapters, draft = setup.parallel, 0.0, 0.0
    if setup.adapters is not None:
        adapters = adapter_bytes(setup.model, setup.adapters, parallel)
    if setup.draft is not None:
        draft = draft_bytes(setup.draft, parallel)
    if setup.available_kv_bytes is not None:
        available = Range(*[setup.available_kv_bytes] * 3)
    else:
        if weights_bytes is None:
            vendor = setup.gpu.vendor if setup.gpu is not None else "nvidia"
            weights = weights_per_gpu(setup.model, setup.scheme, parallel, vendor=vendor)
            weights_bytes = weights.total_bytes
        if setup.gpu is None:
            raise SizingError(
                "set the GPU, or the available KV cache memory that vLLM logged", name="gpu"
            )
        overhead = overhead_of(setup, weights_bytes, setup.gpu)
        room = setup.utilization * setup.gpu.memory_bytes - weights_bytes - adapters - draft
        copied_bytes = second_copy_ratio(setup) * weights_bytes
        spared_bytes = 0.0
        if weights is not None and setup.scheme.compute == "fp4":
            copied_bytes += _MIXED_PRECISION_RATIO * weights_bytes
            attention_bits = setup.scheme.attention_bits_of(mixture=bool(setup.model.experts.count))
            spared_bytes = weights.attention_bytes * (1 - setup.scheme.linear_bits / attention_bits)
        available = Range(
            room - overhead.high_bytes - copied_bytes,
            room - overhead.expected_bytes,
            room - overhead.low_bytes + spared_bytes,
        )
    context = setup.context
    blocks, request = available.map(layout.blocks), layout.request_blocks(context)
    concurrency = blocks.map(lambda count: count / request)
    held = concurrency.map(lambda requests: int(requests * context))
    logged = held
    if not setup.defaults.capacity_by_context:
        logged = available.map(layout.tokens_of_blocks)
    return Memory(
        setup=setup,
        layout=layout,
        weights=weights,
        weights_bytes=None if weights_bytes is None else weights_bytes + adapters + draft,
        overhead=overhead,
        available_bytes=available,
        logged_tokens=logged,
        held_tokens=held,
        concurrency=concurrency,
        adapter_bytes=adapters,
        draft_bytes=draft,
    )


# --- The smallest replica that holds a load -------------------------------------------------------


# Tensor parallel inside a node, then more nodes as pipeline stages.
_SPREADS = tuple(
    Parallel(tensor=tensor, pipeline=pipeline)
    for pipeline in (1, 2, 4)
    for tensor in (1, 2, 4, 8)
    if pipeline == 1 or tensor == 8
)


class FewestGpus(Struct, frozen=True):
    """GPUs of the smallest replica that holds the load; None if more than 32 are needed.

    `low` assumes the lowest overhead, `high` the highest. `spread` is the parallelism for
    `expected`.
    """

    low: int | None
    expected: int | None
    high: int | None
    spread: Parallel | None


def fewest_gpus(setup: Setup, *, concurrency: float) -> FewestGpus:
    """The smallest replica that starts and holds `concurrency` requests of the context's length.

    Stated or measured bytes apply to a single layout, so here they are computed for every layout.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    plain = replace(setup, available_kv_bytes=None, weights_bytes=None, overhead_excess_bytes=None)
    by_bound: dict[str, Parallel] = {}
    # Of layouts with equally many GPUs, the stated one comes first.
    spreads = sorted(
        {setup.parallel: None, **dict.fromkeys(_SPREADS)}, key=lambda parallel: parallel.gpus
    )
    for spread in spreads:
        try:
            answer = memory(replace(plain, parallel=spread))
        except SizingError as error:
            if error.name not in {"tensor_parallel", "draft_model", "dcp"}:
                raise
            continue
        longest = answer.layout.request_blocks(plain.longest_tokens)
        for bound, free_bytes, requests in (
            ("low", answer.available_bytes.high, answer.concurrency.high),
            ("expected", answer.available_bytes.expected, answer.concurrency.expected),
            ("high", answer.available_bytes.low, answer.concurrency.low),
        ):
            if answer.layout.blocks(free_bytes) > longest and requests >= concurrency:
                by_bound.setdefault(bound, spread)
    best = by_bound.get("expected")
    return FewestGpus(
        low=by_bound["low"].gpus if "low" in by_bound else None,
        expected=best.gpus if best else None,
        high=by_bound["high"].gpus if "high" in by_bound else None,
        spread=best,
    )
