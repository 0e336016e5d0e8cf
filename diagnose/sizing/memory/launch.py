"""A vLLM launch to size: its settings, its version's defaults, and validation. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from math import inf
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import fields as struct_fields
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    LONGEST_TOKENS,
    NO_CHUNKS,
    NO_PREFIX_CACHE,
    VLLM,
    EngineKind,
    sized_kinds,
)
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.catalogue.families import family_in
from kneewatch.diagnose.catalogue.gpu_specs import GIB, LINK_BYTES_PER_S, NETWORKS, Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError, positive, within
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.models import (
    UNKNOWN_MODEL,
    Model,
    takes_no_media,
    text_only,
    without_latents,
)
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, Scheme, is_format, scheme, schemes
from kneewatch.diagnose.deployment.vllm_flags import (
    FLAGS,
    Flag,
    Version,
    number_of,
    parameter_of,
)
from kneewatch.diagnose.sizing.memory.kv_formats import (
    KvFormat,
    kernel_missing,
    kv_format,
    kv_formats,
)
from kneewatch.diagnose.sizing.memory.weights import (
    DEFAULT_RANK,
    ONE_GPU,
    Adapters,
    Draft,
    Parallel,
    check_adapters,
    check_draft,
)

LATEST: Version = (0, 33, 0)
# The graph estimate is taken from the KV budget: some 0.3 to 1.5 GiB already with 0.20.0.
GRAPHS_TAKEN: Version = (0, 20, 0)
# V1 raised max_num_seqs to 1024 and the token budget on large GPUs.
_LARGE_BATCHES: Version = (0, 8, 3)
# GPUs of 160 GiB and more got a budget of 16,384 tokens; seen in 0.32, not in 0.20.
_LARGER_BUDGET: Version = (0, 26, 0)
V1: Version = (0, 9, 0)


def parse_version(text: str) -> Version:
    """(major, minor, patch) of a vLLM version such as "0.11.0", "v0.20.1rc2" or "0.19".

    Raises:
        SizingError: the text is not a version.
    """
    match = re.match(r"\s*v?(\d{1,3})\.(\d{1,4})(?:\.(\d{1,4}))?", text)
    if match is None:
        raise SizingError(
            f"{text!r} is not a vLLM version; write it as 0.20.1", name="vllm_version"
        )
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


class Defaults(Struct, frozen=True):
    """The default settings of a vLLM version."""

    version: Version
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    async_batches: bool
    hybrid_pool: bool
    chunked_pool: bool
    capacity_by_context: bool
    padded_latent: bool
    state_blocks: int
    latent_hybrid_tokens: int

    def batches_in_flight(self, pipeline_parallel: int) -> int:
        """Steps in flight at once: one more than the pipeline stages if steps overlap."""
        return pipeline_parallel + 1 if self.async_batches else 1


def defaults(version: Version, gpu: Gpu | None) -> Defaults:
    """The version's defaults on this GPU; without a GPU, those for an 80 GB H100."""
    if gpu is None:
        return _defaults(version, 80 * GIB, ampere=False)
    seen_bytes = gpu.memory_bytes if gpu.nvml_memory else 0
    return _defaults(version, seen_bytes, ampere=gpu.id.startswith("a100"))


class SizeClass(Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults on GPUs with less than `below_mib` of memory: prompt tokens of a step, and the
    largest batch of a CUDA graph, also with four and more GPUs (`graphs_of_many`)."""

    below_mib: float
    step_tokens: int
    graphs: int
    graphs_of_many: int


class SlackRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache of what is free after loading, less a slack: a share of what was free before.

    The default slack is `fixed_mib`, `token_mib` for each prompt token of a step (at least
    `tokens_min`), `gpu_mib` for each GPU and `graph_mib` for each request of the largest CUDA
    graph; on GPUs with more than `large_mib` at least `large_slack_mib`. `process_gib` is what the
    process takes before it loads: lowest, expected, highest.
    """

    version: str
    fixed_mib: float
    token_mib: float
    tokens_min: int
    gpu_mib: float
    graph_mib: float
    large_mib: float
    large_slack_mib: float
    seqs: int
    process_gib: tuple[float, float, float]
    classes: tuple[SizeClass, ...]

    def size_class(self, memory_mib: float) -> SizeClass:
        """The defaults on a GPU with this memory."""
        return next(each for each in self.classes if memory_mib < each.below_mib)

    def share(self, memory_mib: float, step_tokens: int, gpus: int) -> float:
        """The default share of a GPU's memory for weights and KV cache."""
        defaults = self.size_class(memory_mib)
        slack_mib = self.fixed_mib + self.token_mib * max(step_tokens, self.tokens_min)
        slack_mib += self.gpu_mib * gpus
        slack_mib += self.graph_mib * (defaults.graphs_of_many if gpus >= 4 else defaults.graphs)
        if memory_mib > self.large_mib:
            slack_mib = max(slack_mib, self.large_slack_mib)
        return round(1 - slack_mib / memory_mib, 3)


@cache
def _kind_named(title: str) -> EngineKind:
    return next((kind for kind in sized_kinds() if kind.title.lower() == title), VLLM)


@cache
def slack_of(kind: EngineKind) -> SlackRule | None:
    """The rule for the KV cache's memory of an engine; None without one."""
    return read_as(kind.slack, SlackRule) if kind.slack else None


@lru_cache(maxsize=1024)
def _defaults(version: Version, memory_bytes: int, *, ampere: bool) -> Defaults:
    large = memory_bytes >= 70 * GIB and not ampere and version >= _LARGE_BATCHES
    budget = 8192 if large else 2048
    if memory_bytes >= 160 * GIB and version >= _LARGER_BUDGET:
        budget = 16384
    stated: dict[str, Any] = {"max_num_seqs": 1024 if large else 256}
    for since, changed in packaged_tables("diagnose.sizing.memory", "versions.toml").items():
        stated |= changed if version >= parse_version(since) else {}
    return Defaults(version=version, max_num_batched_tokens=budget, **stated)


# --- A launch to size, and its validation ---------------------------------------------------------


OVERHEADS = ("fitted", "guide")
# More than any count of tokens, requests or GPUs will be for a while.
_LARGEST_COUNT = 1 << 40
_MOST_OF = {"block_tokens": 1 << 16}


class Launch(Struct, frozen=True):
    """A launch. None is vLLM's default for that version and GPU in one to size, and in that of a
    running server also what is not known of it.

    - `engine`: the title of an engine; `version` is vLLM's.
    - `weights_bytes`, `available_kv_bytes`: per GPU, as vLLM logs them; they replace computed
      values. Adapters and a draft are added to the weights.
    - `added_bytes`: of a draft on each GPU, if only its size is known.
    - `kv_cache_memory_bytes`: if `available_kv_bytes` is what this flag sets, its value.
    - `language_model_only`: `model` has no vision or audio tower, because of this flag.
    - `overhead_excess_bytes`: how much more memory the running server uses than the overhead model
      predicts; None if not measured.
    - `cpu_offload_bytes`: weights per GPU that stay in host memory.
    - `kv_offloading_bytes`: host memory for evicted KV blocks, of all ranks.
    - `limit_mm_per_prompt`: most items of a modality in a request; a modality without a limit is
      absent.
    - `auto_context`: vLLM takes the longest context that fits; `max_model_len` is an estimate.
    - `context_tokens`: the request length for concurrency; by default `max_model_len`.
    - `network`: between nodes, a key of LINK_BYTES_PER_S.
    - `other_flags`: vLLM's other flags, with their values; `flag` reads them.
    - `settled`: contradictions of the flags, and which of them counts.
    """

    model: Model = UNKNOWN_MODEL
    gpu: Gpu | None = None
    parallel: Parallel = ONE_GPU
    quantization: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    engine: str = VLLM.title
    version: Version = LATEST
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    auto_context: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_tokens: int | None = None
    decode_context_parallel: int = 1
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    max_cudagraph_capture_size: int | None = None
    limit_mm_per_prompt: tuple[tuple[str, int], ...] = ()
    cpu_offload_bytes: float = 0.0
    kv_offloading_bytes: float = 0.0
    hybrid_pool: bool = True
    prefix_caching: bool | None = None
    overhead: str = "fitted"
    weights_bytes: float | None = None
    added_bytes: float = 0.0
    available_kv_bytes: float | None = None
    kv_cache_memory_bytes: float | None = None
    language_model_only: bool = False
    overhead_excess_bytes: float | None = None
    context_tokens: int | None = None
    network: str = NETWORKS[0]
    adapters: Adapters | None = None
    draft: Draft | None = None
    other_flags: tuple[tuple[str, str], ...] = ()
    settled: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """The quantization: as stated, otherwise the checkpoint's own.

        If a quantized checkpoint has a variant of the stated scheme, the variant is used. For
        example, "fp8" for an FP8 checkpoint with attention in 16 bit means that checkpoint's
        scheme. A format such as "modelopt" is that of a quantized checkpoint, whatever its scheme.
        """
        chosen = self._quantized
        is_wide = chosen.expert_bits == FULL_BITS and self.computed_dtype == "float32"
        return chosen.in_float32 if is_wide else chosen

    @property
    def _quantized(self) -> Scheme:
        own = scheme(self.model.quantization)
        quantized = own.expert_bits < FULL_BITS
        if self.quantization is None or (quantized and is_format(self.quantization)):
            return own
        stated = scheme(self.quantization)
        return own if stated.id in {own.id, own.stated_as} else stated

    @property
    def computed_dtype(self) -> str:
        """The dtype of activations: as stated, otherwise bfloat16, which stands for float16 too.

        On GPUs without bfloat16 vLLM takes float16, and float32 for models that it refuses in
        float16.
        """
        if self.dtype != "auto":
            return _DTYPES.get(self.dtype.lower(), self.dtype)
        if not self.lacks_bfloat16:
            return "bfloat16"
        return "float32" if family_in(self.model.family, "without_float16") else "float16"

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether the GPU is older than Ampere, the first with bfloat16."""
        return _capability(self.gpu) < _BFLOAT16_FROM

    @property
    def kv_format(self) -> KvFormat:
        """The format of the KV cache; `auto` has the width of the activations."""
        kept = kv_format(self.kv_cache_dtype)
        is_wide = kept.id == "auto" and self.computed_dtype == "float32"
        return replace(kept, key_bits=32.0, value_bits=32.0) if is_wide else kept

    @property
    def shares_pool(self) -> bool:
        """Whether layers of several kinds share one pool, so that windows and chunks save memory.

        Source: vllm/config/vllm.py (0.32).
        """
        shares = self.hybrid_pool and self.defaults.hybrid_pool
        if not family_in(self.model.family, "chunked_local"):
            return shares
        stated = self.flag("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE")
        allowed = self.defaults.chunked_pool if stated is None else stated != "0"
        return shares and allowed and self.draft is None

    def flag(self, name: str) -> str | None:
        """The value of a flag or variable that has no field; None if it is not set."""
        return dict(self.other_flags).get(name)

    @property
    def kind(self) -> EngineKind:
        return _kind_named(self.engine.lower())

    @property
    def slack(self) -> SlackRule | None:
        """The rule for the KV cache's memory; None for vLLM's."""
        return slack_of(self.kind)

    @property
    def _memory_mib(self) -> float:
        return (self.gpu.memory_bytes if self.gpu is not None else 80 * GIB) / 2**20

    @property
    def defaults(self) -> Defaults:
        """The defaults of this vLLM version on this GPU."""
        return defaults(self.version, self.gpu)

    @property
    def state_blocks(self) -> int:
        """States that a recurrent layer keeps per request, without those of drafted tokens."""
        stated = self.prefix_caching
        return self.defaults.state_blocks if stated is None else 1 + stated

    @property
    def utilization(self) -> float:
        """The share of the GPU's memory that vLLM may use."""
        stated = self.gpu_memory_utilization
        if stated is not None:
            return stated
        if self.slack is not None:
            return self.slack.share(self._memory_mib, self.batched_tokens, self.parallel.gpus)
        return self.defaults.gpu_memory_utilization

    @property
    def seqs(self) -> int:
        """The largest number of running requests (max_num_seqs)."""
        if self.max_num_seqs:
            return self.max_num_seqs
        return self.defaults.max_num_seqs if self.slack is None else self.slack.seqs

    @property
    def batched_tokens(self) -> int:
        """The token budget of one step.

        Source: `_set_default_max_num_seqs_and_batched_tokens_args`, vllm/engine/arg_utils.py, 0.32.
        """
        own = self.defaults.max_num_batched_tokens
        if self.slack is not None:
            own = self.slack.size_class(self._memory_mib).step_tokens
        elif self.whole_prompts:
            own = max(own, self.longest_tokens)
        elif self.model.multimodal and self.model.tower is not None:
            own = max(own, self.model.tower.step_tokens)
        return self.max_num_batched_tokens or own

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is prefilled in one step, without chunks."""
        return self.flag(NO_CHUNKS) is not None

    @property
    def is_lengthened(self) -> bool:
        """Whether a flag or variable may allow requests longer than the model's."""
        named = {flag.partition(".")[0] for flag, _ in self.other_flags}
        longer = any(flag.launch in named for flag in FLAGS if flag.lengthens)
        return longer or self.flag(LONGER) in ("1", "true", "True")

    @property
    def refusal(self) -> str | None:
        """Why vLLM refuses the launch, however much memory there is; None if it takes it."""
        own, scheme = self.model.max_context_tokens, self.scheme
        if self.slack is not None:
            return None
        if own and self.longest_tokens > own and not (self.model.is_assumed or self.is_lengthened):
            return (
                f"{LONGEST_TOKENS} is above the model's {own:,} tokens; use {LONGEST_TOKENS} "
                f"{own}, a rope scaling, or {LONGER}=1"
            )
        if scheme.until and self.version >= scheme.until and not scheme.plugin:
            return (
                f"vLLM {scheme.until[0]}.{scheme.until[1]} and later have no {scheme.id} weights; "
                "use another checkpoint"
            )
        return None

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest allowed request.

        Raises:
            SizingError: neither the launch nor the model states it.
        """
        longest = self.max_model_len or self.model.max_context_tokens
        if not longest:
            raise SizingError(
                f"{self.model.id}: the configuration has no max_position_embeddings; set the "
                "longest context",
                name="max_model_len",
            )
        return longest

    @property
    def context(self) -> int:
        """The request length in tokens that concurrency is computed for."""
        return self.context_tokens or self.longest_tokens


def fields_of(values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """The fields of a launch that flags set; `values` are theirs, by the flags' parameters.

    If not `strict`, a value that is not readable is left out.

    Raises:
        SizingError: a value is not readable, or two flags contradict each other.
    """
    fields: dict[str, Any] = {}
    others: list[tuple[str, str]] = []
    for flag in FLAGS:
        value = values.get(flag.parameter)
        if value is None or (not value and (flag.kind == "switch" or not strict)):
            continue
        if not flag.field:
            others += [(flag.launch, flag.text(value))] if flag.launch and flag.help else []
            continue
        try:
            fields[flag.field] = _field(flag, value, fields.get(flag.field))
        except SizingError:
            if strict:
                raise
    slots, rank = (fields.pop(f"adapters.{name}", None) for name in ("slots", "rank"))
    if slots is not None:
        fields["adapters"] = Adapters(slots, DEFAULT_RANK if rank is None else rank)
    elif rank is not None and strict:
        raise SizingError("set the number of adapters for --max-lora-rank", name="max_loras")
    split = {name: fields.pop(name) for name in [*fields] if name.startswith("parallel.")}
    parallel = Parallel(**{name.partition(".")[2]: value for name, value in split.items()})
    return fields | {"parallel": parallel, "other_flags": tuple(others)}


def launch_of(model: Model, gpu: Gpu | None, fields: Mapping[str, Any]) -> Launch:
    """The launch of a model with these fields, with what some of them imply."""
    without_media = takes_no_media(model, fields.get("limit_mm_per_prompt", ()))
    if without_media or fields.get("language_model_only"):
        model = text_only(model)
    if dict(fields.get("other_flags", ())).get("VLLM_MLA_DISABLE") == "1":
        model = without_latents(model)
    fixed_bytes = fields.get("kv_cache_memory_bytes")
    if fixed_bytes is not None:
        fields = {**fields, "available_kv_bytes": fixed_bytes}
    return Launch(model, gpu, **fields)


LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The variable with which vLLM takes requests longer than the model's."""

UNSET = {
    f"{place}{field.name}": field.default
    for place, record in (("", Launch), ("parallel.", Parallel))
    for field in struct_fields(record)
}
"""The value of a field that no flag sets, by the flags' `launch`; None where vLLM chooses."""


def set_values(launch: Launch) -> Iterator[tuple[Flag, Any]]:
    """The rows of flags.toml that the launch sets, each with the value of its field."""
    for flag in FLAGS:
        place, _, name = flag.field.rpartition(".")
        record = getattr(launch, place) if place else launch
        value = getattr(record, name, None)
        is_set = value is not None and value != UNSET.get(flag.field)
        if is_set and (flag.kind != "switch" or value == flag.sets):
            yield flag, value


_LIMIT = re.compile(r'(\w+)"?\s*[=:]\s*(?:\{[^}]*?"count":\s*)?(\d{1,6})')
_MOST_CAPTURED = 1 << 20
# A pebibyte, more than any GPU has.
_MOST_GIB = 1 << 20


def bytes_of(name: str, stated_gib: float) -> float:
    """Bytes of a number of GiB.

    Raises:
        SizingError: it is out of range; the error has the flag's `name`.
    """
    if not 0 <= stated_gib <= _MOST_GIB:
        raise SizingError(f"{stated_gib:g} GiB is out of range", name=name)
    return stated_gib * GIB


def _field(flag: Flag, value: Any, other: object) -> Any:  # noqa: ANN401
    """A flag's value as that of its field; `other` is what another flag set the field to."""
    if flag.kind == "switch":
        if other not in (None, flag.sets):
            raise SizingError(f"set this or {flag.name}", name=flag.name.removeprefix("--no-"))
        return flag.sets
    if flag.kind == "gib":
        return bytes_of(flag.parameter, value)
    if flag.kind == "bytes":
        amount_bytes = number_of(value)
        if not amount_bytes:
            raise SizingError(f"{value!r} is no size such as 8G", name=flag.parameter)
        return amount_bytes
    if flag.kind == "sizes":
        sizes = tuple(int(size) for size in re.findall(r"\d+", value))
        if not sizes or not all(1 <= size <= _MOST_CAPTURED for size in sizes):
            raise SizingError(f"{value!r} lists no batch sizes", name=flag.parameter)
        return sizes
    if flag.kind == "limits":
        limits = tuple((modality, int(count)) for modality, count in _LIMIT.findall(value))
        if not limits and value != "{}":
            raise SizingError(f"{value!r} is not like image=2,video=0", name=flag.parameter)
        return limits
    return value


def check(launch: Launch) -> None:
    """Check that vLLM would accept the launch.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    if not launch.model.id:
        raise SizingError("set the model", name="model")
    _check_engine(launch)
    within("gpu_memory_utilization", launch.utilization, low=0.01, high=1.0)
    _check_counts(launch)
    for name, choices in (("overhead", OVERHEADS), ("network", tuple(LINK_BYTES_PER_S))):
        if getattr(launch, name) not in choices:
            raise SizingError(
                f"unknown {name} {getattr(launch, name)!r}", name=name, choices=choices
            )
    if launch.context > launch.longest_tokens:
        raise SizingError(
            f"context of {launch.context:,} tokens exceeds the longest allowed request of "
            f"{launch.longest_tokens:,} tokens",
            name="context",
        )
    if launch.batched_tokens < min(launch.seqs, launch.max_num_seqs or 0):
        raise SizingError(
            f"vLLM refuses a budget of {launch.batched_tokens} tokens per step, because "
            f"max_num_seqs is {launch.seqs}; it must not be smaller",
            name="max_num_batched_tokens",
        )
    if launch.whole_prompts and launch.batched_tokens < launch.longest_tokens:
        raise SizingError(
            f"vLLM refuses a budget of {launch.batched_tokens:,} tokens per step without chunked "
            f"prefill, because a request may have {launch.longest_tokens:,} tokens",
            name="max_num_batched_tokens",
        )
    sizes, most = launch.cudagraph_capture_sizes, launch.max_cudagraph_capture_size
    if sizes and most is not None and most != max(sizes):
        raise SizingError(
            f"vLLM refuses {most} beside sizes up to {max(sizes)}",
            name="max_cudagraph_capture_size",
        )
    recurrent = any(isinstance(part.kind, Recurrent) for part in launch.model.layers)
    if launch.whole_prompts and recurrent and launch.state_blocks > 1:
        raise SizingError(
            "vLLM refuses to cache prefixes of recurrent layers without chunked prefill: set "
            f"{NO_PREFIX_CACHE}",
            name="enable_prefix_caching",
        )
    _check_parallel(launch)
    _check_dtypes(launch)
    if launch.model.target_hidden_size:
        raise SizingError(
            f"{launch.model.id} is a draft head and cannot run alone: set the target model here "
            "and the head as the draft model",
            name="model",
        )
    if launch.adapters is not None:
        check_adapters(launch.adapters, launch.model)
    if launch.draft is not None:
        check_draft(launch.draft, launch.model, launch.parallel)


def _check_engine(launch: Launch) -> None:
    titles = tuple(kind.title.lower() for kind in sized_kinds())
    if launch.engine.lower() not in titles:
        raise SizingError(f"unknown engine {launch.engine!r}", name="engine", choices=titles)
    if launch.slack is None:
        return
    unread = {
        "max_loras": launch.adapters,
        "draft_model": launch.draft,
        "limit_mm_per_prompt": launch.limit_mm_per_prompt,
        "dcp": launch.decode_context_parallel > 1,
        "kv_offloading_size": launch.kv_offloading_bytes,
    }
    for name, given in unread.items():
        if given:
            raise SizingError(f"not sized for {launch.kind.title}", name=name)


# The fields that are counts, each with its input's name; adapters are checked with their model.
_COUNTS = {
    flag.field: (flag.input or parameter_of(flag.alias or flag.name), attrgetter(flag.field))
    for flag in FLAGS
    if flag.kind == "count" and flag.field and not flag.field.startswith("adapters.")
}


def _check_counts(launch: Launch) -> None:
    for field, (name, value_of) in _COUNTS.items():
        value = value_of(launch)
        if value is not None:
            positive(name, value)
            within(name, value, low=1, high=_MOST_OF.get(field, _LARGEST_COUNT))
    if launch.weights_bytes is not None:
        positive("weights_gib", launch.weights_bytes)


def _check_parallel(launch: Launch) -> None:
    parallel, model = launch.parallel, launch.model
    heads, tp = model.attention_heads, parallel.tensor
    if parallel.experts and not model.experts.count:
        raise SizingError(
            f"vLLM refuses expert parallelism for {model.id}, which has no routed experts",
            name="expert_parallel",
        )
    if heads and heads % tp:
        fitting = [str(size) for size in range(1, heads + 1) if not heads % size and size <= 64]
        raise SizingError(
            f"tensor parallel {tp} does not divide the {heads} attention heads of {model.id}",
            name="tensor_parallel",
            choices=fitting,
        )
    if parallel.pipeline > model.depth:
        raise SizingError(
            f"{parallel.pipeline} pipeline stages are too many: {model.id} has {model.depth} "
            "layers",
            name="pipeline_parallel",
        )
    fitting_ranks = _context_ranks(launch)
    if launch.decode_context_parallel not in fitting_ranks:
        raise SizingError(
            f"vLLM refuses decode context parallel size {launch.decode_context_parallel} at "
            f"TP {tp} for {model.id}: it is limited by the copies of each KV head",
            name="dcp",
            choices=[str(ranks) for ranks in fitting_ranks],
        )


def _context_ranks(launch: Launch) -> list[int]:
    """The decode context parallel sizes that vLLM accepts at this tensor-parallel size.

    A latent vector is copied to every rank. If there are more ranks than KV heads, each KV head is
    copied to several ranks, and its query heads are split over these ranks.

    Source: vllm/config/model.py, verify_with_parallel_config (0.32).
    """
    tp, queries = launch.parallel.tensor, launch.model.attention_heads
    kinds = [part.kind for part in launch.model.layers]
    ranks = [size for size in range(1, tp + 1) if not tp % size]
    if any(isinstance(kind, LatentAttention) for kind in kinds):
        return ranks
    heads = min((kind.kv_heads for kind in kinds if isinstance(kind, FullAttention)), default=tp)
    return [size for size in ranks if size <= max(tp // heads, 1) and not queries // heads % size]


_BLOCK_TOKENS = 16
"""All attention kernels for NVIDIA GPUs (vllm/v1/attention/backends, 0.32)."""

_DTYPES = {
    **{name: name for name in ("auto", "bfloat16", "float16", "float32")},
    "half": "float16",
    "float": "float32",
}
_BFLOAT16_FROM = 8.0


def _capability(gpu: Gpu | None) -> float:
    """The compute capability; that of no limit where it is unknown."""
    return float((gpu and gpu.compute_capability) or inf)


def _attention(kind: LayerKind) -> str:
    """The kind of kernel that a layer's attention needs, as in kv_formats.toml; "" for others."""
    if isinstance(kind, CompressedAttention | SlidingStates):
        return "sparse"
    if isinstance(kind, LatentAttention):
        return "sparse" if kind.is_sparse else "latent"
    return "plain" if isinstance(kind, FullAttention | SlidingAttention) else ""


def _check_dtypes(launch: Launch) -> None:
    if launch.dtype.lower() not in _DTYPES:
        raise SizingError(f"unknown dtype {launch.dtype!r}", name="dtype", choices=tuple(_DTYPES))
    kinds = [part.kind for part in launch.model.layers]
    attentions = {_attention(kind) for kind in kinds} - {""}
    if launch.slack is not None:
        return
    heads = {
        size
        for kind in kinds
        if isinstance(kind, FullAttention | SlidingAttention)
        for size in (kind.key_dim, kind.value_dim)
    }
    flashinfer = not family_in(launch.model.family, "without_flashinfer")
    # Versions before V1 had other kernels.
    gpu = launch.gpu if launch.version >= V1 else None
    lacks = partial(kernel_missing, gpu=gpu, heads=heads, flashinfer=flashinfer)
    for attention in attentions:
        if why := lacks(launch.kv_format, attention=attention):
            choices = tuple(
                kept.id for kept in kv_formats() if not lacks(kept, attention=attention)
            )
            raise SizingError(why, name="kv_cache_dtype", choices=choices)
    is_nvidia = gpu is not None and gpu.vendor == "nvidia"
    if is_nvidia and (launch.block_tokens or 0) % _BLOCK_TOKENS:
        raise SizingError(
            f"vLLM has no attention kernel for blocks of {launch.block_tokens} tokens: state a "
            f"multiple of {_BLOCK_TOKENS}",
            name="block_size",
        )
    if gpu is not None and _capability(gpu) < launch.scheme.capability:
        raise SizingError(
            f"{gpu.name} has no kernels for {launch.scheme.id} weights",
            name="quantization",
            choices=tuple(
                key for key, each in schemes().items() if each.capability <= _capability(gpu)
            ),
        )
    _check_activations(launch, attentions)


def _check_activations(launch: Launch, attentions: set[str]) -> None:
    dtype, model, refused = launch.computed_dtype, launch.model, ""
    if dtype == "bfloat16" and launch.lacks_bfloat16 and launch.gpu is not None:
        refused = f"on {launch.gpu.name}, which is older than Ampere: float16 runs"
    elif dtype == "float16" and family_in(model.family, "without_float16"):
        refused = f"for {model.id}, whose activations overflow: bfloat16 or float32 run"
    elif dtype not in launch.scheme.dtypes:
        refused = f"with {launch.scheme.id} weights: {' or '.join(launch.scheme.dtypes)} run"
    elif dtype == "float32" and not attentions <= {"plain"}:
        refused = "for latent attention, which has no kernels for it"
    if refused:
        raise SizingError(f"vLLM refuses {dtype} {refused}", name="dtype")
    is_plain = len(attentions) == 1 and all(
        isinstance(part.kind, FullAttention | SlidingAttention) for part in model.layers
    )
    if dtype == "float32" and not (is_plain and launch.adapters is None and launch.draft is None):
        raise SizingError(
            "float32 is not sized with adapters, a draft or recurrent layers", name="dtype"
        )


def tensor_parallel_choices(
    *, attention_heads: int, kv_heads: int, domain_gpus: int
) -> tuple[int, ...]:
    """TP degrees that split the heads evenly within one NVLink domain, smallest first.

    The degree must divide the query heads. It must divide the KV heads or be a multiple of them.

    Source: guide 5.1, 5.2 and 5.6; heads: vLLM, model_executor/layers/linear.py (QKV projection).
    """
    return tuple(
        degree
        for degree in range(1, domain_gpus + 1)
        if attention_heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    )
