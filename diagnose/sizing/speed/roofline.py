"""What a server yields at a concurrency: the roofline's prediction. Pure.

Source: guide chapters 3 and 5; text 001, 4.2 to 4.9; the steady state is `closed_loop`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.sizing.speed.closed_loop import (
    ClosedLoop,
    Drafting,
    Latency,
    Load,
    closed_loop,
)
from kneewatch.diagnose.sizing.speed.costs import Costs
from kneewatch.diagnose.sizing.speed.efficiency import DEFAULT, Efficiency
from kneewatch.diagnose.sizing.speed.step_time import StepTime

__all__ = ["Drafting", "Load", "Performance", "performance", "performance_of"]

_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """What a server yields at a load.

    prefill_tokens_per_s   input tokens that it could take in if it did nothing else
    decode_tokens_per_s    output tokens of all requests together, at the load
    ttft_s                 until the first token, the wait for a place included
    itl_s                  between output tokens of one request, others' prefills included
    running                requests that decode, in the mean
    prefill_step_ratio     share of the steps that carry a chunk of a prompt
    tokens_per_pass        output tokens of one step and request, above 1 with drafts
    binding                memory, compute, interconnect or host: the largest part of the mean
                           step
    queueing               whether requests wait for a place
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    requests_per_s: float
    ttft_s: float
    itl_s: float
    running: float
    chunk_tokens: float
    prefill_step_ratio: float
    tokens_per_pass: float
    draft_factor: float
    decode_step: StepTime
    prefill_step: StepTime
    binding: str
    queueing: bool


def performance(costs: Costs, load: Load, efficiency: Efficiency = DEFAULT) -> Performance:
    """Throughput and latencies in the steady state of a closed loop.

    Each request prefills, then decodes: throughput = places / (prefill + passes x step), where
    the mean step is a plain one and, for the share that carries a prompt's chunk, a longer one.

    Raises:
        SizingError: a load that cannot be, named.
    Source: guide 3.2 to 3.4 and 6.6; Little's law: guide, operating point.
    """
    loop = closed_loop(costs, load, efficiency)
    return performance_of(loop, loop.at(load.concurrency))


def performance_of(loop: ClosedLoop, seen: Latency) -> Performance:
    """All of what a server yields where its requests see those latencies."""
    load, step, cycle = loop.load, loop.step, seen.cycle
    running = max(cycle.running, 1.0)
    plain, mixed = step.parts(running), step.parts(running, cycle.chunk_tokens)
    budget = load.max_num_batched_tokens * step.stages
    return Performance(
        prefill_tokens_per_s=budget / step.total_s(0.0, budget),
        decode_tokens_per_s=seen.requests_per_s * load.output_tokens,
        requests_per_s=seen.requests_per_s,
        ttft_s=seen.ttft_s,
        itl_s=seen.itl_s,
        running=cycle.running,
        chunk_tokens=cycle.chunk_tokens,
        prefill_step_ratio=cycle.prefill_step_ratio,
        tokens_per_pass=loop.per_pass,
        draft_factor=loop.factor,
        decode_step=plain,
        prefill_step=mixed,
        binding=(mixed if cycle.prefill_step_ratio > _HALF else plain).binding,
        queueing=seen.queueing,
    )
