"""Sizes one configuration: memory, speed, replicas and cost, with arithmetic and notes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import ceil, floor

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS, SEATS
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Sheet, gigabytes
from kneewatch.diagnose.sizing.launch_notes import launch_doubts, launch_notes
from kneewatch.diagnose.sizing.memory.budget import (
    FewestGpus,
    Memory,
    fewest_gpus,
    memory,
    second_copy_ratio,
)
from kneewatch.diagnose.sizing.memory.launch import LATEST, V1, Launch, check
from kneewatch.diagnose.sizing.memory.memory_arithmetic import planned_memory
from kneewatch.diagnose.sizing.memory.overhead import start_ups
from kneewatch.diagnose.sizing.memory.weights import Draft
from kneewatch.diagnose.sizing.replica_count import FleetSize, size_fleet
from kneewatch.diagnose.sizing.requirements import Question, at_lengths, check_question
from kneewatch.diagnose.sizing.serving_cost import token_cost, yearly_cost
from kneewatch.diagnose.sizing.speed.performance import (
    ClosedLoop,
    Load,
    Performance,
    closed_loop,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    SOURCE,
    accuracy,
    costs,
    margins,
    safe_targets,
)
from kneewatch.diagnose.sizing.speed.slo_capacity import (
    Capacity,
    capacity,
    drafting_of,
    expert_exchange,
    performance_lines,
)
from kneewatch.diagnose.sizing.speed.wave import Wave, wave
from kneewatch.rules.formatting import duration, figure, percent, stated_duration

KV_BYTES = "--kv-cache-memory-bytes"
# A stated rate gets a note if the predicted one is this many times as high, or if it is itself
# this many times the predicted one.
_APART = 1.5
_OPTIMISTIC = 1.1
_TIGHT_RATIO = 0.99
_OLDEST = (0, 6, 0)
_MOST_RANKS = 8
_MOST_KV_RATIO = 0.9
# A chosen max_model_len is at least this many times the mean request.
_ROOM_FOR_LONGER = 4


def start_failure(answer: Memory, fewest: FewestGpus | None) -> str | None:
    """Why vLLM would not start, and which change would let it start; None if it starts."""
    launch, longest = answer.launch, answer.longest_that_fits
    if answer.starts:
        return None
    if launch.refusal:
        return f"vLLM would not start: {launch.refusal}"
    if not answer.has_room:
        room = figure(max(answer.room_bytes / GIB, 0.0))
        return (
            f"vLLM would not start: {KV_BYTES} is more than the {room} GiB that weights and "
            "overhead leave free on each GPU"
        )
    if answer.holds_one:
        return (
            f"vLLM would not start: max_num_seqs is {launch.seqs:,}, and the KV cache has "
            f"{answer.most_seqs:,} blocks for the states of running requests; use {SEATS} "
            f"{answer.most_seqs} or less"
        )
    gpus = fewest.expected if fewest is not None else None
    if gpus is not None and gpus <= launch.parallel.tensor * launch.parallel.pipeline:
        gpus = None  # these GPUs are there already
    split = f"split the model over {gpus or 'more'} GPUs"
    if not longest and launch.available_kv_bytes is not None:
        return "vLLM would not start: the stated KV cache holds no request; state a larger one"
    if not longest:
        return (
            "vLLM would not start: weights and overhead leave no room for a KV cache; "
            f"{split}, or serve it with fewer bits per weight"
        )
    longest = min(longest, launch.model.max_context_tokens or longest)
    change = f"use {LONGEST_TOKENS} {longest}" + (f" or {split}" if gpus else "")
    default = ""
    if launch.auto_context:
        return (
            f"{LONGEST_TOKENS} auto takes about {longest:,} tokens, and vLLM refuses a request of "
            f"{launch.longest_tokens:,}" + (f"; {split}" if gpus else "")
        )
    if launch.max_model_len is None and launch.context < launch.longest_tokens:
        default = f", the default of {LONGEST_TOKENS}, which --context and mean lengths do not set"
    return (
        "vLLM would not start: the KV cache is too small for one request of "
        f"{launch.longest_tokens:,} tokens{default}; {change}"
    )


_FEW_REQUESTS = 8


def whole_requests(held: float, engines: int = 1) -> str:
    """Requests that each of the engines holds, rounded down, all together; tenths of a few."""
    each = floor(held) if held >= _FEW_REQUESTS else floor(10 * held) / 10
    return figure(round(each * engines, 1))


def memory_notes(
    answer: Memory, concurrency: float, fewest: FewestGpus | None = None
) -> Iterator[str]:
    """Doubts about what fits into memory, if each engine should hold `concurrency` requests."""
    yield from _sources(answer)
    launch, held, layout = answer.launch, answer.held, answer.layout
    failure = start_failure(answer, fewest)
    if failure:
        yield failure
    elif answer.blocks * _TIGHT_RATIO <= layout.request_blocks(launch.longest_tokens):
        yield (
            "a request of full length needs almost the whole KV cache, so it can stay queued "
            "forever"
        )
    if not failure and held.low < concurrency <= held.expected:
        yield (
            f"may not fit: at the low end of the estimate only {whole_requests(held.low)} requests "
            "fit"
        )
    elif not failure and held.expected < concurrency <= held.high:
        yield (f"may fit: at the high end of the estimate {whole_requests(held.high)} requests fit")
    if answer.refused_seqs:
        yield (
            f"vLLM refuses its default max_num_seqs of {answer.refused_seqs:,}: the KV cache has "
            f"fewer blocks for the states of running requests; sized with {launch.seqs}"
        )
    if launch.draft is not None:
        undrafted = memory(replace(launch, draft=None)).held.expected
        yield (
            f"the draft takes KV cache memory: {whole_requests(held.expected)} requests fit with "
            f"it, {whole_requests(undrafted)} without"
        )
    if not launch.defaults.capacity_by_context and len(layout.groups) > 1:
        yield (
            "kv_capacity_tokens is the figure that this version logs; for a model with several "
            "kinds of layers the capacity is kv_tokens_at_context"
        )


def _sources(answer: Memory) -> Iterator[str]:
    """Doubts about the inputs that the figures rest on."""
    launch = answer.launch
    if launch.gpu is not None and launch.gpu.given_name:
        yield f"{launch.gpu.given_name} is taken as {launch.gpu.id} ({launch.gpu.name})"
    if launch.gpu is not None and launch.gpu.memory_is_estimated:
        yield f"{launch.gpu.id}: memory {launch.gpu.memory_source}"
    by_logs = launch.overhead != "guide" and launch.slack is None
    if launch.gpu is not None and answer.overhead is not None and by_logs:
        alike, of_kind = start_ups(launch, launch.gpu)
        yield (
            f"the overhead's band stands on {alike} logged start-ups on GPUs of this class and "
            f"{of_kind} of models of this kind" + ("" if alike else ": it is wider")
        )
    if launch.gpu is not None and launch.gpu.memory_source == "stated" and launch.gpu.note:
        yield f"{launch.gpu.name}: {launch.gpu.note}"
    if launch.gpu is not None and launch.gpu.shows_whole_memory:
        yield (
            f"{launch.gpu.id}: more memory is stated than Linux reports, so what Windows takes is "
            "counted"
        )
    if launch.cpu_offload_bytes:
        yield (
            f"{gigabytes(launch.cpu_offload_bytes)} of weights per GPU cross PCIe in every step, "
            "which the predicted speed does not include"
        )
    if launch.kv_offloading_bytes:
        per_token = answer.layout.token_bytes * launch.parallel.tensor * launch.parallel.pipeline
        yield (
            "host memory keeps the KV cache of "
            f"{figure(launch.kv_offloading_bytes / per_token)} evicted tokens for reuse: no more "
            "requests run at once"
        )
    if launch.model.multimodal and launch.version < V1:
        yield (
            "vLLM V0 profiles vision models with the largest images and may need tens of GiB more "
            "than shown"
        )
    if launch.slack is not None:
        yield (
            f"the memory is by the rule of {launch.kind.title} {launch.slack.version}, not "
            "compared with start-up logs; another process on the GPU shrinks the KV cache by "
            "what it holds"
        )
    elif not _OLDEST <= launch.version <= LATEST:
        yield "no start-up log of this vLLM version is known: the nearest version is used"
    if launch.parallel.tensor > _MOST_RANKS:
        yield "memory overhead above TP 8 is extrapolated, not measured"
    if launch.weights_bytes is not None and (launch.adapters or launch.draft):
        yield "adapters and draft model are added to the stated weights"
    if launch.slack is None and floor(answer.held.expected) > floor(answer.concurrency.expected):
        longest = launch.longest_tokens
        logged = answer.layout.concurrency(answer.available_bytes.expected, longest)
        yield (
            f"vLLM will log a maximum concurrency of {figure(logged)} for {longest:,} tokens: it "
            "counts every request in prefill. In decode a request keeps only its window in "
            "sliding-window layers"
        )
    copied_ratio = second_copy_ratio(launch)
    if copied_ratio:
        yield (
            f"on one AMD GPU vLLM 0.13 to 0.18 took up to {percent(copied_ratio)} more than the "
            "computed weights, which the low end of the estimate includes: set --weights-gib from "
            "the log"
        )
    if launch.draft is not None:
        yield from _draft_doubts(launch.draft, launch)
    own_scheme = launch.model.quantization
    if own_scheme not in ("bf16", "fp16") and launch.scheme.id != own_scheme:
        yield (f"the checkpoint is in {own_scheme}: {launch.scheme.id} needs another checkpoint")


def _draft_doubts(draft: Draft, launch: Launch) -> Iterator[str]:
    drafted = draft.model
    yield from drafted.notes
    own = drafted.target_hidden_size or drafted is launch.model.own_draft
    if not own and drafted.vocab_size != launch.model.vocab_size:
        yield (
            f"vLLM refuses this draft model: {drafted.id} has a vocabulary of "
            f"{drafted.vocab_size:,} tokens, {launch.model.id} of {launch.model.vocab_size:,}; "
            "newer versions accept it with use_heterogeneous_vocab"
        )


def speed_notes(question: Question, predicted: Performance | None) -> Iterator[str]:
    """The assumptions behind the predicted speed."""
    if predicted is None:
        return
    shares = question.efficiency
    routed = question.launch.model.experts.count
    experts = f" ({shares.expert_mfu_ratio:g} in routed experts)" if routed else ""
    defaults = dict[str, str]()
    if question.mfu_ratio is None:
        defaults["--mfu"] = f"MFU {shares.mfu_ratio:g}{experts}"
    if question.mbu_ratio is None:
        defaults["--mbu"] = f"MBU {shares.mbu_ratio:g}"
    if defaults:
        yield (
            f"speed is predicted with {' and '.join(defaults.values())}, {SOURCE}: set your "
            f"measured values with {' and '.join(defaults)}"
        )
        yield f"accuracy: {accuracy(question.launch)}"
    if question.launch.decode_context_parallel > 1:
        yield (
            "speed is predicted without the traffic between context-parallel ranks: benchmark "
            f"--dcp {question.launch.decode_context_parallel}"
        )
    if question.launch.draft is not None and question.acceptance_ratio is None:
        yield ("speed is predicted without speculation: set --acceptance to include it")


def load_notes(
    question: Question, predicted: Performance | None, *, source: str, starts: bool
) -> Iterator[str]:
    """Doubts about the load, and the reason if no fleet was sized."""
    has_target = question.targets.are_set
    longest, own = question.launch.longest_tokens, question.launch.model.max_context_tokens
    if question.users is not None and starts and longest < own:
        yield (
            f"vLLM refuses requests of more than {longest:,} tokens ({LONGEST_TOKENS}): one of "
            f"the model's {own:,} tokens needs more GPUs"
        )
    if source == "predicted":
        yield ("usable requests/s are predicted, not measured: run a benchmark before you buy")
    if predicted is not None and has_target:
        yield "the targets are compared with predicted mean latencies; P99 is higher"
    if source == "unknown" and question.peak_requests_per_s is not None:
        why = "no load is predicted to meet the targets with a margin for the prediction's error"
        if not starts:
            why = "the launch does not fit"
        elif predicted is None or not has_target:
            why = (
                "usable requests/s are unknown: set --usable-rps or --benchmark, or a target or a "
                "concurrency with --input-tokens and --output-tokens"
            )
        else:
            why += f" ({margins(question.targets, question.launch)}): benchmark it for --usable-rps"
        yield f"no fleet: {why}"


def stated_notes(
    stated_per_s: float, usable_per_s: float | None, full_per_s: float | None
) -> Iterator[str]:
    """Doubts about stated usable requests/s.

    With targets: far from the prediction for one replica within the targets. Without: above the
    prediction for as many requests as the replica holds.
    """
    least, load = (usable_per_s or 0.0) / _APART, ""
    if usable_per_s is None:
        load = " with as many requests as it holds"
    expected = full_per_s if usable_per_s is None else usable_per_s
    how = "are far below" if stated_per_s < least else "exceed"
    if expected is not None and not least <= stated_per_s <= expected * _OPTIMISTIC:
        yield (
            f"the stated {figure(stated_per_s)} usable requests/s {how} the predicted "
            f"{figure(expected)} of one replica{load}: check them with a benchmark"
        )


# --- One configuration: memory, speed at a load, replicas and cost --------------------------------
#
# The same answer serves `kneewatch size`, the search and the recommendations.


class Size(Struct, frozen=True):
    """The result of sizing one configuration.

    - `performance` (of one engine), `fleet`: None if inputs are missing.
    - `usable_requests_per_s`: of one replica. `usable_source`: whether stated or predicted; if
      predicted, with `usable_concurrency` on each engine.
    - `missed`: the targets that the load misses, or that no number of replicas meets.
    - `utilization_ratio`: the cost per token assumes it; `utilization_source`: where it comes from.
    - `doubts`: what vLLM would refuse, and flags that kneewatch does not know.
    - `sheet`: the arithmetic of speed, fleet and cost; memory is in `memory_steps`. With the
      overhead model "guide" the fewest GPUs by the sum of the parts come first.
    """

    question: Question
    memory: Memory
    fewest: FewestGpus | None
    performance: Performance | None
    usable_requests_per_s: float | None
    usable_source: str
    usable_concurrency: float | None
    missed: tuple[str, ...]
    fleet: FleetSize | None
    usd_per_million_output_tokens: float | None
    usd_per_year: float | None
    utilization_ratio: float
    utilization_source: str
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    sheet: Sheet

    @property
    def fits(self) -> bool:
        """Whether vLLM starts and holds the concurrency at the context's length."""
        return self.memory.fits(self.question.concurrency_per_engine)

    @property
    def meets_targets(self) -> bool | None:
        """Whether the predicted latencies are within the targets at the load. None: no target,
        nothing predicted, or the stated usable requests/s decide."""
        if not self.question.targets.are_set or self.performance is None:
            return None
        return None if self.usable_source == "stated" else not self.missed

    @property
    def is_above_targets(self) -> bool:
        """Whether a predicted latency at the load is above its target, without any margin."""
        speed, targets = self.performance, self.question.targets
        return speed is not None and any(
            predicted_s > target_s
            for _, predicted_s, target_s in targets.beside(speed.ttft_s, speed.itl_s)
        )

    @property
    def serves_peak(self) -> bool | None:
        """Whether the replicas serve the peak, times the safety factor, by the prediction. None: no
        peak, nothing predicted, or the stated usable requests/s decide."""
        peak_per_s, most_per_s = self.question.peak_requests_per_s, self.most_requests_per_s
        if peak_per_s is None or most_per_s is None or self.usable_source == "stated":
            return None
        return peak_per_s * self.question.safety <= most_per_s

    @property
    def replicas(self) -> int:
        """The replicas for the peak, or the question's where no fleet is sized."""
        return self.question.replicas if self.fleet is None else self.fleet.deployed_instances

    @property
    def most_requests_per_s(self) -> float | None:
        """Requests/s of all replicas with as many requests as they can hold; None if unknown."""
        each_per_s = full_requests_per_s(self.question, self.performance)
        return each_per_s and each_per_s * self.replicas

    @property
    def planned(self) -> Question:
        """The question with the replicas and the requests in flight that it plans for: those at the
        peak, or all that can run where they do not serve it; otherwise the usable load."""
        question, at_peak = replace(self.question, replicas=self.replicas), self.at_peak()
        in_flight = self.usable_concurrency if question.concurrency is None else None
        if at_peak is not None:
            in_flight = at_peak[0]
        elif self.performance is not None and self.serves_peak is False:
            in_flight = self.performance.loop.load.max_running
        if in_flight is None:
            return question
        return replace(question, concurrency=in_flight * question.engines)

    @property
    def succeeds(self) -> bool:
        """Whether it fits, meets the targets and serves the peak; what is unknown fails nothing."""
        return self.fits and self.meets_targets is not False and self.serves_peak is not False

    def at_peak(self) -> tuple[float, Performance] | None:
        """The requests in flight on one engine and its latencies, while the peak is spread evenly
        over the deployed replicas, or over the question's where no fleet is sized. None if unknown,
        or if they cannot serve it."""
        peak_per_s = self.question.peak_requests_per_s
        if self.performance is None or peak_per_s is None:
            return None
        per_engine_per_s = peak_per_s / (self.replicas * self.question.launch.parallel.data)
        return self.performance.loop.serving(per_engine_per_s)

    def in_waves(self, rounds: int = 1) -> Wave | None:
        """What a benchmark at the load's concurrency measures of one engine; None if unknown."""
        if self.performance is None:
            return None
        return wave(self.performance.loop, self.question.concurrency_per_engine, rounds)

    @property
    def gpus(self) -> int:
        """GPUs of the fleet; without a peak, of the question's replicas."""
        if self.fleet is not None:
            return self.fleet.gpus
        return self.question.launch.parallel.gpus * self.question.replicas


def size(question: Question) -> Size:
    """Sizes one configuration.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    check(question.launch)
    check_question(question)
    question = replace(question, launch=at_lengths(question))
    answer, fewest = memory(question.launch), _fewest(question)
    question = replace(question, launch=answer.launch)
    notes = [
        *question.launch.model.notes,
        *memory_notes(answer, question.concurrency_per_engine, fewest),
    ]
    sheet = Sheet()
    gpu, counted = question.launch.gpu, question.launch.model.parameters
    if question.launch.overhead == "guide" and gpu is not None and counted is not None:
        each = question.concurrency_per_engine
        sheet.text(*planned_memory(question.launch, gpu, concurrency=each).steps)
    # A launch that would not start has neither speed nor price.
    loop = loop_of(question, answer) if answer.starts else None
    speed = None if loop is None else loop.at(loop.load.concurrency)
    if speed is not None:
        performance_lines(sheet, speed)
        sheet.text(*speed.intensity.steps)
        launch, costs = question.launch, speed.loop.costs
        if launch.parallel.experts and launch.model.experts.count:
            tokens, gpus = speed.running * launch.parallel.data, launch.parallel.gpus
            of = "per decode step"
            expert_exchange(sheet, launch.model, costs, tokens=tokens, gpus=gpus, of=of)
    predicted = Sheet("roofline prediction")
    usable, source, in_flight = _predicted_usable(predicted, question, answer, speed)
    notes += [*launch_notes(question.launch), *speed_notes(question, speed)]
    stated = question.usable_requests_per_s
    if stated is not None:
        if not question.is_benchmarked:
            notes += stated_notes(stated, usable, full_requests_per_s(question, speed))
        usable, source, in_flight = stated, "stated", None
    else:
        sheet.add(predicted)
    notes += load_notes(question, speed, source=source, starts=answer.starts)
    fleet = fleet_of(question, usable, sheet)
    capacity_per_s = None
    if fleet is not None and usable is not None:
        capacity_per_s = fleet.deployed_instances * usable
    utilization_ratio, why = peak_utilization(question, capacity_per_s)
    per_token, per_year = (
        _cost(sheet, question, fleet, usable, utilization_ratio) if answer.starts else (None, None)
    )
    return Size(
        question=question,
        memory=answer,
        fewest=fewest,
        performance=speed,
        usable_requests_per_s=usable,
        usable_source=source,
        usable_concurrency=in_flight,
        missed=tuple(_missed(question, speed, usable)),
        fleet=fleet,
        usd_per_million_output_tokens=per_token,
        usd_per_year=per_year,
        utilization_ratio=utilization_ratio,
        utilization_source=why,
        doubts=tuple(launch_doubts(question.launch)),
        notes=tuple(notes),
        sheet=sheet,
    )


def for_users(question: Question, users: int, tensor_parallel: Sequence[int]) -> Question:
    """The question with as many replicas as serve these users at once, within the targets.

    Of the tensor-parallel sizes, the one that takes the fewest GPUs, the smaller first. A shorter
    max_model_len is chosen where it saves GPUs and leaves room for much longer requests than the
    mean. If none serves anybody, the question has one replica, whose answer says why.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    base = replace(question, users=users, replicas=1, concurrency=users)
    check_question(base)
    splits: list[tuple[int, bool, Question]] = []
    for tensor in tensor_parallel:
        parallel = replace(base.launch.parallel, tensor=tensor)
        # A size that does not divide the attention heads is no choice.
        with suppress(SizingError):
            split = _starting(replace(base, launch=replace(base.launch, parallel=parallel)))
            if served := _served(split):
                split = replace(split, replicas=ceil(users / served))
                is_shorter = split.launch.max_model_len != base.launch.max_model_len
                splits.append((split.replicas * parallel.gpus, is_shorter, split))
    return min(splits, key=lambda split: split[:2], default=(0, False, base))[2]


def _starting(question: Question) -> Question:
    """The question with the longest max_model_len that fits, where none is stated and vLLM does not
    start with its default."""
    answer = memory(at_lengths(question))
    longest, launch = answer.longest_that_fits, question.launch
    stays = launch.max_model_len is not None or answer.holds_one
    if stays or longest < _ROOM_FOR_LONGER * answer.launch.context:
        return question
    return replace(question, launch=replace(launch, max_model_len=longest))


def with_longest(question: Question) -> Question:
    """The question with the longest context that fits where the launch leaves it to vLLM; with the
    question's own length if that is longer, which does not fit then."""
    launch = question.launch
    if not launch.auto_context or launch.max_model_len is not None:
        return question
    needed = launch.context_tokens or ceil(
        (question.input_tokens or 0.0) + (question.output_tokens or 0.0)
    )
    longest = max(memory(at_lengths(question)).longest_that_fits, needed)
    if not 0 < longest < launch.longest_tokens:
        return question
    return replace(question, launch=replace(launch, max_model_len=longest))


def _served(question: Question) -> int:
    """Users that one replica surely holds, at most max_num_seqs an engine, within the targets; 0 if
    vLLM would not start."""
    launch = at_lengths(question)
    answer = memory(launch)
    served = floor(min(answer.held.low, launch.seqs)) if answer.starts else 0
    loop = loop_of(replace(question, launch=launch), answer) if served >= 1 else None
    if loop is not None and question.targets.are_set:
        served = within_targets(question, loop, served).concurrency
    return served * launch.parallel.data


def _fewest(question: Question) -> FewestGpus | None:
    launch = question.launch
    # A stated KV cache is that of one layout: it says nothing about others.
    if (
        launch.gpu is None
        or launch.model.parameters is None
        or launch.available_kv_bytes is not None
    ):
        return None
    return fewest_gpus(launch, concurrency=question.concurrency_per_engine)


def held_to_plan(question: Question, answer: Memory) -> float:
    """Requests that the KV cache holds: of mean length, or of the stated context if that is
    longer."""
    mean_tokens = (question.input_tokens or 0.0) + (question.output_tokens or 0.0)
    return held(answer, max(mean_tokens, answer.launch.context))


def held(answer: Memory, mean_tokens: float) -> float:
    """Requests of this mean length that the KV cache holds."""
    return answer.layout.held(answer.available_bytes.expected, max(int(mean_tokens), 1))


def usable_limit(held_mean: float, seqs: int) -> int:
    """Requests in flight to plan with, where the KV cache holds `held_mean`: it is not full in the
    mean, because requests are longer than the mean at times, and a full cache evicts them."""
    return max(int(min(held_mean * _MOST_KV_RATIO, float(seqs))), 1)


def loop_of(question: Question, answer: Memory, limit: float | None = None) -> ClosedLoop | None:
    """One engine with the question's requests; None if too little is stated or none can run.

    `limit` are the most requests that may run; by default those of mean length that fit.
    """
    launch, inputs, outputs = question.launch, question.input_tokens, question.output_tokens
    if launch.gpu is None or launch.model.parameters is None or inputs is None or outputs is None:
        return None
    limit = min(held(answer, inputs + outputs), launch.seqs) if limit is None else limit
    if limit < 1 or launch.computed_dtype == "float32":
        return None
    step_costs = costs(launch)
    load = Load(
        input_tokens=inputs,
        output_tokens=outputs,
        concurrency=question.concurrency_per_engine,
        max_running=limit,
        max_num_batched_tokens=launch.batched_tokens,
        drafting=drafting_of(question, launch, step_costs),
    )
    return closed_loop(step_costs, load, question.efficiency)


def within_targets(question: Question, loop: ClosedLoop, most: float) -> Capacity:
    """The highest load of one engine, of at most `most` requests, within the targets with a margin
    for the prediction's error."""
    return capacity(loop, safe_targets(question.targets, question.launch), most)


def _missed(question: Question, speed: Performance | None, usable: float | None) -> Iterator[str]:
    if speed is None:
        return
    targets, safe = question.targets, safe_targets(question.targets, question.launch)
    above, unsure = list[str](), list[str]()
    for (name, predicted_s, target_s), (_, _, most_s) in zip(
        targets.beside(speed.ttft_s, speed.itl_s),
        safe.beside(speed.ttft_s, speed.itl_s),
        strict=True,
    ):
        if predicted_s > target_s:
            target = stated_duration(target_s)
            above.append(f"{name} {duration(predicted_s)} is above the target of {target}")
        elif predicted_s > most_s:
            unsure.append(
                f"{name} {duration(predicted_s)} may miss {stated_duration(target_s)}: at most "
                f"{duration(most_s)} surely meets it"
            )
    yield from above
    over = ""
    scales = question.users is not None or question.peak_requests_per_s is not None
    if usable is None and targets.are_set and (above or unsure or scales):
        alone = speed.loop.at(1)
        over = "; ".join(
            f"{name} is {duration(predicted_s)} (at most {duration(most_s)} surely meets it)"
            for name, predicted_s, most_s in safe.beside(alone.ttft_s, alone.itl_s)
            if predicted_s > most_s
        )
    if over:
        yield f"no number of replicas surely meets them: for one request alone {over}"
    else:
        yield from unsure


def _predicted_usable(
    sheet: Sheet, question: Question, answer: Memory, speed: Performance | None
) -> tuple[float | None, str, float | None]:
    """Requests/s of one replica within the targets, the source of the figure, and the requests in
    flight on each engine.

    Without targets, requests/s at the stated load.
    """
    unknown = None, "unknown", None
    if speed is None:
        return unknown
    load, where = speed.loop.load, "at the stated concurrency"
    # Without a target any concurrency would do: only a stated one says what is usable.
    concurrency = question.concurrency and load.concurrency
    if question.targets.are_set:
        most = usable_limit(held_to_plan(question, answer), question.launch.seqs)
        best, where = within_targets(question, speed.loop, most), "the most within the targets"
        speed, concurrency = best.performance, best.concurrency
    if not concurrency:
        return unknown
    usable_per_s = sheet.line(
        "Usable RPS of one replica",
        f"{{requests/s of one engine ({where}):at {figure(concurrency)} in flight}} x {{engines}}",
        (speed.requests_per_s, question.launch.parallel.data),
        result="{} requests/s",
    )
    return usable_per_s, "predicted", concurrency


def full_requests_per_s(question: Question, speed: Performance | None) -> float | None:
    """Requests/s of one replica with as many requests as it can hold; None if not predicted."""
    if speed is None:
        return None
    return speed.loop.most.requests_per_s * question.launch.parallel.data


def fleet_of(
    question: Question, usable: float | None, sheet: Sheet | None = None
) -> FleetSize | None:
    """The fleet for the question's peak; None without a peak or a usable rate."""
    if question.peak_requests_per_s is None or usable is None:
        return None
    return size_fleet(
        Sheet() if sheet is None else sheet,
        peak_requests_per_s=question.peak_requests_per_s,
        usable_requests_per_s=usable,
        gpus_each=question.launch.parallel.gpus,
        safety=question.safety,
    )


def _cost(
    sheet: Sheet,
    question: Question,
    fleet: FleetSize | None,
    usable: float | None,
    utilization_ratio: float,
) -> tuple[float | None, float | None]:
    """USD per million output tokens and USD per year; None if unknown."""
    outputs, price = question.output_tokens, question.price_usd_per_gpu_hour
    if price is None:
        return None, None
    per_token, gpus_per_replica = None, question.launch.parallel.gpus
    if usable is not None and outputs is not None:
        per_token = token_cost(
            sheet,
            gpus=gpus_per_replica,
            usd_per_gpu_hour=price,
            tokens_per_s=usable * outputs,
            utilization_ratio=utilization_ratio,
            owner="one replica",
        )
    gpus = fleet.gpus if fleet is not None else gpus_per_replica * question.replicas
    return per_token, yearly_cost(sheet, gpus=gpus, usd_per_gpu_hour=price)


def peak_utilization(question: Question, capacity_per_s: float | None) -> tuple[float, str]:
    """The utilization (0..1) for the cost per token, and where it comes from: the stated average,
    otherwise an upper bound.

    The bound is the peak divided by the deployed replicas' capacity (`capacity_per_s` requests/s).
    """
    if question.utilization_ratio is not None:
        return question.utilization_ratio, "the stated average"
    peak = question.peak_requests_per_s
    if capacity_per_s is None or peak is None:
        return 1.0, "at full load; set --utilization to the average"
    return min(peak / capacity_per_s, 1.0), "at the peak; set --utilization to the average"
