"""Does it fit, and how much KV cache is left: the memory of one GPU of a replica. Pure.

available KV = utilization x memory - weights - overhead; the rest follows from the cache's layout.
Source: guide 2.1 to 2.6; vLLM's own start-up accounting (vllm/v1/worker/gpu_worker.py, 0.32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.quantization import Scheme, scheme
from kneewatch.diagnose.sizing.inputs import SizingError, positive, within
from kneewatch.diagnose.sizing.kv_cache import KvLayout, KvSettings, kv_element_bytes, kv_layout
from kneewatch.diagnose.sizing.overhead import Launch, Overhead, fitted_overhead, guide_overhead
from kneewatch.diagnose.sizing.vllm_defaults import LATEST, Defaults, Version, defaults
from kneewatch.diagnose.sizing.weights import ONE_GPU, Parallel, Weights, weights_per_gpu

OVERHEADS = ("fitted", "guide")


@dataclass(frozen=True, slots=True)
class Range:
    """A quantity with its least and most likely bounds."""

    low: float
    expected: float
    high: float

    def map(self, function: Callable[[float], float]) -> Range:
        """The range of a quantity that grows with this one."""
        return Range(function(self.low), function(self.expected), function(self.high))


@dataclass(frozen=True, slots=True)
class Setup:
    """A launch to be sized. None means vLLM's default for that version and GPU.

    `weights_bytes` and `available_kv_bytes` are per GPU, as vLLM logs them, and win over what
    would be computed. `context_tokens` is the length at which concurrency is asked for, the
    longest allowed one (`max_model_len`) where it is None.
    """

    model: Model
    gpu: Gpu | None = None
    parallel: Parallel = ONE_GPU
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    version: Version = LATEST
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_tokens: int | None = None
    decode_context_parallel: int = 1
    enforce_eager: bool = False
    hybrid_pool: bool = True
    overhead: str = "fitted"
    weights_bytes: float | None = None
    available_kv_bytes: float | None = None
    context_tokens: int | None = None

    @property
    def scheme(self) -> Scheme:
        """The quantization: the one stated, else the checkpoint's own."""
        return scheme(self.quantization or self.model.quantization)

    @property
    def defaults(self) -> Defaults:
        """What that vLLM takes by default on that GPU."""
        return defaults(self.version, self.gpu)

    @property
    def utilization(self) -> float:
        """The share of the GPU's memory that vLLM may use."""
        stated = self.gpu_memory_utilization
        return self.defaults.gpu_memory_utilization if stated is None else stated

    @property
    def seqs(self) -> int:
        """The most requests that run at once."""
        return self.max_num_seqs or self.defaults.max_num_seqs

    @property
    def batched_tokens(self) -> int:
        """The token budget of one step."""
        return self.max_num_batched_tokens or self.defaults.max_num_batched_tokens

    @property
    def longest_tokens(self) -> int:
        """The longest request that is allowed.

        Raises:
            SizingError: neither the launch nor the model says.
        """
        longest = self.max_model_len or self.model.max_context_tokens
        if not longest:
            raise SizingError(
                f"{self.model.id}: the configuration has no max_position_embeddings; "
                "state the longest context",
                name="max_model_len",
            )
        return longest

    @property
    def context(self) -> int:
        """The length at which concurrency is asked for."""
        return self.context_tokens or self.longest_tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """The answer for one GPU. `weights` and `overhead` are None where the KV bytes were stated.

    `logged_tokens` is what that version prints as "GPU KV cache size"; `held_tokens` is what the
    cache holds of requests of the context's length; `concurrency` counts such requests.
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

    @property
    def holds_one(self) -> bool:
        """True where one request of the longest allowed length fits: else vLLM does not start."""
        blocks = self.layout.blocks(self.available_bytes.expected)
        return blocks >= self.layout.request_blocks(self.setup.longest_tokens)

    def fits(self, concurrency: float = 1.0) -> bool:
        """True where vLLM starts and holds that many requests of the context's length."""
        return self.holds_one and self.concurrency.expected >= concurrency


def check(setup: Setup) -> None:
    """Refuse what vLLM would refuse or what no launch can mean.

    Raises:
        SizingError: with the input's name.
    """
    within("gpu_memory_utilization", setup.utilization, low=0.01, high=1.0)
    for name, value in (
        ("max_model_len", setup.max_model_len),
        ("max_num_seqs", setup.max_num_seqs),
        ("max_num_batched_tokens", setup.max_num_batched_tokens),
        ("context", setup.context_tokens),
        ("weights_gib", setup.weights_bytes),
        ("tensor_parallel", setup.parallel.tensor),
        ("pipeline_parallel", setup.parallel.pipeline),
    ):
        if value is not None:
            positive(name, value)
    if setup.overhead not in OVERHEADS:
        raise SizingError(
            f"overhead {setup.overhead!r} is not known", name="overhead", choices=OVERHEADS
        )
    if setup.context > setup.longest_tokens:
        raise SizingError(
            f"context {setup.context} is longer than the {setup.longest_tokens} tokens allowed",
            name="context",
        )
    heads, tp = setup.model.attention_heads, setup.parallel.tensor
    if heads and heads % tp:
        fitting = [str(size) for size in range(1, heads + 1) if not heads % size and size <= 64]
        raise SizingError(
            f"tensor parallel {tp} does not divide the {heads} attention heads of {setup.model.id}",
            name="tensor_parallel",
            choices=fitting,
        )
    _check_dtypes(setup)


def _check_dtypes(setup: Setup) -> None:
    gpu, arithmetic = setup.gpu, setup.scheme.compute
    if gpu is None:
        return
    # Ampere and older run 8- and 4-bit weights through weight-only kernels, which is no refusal.
    if arithmetic == "fp4" and gpu.flop_per_s("fp8") is None:
        raise SizingError(
            f"{gpu.name} has neither FP4 nor FP8 arithmetic for {setup.scheme.id} weights",
            name="quantization",
            choices=("bf16", "int8", "awq", "gptq", "int4"),
        )


def kv_layout_of(setup: Setup) -> KvLayout:
    """How that launch's KV cache is cut into blocks.

    Raises:
        SizingError: a dtype that is not known, heads that cannot be split.
    """
    taken = setup.defaults
    return kv_layout(
        setup.model.layers,
        KvSettings(
            tensor_parallel=setup.parallel.tensor,
            pipeline_parallel=setup.parallel.pipeline,
            decode_context_parallel=setup.decode_context_parallel,
            element_bytes=kv_element_bytes(setup.kv_cache_dtype),
            block_tokens=setup.block_tokens,
            in_flight_tokens=setup.batched_tokens * taken.batches_in_flight,
            hybrid_pool=setup.hybrid_pool and taken.hybrid_pool,
            padded_latent=taken.padded_latent,
        ),
    )


def memory(setup: Setup) -> Memory:
    """The memory of the fullest GPU of that launch.

    Raises:
        SizingError: an input that cannot be, with its name.
    """
    check(setup)
    layout = kv_layout_of(setup)
    weights, weights_bytes, overhead = None, setup.weights_bytes, None
    if setup.available_kv_bytes is not None:
        available = Range(*[setup.available_kv_bytes] * 3)
    else:
        if weights_bytes is None:
            weights = weights_per_gpu(setup.model, setup.scheme, setup.parallel)
            weights_bytes = weights.total_bytes
        gpu = _known_gpu(setup)
        overhead = overhead_of(setup, weights_bytes, gpu)
        room = setup.utilization * gpu.memory_bytes - weights_bytes
        available = Range(
            room - overhead.high_bytes, room - overhead.expected_bytes, room - overhead.low_bytes
        )
    context = setup.context
    concurrency = available.map(lambda free_bytes: layout.concurrency(free_bytes, context))
    by_context = setup.defaults.capacity_by_context
    return Memory(
        setup=setup,
        layout=layout,
        weights=weights,
        weights_bytes=weights_bytes,
        overhead=overhead,
        available_bytes=available,
        logged_tokens=available.map(
            lambda free_bytes: layout.logged_tokens(free_bytes, context, by_context=by_context)
        ),
        held_tokens=concurrency.map(lambda requests: int(requests * context)),
        concurrency=concurrency,
    )


def _known_gpu(setup: Setup) -> Gpu:
    if setup.gpu is None:
        raise SizingError("state the GPU, or the KV bytes that vLLM logged", name="gpu")
    return setup.gpu


def overhead_of(setup: Setup, weights_bytes: float, gpu: Gpu) -> Overhead:
    """What is taken beside weights and KV, by the overhead model that the launch asks for."""
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


# Tensor parallel inside a node, then more nodes as pipeline stages.
_SPREADS = tuple(
    Parallel(tensor=tensor, pipeline=pipeline)
    for pipeline in (1, 2, 4)
    for tensor in (1, 2, 4, 8)
    if pipeline == 1 or tensor == 8
)


@dataclass(frozen=True, slots=True)
class FewestGpus:
    """GPUs of the smallest replica that holds the load; None where 32 do not do.

    `low` believes the least overhead, `high` the most; `spread` is the expected one's layout.
    """

    low: int | None
    expected: int | None
    high: int | None
    spread: Parallel | None


def fewest_gpus(setup: Setup, *, concurrency: float) -> FewestGpus:
    """The smallest replica that starts and holds `concurrency` requests of the context's length.

    Weights or KV bytes that were stated for one layout say nothing about another, so both are
    computed here.

    Raises:
        SizingError: an input that cannot be, with its name.
    """
    plain = replace(setup, available_kv_bytes=None, weights_bytes=None)
    found: dict[str, Parallel] = {}
    for spread in _SPREADS:
        try:
            answer = memory(replace(plain, parallel=spread))
        except SizingError as error:
            if error.name != "tensor_parallel":
                raise
            continue
        longest = answer.layout.request_blocks(plain.longest_tokens)
        for bound, free_bytes, requests in (
            ("low", answer.available_bytes.high, answer.concurrency.high),
            ("expected", answer.available_bytes.expected, answer.concurrency.expected),
            ("high", answer.available_bytes.low, answer.concurrency.low),
        ):
            if answer.layout.blocks(free_bytes) >= longest and requests >= concurrency:
                found.setdefault(bound, spread)
    best = found.get("expected")
    return FewestGpus(
        low=found["low"].gpus if "low" in found else None,
        expected=best.gpus if best else None,
        high=found["high"].gpus if "high" in found else None,
        spread=best,
    )
