"""The cheapest configuration that meets the targets, the next best, and why others fail. Pure.

A configuration is a launch (GPU, tensor and pipeline parallelism, quantization, KV dtype, longest
context) and its replicas. Every launch is sized as `size` sizes it, at the highest concurrency
that keeps the targets; the replicas follow from the peak. Guide 8.3, 9.1 steps 2 to 11, 9.2.
"""

from __future__ import annotations

from math import ceil

from kneewatch.diagnose.catalogue.inputs import positive
from kneewatch.diagnose.sizing.arithmetic import exact, seconds
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.replicas.serving_cost import SECONDS_PER_HOUR
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.search_results import (
    BY_HOUR,
    BY_TOKENS,
    GPUS,
    ITL_MISSED,
    TTFT_MISSED,
    Candidate,
    SearchResult,
    Tally,
    gpu_of,
)
from kneewatch.diagnose.sizing.search_space import ANYTHING, Choices, Launch, Space, launches, space
from kneewatch.diagnose.sizing.size import peak_utilization
from kneewatch.diagnose.sizing.speed.performance import Load
from kneewatch.diagnose.sizing.speed.roofline_inputs import launch_costs
from kneewatch.diagnose.sizing.speed.slo_capacity import (
    ITL,
    RUNNING_LIMIT,
    Capacity,
    Targets,
    capacity,
    drafting_of,
)

KV_CACHE, MAX_NUM_SEQS = "KV cache", "max_num_seqs"
# Nearer than this to a whole number a quotient is worked out in decimals.
_NEAR_WHOLE = 1e-9


def search(question: Question, choices: Choices = ANYTHING, *, top: int = 3) -> SearchResult:
    """The `top` cheapest launches for the question's lengths, targets and peak.

    Of equal cost, the fewer GPUs come first, then what leaves less quality to validate, then the
    lower latency. The question's concurrency and replicas are results here and are not read.

    Raises:
        SizingError: an invalid or missing input, or one that describes a single launch.
    """
    positive("top", top)
    tried, tally = space(question, choices), Tally()
    chosen: dict[tuple[object, ...], tuple[tuple[float, ...], Candidate]] = {}
    launched = meeting = 0
    for launch in launches(question.setup, tried, tally):
        launched += 1
        candidate = _candidate(question, tried, launch, tally)
        if candidate is not None:
            meeting += launch.configurations
            setup = candidate.setup
            same = candidate.gpu.id, setup.parallel, setup.scheme.id, setup.kv_cache_dtype
            rank = _rank(question, candidate)
            if same not in chosen or rank < chosen[same][0]:
                chosen[same] = rank, candidate
    ordered = [candidate for _, candidate in sorted(chosen.values(), key=lambda entry: entry[0])]
    by_gpu: dict[str, Candidate] = {}
    for candidate in ordered:
        by_gpu.setdefault(candidate.gpu.id, candidate)
    rejections = tally.rejections()
    return SearchResult(
        question=question,
        ranked_by=BY_TOKENS if question.peak_requests_per_s is None else BY_HOUR,
        best=tuple(ordered[:top]),
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
    longest = candidate.setup.longest_tokens
    return cost, candidate.gpus, candidate.validations, request_s, -longest


def _candidate(question: Question, tried: Space, launch: Launch, tally: Tally) -> Candidate | None:
    """The launch with its replicas at the highest load it may have; None where it fails."""
    setup, gpus_per_replica = launch.setup, launch.setup.parallel.gpus
    held, limit, binding = _limit(tried, launch)
    limit_at_targets = _capacity(question, tried, setup, limit)
    if not limit_at_targets.concurrency:
        _reject_latency(question, launch, limit_at_targets, tally)
        return None
    speed = limit_at_targets.performance
    replicas = _replicas(question, speed.requests_per_s)
    if tried.most_gpus is not None and replicas * gpus_per_replica > tried.most_gpus:
        most = tried.most_gpus
        tally.reject(
            GPUS,
            setup,
            lambda: f"{replicas} replicas of {gpus_per_replica} GPUs, {most} GPUs are allowed",
            configurations=launch.configurations,
            needed_ratio=replicas * gpus_per_replica / most,
        )
        return None
    price = question.usd_per_gpu_hour
    if price is None:
        price = gpu_of(setup).usd_per_hour
    layout = launch.memory.layout
    shared = peak_utilization(question, speed.requests_per_s * replicas)
    tokens = speed.decode_tokens_per_s * SECONDS_PER_HOUR * shared.ratio
    return Candidate(
        setup=setup,
        replicas=replicas,
        gpus=replicas * gpus_per_replica,
        usd_per_hour=replicas * gpus_per_replica * price,
        usd_per_million_output_tokens=gpus_per_replica * price / tokens * 1e6,
        concurrency=limit_at_targets.concurrency,
        requests_per_s=speed.requests_per_s,
        ttft_s=speed.ttft_s,
        itl_s=speed.itl_s,
        kv_usage_ratio=limit_at_targets.concurrency / held,
        binding=binding if limit_at_targets.binding == RUNNING_LIMIT else limit_at_targets.binding,
        starts_for_certain=layout.blocks(launch.memory.available_bytes.low)
        >= layout.request_blocks(setup.longest_tokens),
    )


def _limit(tried: Space, launch: Launch) -> tuple[float, int, str]:
    """Requests that the KV cache holds, those that run at once, and which of the two binds.

    Counted at the length of a whole request, or at the context where one was stated.
    """
    answer, setup = launch.memory, launch.setup
    tokens = max(tried.request_tokens, setup.context)
    held = answer.concurrency.expected
    if int(tokens) != setup.context:
        held = answer.layout.concurrency(answer.available_bytes.expected, int(tokens))
    limit = max(int(min(held, float(setup.seqs))), 1)
    return held, limit, KV_CACHE if held < setup.seqs else MAX_NUM_SEQS


def _capacity(question: Question, tried: Space, setup: Setup, limit: int) -> Capacity:
    costs = launch_costs(setup)
    load = Load(
        input_tokens=tried.input_tokens,
        output_tokens=tried.output_tokens,
        concurrency=limit,
        max_running=limit,
        max_num_batched_tokens=setup.batched_tokens,
        drafting=drafting_of(question, setup, costs),
    )
    targets = Targets(question.ttft_slo_s, question.itl_slo_s)
    return capacity(costs, load, targets, tried.efficiency)


def _replicas(question: Question, usable_requests_per_s: float) -> int:
    # As size_fleet counts them (guide 9.1 step 11), without its steps: it is asked ten thousand
    # times.
    if question.peak_requests_per_s is None:
        return 1
    ratio = question.peak_requests_per_s / usable_requests_per_s
    instances = ceil(ratio)
    if abs(ratio - round(ratio)) < _NEAR_WHOLE * ratio:
        instances = ceil(exact(question.peak_requests_per_s) / exact(usable_requests_per_s))
    return ceil(instances * exact(question.safety))


def _reject_latency(question: Question, launch: Launch, reached: Capacity, tally: Tally) -> None:
    speed = reached.performance
    missed, missed_s, target_s = TTFT_MISSED, speed.ttft_s, question.ttft_slo_s
    if reached.binding == ITL:
        missed, missed_s, target_s = ITL_MISSED, speed.itl_s, question.itl_slo_s
    if target_s is None:
        raise TypeError(f"{reached.binding} missed without a target")
    target = target_s
    tally.reject(
        missed,
        launch.setup,
        lambda: f"{seconds(missed_s)}, the target is {seconds(target)}",
        configurations=launch.configurations,
        needed_ratio=missed_s / target,
    )
