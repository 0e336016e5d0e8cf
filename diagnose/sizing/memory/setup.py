"""A launch to be sized, and what no launch can be. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.catalogue.layers import FullAttention, LatentAttention
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.quantization import SCHEMES, Scheme, scheme
from kneewatch.diagnose.sizing.inputs import SizingError, positive, within
from kneewatch.diagnose.sizing.memory.adapters import Adapters, check_adapters
from kneewatch.diagnose.sizing.memory.draft import Draft, check_draft
from kneewatch.diagnose.sizing.memory.vllm_defaults import LATEST, Defaults, Version, defaults
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU, Parallel

OVERHEADS = ("fitted", "guide")
# More than any count of tokens, requests or GPUs will be for a while.
_LARGEST_COUNT = 1 << 40
_LARGEST_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Setup:
    """A launch to be sized. None means vLLM's default for that version and GPU.

    `weights_bytes` and `available_kv_bytes` are per GPU, as vLLM logs them, and win over what
    would be computed; adapters and a draft come on top of the first. `context_tokens` is the length
    at which concurrency is asked for, the longest allowed one (`max_model_len`) where it is None.
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
    prefix_caching: bool = True
    overhead: str = "fitted"
    weights_bytes: float | None = None
    available_kv_bytes: float | None = None
    context_tokens: int | None = None
    adapters: Adapters | None = None
    draft: Draft | None = None

    @property
    def scheme(self) -> Scheme:
        """The quantization: the one stated, else the checkpoint's own.

        A checkpoint that is quantized already keeps its own form of what is stated: "fp8" of one
        that leaves attention in 16 bit is that.
        """
        own = scheme(self.model.quantization)
        if self.quantization is None:
            return own
        stated = scheme(self.quantization)
        return own if stated.id in {own.id, own.stated_as} else stated

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


def check(setup: Setup) -> None:
    """Refuse what vLLM would refuse or what no launch can mean.

    Raises:
        SizingError: with the input's name.
    """
    within("gpu_memory_utilization", setup.utilization, low=0.01, high=1.0)
    _check_counts(setup)
    if setup.overhead not in OVERHEADS:
        raise SizingError(
            f"overhead {setup.overhead!r} is not known", name="overhead", choices=OVERHEADS
        )
    if setup.context > setup.longest_tokens:
        raise SizingError(
            f"context {setup.context} is longer than the {setup.longest_tokens} tokens allowed",
            name="context",
        )
    if setup.batched_tokens < min(setup.seqs, setup.max_num_seqs or 0):
        raise SizingError(
            f"a budget of {setup.batched_tokens} tokens is below the {setup.seqs} requests of a "
            "batch; vLLM refuses that",
            name="max_num_batched_tokens",
        )
    _check_parallel(setup)
    _check_dtypes(setup)
    if setup.model.target_hidden_size:
        raise SizingError(
            f"{setup.model.id} is a draft head, which runs beside its target only: state the "
            "target here and the head as the draft",
            name="model",
        )
    if setup.adapters is not None:
        check_adapters(setup.adapters, setup.model)
    if setup.draft is not None:
        check_draft(setup.draft, setup.model, setup.parallel)


def _check_counts(setup: Setup) -> None:
    for name, value in (
        ("max_model_len", setup.max_model_len),
        ("max_num_seqs", setup.max_num_seqs),
        ("max_num_batched_tokens", setup.max_num_batched_tokens),
        ("context", setup.context_tokens),
        ("block_size", setup.block_tokens),
        ("tensor_parallel", setup.parallel.tensor),
        ("pipeline_parallel", setup.parallel.pipeline),
        ("dcp", setup.decode_context_parallel),
    ):
        if value is not None:
            positive(name, value)
            most = _LARGEST_BLOCK if name == "block_size" else _LARGEST_COUNT
            within(name, value, low=1, high=most)
    if setup.weights_bytes is not None:
        positive("weights_gib", setup.weights_bytes)


def _check_parallel(setup: Setup) -> None:
    parallel, model = setup.parallel, setup.model
    heads, tp = model.attention_heads, parallel.tensor
    if heads and heads % tp:
        fitting = [str(size) for size in range(1, heads + 1) if not heads % size and size <= 64]
        raise SizingError(
            f"tensor parallel {tp} does not divide the {heads} attention heads of {model.id}",
            name="tensor_parallel",
            choices=fitting,
        )
    if parallel.pipeline > model.depth:
        raise SizingError(
            f"{model.id} has {model.depth} layers for {parallel.pipeline} pipeline stages",
            name="pipeline_parallel",
        )
    most = _most_context_ranks(setup)
    if tp % setup.decode_context_parallel or setup.decode_context_parallel > most:
        fitting = [str(ranks) for ranks in range(1, most + 1) if not tp % ranks]
        raise SizingError(
            f"{setup.decode_context_parallel} context ranks do not fit TP {tp} of {model.id}: "
            "they share the ranks that hold copies of the same KV heads",
            name="dcp",
            choices=fitting,
        )


def _most_context_ranks(setup: Setup) -> int:
    """Ranks that hold the same KV: all with latent attention, else those beyond the KV heads."""
    tp = setup.parallel.tensor
    full = [part.kind for part in setup.model.layers]
    if all(isinstance(kind, LatentAttention) for kind in full):
        return tp
    heads = [kind.kv_heads for kind in full if isinstance(kind, FullAttention)]
    return max(tp // min(heads, default=tp), 1)


def _check_dtypes(setup: Setup) -> None:
    gpu, arithmetic = setup.gpu, setup.scheme.compute
    # Ampere and older run 8- and 4-bit weights through weight-only kernels, which is no refusal.
    if gpu is not None and arithmetic == "fp4" and gpu.flop_per_s("fp8") is None:
        raise SizingError(
            f"{gpu.name} has neither FP4 nor FP8 arithmetic for {setup.scheme.id} weights",
            name="quantization",
            choices=tuple(key for key in SCHEMES if SCHEMES[key].compute != "fp4"),
        )
