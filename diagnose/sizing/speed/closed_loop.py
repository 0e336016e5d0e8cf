"""The steady state of a closed loop on one server, for any number of requests in flight. Pure.

The mean step carries the decodes of all running requests and, now and then, a chunk of a prompt.
Source: guide chapters 3 and 5; text 001, 4.2 to 4.9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kneewatch.diagnose.sizing.inputs import not_negative, positive, within
from kneewatch.diagnose.sizing.speed.costs import Costs
from kneewatch.diagnose.sizing.speed.efficiency import Efficiency
from kneewatch.diagnose.sizing.speed.speculation import tokens_per_pass
from kneewatch.diagnose.sizing.speed.step_time import StepModel, step_model

_ROUNDS = 12
_SETTLED_RATIO = 1e-4
# An output of one token has no decode; a share of a pass keeps the arithmetic the same.
_FEWEST_PASSES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Speculative decoding: the draft's length, its acceptance and its cost.

    `acceptance_ratio` is of one drafted token; `cost_ratio` is one draft step over one target
    step.
    """

    tokens: int
    acceptance_ratio: float
    cost_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server is asked for: mean lengths and the requests in flight (closed loop).

    `max_running` is what the KV cache and max_num_seqs admit; the rest queues.
    `prefix_hit_ratio` is the share of input tokens that the prefix cache holds.
    """

    input_tokens: float
    output_tokens: float
    concurrency: float
    max_running: float = math.inf
    max_num_batched_tokens: int = 8192
    prefix_hit_ratio: float = 0.0
    drafting: Drafting | None = None


@dataclass(slots=True)
class Cycle:
    """The steady state: the mean step with `running` decodes, and a prompt's way among them.

    `full` where the token budget keeps prompts out.
    """

    running: float
    step_s: float = 0.0
    prefill_s: float = 0.0
    chunk_tokens: float = 0.0
    prefill_step_ratio: float = 0.0
    full: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """What a request sees at so many in flight, and the cycle behind it."""

    ttft_s: float
    itl_s: float
    requests_per_s: float
    queueing: bool
    cycle: Cycle


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A server and lengths for which any number of requests in flight can be asked about.

    `fresh` prompt tokens are computed, `per_pass` output tokens come out of a step; `factor` is
    what a draft makes a plain step longer by.
    """

    load: Load
    step: StepModel
    fresh: float
    per_pass: float
    passes: float
    factor: float

    def at(self, concurrency: float) -> Latency:
        """The latencies with so many requests in flight."""
        places = min(concurrency, self.load.max_running)
        cycle = self._cycle(places)
        decode_s = self.passes * cycle.step_s
        if cycle.full:
            requests_per_s = cycle.running / decode_s
            ttft_s = concurrency / requests_per_s - decode_s
        else:
            requests_per_s = places / (cycle.prefill_s + decode_s)
            ttft_s = cycle.prefill_s + (concurrency - places) / requests_per_s
        return Latency(
            ttft_s,
            cycle.step_s / self.per_pass,
            requests_per_s,
            cycle.full or concurrency > places,
            cycle,
        )

    def _cycle(self, places: float) -> Cycle:
        """The steady state, by repeated substitution of the requests that decode."""
        load, step, fresh = self.load, self.step, self.fresh
        passes, factor, stages = self.passes, self.factor, step.stages
        # A step's tokens are bounded: beyond this many decodes prompts come in no faster.
        most = load.max_num_batched_tokens * stages / (fresh / passes + step.tokens_per_sequence)
        chunks = math.ceil(fresh / load.max_num_batched_tokens)
        chunk = fresh / chunks
        # The stages of a pipeline work on a prompt's chunks one behind the other.
        turns = (chunks + stages - 1) / stages
        # A request's own prompt never stands in the way of its own decode.
        others_ratio = 1 - 1 / max(places, 1.0)
        own = load.drafting.cost_ratio if load.drafting is not None else 0.0
        cycle = Cycle(running=min(places, most), chunk_tokens=chunk)
        for _ in range(_ROUNDS):
            running = max(cycle.running, 1.0)
            mean_tokens = others_ratio * cycle.running * fresh / passes
            # Chunks arrive independently, and those that meet share a step.
            ratio = -math.expm1(-mean_tokens / chunk)
            together = mean_tokens / ratio if ratio else chunk
            plain_s = step.total_s(running)
            mixed_s = step.total_s(running, together)
            # The draft takes its turns at every step, and reads a prompt once as its target does.
            cycle.step_s = factor * plain_s + (1 + own) * ratio * (mixed_s - plain_s)
            own_s = mixed_s if stages == 1 else step.total_s(running, max(together, chunk * stages))
            # A prompt waits for the end of the step that it arrives in: half of one in the mean.
            cycle.prefill_s = turns * own_s + cycle.step_s / 2
            cycle.chunk_tokens, cycle.prefill_step_ratio = together, ratio
            decode_s = passes * cycle.step_s
            settled = places * decode_s / (cycle.prefill_s + decode_s)
            cycle.full = settled > most
            settled = min(settled, most)
            moved = abs(settled - cycle.running)
            cycle.running = settled
            if moved <= _SETTLED_RATIO * settled:
                break
        return cycle


def closed_loop(costs: Costs, load: Load, efficiency: Efficiency) -> ClosedLoop:
    """The loop for a load's lengths on a server.

    Raises:
        SizingError: a load that cannot be, named.
    """
    _check(load)
    # vLLM computes the last token of a prompt even where all of it is cached.
    fresh = max(load.input_tokens * (1 - load.prefix_hit_ratio), 1.0)
    drafting = load.drafting
    per_pass, verified, factor = 1.0, 1.0, 1.0
    if drafting is not None and drafting.tokens:
        per_pass = tokens_per_pass(
            acceptance_ratio=drafting.acceptance_ratio, draft_tokens=drafting.tokens
        )
        verified = 1.0 + drafting.tokens
        factor = 1 + drafting.tokens * drafting.cost_ratio
    step = step_model(
        costs,
        efficiency,
        context_tokens=load.input_tokens + load.output_tokens / 2,
        prompt_context_tokens=load.input_tokens - fresh / 2,
        tokens_per_sequence=verified,
    )
    # The first token comes out of the prefill.
    passes = max((load.output_tokens - 1) / per_pass, _FEWEST_PASSES)
    return ClosedLoop(load, step, fresh, per_pass, passes, factor)


def _check(load: Load) -> None:
    positive("input_tokens", load.input_tokens)
    positive("concurrency", load.concurrency)
    positive("max_num_batched_tokens", load.max_num_batched_tokens)
    for name, value in (("output_tokens", load.output_tokens), ("max_running", load.max_running)):
        within(name, value, low=1, high=math.inf)
    within("prefix_hit_ratio", load.prefix_hit_ratio, low=0.0, high=1.0)
    if load.drafting is not None:
        not_negative("draft_cost_ratio", load.drafting.cost_ratio)
