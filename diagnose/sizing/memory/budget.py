"""The memory budget of one GPU, its KV cache, and the fewest GPUs for a load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    MXFP8_PAGE_BYTES,
    CompressedAttention,
    Layers,
    SlidingStates,
)
from kneewatch.diagnose.sizing.memory.kv_cache import (
    KvLayout,
    KvSettings,
    kv_layout,
)
from kneewatch.diagnose.sizing.memory.kv_formats import KvFormat, kv_format
from kneewatch.diagnose.sizing.memory.launch_setup import Setup, check
from kneewatch.diagnose.sizing.memory.overhead import (
    Launch,
    Overhead,
    corrected_overhead,
    fitted_overhead,
    guide_overhead,
)
from kneewatch.diagnose.sizing.memory.weights import (
    Parallel,
    Weights,
    adapter_bytes,
    draft_bytes,
    draft_layers,
    weights_per_gpu,
)


@dataclass(frozen=True, slots=True)
class Range:
    """An expected value with its lower and upper bound."""

    low: float
    expected: float
    high: float

    def map(self, function: Callable[[float], float]) -> Range:
        """The range of an increasing function of this quantity."""
        return Range(function(self.low), function(self.expected), function(self.high))


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one GPU. `weights` and `overhead` are None if the KV bytes were stated.

    `weights_bytes` is everything that vLLM logs as loaded: the model, `adapter_bytes` and
    `draft_bytes`. `logged_tokens` is what that version logs as "GPU KV cache size"; `held_tokens`
    is the cache's capacity in requests of the context's length; `concurrency` counts such requests.
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

        If not, newer versions refuse to start; older ones start, and such a request waits for ever.
        """
        blocks = self.layout.blocks(self.available_bytes.expected)
        return blocks > self.layout.request_blocks(self.setup.longest_tokens)

    @property
    def longest_that_fits(self) -> int:
        """Tokens of the longest request that fits beside vLLM's own block; 0 if none does."""
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
        """Whether vLLM starts and holds that many requests of the context's length."""
        return self.holds_one and self.concurrency.expected >= concurrency


# A search asks for the same one on every GPU.
_layout_of = lru_cache(maxsize=1024)(kv_layout)


def kv_layout_of(setup: Setup) -> KvLayout:
    """The block layout of the launch's KV cache.

    Raises:
        SizingError: an unknown dtype, heads that cannot be split, or layers that vLLM cannot lay
    out together; the message names the setting.
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
            state_blocks=(taken.state_blocks if setup.prefix_caching else 1) + drafted,
            latent_hybrid_tokens=taken.latent_hybrid_tokens,
        ),
    )


def _in_records_of(gpu: Gpu | None, layers: Sequence[Layers]) -> tuple[Layers, ...]:
    """The layers with the vectors that this GPU's kernels keep."""
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
    """The format of an FP8 cache's latent vectors with an indexer, which Hopper's kernel packs;
    None where it is the cache's own: on Blackwell and AMD, and of a packed format.

    Source: vllm/platforms/cuda.py and vllm/model_executor/layers/attention/mla_attention.py (0.32).
    """
    gpu = setup.gpu
    hopper = gpu is None or (gpu.vendor == "nvidia" and gpu.architecture != "blackwell")
    packs = hopper and kv_format(setup.kv_cache_dtype).id.startswith("fp8")
    return kv_format("fp8_ds_mla") if packs else None


# Measured on MI300X with vLLM 0.13 to 0.18, one GPU: 17 % for Ministral-3-14B, 27 % for
# Qwen3-VL-30B-A3B and Llama-4-Maverick in 16 bit; 0.13.1 loaded Qwen3-VL without it.
_SECOND_COPY_VERSIONS = ((0, 13, 0), (0, 19, 0))
_SECOND_COPY_RATIO = 0.27


def second_copy_ratio(setup: Setup) -> float:
    """How much more of the computed weights a load on that GPU and version has taken, at most."""
    first, after = _SECOND_COPY_VERSIONS
    amd = setup.gpu is not None and setup.gpu.vendor == "amd"
    if not amd or setup.weights_bytes is not None or not first <= setup.version < after:
        return 0.0
    return _SECOND_COPY_RATIO if setup.parallel.tensor == 1 else 0.0


def memory(setup: Setup) -> Memory:
    """The memory of the launch's fullest GPU.

    Raises:
        SizingError: an invalid input, with its name.
    """
    check(setup)
    layout = kv_layout_of(setup)
    weights, weights_bytes, overhead = None, setup.weights_bytes, None
    adapters, draft = _beside(setup)
    if setup.available_kv_bytes is not None:
        available = Range(*[setup.available_kv_bytes] * 3)
    else:
        if weights_bytes is None:
            vendor = setup.gpu.vendor if setup.gpu is not None else "nvidia"
            weights = weights_per_gpu(setup.model, setup.scheme, setup.parallel, vendor=vendor)
            weights_bytes = weights.total_bytes
        gpu = _known_gpu(setup)
        overhead = overhead_of(setup, weights_bytes, gpu)
        room = setup.utilization * gpu.memory_bytes - weights_bytes - adapters - draft
        copied_bytes = second_copy_ratio(setup) * weights_bytes
        available = Range(
            room - overhead.high_bytes - copied_bytes,
            room - overhead.expected_bytes,
            room - overhead.low_bytes,
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


def _beside(setup: Setup) -> tuple[float, float]:
    """Bytes of adapters and draft model on the fullest GPU."""
    adapters, draft, parallel = setup.adapters, setup.draft, setup.parallel
    return (
        0.0 if adapters is None else adapter_bytes(setup.model, adapters, parallel),
        0.0 if draft is None else draft_bytes(draft, parallel),
    )


def _known_gpu(setup: Setup) -> Gpu:
    if setup.gpu is None:
        raise SizingError(
            "set the GPU, or the available KV cache memory that vLLM logged", name="gpu"
        )
    return setup.gpu


def overhead_of(setup: Setup, weights_bytes: float, gpu: Gpu) -> Overhead:
    """The overhead beside weights and KV cache: by the launch's overhead model, corrected by what
    the running server showed."""
    predicted = _predicted_overhead(setup, weights_bytes, gpu)
    excess_bytes = setup.overhead_excess_bytes
    return predicted if excess_bytes is None else corrected_overhead(predicted, excess_bytes)


def _predicted_overhead(setup: Setup, weights_bytes: float, gpu: Gpu) -> Overhead:
    if setup.overhead == "guide":
        return guide_overhead(weights_bytes=weights_bytes, memory_bytes=gpu.memory_bytes)
    return fitted_overhead(
        model=setup.model,
        gpu=gpu,
        parallel=setup.parallel,
        launch=Launch(
            version=setup.version,
            max_num_seqs=setup.seqs,
            max_num_batched_tokens=setup.batched_tokens,
            max_context_tokens=setup.longest_tokens,
            enforce_eager=setup.enforce_eager,
        ),
    )


# --- The smallest replica that holds a load -------------------------------------------------------


# Tensor parallel inside a node, then more nodes as pipeline stages.
_SPREADS = tuple(
    Parallel(tensor=tensor, pipeline=pipeline)
    for pipeline in (1, 2, 4)
    for tensor in (1, 2, 4, 8)
    if pipeline == 1 or tensor == 8
)


@dataclass(frozen=True, slots=True)
class FewestGpus:
    """GPUs of the smallest replica that holds the load; None if more than 32 are needed.

    `low` assumes the lowest overhead, `high` the highest; `spread` is the layout of the expected
    one.
    """

    low: int | None
    expected: int | None
    high: int | None
    spread: Parallel | None


def fewest_gpus(setup: Setup, *, concurrency: float) -> FewestGpus:
    """The smallest replica that starts and holds `concurrency` requests of the context's length.

    Stated or measured bytes are of one layout, so all are computed here.

    Raises:
        SizingError: an invalid input, with its name.
    """
    plain = replace(setup, available_kv_bytes=None, weights_bytes=None, overhead_excess_bytes=None)
    by_bound: dict[str, Parallel] = {}
    # What was stated comes first of its size.
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
