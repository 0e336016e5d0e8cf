"""The memory budget of one GPU: overhead, KV cache, and the fewest GPUs for a load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.capacity import Range
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    MXFP8_PAGE_BYTES,
    CompressedAttention,
    Layers,
    Recurrent,
    SlidingStates,
)
from kneewatch.diagnose.sizing.arithmetic import compiled
from kneewatch.diagnose.sizing.memory.kv_cache import KvLayout, KvSettings, kv_layout
from kneewatch.diagnose.sizing.memory.kv_formats import KvFormat, kv_format
from kneewatch.diagnose.sizing.memory.launch import Launch, check
from kneewatch.diagnose.sizing.memory.overhead import Overhead, overhead_of
from kneewatch.diagnose.sizing.memory.weights import (
    ATTENTION,
    Parallel,
    adapter_bytes,
    draft_layers,
    draft_weights,
    splits,
    weights_per_gpu,
)

HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO = 0.30, 0.50
"""Headroom to add to the calculated memory before deploying, as a share (guide 2.6)."""

# Computed weights are within 2% of logged ones, of NVFP4 within 3%. Where the maker's recipe is not
# known, some layers may be in 8 or 16 bit (up to 9% above computed), or attention in 4 bit.
_WEIGHTS_RATIO, _NVFP4_RATIO, _MIXED_PRECISION_RATIO = 0.02, 0.03, 0.09

_MXFP8_FROM = (0, 30, 0)


class Memory(Struct, frozen=True):
    """The memory of one GPU.

    - `weights`, `overhead`: None if the KV bytes were stated.
    - `weights_bytes`: everything that vLLM logs as loaded: the model, `adapter_bytes`,
      `draft_bytes` and the launch's `added_bytes`.
    - `logged_tokens`: what this vLLM version logs as "GPU KV cache size".
    - `concurrency`: requests of the context's length that fit at once, as vLLM logs at start-up.
    - `held_tokens`: their tokens.
    - `refused_seqs`: the default max_num_seqs, if vLLM would refuse it and `launch` has another.
    - `room_bytes`: the largest KV cache that the whole GPU has room for, if a flag states its size.
    """

    launch: Launch
    layout: KvLayout
    weights: Mapping[str, float] | None
    weights_bytes: float | None
    overhead: Overhead | None
    available_bytes: Range
    logged_tokens: Range
    held_tokens: Range
    concurrency: Range
    adapter_bytes: float = 0.0
    draft_bytes: float = 0.0
    refused_seqs: int = 0
    room_bytes: float = inf

    @property
    def held(self) -> Range:
        """Requests of the context's length that run at once: more than `concurrency` where layers
        have windows."""
        context = self.launch.context
        return self.available_bytes.map(lambda free_bytes: self.layout.held(free_bytes, context))

    @property
    def starts(self) -> bool:
        """Whether vLLM starts: it takes the flags, and one request of full length fits, and a state
        for each request that may run, in no more memory than the GPU has."""
        has_memory = self.has_room and self.holds_one and self.most_seqs >= self.launch.seqs
        return has_memory and self.launch.refusal is None

    @property
    def has_room(self) -> bool:
        """Whether the GPU's memory is enough for the KV cache that a flag states."""
        return self.available_bytes.expected <= self.room_bytes

    @property
    def blocks(self) -> int:
        """The blocks of the KV cache."""
        return self.layout.blocks(self.available_bytes.expected)

    @property
    def most_seqs(self) -> float:
        """The largest max_num_seqs that vLLM accepts: recurrent layers keep the state of each
        running request in a block of its own, and CUDA graphs are captured for all of them."""
        checked = _checks_seqs(self.launch)
        return self.blocks if checked else inf

    @property
    def holds_one(self) -> bool:
        """Whether one request of the longest allowed length fits beside vLLM's own block.

        If not, newer versions refuse to start. Older versions start, and such a request waits
        forever.
        """
        return self.blocks > self.layout.request_blocks(self.launch.longest_tokens)

    @property
    def longest_that_fits(self) -> int:
        """Tokens of the longest request that fits beside vLLM's own block; 0 if none fits."""
        low, high = 0, self.launch.longest_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.layout.request_blocks(middle) < self.blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def fits(self, concurrency: float = 1.0) -> bool:
        """Whether vLLM starts and holds this many requests of the context's length."""
        return self.starts and self.held.expected >= concurrency


_SEQS_CHECKED = (0, 20, 0)
"""vLLM pull request 38270: 1,024 refused where 512 states fit; 0.19 started with 1,019."""


def _checks_seqs(launch: Launch) -> bool:
    # With a draft vLLM lowers the number itself.
    if launch.enforce_eager or launch.draft is not None or launch.version < _SEQS_CHECKED:
        return False
    recurrent = any(isinstance(layers.kind, Recurrent) for layers in launch.model.layers)
    return recurrent and launch.slack is None


AVAILABLE = "{utilization} x {memory:GiB} - {loaded:GiB} - {overhead:GiB}"
"""Bytes of one GPU that are left for the KV cache."""


# A search asks for the same layout on every GPU.
_layout_of = lru_cache(maxsize=1024)(kv_layout)


def kv_layout_of(launch: Launch) -> KvLayout:
    """The block layout of the launch's KV cache.

    Raises:
        SizingError: the dtype is unknown, heads cannot be split, or vLLM cannot combine the layers;
            the message names the setting.
    """
    try:
        return _laid_out(launch)
    except SizingError as error:
        if error.name != "hybrid_pool" or not launch.hybrid_pool:
            raise
        if not launch.defaults.hybrid_pool:
            raise SizingError(
                f"{error}, and this version has no shared pool of them; 0.9.2 and later do",
                name="vllm_version",
            ) from error
        if launch.draft is not None:
            raise SizingError(
                f"the layers of the draft {launch.draft.model.id} have no page in common with "
                f"those of {launch.model.id}",
                name="draft_model",
            ) from error
        raise


def _laid_out(launch: Launch) -> KvLayout:
    taken = launch.defaults
    layers, drafted = launch.model.layers, 0
    if launch.draft is not None:
        layers = (*layers, *draft_layers(launch.draft, launch.parallel))
        drafted = launch.draft.tokens
    batches = taken.batches_in_flight(launch.parallel.pipeline)
    return _layout_of(
        _in_records_of(launch, layers),
        KvSettings(
            tensor_parallel=launch.parallel.tensor,
            pipeline_parallel=launch.parallel.pipeline,
            decode_context_parallel=launch.decode_context_parallel,
            kv_format=launch.kv_format,
            block_tokens=launch.block_tokens,
            in_flight_tokens=launch.batched_tokens * batches,
            decode_tokens=(1 + drafted) * batches,
            hybrid_pool=launch.shares_pool,
            padded_latent=taken.padded_latent,
            indexed_format=indexed_format(launch),
            state_blocks=launch.state_blocks + drafted,
            draft_tokens=drafted,
            latent_hybrid_tokens=taken.latent_hybrid_tokens,
        ),
    )


def _in_records_of(launch: Launch, layers: Sequence[Layers]) -> tuple[Layers, ...]:
    """The layers, with MXFP8 vectors if this GPU's kernels store them (images before 0.30 did not:
    FLASHMLA_SPARSE_DSV41)."""
    capability = launch.gpu.compute_capability if launch.gpu is not None else ""
    if not (capability or "").startswith("10.") or launch.version < _MXFP8_FROM:
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


def indexed_format(launch: Launch) -> KvFormat | None:
    """The packed format of latent vectors in an FP8 cache, for models with an indexer.

    Kernels of Hopper and of workstation Blackwell (capability 12) store this format; the latter
    store nothing else. None if latent vectors have the cache's own format: on data-centre Blackwell
    and AMD, and on Hopper in caches of other types than FP8.

    Source: vllm/platforms/cuda.py, vllm/model_executor/layers/attention/mla_attention.py and
    vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py (0.32).
    """
    gpu, kept = launch.gpu, kv_format(launch.kv_cache_dtype).id
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


def second_copy_ratio(launch: Launch) -> float:
    """Extra memory for loading weights on this GPU and version, divided by the weights.

    The largest measured ratio; 0 for GPUs and versions without a measurement.
    """
    first, after = _SECOND_COPY_VERSIONS
    amd = launch.gpu is not None and launch.gpu.vendor == "amd"
    if not amd or launch.weights_bytes is not None or not first <= launch.version < after:
        return 0.0
    return _SECOND_COPY_RATIO if launch.parallel.tensor == 1 else 0.0


def memory(launch: Launch) -> Memory:
    """The memory of the launch's fullest GPU.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    check(launch)
    layout = kv_layout_of(launch)
    weights, weights_bytes, overhead = None, launch.weights_bytes, None
    parallel, adapters, draft = launch.parallel, 0.0, 0.0
    if launch.adapters is not None:
        adapters = adapter_bytes(launch.model, launch.adapters, parallel)
    if launch.draft is not None:
        draft = sum(draft_weights(launch.draft, parallel).values())
    if launch.available_kv_bytes is not None:
        available = Range(*[launch.available_kv_bytes] * 3)
    else:
        scheme = launch.scheme
        if weights_bytes is None:
            vendor = launch.gpu.vendor if launch.gpu is not None else "nvidia"
            weights = weights_per_gpu(launch.model, scheme, parallel, vendor=vendor)
            weights_bytes = max(sum(weights.values()) - launch.cpu_offload_bytes, 0.0)
        if launch.gpu is None:
            raise SizingError(
                "set the GPU, or the available KV cache memory that vLLM logged", name="gpu"
            )
        overhead = overhead_of(launch, weights_bytes, launch.gpu)
        loaded_bytes = weights_bytes + adapters + draft + launch.added_bytes
        fixed = launch.utilization, launch.gpu.memory_bytes, loaded_bytes
        copied_bytes = second_copy_ratio(launch) * weights_bytes
        spared_bytes = 0.0
        if weights is not None:
            doubt_ratio = _NVFP4_RATIO if scheme.compute == "fp4" else _WEIGHTS_RATIO
            doubt_bytes = doubt_ratio * weights_bytes
            copied_bytes, spared_bytes = copied_bytes + doubt_bytes, doubt_bytes
        if weights is not None and scheme.id == "nvfp4":
            copied_bytes += (_MIXED_PRECISION_RATIO - _NVFP4_RATIO) * weights_bytes
            attention_bits = scheme.attention_bits_of(mixture=bool(launch.model.experts.count))
            spared_bytes += weights[ATTENTION] * (1 - scheme.linear_bits / attention_bits)
        available = Range(
            *(
                compiled(AVAILABLE)(*fixed, taken_bytes)
                for taken_bytes in (
                    overhead.high_bytes + copied_bytes,
                    overhead.expected_bytes,
                    overhead.low_bytes - spared_bytes,
                )
            )
        )
    context = launch.context
    blocks, request = available.map(layout.blocks), layout.request_blocks(context)
    concurrency = blocks.map(lambda count: count / request)
    tokens = concurrency.map(lambda requests: int(requests * context))
    logged = tokens
    if not launch.defaults.capacity_by_context:
        logged = available.map(layout.tokens_of_blocks)
    beside_bytes = adapters + draft + launch.added_bytes
    answer = Memory(
        launch=launch,
        layout=layout,
        weights=weights,
        weights_bytes=None if weights_bytes is None else weights_bytes + beside_bytes,
        overhead=overhead,
        available_bytes=available,
        logged_tokens=logged,
        held_tokens=tokens,
        concurrency=concurrency,
        adapter_bytes=adapters,
        draft_bytes=draft,
        room_bytes=_room_bytes(launch),
    )
    accepted = answer.most_seqs >= launch.seqs
    if launch.max_num_seqs is not None or accepted or not answer.holds_one:
        return answer
    # Fewer requests take less memory beside the cache, so this number is accepted.
    seqs = 1 << int(answer.most_seqs).bit_length() - 1
    return replace(memory(replace(launch, max_num_seqs=seqs)), refused_seqs=launch.seqs)


def _room_bytes(launch: Launch) -> float:
    if launch.kv_cache_memory_bytes is None or launch.gpu is None or not launch.model.parameters:
        return inf
    whole = replace(launch, available_kv_bytes=None, kv_cache_memory_bytes=None)
    return memory(replace(whole, gpu_memory_utilization=1.0)).available_bytes.expected


# --- The smallest replica that holds a load -------------------------------------------------------


# Tensor parallel inside a node, then more nodes as pipeline stages.
_SPREADS = (*splits((1, 2, 4, 8)), *splits((8,), stages=(2, 4)))


class FewestGpus(Struct, frozen=True):
    """GPUs of the smallest replica that holds the load; None if more than 32 are needed.

    `low` assumes the lowest overhead, `high` the highest. `spread` is the parallelism for
    `expected`.
    """

    low: int | None
    expected: int | None
    high: int | None
    spread: Parallel | None


def fewest_gpus(launch: Launch, *, concurrency: float) -> FewestGpus:
    """The smallest replica that starts and holds `concurrency` requests of the context's length.

    Stated or measured bytes apply to a single layout, so here they are computed for every layout.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    plain = replace(launch, available_kv_bytes=None, weights_bytes=None, overhead_excess_bytes=None)
    by_bound: dict[str, Parallel] = {}
    # Of layouts with equally many GPUs, the stated one comes first.
    spreads = sorted(
        {launch.parallel: None, **dict.fromkeys(_SPREADS)}, key=lambda parallel: parallel.gpus
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
            ("low", answer.available_bytes.high, answer.held.high),
            ("expected", answer.available_bytes.expected, answer.held.expected),
            ("high", answer.available_bytes.low, answer.held.low),
        ):
            if answer.layout.blocks(free_bytes) > longest and requests >= concurrency:
                by_bound.setdefault(bound, spread)
    counts = {bound: spread.gpus for bound, spread in by_bound.items()}
    return FewestGpus(
        counts.get("low"), counts.get("expected"), counts.get("high"), by_bound.get("expected")
    )
