"""The running server's configuration, from its metrics page and the user's settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import KV_DTYPE, SEATS, STEP_TOKENS, TENSOR_SPLIT
from kneewatch.collector.signals.expr import count_in
from kneewatch.diagnose.capacity import DegreeComparison, StatedServer
from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import UNKNOWN_MODEL, Model
from kneewatch.diagnose.deployment.vllm_flags import (
    CACHING_BY_DEFAULT,
    FLAGS,
    LARGEST,
    VLLM,
    CommandLine,
    Version,
    command_values,
    oldest_version,
    supports_flag,
)
from kneewatch.diagnose.lengths import StatedPoint
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark
from kneewatch.diagnose.sizing.benchmark.operating_point import compared, degrees_of
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of, memory
from kneewatch.diagnose.sizing.memory.kv_cache import KvLayout
from kneewatch.diagnose.sizing.memory.launch import (
    LATEST,
    UNSET,
    Launch,
    defaults,
    fields_of,
    launch_of,
)
from kneewatch.diagnose.sizing.memory.weights import RANKS, Parallel
from kneewatch.rules.facts import Targets

KV_SIZE_LABEL = "kv_cache_size_tokens"
_UNSET_LABELS = ("", "None", "none", "null")


def label_capacity_tokens(
    size: float | None, block: int | None, blocks: int | None
) -> float | None:
    """KV cache capacity in tokens, without the null block that vLLM reserves."""
    if size is None and block and blocks:
        size = float(block * blocks)
    if size is None or blocks is None:
        return size
    if size > LARGEST:
        return None
    return size * (blocks - 1) / blocks if blocks > 1 else None


def config_capacity_tokens(config: Mapping[str, str]) -> float | None:
    """KV cache capacity in tokens by the labels of cache_config_info; None if they lack it."""
    size, blocks = label_count(config, KV_SIZE_LABEL), label_count(config, "num_gpu_blocks")
    return label_capacity_tokens(size, label_count(config, "block_size"), blocks)


def label_context_tokens(config: Mapping[str, str], size: float | None) -> int | None:
    """max_model_len in tokens, computed from labels: cache size divided by maximum concurrency."""
    concurrency = label_number(config, "kv_cache_max_concurrency")
    if not size or not concurrency or size / concurrency > LARGEST:
        return None
    return round(size / concurrency)


def label_number(config: Mapping[str, str], label: str) -> float | None:
    """The label's value as a number above 0; None if it is missing or not such a number."""
    value = count_in(config.get(label, ""))
    return value if value and value <= LARGEST else None


def label_count(config: Mapping[str, str], label: str) -> int | None:
    """The label's value as a whole number of 1 or more, else None."""
    value = label_number(config, label)
    return None if value is None or value < 1 else int(value)


def page_values(config: Mapping[str, str]) -> dict[str, Any]:
    """The values of the flags of `size` that the labels have, by the flags' parameters."""
    values: dict[str, Any] = {}
    for flag in FLAGS:
        if not flag.label or not flag.help or flag.kind == "bytes":
            continue
        if flag.kind == "switch":
            on = {"True": True, "False": False}.get(config.get(flag.label, ""))
            value = None if on is None else on == flag.sets
        elif flag.kind == "text":
            value = config.get(flag.label)
        else:
            value = label_number(config, flag.label)
            value = int(value) if value is not None and flag.kind == "count" else value
        if value not in (None, *_UNSET_LABELS):
            values[flag.parameter] = value
    return values


# --- What is known about the running server: from its page, and from what the user states ---------


memory_of = lru_cache(maxsize=64)(memory)


class Reported(Struct, frozen=True):
    """Memory figures that the server itself reports; None if unknown. Users cannot set these.

    `weights_bytes` and `available_kv_bytes` are per GPU, as vLLM logs them; the weights include
    adapters. `kv_cache_tokens` is the whole cache. `start_s` is the time to load the weights and to
    capture CUDA graphs. `in_pod`: the server's pod was read.
    """

    max_model_len: int | None = None
    weights_bytes: float | None = None
    available_kv_bytes: float | None = None
    kv_cache_tokens: float | None = None
    start_s: float | None = None
    in_pod: bool = False


NOT_REPORTED = Reported()
UNKNOWN_LAUNCH = CommandLine(complete=False)
_SPLIT = {
    row.field.removeprefix("parallel."): row for row in FLAGS if row.field.startswith("parallel.")
}


class Stated(StatedServer, frozen=True, kw_only=True):
    """What the user set, or kneewatch found out, about the server; None if unknown.

    `flags` go before those of `command_line`. `sweeps` are benchmarks of this model on
    this GPU, one per tensor-parallel degree.
    """

    model: Model | None = None
    gpu: Gpu | None = None
    version: Version | None = None
    command_line: CommandLine | None = None
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    usd_per_gpu_hour: float | None = None
    sweeps: Mapping[int, Benchmark] = {}
    reported: Reported = NOT_REPORTED

    @property
    def command(self) -> CommandLine:
        """The command line with the stated flags; if unknown, one of which only these are known."""
        line = self.command_line or UNKNOWN_LAUNCH
        return replace(line, flags={**line.flags, **self.flags}) if self.flags else line

    @property
    def degree(self) -> int | None:
        """The tensor-parallel size from the setting or the command line; None if neither has it."""
        return self.tensor_parallel or self.command.count(TENSOR_SPLIT)

    @property
    def parallel(self) -> Parallel:
        """How the server is split over GPUs; 1 for sizes that are not stated."""
        read: dict[str, Any] = {name: row.read(self.command) for name, row in _SPLIT.items()}
        read["tensor"] = self.degree
        return Parallel(**{name: value for name, value in read.items() if value})

    @property
    def engines(self) -> int:
        """Data-parallel engines of the server; 1 if not stated."""
        return self.parallel.data

    @property
    def server_gpus(self) -> int | None:
        """GPUs of the server: GPUs per engine times the number of engines; None if not stated."""
        return None if self.engine_gpus is None else self.engine_gpus * self.engines

    @property
    def engine_gpus(self) -> int | None:
        """GPUs of one engine: as stated, else by its split; None if neither is."""
        if self.gpus is None and self.degree is not None:
            return self.degree * self.parallel.pipeline
        return self.gpus

    @property
    def lacking(self) -> list[str]:
        """The settings that a size needs, as far as they are unknown."""
        needed = {"model": self.model, "gpu": self.gpu, "tensor_parallel": self.degree}
        return [name for name, value in needed.items() if value is None]

    @property
    def price_usd_per_gpu_hour(self) -> float | None:
        """The stated price, else the catalogue's; None if the GPU is unknown."""
        catalogued = None if self.gpu is None else self.gpu.usd_per_hour
        return catalogued if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour

    @property
    def seats(self) -> float | None:
        """The seats of the command line; None if not given."""
        return self.command.count(SEATS)

    @property
    def points(self) -> Mapping[str, tuple[StatedPoint, ...]]:
        """The stated request lengths of this model on this GPU, by side."""
        if self.workload is None:
            return {}
        model, gpu = self.model, self.gpu
        return self.workload.lengths(model.id if model else None, gpu.id if gpu else None)

    def split(self, targets: Targets) -> DegreeComparison | None:
        """The degree compared with smaller ones by the sweeps, within the targets."""
        if not self.sweeps:
            return None
        if self.degree is None:
            return DegreeComparison("tokens", why="degree not stated (tensor_parallel)")
        return self.split_at(self.degree, targets)

    def split_at(self, tensor_parallel: int, targets: Targets) -> DegreeComparison:
        """A degree compared with smaller ones by the sweeps, within the targets."""
        unit, degrees = degrees_of(self.sweeps, targets)
        return compared(unit, degrees, tensor_parallel)


NOTHING = Stated()


def stated_of(server: StatedServer) -> Stated:
    """All settings of a server, where a judge reads some of them."""
    return server if isinstance(server, Stated) else NOTHING


class Deployment(Struct, frozen=True, kw_only=True):
    """A running server; None for values that are unknown.

    `launch` is its launch by the page, else by the command line and the settings. It can be sized
    if `layout` is known. `capacity_tokens` is the cache without the block that vLLM keeps for
    itself. `blocks_override` and `kv_memory_bytes` are set if the user fixed the cache's size;
    memory utilization then has no effect. `misfit` says why the stated configuration cannot run.
    """

    stated: Stated
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    launch: Launch = Launch()
    blocks: int | None = None
    capacity_tokens: float | None = None
    kv_memory_bytes: float | None = None
    blocks_override: int | None = None
    misfit: str = ""
    layout: KvLayout | None = None

    @property
    def sized_launch(self) -> Launch | None:
        return None if self.layout is None else self.launch

    @property
    def version(self) -> Version | None:
        """vLLM's version as stated, else the oldest with the page's labels."""
        return self.stated.version or oldest_version(self.config)

    @property
    def replicas(self) -> int:
        """Replicas behind the load balancer; 1 where not set."""
        return self.stated.replicas or 1

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars per hour for one engine; None if GPUs or price are unknown."""
        gpus, price = self.stated.engine_gpus, self.stated.price_usd_per_gpu_hour
        return None if gpus is None or price is None else gpus * price

    @property
    def kv_is_quantized(self) -> bool:
        """Whether the KV cache already uses 8 bits per value or fewer."""
        return self.launch.kv_cache_dtype not in ("auto", "bfloat16", "float16")

    @property
    def caching_by_default(self) -> bool:
        """Whether this vLLM version turns prefix caching and chunked prefill on by default."""
        return (self.version or LATEST) >= CACHING_BY_DEFAULT

    @property
    def launch_known(self) -> bool:
        """Whether the whole command line is known. Flags that it lacks then have their defaults."""
        return self.stated.command.complete

    @property
    def chunked_prefill(self) -> bool | None:
        """Whether the command line turns chunked prefill on or off; None if it says nothing."""
        return self.stated.command.switched("enable-chunked-prefill")

    @property
    def chunks(self) -> bool | None:
        """Whether chunked prefill is on; None if unknown."""
        if self.chunked_prefill is None and self.launch_known:
            return self.caching_by_default
        return self.chunked_prefill

    def supports(self, flag: str) -> bool:
        return supports_flag(flag, version=self.version, config=self.config)

    def in_force(self, flag: str) -> object:
        """The flag's value on the running server; None if unknown."""
        own = {
            KV_DTYPE: self.launch.kv_cache_dtype if "cache_dtype" in self.config else None,
            "--num-gpu-blocks-override": self.blocks_override,
            "--kv-cache-memory-bytes": self.kv_memory_bytes,
            "--enable-chunked-prefill": self.chunked_prefill,
            TENSOR_SPLIT: self.stated.degree,
            "replicas": self.stated.replicas,
        }
        row = VLLM.get(flag)
        if flag in own or row is None or row.sets is False:
            return own.get(flag)
        if UNSET.get(row.field, row) is None:
            known = getattr(self.launch, row.field)
        else:
            known = page_values(self.config).get(row.parameter)
        return row.read(self.stated.command) if known is None else known


def deployment(config: Mapping[str, str], stated: Stated = NOTHING) -> Deployment:
    """The server, from its cache_config_info labels and the user's settings; labels override
    settings."""
    block, blocks = label_count(config, "block_size"), label_count(config, "num_gpu_blocks")
    override = label_count(config, "num_gpu_blocks_override")
    size = label_count(config, KV_SIZE_LABEL)
    if override is not None and blocks is not None and override != blocks:
        # The page contradicts itself: no size can be computed from it.
        block, blocks, override, size = None, None, None, None
    running = Deployment(
        stated=stated,
        config=config,
        launch=_launched(config, stated, block_tokens=block, size_tokens=size),
        blocks=blocks,
        capacity_tokens=label_capacity_tokens(size, block, blocks)
        or stated.reported.kv_cache_tokens,
        kv_memory_bytes=label_count(config, "kv_cache_memory_bytes"),
        blocks_override=override,
    )
    is_known = stated.model is not None and stated.degree is not None
    return _sized(running) if is_known else running


def _launched(
    config: Mapping[str, str],
    stated: Stated,
    *,
    block_tokens: int | None,
    size_tokens: float | None,
) -> Launch:
    """The server's launch; the page has a KV cache of this size, in blocks of so many tokens."""
    # What the page says goes before the command line.
    fields = fields_of(command_values(stated.command) | page_values(config), strict=False)
    fields["parallel"] = stated.parallel
    # The page has the size of the cache.
    fields.pop("kv_cache_memory_bytes", None)
    if "adapters" in fields and fields["adapters"].rank not in RANKS:
        del fields["adapters"]
    if block_tokens is not None:
        fields["block_tokens"] = block_tokens
    longest = stated.reported.max_model_len or label_context_tokens(config, size_tokens)
    fields.setdefault("max_model_len", longest)
    if stated.version is not None and stated.gpu is not None:
        taken = defaults(stated.version, stated.gpu)
        for flag in (SEATS, STEP_TOKENS):
            if stated.command.absent(flag):
                name = VLLM[flag].field
                fields.setdefault(name, getattr(taken, name))
    fields["version"] = stated.version or oldest_version(config) or LATEST
    return launch_of(stated.model or UNKNOWN_MODEL, stated.gpu, fields)


def _sized(running: Deployment) -> Deployment:
    """The deployment with its layout; unchanged if its launch cannot hold the model."""
    fixed = running.kv_memory_bytes is not None
    try:
        launch = _as_reported(running.launch, running.stated.reported, kv_is_fixed=fixed)
        layout = kv_layout_of(launch)
        fits = launch.gpu is None or memory_of(launch).holds_one
    except SizingError as exc:
        # The server runs with this format, so it is newer than what is known of formats here.
        newer = exc.name == "kv_cache_dtype"
        return running if newer else replace(running, misfit=str(exc))
    misfit = "" if fits else "weights and one request do not fit into GPU memory"
    return replace(running, launch=launch, layout=layout, misfit=misfit)


def _as_reported(launch: Launch, reported: Reported, *, kv_is_fixed: bool) -> Launch:
    """The launch with the server's reported figures in place of predicted ones.

    `kv_is_fixed`: the user set the size of the KV cache, so the size does not show the overhead.

    Raises:
        SizingError: the launch cannot be sized.
    """
    if launch.gpu is None:
        return replace(launch, available_kv_bytes=reported.available_kv_bytes)
    weights_bytes = reported.weights_bytes
    if weights_bytes is not None:
        weights_bytes -= memory_of(launch).adapter_bytes
    if weights_bytes is None or weights_bytes <= 0:
        return launch
    launch = replace(launch, weights_bytes=weights_bytes)
    if reported.available_kv_bytes is None or kv_is_fixed:
        return launch
    # What vLLM took beside weights and cache holds for other utilizations and cache types too.
    excess_bytes = memory_of(launch).available_bytes.expected - reported.available_kv_bytes
    return replace(launch, overhead_excess_bytes=excess_bytes)
