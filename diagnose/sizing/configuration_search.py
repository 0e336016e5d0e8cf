"""Searches vLLM configurations for the cheapest one that meets the targets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, NODE_GPUS, Gpu, gpus
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import seconds
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import V1, Launch
from kneewatch.diagnose.sizing.memory.weights import Parallel, splits
from kneewatch.diagnose.sizing.requirements import Question, check_question
from kneewatch.diagnose.sizing.search_results import (
    ASSUMED_ITL_S,
    BY_HOUR,
    BY_TOKENS,
    Candidate,
    Reason,
    Rejection,
    SearchResult,
    by_reason,
)
from kneewatch.diagnose.sizing.serving_cost import usd_per_million_tokens
from kneewatch.diagnose.sizing.size import (
    fleet_of,
    held_to_plan,
    loop_of,
    peak_utilization,
    usable_limit,
    within_targets,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import safe_targets
from kneewatch.diagnose.sizing.speed.slo_capacity import RUNNING_LIMIT, Capacity
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import figure

_TENSOR_PARALLELS = (1, 2, 4, 8)
_DATA_PARALLELS = (1, 2, 4, 8)
_PIPELINE_PARALLELS = (2, 4)
# Beside a 16-bit checkpoint's own. INT4 formats differ in quality, not in bytes or speed.
_QUANTIZATIONS = ("fp8", "awq", "nvfp4")
_LONGEST_TO_MEAN = 2


class Choices(Struct, frozen=True, kw_only=True):
    """Limits of a search, in addition to those of the question's launch.

    None means that every sensible value is tried. Quantization, KV dtype, longest context and GPU
    are fixed if the launch states them. Without a GPU, every data-centre GPU is tried.

    The launch's parallelism is fixed if it has more than one GPU; to fix a single GPU, or the
    pipeline stages, set it here. A given `pipeline_parallel` is always tried; other sizes only if
    no tensor-parallel size starts. `most_gpus` limits the fleet. `gpus` are the only ones to try.
    Data-parallel engines share their experts, within a node unless their number is set here.
    """

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool = False
    most_gpus: int | None = None
    gpus: tuple[Gpu, ...] = ()


ANYTHING = Choices()


class Space(Struct, frozen=True, kw_only=True):
    """What a search tries.

    `max_model_lens` has the longest first. `deeper` are pipeline sizes that are tried if no
    tensor-parallel size starts with `pipeline_parallel`.
    """

    gpus: tuple[Gpu, ...]
    tensor_parallels: tuple[int, ...]
    pipeline_parallel: int
    data_parallels: tuple[int, ...]
    """The numbers of engines to try; more than one share their experts."""
    expert_parallel: bool
    deeper: tuple[int, ...]
    quantizations: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    max_model_lens: tuple[int, ...]
    request_tokens: float
    """Tokens of a whole request."""

    @property
    def spreads(self) -> tuple[Parallel, ...]:
        """The splits to try first: each tensor-parallel size with each number of engines."""
        return tuple(
            splits(
                self.tensor_parallels,
                stages=(self.pipeline_parallel,),
                engines=self.data_parallels,
                experts=self.expert_parallel,
                most_gpus=inf if len(self.data_parallels) == 1 else NODE_GPUS,
            )
        )


def space(question: Question, choices: Choices = ANYTHING) -> Space:
    """The configurations that a search for this question tries.

    Raises:
        SizingError: an input is invalid or missing, or is one that the search itself computes for
            each configuration, such as `weights_gib`.
    """
    launch, inputs, outputs = question.launch, question.input_tokens, question.output_tokens
    if inputs is None or outputs is None:
        raise SizingError(
            "a search needs the input and output lengths",
            name="input_tokens" if inputs is None else "output_tokens",
        )
    for name, value in (
        ("weights_gib", launch.weights_bytes),
        ("kv_cache_memory_bytes", launch.kv_cache_memory_bytes),
        ("available_kv_gib", launch.available_kv_bytes),
        ("usable_rps", question.usable_requests_per_s),
    ):
        if value is not None:
            raise SizingError("a search computes this for each launch: leave it out", name=name)
    check_question(question)
    data_centre = (card for card in gpus().values() if card.segment == "data-centre")
    cards = choices.gpus or (tuple(data_centre) if launch.gpu is None else (launch.gpu,))
    if question.usd_per_gpu_hour is not None and len(cards) > 1:
        raise SizingError(
            f"one price cannot apply to {len(cards)} GPUs: set the GPU as well",
            name="usd_per_gpu_hour",
            choices=[card.id for card in cards],
        )
    is_spread = launch.parallel.tensor * launch.parallel.pipeline > 1
    tensor = choices.tensor_parallel or (launch.parallel.tensor if is_spread else None)
    pipeline = choices.pipeline_parallel or (launch.parallel.pipeline if is_spread else None)
    kv_format(launch.kv_cache_dtype)
    engines = _DATA_PARALLELS if launch.model.experts.count else _DATA_PARALLELS[:1]
    if is_spread or launch.parallel.data > 1 or choices.data_parallel is not None:
        engines = (choices.data_parallel or launch.parallel.data,)
    experts = choices.expert_parallel or launch.parallel.experts
    if (experts or engines[0] > 1) and not launch.model.experts.count:
        name = "data_parallel" if engines[0] > 1 else "expert_parallel"
        raise SizingError(f"{launch.model.id} has no routed experts to share", name=name)
    return Space(
        gpus=cards,
        tensor_parallels=(tensor,) if tensor else _TENSOR_PARALLELS,
        pipeline_parallel=pipeline or 1,
        data_parallels=engines,
        expert_parallel=experts,
        deeper=() if pipeline else _PIPELINE_PARALLELS,
        quantizations=_quantizations(launch),
        kv_cache_dtypes=(
            ("auto", "fp8") if launch.kv_cache_dtype == "auto" else (launch.kv_cache_dtype,)
        ),
        max_model_lens=_max_model_lens(launch, inputs + outputs),
        request_tokens=inputs + outputs,
    )


def _quantizations(launch: Launch) -> tuple[str, ...]:
    if launch.quantization is not None:
        return (scheme(launch.quantization).id,)
    own = scheme(launch.model.quantization)
    return (own.id, *_QUANTIZATIONS) if own.linear_bits == own.expert_bits == 16 else (own.id,)


def _max_model_lens(launch: Launch, request_tokens: float) -> tuple[int, ...]:
    lengths, needed = [launch.longest_tokens], max(request_tokens, launch.context_tokens or 0)
    # The stated lengths are means: leave room for requests of twice that.
    while launch.max_model_len is None and lengths[-1] // 2 >= needed * _LONGEST_TO_MEAN:
        lengths.append(lengths[-1] // 2)
    return tuple(lengths)


# --- Launches that vLLM would start, with their memory; rejected ones are counted -----------------


_BF16_BITS = 16
# Reasons by the input that an error of `memory` names.
_REASONS = {
    "tensor_parallel": Reason.HEADS,
    "draft_model": Reason.HEADS,
    "dcp": Reason.CONTEXT_RANKS,
    "quantization": Reason.FORMAT,
}


Started = tuple[Memory, int]
"""A launch with the longest context with which it starts, and the number of shorter contexts and
this one that start; they differ in nothing else."""


def launches(base: Launch, space: Space) -> Iterator[Started | Rejection]:
    """Every launch of the space that starts, and why the others do not.

    Raises:
        SizingError: an input of `base` is invalid.
    """
    base = replace(base, context_tokens=base.context_tokens or ceil(space.request_tokens))
    for board in space.gpus:
        for quantization in space.quantizations:
            for kv_cache_dtype in space.kv_cache_dtypes:
                # The checkpoint's own scheme needs no flag.
                own = scheme(base.model.quantization).id == quantization
                launch = replace(
                    base,
                    gpu=board,
                    quantization=None if own else quantization,
                    kv_cache_dtype=kv_cache_dtype,
                    max_model_len=space.max_model_lens[0],
                )
                misfit = _misfit(launch, board)
                if misfit is None:
                    yield from _spread(launch, space)
                else:
                    configurations = len(space.spreads) * len(space.max_model_lens)
                    yield replace(misfit, configurations=configurations)


def _misfit(launch: Launch, gpu: Gpu) -> Rejection | None:
    """Why neither checkpoint nor GPU has the formats of a launch; None if they do."""
    own, launched = scheme(launch.model.quantization), launch.scheme
    if launch.quantization is not None and min(own.linear_bits, own.expert_bits) < _BF16_BITS:
        why = f"{launch.model.id} is published in {own.id}"
        return Rejection(Reason.REQUANTIZED, launch, lambda: why)
    # A checkpoint's own format may still be unpacked by weight-only kernels, which `memory` knows.
    if launch.quantization is not None and (
        (launched.compute == "fp8" and gpu.fp8_flop_per_s is None)
        or (launched.compute == "fp4" and gpu.architecture != "blackwell")
    ):
        missing = launched.id
    elif "fp8" in launch.kv_cache_dtype and gpu.fp8_flop_per_s is None:
        missing = f"{launch.kv_cache_dtype} KV cache"
    else:
        return None
    return Rejection(Reason.FORMAT, launch, lambda: f"{gpu.name} has no {missing}")


def _spread(launch: Launch, space: Space) -> Iterator[Started | Rejection]:
    started = False
    for spread in space.spreads:
        for start in _lengths(replace(launch, parallel=spread), space.max_model_lens):
            started = started or not isinstance(start, Rejection)
            yield start
    if started:
        return
    heads = launch.model.attention_heads
    widest = max(
        (tensor for tensor in space.tensor_parallels if not heads % tensor),
        default=space.tensor_parallels[-1],
    )
    engines, experts = space.data_parallels[:1], space.expert_parallel
    for spread in splits((widest,), stages=space.deeper, engines=engines, experts=experts):
        yield from _lengths(replace(launch, parallel=spread), space.max_model_lens)


def _lengths(launch: Launch, lengths: Sequence[int]) -> Iterator[Started | Rejection]:
    gpu, spread, depth = launch.gpu, launch.parallel, launch.model.depth
    unlinked = gpu is not None and gpu.c2c_bytes_per_s is not None and gpu.nvlink_gpus == 1
    if gpu is not None and spread.gpus > 1 and unlinked:
        why = f"{gpu.name} has no link to other GPUs"
        yield Rejection(Reason.NODE, launch, lambda: why, len(lengths))
        return
    if spread.pipeline > depth:
        yield Rejection(Reason.LAYERS, launch, lambda: f"{depth} layers", len(lengths))
        return
    # V0 profiles whole prompts, so there every length has a memory of its own.
    for part in [lengths] if launch.version >= V1 else [[length] for length in lengths]:
        yield from _starts(replace(launch, max_model_len=part[0]), part)


def _starts(launch: Launch, lengths: Sequence[int]) -> Iterator[Started | Rejection]:
    try:
        answer = memory(launch)
    except SizingError as error:
        reason, message = _REASONS.get(error.name), str(error)
        if reason is None:
            raise
        yield Rejection(reason, launch, lambda: message, len(lengths))
        return
    lacking_gib = -answer.available_bytes.expected / GIB
    if lacking_gib >= 0:
        detail = f"each GPU lacks {figure(lacking_gib)} GiB for weights and overhead"
        yield Rejection(Reason.WEIGHTS, launch, lambda: detail, len(lengths), 1 + lacking_gib)
        return
    blocks = answer.blocks
    for short, length in enumerate(lengths):
        needed = answer.layout.request_blocks(length)
        # With no block to spare vLLM starts, but a request of that length waits for ever: the null
        # block is missing.
        if blocks > needed:
            fitting = launch if not short else replace(launch, max_model_len=length)
            yield replace(answer, launch=fitting), len(lengths) - short
            return
        yield _no_length(answer, length, needed / max(blocks, 1))


def _no_length(answer: Memory, length: int, needed_ratio: float) -> Rejection:
    needed, left = answer.layout.request_bytes(length), answer.available_bytes.expected
    return Rejection(
        Reason.KV,
        replace(answer.launch, max_model_len=length),
        lambda: f"needs {figure(needed / GIB)} GiB per GPU, {figure(left / GIB)} GiB are left",
        needed_ratio=needed_ratio,
    )


# --- The search: the cheapest configuration, the next best, and why others fail -------------------
#
# A configuration is a launch (GPU, tensor and pipeline parallelism, quantization, KV dtype,
# longest context) and its replicas. Every launch is sized as `size` sizes it, at the highest
# concurrency that keeps the targets; the replicas follow from the peak. Guide 8.3, 9.1 steps 2 to
# 11, 9.2.


KV_CACHE, MAX_NUM_SEQS = "KV cache", "max_num_seqs"
_BEST = 3
# A fleet of this many times the winner's GPUs is no alternative to it.
_MOST_TIMES = 16


def search(question: Question, choices: Choices = ANYTHING) -> SearchResult:
    """The cheapest launches for the question's lengths, targets and peak.

    Launches of equal cost are ordered by number of GPUs, then by how little quality must be
    validated, then by latency. The question's concurrency and replicas are ignored: the search
    computes them.

    Raises:
        SizingError: an input is invalid or missing, or describes a single launch.
    """
    stated = question.targets
    if stated.itl_p99_s is None:
        question = replace(question, targets=Targets(stated.ttft_p99_s, ASSUMED_ITL_S))
    tried, rejected = space(question, choices), list[Rejection]()
    chosen: dict[tuple[object, ...], tuple[tuple[float, ...], Candidate]] = {}
    launched = meeting = 0
    for start in launches(question.launch, tried):
        if isinstance(start, Rejection):
            rejected.append(start)
            continue
        started, configurations = start
        launched += 1
        candidate = _candidate(question, started, choices.most_gpus)
        if isinstance(candidate, Rejection):
            rejected.append(replace(candidate, configurations=configurations))
            continue
        meeting += configurations
        launch = candidate.launch
        same = candidate.gpu.id, launch.parallel, launch.scheme.id, launch.kv_cache_dtype
        rank = _rank(question, candidate)
        if same not in chosen or rank < chosen[same][0]:
            chosen[same] = rank, candidate
    ordered = [candidate for _, candidate in sorted(chosen.values(), key=lambda entry: entry[0])]
    by_gpu: dict[str, Candidate] = {}
    for candidate in ordered:
        if candidate.gpus <= _MOST_TIMES * ordered[0].gpus:
            by_gpu.setdefault(candidate.gpu.id, candidate)
    rejections = by_reason(rejected)
    return SearchResult(
        question=question,
        is_itl_assumed=stated.itl_p99_s is None,
        ranked_by=BY_TOKENS if question.peak_requests_per_s is None else BY_HOUR,
        best=tuple(ordered[:_BEST]),
        by_gpu=tuple(by_gpu.values()),
        rejections=rejections,
        configurations=meeting + sum(rejection.configurations for rejection in rejections),
        launches=launched,
        meeting=meeting,
    )


def _rank(question: Question, candidate: Candidate) -> tuple[float, ...]:
    cost = candidate.usd_per_hour
    if question.peak_requests_per_s is None:
        cost = candidate.usd_per_million_output_tokens
    request_s = candidate.ttft_s + candidate.itl_s * (question.output_tokens or 0.0)
    longest = candidate.launch.longest_tokens
    certain = candidate.starts_for_certain
    return not certain, cost, candidate.gpus, candidate.validations, request_s, -longest


def _candidate(question: Question, answer: Memory, most_gpus: int | None) -> Candidate | Rejection:
    """The launch with its replicas at the highest load within the targets, or why it fails."""
    launch, gpus_per_replica = answer.launch, answer.launch.parallel.gpus
    held_mean = held_to_plan(question, answer)
    limit = usable_limit(held_mean, launch.seqs)
    binding = KV_CACHE if limit < launch.seqs else MAX_NUM_SEQS
    question = replace(question, launch=launch)
    loop = loop_of(question, answer, limit)
    if loop is None:
        raise TypeError("a launch of a search has lengths, a GPU and a number of parameters")
    limit_at_targets = within_targets(question, loop, limit)
    if not limit_at_targets.concurrency:
        return _too_slow(question, limit_at_targets)
    speed = limit_at_targets.performance
    engines = launch.parallel.data
    served_per_s = speed.requests_per_s * engines
    fleet = fleet_of(question, served_per_s)
    replicas = 1 if fleet is None else fleet.deployed_instances
    if most_gpus is not None and replicas * gpus_per_replica > most_gpus:
        why = f"{replicas} replicas of {gpus_per_replica} GPUs, {most_gpus} GPUs are allowed"
        needed_ratio = replicas * gpus_per_replica / most_gpus
        return Rejection(Reason.GPUS, launch, lambda: why, needed_ratio=needed_ratio)
    price = question.price_usd_per_gpu_hour or 0.0
    layout = answer.layout
    utilization_ratio, _ = peak_utilization(question, served_per_s * replicas)
    tokens_per_s = speed.decode_tokens_per_s * engines
    return Candidate(
        launch=launch,
        replicas=replicas,
        gpus=replicas * gpus_per_replica,
        usd_per_hour=replicas * gpus_per_replica * price,
        usd_per_million_output_tokens=usd_per_million_tokens(
            gpus_per_replica * price, tokens_per_s, utilization_ratio
        ),
        concurrency=limit_at_targets.concurrency * engines,
        requests_per_s=served_per_s,
        ttft_s=speed.ttft_s,
        itl_s=speed.itl_s,
        kv_usage_ratio=limit_at_targets.concurrency / held_mean,
        binding=binding if limit_at_targets.binding == RUNNING_LIMIT else limit_at_targets.binding,
        starts_for_certain=layout.blocks(answer.available_bytes.low)
        >= layout.request_blocks(launch.longest_tokens),
    )


def _too_slow(question: Question, reached: Capacity) -> Rejection:
    speed, targets = reached.performance, safe_targets(question.targets, question.launch)
    missed_s, target_s = next(
        (latency_s, target_s)
        for name, latency_s, target_s in targets.beside(speed.ttft_s, speed.itl_s)
        if name == reached.binding
    )
    return Rejection(
        Reason.ITL_MISSED if reached.binding == "ITL" else Reason.TTFT_MISSED,
        question.launch,
        lambda: f"{seconds(missed_s)}, the target with its margin is {seconds(target_s)}",
        needed_ratio=missed_s / target_s,
    )
