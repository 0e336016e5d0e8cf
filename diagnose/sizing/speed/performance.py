"""A server's predicted step time, and its throughput and latency at a concurrency. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    ACTIVATION_BYTES,
    DEFAULT,
    Costs,
    Efficiency,
    touched_ratio,
)
from kneewatch.diagnose.speculation import tokens_per_pass

ALLREDUCES_PER_LAYER = 2
"""One after attention and one after the MLP (text 003, Q4; guide 5.1 counts one)."""

TP_OVERHEAD_RATIO: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        # guide 5.6 gives 2-9 % over TP 2 to 8; TP 4 lies between by the ring's arithmetic
        "nvlink": MappingProxyType({1: 0.0, 2: 0.02, 4: 0.04, 8: 0.09}),
        "pcie": MappingProxyType({1: 0.0, 2: 0.08, 4: 0.25, 8: 0.38}),
    }
)
"""Planned share of a step spent on all-reduces (guide 5.6)."""


class Kernels(Struct, frozen=True):
    """Seconds that kernels of one kind need for reading and for computing. The two overlap."""

    read_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """Seconds that the kernels take: the longer of reading and computing."""
        return max(self.read_s, self.compute_s)


class StepTime(Struct, frozen=True):
    """One step and its parts, which run one after another.

    `launch_s` is GPU time that no peak explains; `host_s` is what the CPU adds to the step.
    """

    weights: Kernels
    experts: Kernels
    attention: Kernels
    interconnect_s: float
    launch_s: float
    host_s: float

    @property
    def memory_s(self) -> float:
        """Seconds that the step needs to read weights, experts and KV cache at full bandwidth."""
        return self.weights.read_s + self.experts.read_s + self.attention.read_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        rest_s = self.interconnect_s + self.launch_s + self.host_s
        return self.weights.total_s + self.experts.total_s + self.attention.total_s + rest_s

    @property
    def binding(self) -> str:
        """The resource that takes the most time: memory, compute, interconnect or host.

        Time between kernels counts as the host's, because the host launches them.
        """
        parts = {
            "memory": 0.0,
            "compute": 0.0,
            "interconnect": self.interconnect_s,
            "host": self.launch_s + self.host_s,
        }
        for kernels in (self.weights, self.experts, self.attention):
            reads = kernels.read_s >= kernels.compute_s
            parts["memory" if reads else "compute"] += kernels.total_s
        return max(parts, key=lambda name: parts[name])


class StepModel(Struct, frozen=True, kw_only=True):
    """A step's time as a function of its sequences and prompt tokens, at fixed lengths.

    Three kinds of kernels run one after another: products with weights that every token uses;
    routed experts (the step reads those that its tokens use); and attention (each sequence's KV and
    state). Each takes the longer of its reading time and its computing time. There are two ring
    all-reduces per layer.

    With pipeline parallelism, running sequences and prompt tokens are divided evenly into one
    micro-batch per stage. A step is then one pass through all stages. Micro-batches are never equal
    in practice, so stages wait for each other: `stage_wait_ratio` of a pass with all stages busy.
    """

    weights_s: float
    experts_s: float
    """Seconds to read all routed experts once."""
    touch_s: float
    """Seconds of fixed costs of all routed experts' kernels."""
    token_ratio: float
    """Share of the experts that one token uses."""
    sequence_read_s: float
    sequence_compute_s: float
    prompt_token_compute_s: float
    token_experts_s: float
    """Seconds to compute one token's experts."""
    token_rows_s: float
    """Seconds to put one token into the experts' order and back."""
    sequence_attention_s: float
    prompt_token_attention_s: float
    token_link_s: float
    collectives_s: float
    """Seconds of fixed costs of a step's all-reduces and of passing data between stages."""
    layers_s: float
    sequence_s: float
    host_s: float
    prompt_step_s: float
    tokens_per_sequence: float
    stages: int
    stage_wait_ratio: float

    def _stretch(self, sequences: float) -> float:
        """How many times as long a pass takes as with stages that never wait; 1 for one request."""
        return 1 + self.stage_wait_ratio * min(max(sequences - 1, 0.0) / (self.stages - 1), 1.0)

    def total_s(self, sequences: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of a step with `sequences` decoding and `prompt_tokens` in prefill."""
        # The sum of `parts` without building its objects: a search calls this a million times.
        stretch = 1.0
        if self.stages > 1:
            stretch = self._stretch(sequences)
            sequences = max(min(sequences, 1.0), sequences / self.stages)
            prompt_tokens /= self.stages
        tokens = sequences * self.tokens_per_sequence + prompt_tokens
        total_s = tokens * self.token_link_s + self.collectives_s + self.layers_s
        total_s += sequences * self.sequence_s + self.host_s
        if prompt_tokens:
            total_s += self.prompt_step_s
        compute_s = (
            sequences * self.sequence_compute_s + prompt_tokens * self.prompt_token_compute_s
        )
        total_s += self.weights_s if self.weights_s > compute_s else compute_s
        if self.experts_s:
            touched = touched_ratio(self.token_ratio, tokens)
            read_s, compute_s = self.experts_s * touched, tokens * self.token_experts_s
            total_s += touched * self.touch_s + (read_s if read_s > compute_s else compute_s)
            total_s += tokens * self.token_rows_s
        read_s = sequences * self.sequence_read_s
        compute_s = (
            sequences * self.sequence_attention_s + prompt_tokens * self.prompt_token_attention_s
        )
        return stretch * (total_s + (read_s if read_s > compute_s else compute_s))

    def parts(self, sequences: float, prompt_tokens: float = 0.0) -> StepTime:
        """The parts of a step with `sequences` decoding and `prompt_tokens` in prefill.

        The time that stages wait for each other is a part of `launch_s`.
        """
        waited_s = 0.0
        if self.stages > 1:
            waited_s = self.total_s(sequences, prompt_tokens) * (1 - 1 / self._stretch(sequences))
            sequences = max(min(sequences, 1.0), sequences / self.stages)
            prompt_tokens /= self.stages
        tokens = sequences * self.tokens_per_sequence + prompt_tokens
        touched = touched_ratio(self.token_ratio, tokens)
        return StepTime(
            weights=Kernels(
                self.weights_s,
                sequences * self.sequence_compute_s + prompt_tokens * self.prompt_token_compute_s,
            ),
            experts=Kernels(
                self.experts_s * touched + tokens * self.token_rows_s,
                tokens * (self.token_experts_s + self.token_rows_s),
            ),
            attention=Kernels(
                sequences * self.sequence_read_s,
                sequences * self.sequence_attention_s
                + prompt_tokens * self.prompt_token_attention_s,
            ),
            interconnect_s=tokens * self.token_link_s + self.collectives_s,
            launch_s=self.layers_s
            + sequences * self.sequence_s
            + touched * self.touch_s
            + waited_s,
            host_s=self.host_s + (self.prompt_step_s if prompt_tokens else 0.0),
        )


def step_model(
    costs: Costs,
    efficiency: Efficiency,
    *,
    context_tokens: float,
    prompt_context_tokens: float,
    tokens_per_sequence: float = 1.0,
) -> StepModel:
    """The step times of a server at these mean contexts.

    `context_tokens` is the mean context of the decodes; `prompt_context_tokens` is that of prompt
    tokens in prefill. `tokens_per_sequence` is above 1 if drafted tokens are verified.
    """
    kv_bytes = costs.kv_bytes_per_token * context_tokens + costs.state_bytes
    pair_flop = costs.flop_per_pair * context_tokens
    prompt_pair_flop = costs.prefill_flop_per_pair * prompt_context_tokens
    for window in costs.windows:
        kv_bytes += window.kv_bytes_per_token * min(context_tokens, window.tokens)
        pair_flop += window.computed(context_tokens)
        prompt_pair_flop += window.computed(prompt_context_tokens)
    read_per_s = costs.bandwidth_bytes_per_s * efficiency.mbu_ratio
    matrix_per_s = costs.flop_per_s * efficiency.mfu_ratio
    dense_flop = costs.body_flop_per_token - costs.experts_flop_per_token
    attention_per_s = costs.attention_flop_per_s * efficiency.attention_mfu_ratio
    degree, stages = costs.tensor_parallel, costs.pipeline_parallel
    link_ratio = efficiency.pcie_ratio if costs.link == "PCIe" else efficiency.link_ratio
    link_per_s = costs.link_bytes_per_s * link_ratio
    token_bytes = costs.hidden_size * ACTIVATION_BYTES
    allreduces = ALLREDUCES_PER_LAYER * costs.layers if degree > 1 else 0
    sent_bytes = allreduces * 2 * (degree - 1) / degree * token_bytes
    sent_bytes += (stages - 1) * token_bytes / degree
    exchanges = 2 * costs.expert_layers if costs.token_exchange_s else 0
    return StepModel(
        weights_s=costs.weights_bytes / read_per_s,
        experts_s=costs.experts_bytes / read_per_s,
        touch_s=costs.experts * efficiency.expert_s,
        token_ratio=costs.touched_ratio,
        sequence_read_s=kv_bytes / read_per_s,
        sequence_compute_s=tokens_per_sequence
        * (dense_flop + costs.head_flop_per_token)
        / matrix_per_s,
        prompt_token_compute_s=dense_flop / matrix_per_s,
        token_experts_s=costs.experts_flop_per_token
        / (costs.expert_flop_per_s * efficiency.expert_mfu_ratio),
        token_rows_s=efficiency.expert_row_passes * costs.routed_rows * token_bytes / read_per_s,
        sequence_attention_s=tokens_per_sequence * pair_flop / attention_per_s,
        prompt_token_attention_s=prompt_pair_flop / attention_per_s,
        token_link_s=sent_bytes / link_per_s + costs.token_exchange_s / link_ratio,
        collectives_s=(allreduces + exchanges + stages - 1) * efficiency.allreduce_latency_s
        + allreduces * costs.link_latency_s,
        layers_s=(costs.layers + costs.added_layers) * efficiency.layer_s
        + costs.expert_layers * efficiency.expert_layer_s,
        sequence_s=efficiency.sequence_s,
        host_s=efficiency.host_s + (efficiency.nodes_s if costs.nodes > 1 else 0.0),
        prompt_step_s=efficiency.prompt_step_s,
        tokens_per_sequence=tokens_per_sequence,
        stages=stages,
        stage_wait_ratio=(stages - 1) / (stages * efficiency.microbatches_per_stage),
    )


# --- The steady state of a closed loop on one server, at a concurrency ----------------------------
#
# The mean step carries the decodes of all running requests and, now and then, a chunk of a
# prompt. Source: guide chapters 3 and 5; text 001, 4.2 to 4.9.


_HALVINGS = 30
_ROUNDS = 12
_SETTLED_RATIO = 1e-4
# An output of one token has no decode; a share of a pass keeps the arithmetic the same.
_FEWEST_PASSES = 1e-3


class Drafting(Struct, frozen=True, kw_only=True):
    """Speculative decoding: the draft's length, acceptance and cost.

    `acceptance_ratio` is the chance that one drafted token is accepted. `cost_ratio` is the time of
    one draft step divided by one target step.
    """

    tokens: int
    acceptance_ratio: float
    cost_ratio: float = 0.0


class Load(Struct, frozen=True, kw_only=True):
    """The load on a server: mean lengths, and the requests in flight (closed loop).

    `max_running` requests are admitted by the KV cache and max_num_seqs; the others queue.
    `prefix_hit_ratio` is the share of input tokens that hit the prefix cache.
    """

    input_tokens: float
    output_tokens: float
    concurrency: float
    max_running: float = math.inf
    max_num_batched_tokens: int = 8192
    prefix_hit_ratio: float = 0.0
    drafting: Drafting | None = None


class Cycle(Struct):
    """The steady state: the mean step with `running` decodes, and how prompts are prefilled in it.

    `chunks_s`: seconds from a prompt's first step to its first token. `prefill_s`: seconds from its
    arrival. `full`: the token budget delays new prompts.
    """

    running: float
    step_s: float = 0.0
    chunks_s: float = 0.0
    prefill_s: float = 0.0
    chunk_tokens: float = 0.0
    prefill_step_ratio: float = 0.0
    full: bool = False


class Latency(Struct, frozen=True):
    """A request's latencies at a concurrency, with the steady state that they come from."""

    ttft_s: float
    itl_s: float
    requests_per_s: float
    queueing: bool
    cycle: Cycle


class ClosedLoop(Struct, frozen=True):
    """A server with given request lengths; `at` gives the latencies for any number in flight.

    - `request_s`: a request's time in the API server.
    - `fresh`: prompt tokens that a request must compute.
    - `passes`: decode steps of a request; each has `per_pass` output tokens.
    - `factor`: a draft makes a plain step this many times as long.
    - `decode_factor`: measured divided by predicted time of a plain step.
    - `prefill_factor`: measured divided by predicted time of the prompts in a step.
    """

    load: Load
    step: StepModel
    request_s: float
    decode_factor: float
    prefill_factor: float
    fresh: float
    per_pass: float
    passes: float
    factor: float

    def at(self, concurrency: float) -> Latency:
        """The latencies with `concurrency` requests in flight."""
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

    def serving(self, requests_per_s: float) -> tuple[float, Latency] | None:
        """The requests in flight at a rate, and the latencies. None if the rate is not served."""
        low, high = 0.0, self.load.max_running
        if not math.isfinite(high) or self.at(high).requests_per_s < requests_per_s:
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.at(middle).requests_per_s < requests_per_s:
                low = middle
            else:
                high = middle
        return high, self.at(high)

    def _cycle(self, places: float) -> Cycle:
        """The steady state, found by iterating the number of requests that decode."""
        load, step, fresh = self.load, self.step, self.fresh
        passes, factor, stages = self.passes, self.factor, step.stages
        # A step's tokens are bounded: beyond this many decodes prompts come in no faster.
        most = load.max_num_batched_tokens * stages / (fresh / passes + step.tokens_per_sequence)
        # Chunks fill the token budget, and the next prompt fills what the last chunk leaves: a
        # prompt of 1.5 budgets takes 1.5 steps, not two of three quarters.
        chunks = max(fresh / load.max_num_batched_tokens, 1.0)
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
            alone_s = step.total_s(running)
            plain_s = self.decode_factor * alone_s
            mixed_s = plain_s + self.prefill_factor * (step.total_s(running, together) - alone_s)
            # The draft takes its turns at every step, and reads a prompt once as its target does.
            cycle.step_s = factor * plain_s + (1 + own) * ratio * (mixed_s - plain_s)
            own_s = mixed_s
            if stages > 1:
                filled_s = step.total_s(running, max(together, chunk * stages))
                own_s = plain_s + self.prefill_factor * (filled_s - alone_s)
            # A prompt waits for the end of the step that it arrives in: half of one in the mean.
            cycle.chunks_s = turns * own_s
            cycle.prefill_s = self.request_s + cycle.chunks_s + cycle.step_s / 2
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
    """The closed loop for a load's lengths on a server.

    Raises:
        SizingError: the load is invalid; the error has the input's name.
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
    return ClosedLoop(
        load,
        step,
        efficiency.request_s,
        efficiency.decode_factor,
        efficiency.prefill_factor,
        fresh,
        per_pass,
        passes,
        factor,
    )


def _check(load: Load) -> None:
    positive("input_tokens", load.input_tokens)
    positive("concurrency", load.concurrency)
    positive("max_num_batched_tokens", load.max_num_batched_tokens)
    for name, value in (("output_tokens", load.output_tokens), ("max_running", load.max_running)):
        within(name, value, low=1, high=math.inf)
    within("prefix_hit_ratio", load.prefix_hit_ratio, low=0.0, high=1.0)
    if load.drafting is not None:
        within("acceptance_ratio", load.drafting.acceptance_ratio, low=0.0, high=1.0)
        not_negative("draft_cost_ratio", load.drafting.cost_ratio)


# --- The roofline's prediction at a concurrency ---------------------------------------------------
#
# Source: guide chapters 3 and 5; text 001, 4.2 to 4.9; the steady state is `closed_loop`'s.


_HALF = 0.5


class Performance(Struct, frozen=True, kw_only=True):
    """Throughput and latencies of a server at a load.

    - `prefill_tokens_per_s`: input tokens/s that it could process if it did nothing else.
    - `decode_tokens_per_s`: output tokens/s of all requests together, at the load.
    - `ttft_s`: time to the first token, including the wait for a place in the batch.
    - `prefill_s`: time from a prompt's first step to its first token.
    - `itl_s`: time between output tokens of one request, including prefills of others.
    - `running`: mean number of decoding requests.
    - `prefill_step_ratio`: share of the steps with a chunk of a prompt.
    - `tokens_per_pass`: output tokens per step and request; above 1 with drafts.
    - `binding`: memory, compute, interconnect or host: the largest part of the mean step.
    - `queueing`: whether requests wait for a place in the batch.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    requests_per_s: float
    ttft_s: float
    prefill_s: float
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

    @property
    def bound_by(self) -> str:
        """What the mean step spends most of its time on, as text."""
        return "memory bandwidth" if self.binding == "memory" else self.binding


def performance(costs: Costs, load: Load, efficiency: Efficiency = DEFAULT) -> Performance:
    """Throughput and latencies in the steady state of a closed loop.

    Each request prefills, then decodes: throughput = places / (prefill + passes x mean step). The
    mean includes plain decode steps and the longer steps with a chunk of a prompt.

    Raises:
        SizingError: the load is invalid; the error has the input's name.

    Source: guide 3.2 to 3.4 and 6.6; Little's law: guide, operating point.
    """
    loop = closed_loop(costs, load, efficiency)
    return performance_of(loop, loop.at(load.concurrency))


def performance_of(loop: ClosedLoop, seen: Latency) -> Performance:
    """Throughput, latencies and the limiting resource of a server with these request latencies."""
    load, step, cycle = loop.load, loop.step, seen.cycle
    running = max(cycle.running, 1.0)
    plain, mixed = step.parts(running), step.parts(running, cycle.chunk_tokens)
    budget = load.max_num_batched_tokens * step.stages
    return Performance(
        prefill_tokens_per_s=budget / step.total_s(0.0, budget),
        decode_tokens_per_s=seen.requests_per_s * load.output_tokens,
        requests_per_s=seen.requests_per_s,
        ttft_s=seen.ttft_s,
        prefill_s=cycle.chunks_s,
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


def planned_overhead_ratio(*, link: str, tensor_parallel: int) -> float:
    """Planned share of a step for all-reduces, for a `link` of nvlink or pcie.

    The guide has figures for TP 1, 2, 4 and 8. Other degrees n are derived from ring all-reduce: a
    GPU sends 2 (n - 1) / n of the message and computes 1 / n of the step. So communication divided
    by computation grows as n - 1, scaled to the guide's value for TP 8.

    Source: guide 5.6.
    """
    by_degree = TP_OVERHEAD_RATIO[link]
    if tensor_parallel in by_degree:
        return by_degree[tensor_parallel]
    sent_to_computed = by_degree[8] / (1 - by_degree[8]) / (8 - 1) * (tensor_parallel - 1)
    return sent_to_computed / (1 + sent_to_computed)
