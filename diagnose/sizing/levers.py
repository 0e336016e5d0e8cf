"""What changes how many requests a launch holds: each change with its numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    CONTEXT_SPLIT,
    KV_DTYPE,
    LONGEST_TOKENS,
    MEMORY_SHARE,
    NO_GRAPHS,
    SEATS,
    STAGE_SPLIT,
    TENSOR_SPLIT,
)
from kneewatch.diagnose.catalogue.gpu_specs import Gpu, gpus
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import LatentAttention
from kneewatch.diagnose.catalogue.quantization import FULL_BITS
from kneewatch.diagnose.sizing.launch_notes import most_utilization
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.launch import Launch, check
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.serving_cost import usd_per_million_tokens
from kneewatch.diagnose.sizing.size import (
    KV_BYTES,
    Size,
    loop_of,
    whole_requests,
    within_targets,
)
from kneewatch.diagnose.sizing.speed.performance import ClosedLoop, Performance
from kneewatch.rules.formatting import duration, figure, plural

_FEW_REQUESTS = 8
_FEWEST_SEATS = 16
# The shortest context of any use, where requests have no stated length.
_SHORTEST_CONTEXT = 4096
# The compute capability of Ampere: vLLM has few kernels for older GPUs.
_OLDEST_CAPABILITY = 8.0
# A change that holds less than this many times the requests is none.
_GAIN = 1.02
_MOST_REPLICAS = 64


class Lever(Struct, frozen=True):
    """A launch after one change. `speed` is of one engine at the question's load; None if unknown.

    `lacks`: why it is not enough for the load within the targets; empty if it is. `validates`:
    answers must be tested, as weights or KV cache have fewer bits.
    """

    change: str
    question: Question
    memory: Memory
    speed: Performance | None
    lacks: str
    validates: bool

    @property
    def held(self) -> float:
        """Requests that run at once on all engines, of which each has max_num_seqs at most; 0 if
        vLLM would not start."""
        return _running(self.memory) * self.question.engines

    @property
    def fits(self) -> bool:
        """Whether vLLM starts and holds the question's concurrency."""
        return self.memory.fits(self.question.concurrency_per_engine)

    @property
    def gpus(self) -> int:
        return self.question.launch.parallel.gpus * self.question.replicas

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all GPUs; None if unknown."""
        price = self.question.price_usd_per_gpu_hour
        return None if price is None else price * self.gpus

    @property
    def output_tokens_per_s(self) -> float | None:
        """Of all engines together, with steady arrivals."""
        if self.speed is None:
            return None
        return self.speed.decode_tokens_per_s * self.question.engines

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """The price at this load; None if the speed or the price is unknown."""
        if self.usd_per_hour is None or not self.output_tokens_per_s:
            return None
        return usd_per_million_tokens(self.usd_per_hour, self.output_tokens_per_s)

    @property
    def figures(self) -> dict[str, float | None]:
        """What the launch holds and how fast it is, as in documents."""
        speed, per_s = self.speed, self.output_tokens_per_s
        return {
            "max_concurrency": round(self.held, 3),
            "ttft_s": None if speed is None else round(speed.ttft_s, 5),
            "itl_s": None if speed is None else round(speed.itl_s, 6),
            "output_tokens_per_s": per_s and round(per_s, 1),
        }


def _running(memory: Memory) -> float:
    return min(memory.held.expected, memory.launch.seqs) if memory.starts else 0.0


def as_sized(name: str, answer: Size) -> Lever:
    """A launch that was sized, to be shown beside others, at the load that it is planned for."""
    question, speed = answer.planned, answer.performance
    if speed is not None:
        speed = speed.loop.at(question.concurrency_per_engine)
    lacks = _lacking(question, answer.memory, None)
    if answer.meets_targets is False:
        lacks = "misses the targets"
    elif answer.serves_peak is False:
        lacks = "does not serve the rate"
    return Lever(name, question, answer.memory, speed, lacks, validates=False)


def holds_few(answer: Size) -> bool:
    """Whether the launch does not fit, may not, or holds only a few requests."""
    least = max(answer.question.concurrency_per_engine, _FEW_REQUESTS)
    return not answer.fits or answer.memory.held.low < least


def levers(answer: Size) -> tuple[Lever, ...]:
    """The changes that hold more requests, best first: those that are enough for the load within
    the targets, the cheapest first, then those that need no test of answers; then the others, most
    tokens first. A change with more replicas comes first if it is better than all of them.

    Empty if the GPU is unknown or the KV cache is a running server's, because then nothing is
    computed.
    """
    question, before = answer.planned, answer.memory
    launch = question.launch
    is_logged = launch.kv_cache_memory_bytes is None and launch.available_kv_bytes is not None
    if launch.gpu is None or is_logged:
        return ()
    held = _running(before) * question.engines
    changed_sizes = [
        _lever(change, changed, question) for change, changed in _changes(question, answer)
    ]
    if before.starts and (unchanged := _lever("", question, question)):
        changed_sizes.append(_with_replicas(unchanged, question))
    better = [lever for lever in changed_sizes if lever is not None and lever.held > held * _GAIN]
    is_stated = launch.max_model_len is not None or launch.context_tokens is not None
    least_tokens = launch.context if is_stated else 0

    def rank(lever: Lever) -> tuple[float, ...]:
        return _rank(lever, least_tokens)

    pairs = [_with_replicas(lever, question) for lever in better if lever.lacks]
    pair = min((pair for pair in pairs if pair is not None), key=rank, default=None)
    better.sort(key=rank)
    if pair is not None and rank(pair) < rank(better[0]):
        better.insert(0, pair)
    return tuple(better)


def _rank(lever: Lever, least_tokens: int) -> tuple[float, ...]:
    """The place of a change; one that shortens the requests that were asked for is not enough."""
    context = lever.memory.launch.context
    cost, tokens = lever.usd_per_hour or float(lever.gpus), lever.held * context
    if not lever.lacks and context >= least_tokens:
        return (0.0, cost, lever.validates, -lever.question.launch.scheme.linear_bits, -tokens)
    return (1.0, -tokens, cost)


def _with_replicas(lever: Lever, question: Question) -> Lever | None:
    """The change with as many replicas as the load takes, at least one more; None if too many."""
    loop = None if lever.speed is None else lever.speed.loop
    asked, most = _load(lever.question, lever.memory, loop)
    if most * _MOST_REPLICAS < asked:
        return None
    replicas = max(ceil(asked / most), question.replicas + 1)
    change = f"{lever.change}, {replicas} replicas".removeprefix(", ")
    return _lever(change, replace(lever.question, replicas=replicas), question)


def _lacking(question: Question, memory: Memory, loop: ClosedLoop | None) -> str:
    asked, most = _load(question, memory, loop)
    reached, wanted = most * question.replicas, figure(round(asked, 1))
    if reached >= asked:
        return ""
    if loop is not None and question.peak_requests_per_s is not None:
        return f"not enough: {figure(round(reached, 1))} of {wanted} requests/s"
    if _running(memory) * question.engines >= asked:
        return f"not enough: {figure(reached)} of {wanted} within the targets"
    return f"not enough: {wanted} wanted"


def _load(question: Question, memory: Memory, loop: ClosedLoop | None) -> tuple[float, float]:
    """The load, and the most of it that one replica takes within the targets: requests/s if a rate
    is stated, otherwise requests at once."""
    rate, data, most = question.peak_requests_per_s, question.launch.parallel.data, _running(memory)
    if loop is not None and most >= 1:
        within = within_targets(question, loop, min(most, loop.load.max_running))
        if rate is not None:
            each_per_s = within.performance.requests_per_s if within.concurrency else 0.0
            return rate * question.safety, each_per_s * data
        if question.targets.are_set:
            most = min(most, within.concurrency)
    return question.concurrency or float(question.engines), most * data


def _lever(change: str, changed: Question, question: Question) -> Lever | None:
    """The changed launch; None if vLLM refuses it."""
    launch = changed.launch
    try:
        check(launch)
        held = memory(launch)
        longest = held.longest_that_fits
        if not held.holds_one and longest >= (launch.context_tokens or _SHORTEST_CONTEXT):
            # A shorter limit lets it start.
            launch = replace(
                launch,
                max_model_len=longest,
                auto_context=False,
                context_tokens=min(launch.context, longest),
            )
            change, changed = (
                f"{change} {LONGEST_TOKENS} {longest}",
                replace(changed, launch=launch),
            )
            held = memory(launch)
    except SizingError:
        return None
    loop, peak_per_s = loop_of(changed, held) if held.starts else None, changed.peak_requests_per_s
    speed = None
    if loop is not None:
        served = loop.serving(peak_per_s / changed.engines) if peak_per_s is not None else None
        speed = loop.at(loop.load.concurrency) if served is None else served[1]
    before = question.launch
    narrower = (launch.quantization, launch.kv_cache_dtype) != (
        before.quantization,
        before.kv_cache_dtype,
    )
    return Lever(change.strip(), changed, held, speed, _lacking(changed, held, loop), narrower)


def _changes(question: Question, answer: Size) -> Iterator[tuple[str, Question]]:
    """Each change as flags, and the question after it. Where a flag sets the bytes of the KV cache,
    memory that is freed adds nothing to it."""
    launch, parallel, gpu = question.launch, question.launch.parallel, question.launch.gpu
    seats = max(ceil(question.concurrency_per_engine), _FEWEST_SEATS)
    for flags, changed in (*_flags(answer, seats), *_together(launch, seats)):
        yield flags, replace(question, launch=changed)
    for tensor, pipeline in sorted(_splits(answer)):
        split = replace(launch, parallel=replace(parallel, tensor=tensor, pipeline=pipeline))
        stages = f" {STAGE_SPLIT} {pipeline}" if pipeline > parallel.pipeline else ""
        yield f"{TENSOR_SPLIT} {tensor}{stages}", replace(question, launch=split)
    if launch.available_kv_bytes is not None:
        computed = replace(launch, kv_cache_memory_bytes=None, available_kv_bytes=None)
        yield f"{KV_BYTES} unset", replace(question, launch=computed)
        if answer.memory.has_room:
            return
    if not launch.enforce_eager:
        eager = replace(launch, enforce_eager=True)
        yield f"{NO_GRAPHS} (slower steps)", replace(question, launch=eager)
    for scheme_id in _fewer_bits(launch):
        weights = replace(launch, quantization=scheme_id)
        yield f"{scheme_id} weights", replace(question, launch=weights)
        if launch.kv_cache_dtype == "auto":
            both = replace(weights, kv_cache_dtype="fp8")
            yield f"{scheme_id} weights {KV_DTYPE} fp8", replace(question, launch=both)
    larger = None if gpu is None else _next_gpu(gpu)
    if larger is not None:
        own = replace(question, launch=replace(launch, gpu=larger), usd_per_gpu_hour=None)
        yield f"--gpu {larger.id}", own


def _splits(answer: Size) -> set[tuple[int, int]]:
    """Degrees of tensor and pipeline parallelism: twice as many ranks in a node, and the fewest
    GPUs that hold a replica."""
    launch, fewest = answer.question.launch, answer.fewest and answer.fewest.spread
    now, splits = launch.parallel, set[tuple[int, int]]()
    if launch.gpu is None or launch.gpu.node_gpus == 1 or 2 * now.tensor <= launch.gpu.node_gpus:
        splits.add((2 * now.tensor, now.pipeline))
    if fewest and fewest.tensor * fewest.pipeline > now.tensor * now.pipeline:
        splits.add((fewest.tensor, fewest.pipeline))
    return splits


def _flags(answer: Size, seats: int) -> Iterator[tuple[str, Launch]]:
    """Changes of vLLM's flags that need no other GPUs or weights."""
    launch = answer.question.launch
    own = launch.model.max_context_tokens
    if launch.refusal and launch.longest_tokens > own:
        yield (
            f"{LONGEST_TOKENS} {own}",
            replace(launch, max_model_len=own, context_tokens=min(launch.context, own)),
        )
    elif not answer.memory.holds_one and answer.memory.longest_that_fits:
        yield "", launch
    yield from _roomier(launch, seats)
    latent = any(isinstance(part.kind, LatentAttention) for part in launch.model.layers)
    ranks = launch.parallel.tensor
    if latent and ranks > 1 and launch.decode_context_parallel == 1:
        yield f"{CONTEXT_SPLIT} {ranks}", replace(launch, decode_context_parallel=ranks)


def _roomier(launch: Launch, seats: int) -> Iterator[tuple[str, Launch]]:
    if launch.kv_cache_dtype == "auto":
        yield f"{KV_DTYPE} fp8", replace(launch, kv_cache_dtype="fp8")
    if launch.available_kv_bytes is not None:
        return
    most = most_utilization(launch.gpu)
    if launch.utilization < most:
        yield f"{MEMORY_SHARE} {most:g}", replace(launch, gpu_memory_utilization=most)
    if launch.seqs > seats:
        yield f"{SEATS} {seats}", replace(launch, max_num_seqs=seats)


def _together(launch: Launch, seats: int) -> Iterator[tuple[str, Launch]]:
    """KV dtype, utilization and seats in one change."""
    words = list[str]()
    while (change := next(_roomier(launch, seats), None)) is not None:
        words.append(change[0])
        launch = change[1]
    if len(words) > 1:
        yield " ".join(words), launch


def _fewer_bits(launch: Launch) -> Iterator[str]:
    """Schemes with half of the bits per weight or less that the GPU computes in."""
    gpu, own = launch.gpu, launch.scheme
    bits = min(own.linear_bits, own.expert_bits)
    if gpu is None or bits < 8:
        return
    if bits >= FULL_BITS:
        yield "fp8" if gpu.fp8_flop_per_s is not None else "int8"
    yield "nvfp4" if gpu.fp4_flop_per_s is not None else "awq"


def _next_gpu(gpu: Gpu) -> Gpu | None:
    """The GPU of the same vendor with the least memory above this one's by a tenth, as fast, and
    not older than today's kernels."""
    larger = [
        other
        for other in gpus().values()
        if other.vendor == gpu.vendor
        and other.memory_bytes > 1.1 * gpu.memory_bytes
        and other.memory_bandwidth_bytes_per_s > 0.9 * gpu.memory_bandwidth_bytes_per_s
        and other.bf16_flop_per_s > 0.5 * gpu.bf16_flop_per_s
        and other.nvlink_gpus >= min(gpu.nvlink_gpus, 8)
        and float(other.compute_capability or _OLDEST_CAPABILITY) >= _OLDEST_CAPABILITY
    ]
    return min(larger, key=lambda other: (other.memory_bytes, other.usd_per_hour), default=None)


def lever_document(lever: Lever) -> dict[str, object]:
    """A lever as JSON types."""
    return {
        "change": lever.change,
        "fits": lever.fits,
        "suffices": not lever.lacks,
        **lever.figures,
        "context_tokens": lever.memory.launch.context,
        "max_model_len": lever.memory.launch.longest_tokens,
        "gpus": lever.gpus,
        "usd_per_hour": lever.usd_per_hour,
        "usd_per_million_output_tokens": lever.usd_per_million_output_tokens,
        "validate_answers": lever.validates,
    }


def lever_text(lever: Lever, context_tokens: int) -> str:
    """A lever in one line: the change, requests held, speed, GPUs and price.

    The length of the requests is left out if it is `context_tokens`.
    """
    context, parts = lever.memory.launch.context, list[str]()
    engines = lever.question.engines
    held = whole_requests(lever.held / engines, engines)
    if lever.speed is not None:
        tokens = figure(round(lever.output_tokens_per_s or 0.0))
        cost = lever.usd_per_million_output_tokens
        per_token = "" if cost is None else f", {figure(round(cost, 2))} USD/M"
        parts.append(f"ITL {duration(lever.speed.itl_s)}, {tokens} tokens/s{per_token}")
    length = "" if context == context_tokens else f" of {context:,} tokens"
    if lever.lacks:
        length += f" ({lever.lacks})"
    price = "" if lever.usd_per_hour is None else f", {figure(lever.usd_per_hour)} USD/h"
    parts.append(f"{plural(lever.gpus, 'GPU')}{price}")
    if lever.validates:
        parts.append("test answers")
    return f"{lever.change}: {held}{length}; {'; '.join(parts)}"
