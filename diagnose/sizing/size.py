"""One configuration sized: memory, speed at a load, fleet and cost, with the arithmetic. Pure.

The same answer serves `kneewatch size`, the search and the recommendations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

from kneewatch.diagnose.sizing.fleet.cost import TokenCost, YearlyCost, token_cost, yearly_cost
from kneewatch.diagnose.sizing.fleet.fleet import FleetSize, size_fleet
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.fewest import FewestGpus, fewest_gpus
from kneewatch.diagnose.sizing.memory.setup import check
from kneewatch.diagnose.sizing.question import Question, at_lengths, check_question
from kneewatch.diagnose.sizing.size_notes import load_notes, memory_notes, speed_notes
from kneewatch.diagnose.sizing.speed.costs import Costs, launch_costs
from kneewatch.diagnose.sizing.speed.drafting import drafting_of
from kneewatch.diagnose.sizing.speed.roofline import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_steps import performance_steps
from kneewatch.diagnose.sizing.speed.slo_capacity import Targets, capacity
from kneewatch.diagnose.sizing.steps import Step, figure


@dataclass(frozen=True, slots=True)
class Size:
    """The answer. `performance` of one engine and `fleet` are None where too little is stated.

    `loaded` is what the prediction was made of.

    `usable_requests_per_s` is of one replica, `usable_source` how it is known; `missed` says
    which targets the load breaks.
    """

    question: Question
    memory: Memory
    fewest: FewestGpus | None
    loaded: tuple[Costs, Load] | None
    performance: Performance | None
    usable_requests_per_s: float | None
    usable_source: str
    missed: tuple[str, ...]
    fleet: FleetSize | None
    token_cost: TokenCost | None
    yearly_cost: YearlyCost | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True where vLLM starts and holds the concurrency at the context's length."""
        return self.memory.fits(self.question.concurrency_per_engine)

    @property
    def gpus(self) -> int:
        """GPUs of the fleet, or of the replicas asked about where there is no peak."""
        if self.fleet is not None:
            return self.fleet.gpus
        return self.question.setup.parallel.gpus * self.question.replicas


def size(question: Question) -> Size:
    """The sizing of one configuration.

    Raises:
        SizingError: an input that cannot be, with its name.
    """
    check(question.setup)
    check_question(question)
    question = replace(question, setup=at_lengths(question))
    answer = memory(question.setup)
    notes = [*question.setup.model.notes, *memory_notes(answer, question.concurrency_per_engine)]
    loaded = _load(question, answer)
    efficiency = question.efficiency
    speed = performance(*loaded, efficiency) if loaded is not None else None
    usable, source = _usable(question, loaded, speed)
    notes += speed_notes(question, speed)
    notes += load_notes(
        source=source,
        has_target=question.has_target,
        has_peak=question.peak_requests_per_s is not None,
        stated_requests_per_s=question.usable_requests_per_s,
        predicted=speed,
    )
    fleet = _fleet(question, usable)
    per_token, per_year = _cost(question, fleet, usable)
    return Size(
        question=question,
        memory=answer,
        fewest=_fewest(question),
        loaded=loaded,
        performance=speed,
        usable_requests_per_s=usable,
        usable_source=source,
        missed=_missed(question, speed),
        fleet=fleet,
        token_cost=per_token,
        yearly_cost=per_year,
        notes=tuple(notes),
    )


def _fewest(question: Question) -> FewestGpus | None:
    setup = question.setup
    if setup.gpu is None or setup.model.parameters is None:
        return None
    return fewest_gpus(setup, concurrency=question.concurrency_per_engine)


def running_limit(answer: Memory, mean_tokens: float) -> float:
    """Requests of that mean length that the KV cache and max_num_seqs let run at once."""
    held = answer.layout.concurrency(answer.available_bytes.expected, max(int(mean_tokens), 1))
    return max(min(held, float(answer.setup.seqs)), 0.0)


def _load(question: Question, answer: Memory) -> tuple[Costs, Load] | None:
    """What one engine costs and is asked for; None where too little is stated or nothing runs."""
    setup, inputs, outputs = question.setup, question.input_tokens, question.output_tokens
    if setup.gpu is None or setup.model.parameters is None or inputs is None or outputs is None:
        return None
    limit = running_limit(answer, inputs + outputs)
    if limit < 1:
        return None
    known = launch_costs(setup)
    load = Load(
        input_tokens=inputs,
        output_tokens=outputs,
        concurrency=question.concurrency_per_engine,
        max_running=limit,
        max_num_batched_tokens=setup.batched_tokens,
        drafting=drafting_of(question, setup, known),
    )
    return known, load


def _missed(question: Question, speed: Performance | None) -> tuple[str, ...]:
    if speed is None:
        return ()
    missed: list[str] = []
    for name, found_s, target_s in (
        ("TTFT", speed.ttft_s, question.ttft_slo_s),
        ("ITL", speed.itl_s, question.itl_slo_s),
    ):
        if target_s is not None and found_s > target_s:
            missed.append(f"{name} {figure(found_s)} s is above the target of {figure(target_s)} s")
    return tuple(missed)


def _usable(
    question: Question, loaded: tuple[Costs, Load] | None, speed: Performance | None
) -> tuple[float | None, str]:
    """Requests/s of one replica at the targets (at the load without any), and how it is known."""
    if question.usable_requests_per_s is not None:
        return question.usable_requests_per_s, "stated"
    if loaded is None or speed is None:
        return None, "unknown"
    engines = question.setup.parallel.data
    if not question.has_target:
        # Without a target any concurrency would do: only a stated one says what is usable.
        known_load = question.concurrency is not None
        return (speed.requests_per_s * engines, "predicted") if known_load else (None, "unknown")
    known, load = loaded
    targets = Targets(question.ttft_slo_s, question.itl_slo_s)
    most = replace(load, concurrency=max(floor(load.max_running), 1))
    best = capacity(known, most, targets, question.efficiency)
    if not best.concurrency:
        return None, "unknown"
    return best.performance.requests_per_s * engines, "predicted"


def _fleet(question: Question, usable: float | None) -> FleetSize | None:
    if question.peak_requests_per_s is None or usable is None:
        return None
    parallel = question.setup.parallel
    return size_fleet(
        peak_requests_per_s=question.peak_requests_per_s,
        usable_requests_per_s=usable,
        tensor_parallel=parallel.tensor * parallel.data,
        pipeline_parallel=parallel.pipeline,
        safety=question.safety,
    )


def _cost(
    question: Question, fleet: FleetSize | None, usable: float | None
) -> tuple[TokenCost | None, YearlyCost | None]:
    setup, outputs = question.setup, question.output_tokens
    price = question.usd_per_gpu_hour
    if price is None:
        if setup.gpu is None:
            return None, None
        price = setup.gpu.usd_per_hour
    each = setup.parallel.gpus
    gpus = fleet.gpus if fleet is not None else each * question.replicas
    per_year = yearly_cost(gpus=gpus, usd_per_gpu_hour=price)
    if usable is None or outputs is None:
        return None, per_year
    per_token = token_cost(
        gpus=each,
        usd_per_gpu_hour=price,
        tokens_per_s=usable * outputs,
        utilization_ratio=question.utilization_ratio,
    )
    return per_token, per_year


def steps(answer: Size) -> tuple[Step, ...]:
    """The arithmetic of speed, fleet and cost, line by line; the memory's is its own."""
    found: list[Step] = []
    if answer.loaded is not None and answer.performance is not None:
        efficiency = answer.question.efficiency
        found += performance_steps(*answer.loaded, answer.performance, efficiency)
    for part in (answer.fleet, answer.token_cost, answer.yearly_cost):
        found += part.steps if part is not None else ()
    return tuple(found)
