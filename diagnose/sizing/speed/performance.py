"""A server's predicted step time, and its throughput and latency at a concurrency. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.inputs import not_negative, positive, within
from kneewatch.diagnose.halving import end_of
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    ACTIVATION_BYTES,
    DEFAULT,
    Costs,
    Efficiency,
    Intensity,
    busiest_reads,
    intensity_of,
    touched_ratio,
)
from kneewatch.diagnose.speculation import tokens_per_pass

ALLREDUCES_PER_LAYER = 2
"""One after attention and one after the MLP (text 003, Q4; guide 5.1 counts one)."""

TP_OVERHEAD_RATIO: Mapping[str, Mapping[int, float]] = {
    # guide 5.6 gives 2-9 % over TP 2 to 8; TP 4 lies between by the ring's arithmetic
    "nvlink": {1: 0.0, 2: 0.02, 4: 0.04, 8: 0.09},
    "pcie": {1: 0.0, 2: 0.08, 4: 0.25, 8: 0.38},
}
"""Planned share of a step spent on all-reduces (guide 5.6)."""


KERNELS = "weights", "experts", "attention"
_Three = tuple[float, float, float]


class StepTime(Struct, frozen=True):
    """One step and its parts, which run one after another.

    `reads_s` and `computes_s` are of each of KERNELS, whose reading and computing overlap.
    `launch_s` is GPU time that no peak explains; `host_s` is what the CPU adds to the step.
    """

    reads_s: _Three
    computes_s: _Three
    interconnect_s: float
    launch_s: float
    host_s: float

    @property
    def memory_s(self) -> float:
        """Seconds that the step needs to read weights, experts and KV cache at full bandwidth."""
        return sum(self.reads_s)

    @property
    def total_s(self) -> float:
        rest_s = self.interconnect_s + self.launch_s + self.host_s
        return sum(map(max, self.reads_s, self.computes_s)) + rest_s

    @property
    def binding(self) -> str:
        """The resource that takes the most time: memory, compute, interconnect or host.

        Time between kernels counts as the host's, because the host launches them.
        """
        pairs = tuple(zip(self.reads_s, self.computes_s, strict=True))
        parts = {
            "memory": sum(read_s for read_s, compute_s in pairs if read_s >= compute_s),
            "compute": sum(compute_s for read_s, compute_s in pairs if read_s < compute_s),
            "interconnect": self.interconnect_s,
            "host": self.launch_s + self.host_s,
        }
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
    expert_spread: float
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
    eager_s: float
    """Seconds of the CPU to launch a step's kernels one by one; 0 with CUDA graphs."""
    sequence_s: float
    host_s: float
    prompt_step_s: float
    prompt_layer_ratio: float
    tokens_per_sequence: float
    stages: int
    stage_wait_ratio: float

    def total_s(self, sequences: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of a step with `sequences` decoding and `prompt_tokens` in prefill."""
        # A search calls this a million times, so it builds no objects.
        reads_s, computes_s, rest_s, stretch = self._times(sequences, prompt_tokens)
        link_s, launch_s, host_s = rest_s
        return stretch * (sum(map(max, reads_s, computes_s)) + link_s + launch_s + host_s)

    def parts(self, sequences: float, prompt_tokens: float = 0.0) -> StepTime:
        """The parts of a step with `sequences` decoding and `prompt_tokens` in prefill.

        The time that stages wait for each other is a part of `launch_s`.
        """
        reads_s, computes_s, rest_s, stretch = self._times(sequences, prompt_tokens)
        time = StepTime(reads_s, computes_s, *rest_s)
        return replace(time, launch_s=time.launch_s + (stretch - 1) * time.total_s)

    def _times(
        self, sequences: float, prompt_tokens: float
    ) -> tuple[_Three, _Three, _Three, float]:
        """Seconds to read and to compute weights, experts and attention, the seconds beside them,
        and the ratio by which stages that wait for each other stretch all."""
        prompt_tokens *= self.prompt_layer_ratio
        stretch = 1.0
        if self.stages > 1:
            waiting_ratio = min(max(sequences - 1, 0.0) / (self.stages - 1), 1.0)
            stretch += self.stage_wait_ratio * waiting_ratio
            sequences = max(min(sequences, 1.0), sequences / self.stages)
            prompt_tokens /= self.stages
        tokens = sequences * self.tokens_per_sequence + prompt_tokens
        touched = touched_ratio(self.token_ratio, tokens)
        read = touched * busiest_reads(self.expert_spread, touched)
        rows_s = tokens * self.token_rows_s
        launch_s = self.layers_s + sequences * self.sequence_s + touched * self.touch_s
        reads_s = self.weights_s, self.experts_s * read + rows_s, sequences * self.sequence_read_s
        computes_s = (
            sequences * self.sequence_compute_s + prompt_tokens * self.prompt_token_compute_s,
            tokens * self.token_experts_s + rows_s,
            sequences * self.sequence_attention_s + prompt_tokens * self.prompt_token_attention_s,
        )
        link_s = tokens * self.token_link_s + self.collectives_s
        if self.eager_s:
            launch_s = max(launch_s, self.eager_s - sum(map(max, reads_s, computes_s)) - link_s)
        host_s = self.host_s + (self.prompt_step_s if prompt_tokens else 0.0)
        return reads_s, computes_s, (link_s, launch_s, host_s), stretch


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
    kernel_ratio = costs.expert_kernel_ratio
    exchanges = 2 * costs.expert_layers if costs.token_exchange_s else 0
    layers_s = (costs.layers + costs.added_layers) * efficiency.layer_s
    layers_s += costs.expert_layers * efficiency.expert_layer_s
    return StepModel(
        weights_s=costs.weights_bytes / read_per_s,
        experts_s=costs.experts_bytes / (read_per_s * kernel_ratio),
        expert_spread=costs.expert_spread,
        touch_s=costs.experts * efficiency.expert_s,
        token_ratio=costs.touched_ratio,
        sequence_read_s=kv_bytes / read_per_s,
        sequence_compute_s=tokens_per_sequence
        * (dense_flop + costs.head_flop_per_token)
        / matrix_per_s,
        prompt_token_compute_s=dense_flop / matrix_per_s,
        token_experts_s=costs.experts_flop_per_token
        / (costs.expert_flop_per_s * efficiency.expert_mfu_ratio * kernel_ratio),
        token_rows_s=efficiency.expert_row_passes * costs.routed_rows * token_bytes / read_per_s,
        sequence_attention_s=tokens_per_sequence * pair_flop / attention_per_s,
        prompt_token_attention_s=prompt_pair_flop / attention_per_s,
        token_link_s=sent_bytes / link_per_s + costs.token_exchange_s / link_ratio,
        collectives_s=(allreduces + exchanges + stages - 1) * efficiency.allreduce_latency_s
        + allreduces * costs.link_latency_s,
        layers_s=layers_s,
        eager_s=0.0 if costs.has_graphs else efficiency.eager_ratio * layers_s,
        sequence_s=efficiency.sequence_s,
        host_s=efficiency.host_s + (efficiency.nodes_s if costs.nodes > 1 else 0.0),
        prompt_step_s=efficiency.prompt_step_s,
        prompt_layer_ratio=costs.prompt_layer_ratio,
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


class ClosedLoop(Struct, frozen=True):
    """A server with given request lengths; `at` gives its speed for any number in flight.

    - `request_s`: a request's time in the API server.
    - `fresh`: prompt tokens that a request must compute.
    - `passes`: decode steps of a request; each has `per_pass` output tokens.
    - `factor`: a draft makes a plain step this many times as long.
    """

    costs: Costs
    load: Load
    efficiency: Efficiency
    step: StepModel
    request_s: float
    fresh: float
    per_pass: float
    passes: float
    factor: float

    @property
    def most(self) -> Performance:
        """The speed with as many requests as may run."""
        return self.at(max(math.floor(self.load.max_running), 1))

    def at(self, concurrency: float) -> Performance:
        """The steady state with `concurrency` requests in flight, found by iterating the number of
        requests that decode."""
        load, step, fresh = self.load, self.step, self.fresh
        passes, factor, stages = self.passes, self.factor, step.stages
        prefill_factor = self.efficiency.prefill_factor
        places = min(concurrency, load.max_running)
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
        decoding = min(places, most)
        rounds = 0
        while True:
            rounds += 1
            running = max(decoding, 1.0)
            mean_tokens = others_ratio * decoding * fresh / passes
            # Chunks arrive independently, and those that meet share a step.
            ratio = -math.expm1(-mean_tokens / chunk)
            together = mean_tokens / ratio if ratio else chunk
            alone_s = step.total_s(running)
            plain_s = self.efficiency.decode_factor * alone_s
            mixed_s = plain_s + prefill_factor * (step.total_s(running, together) - alone_s)
            # The draft takes its turns at every step, and reads a prompt once as its target does.
            step_s = factor * plain_s + (1 + own) * ratio * (mixed_s - plain_s)
            own_s = mixed_s
            if stages > 1:
                filled_s = step.total_s(running, max(together, chunk * stages))
                own_s = plain_s + prefill_factor * (filled_s - alone_s)
            # A prompt waits for the end of the step that it arrives in, half of one in the mean,
            # and where the next is scheduled already for that.
            waited = 0.5 + self.costs.steps_ahead * others_ratio
            arrival_s = self.request_s + turns * own_s + waited * step_s
            decode_s = passes * step_s
            settled = places * decode_s / (arrival_s + decode_s)
            full, settled = settled > most, min(settled, most)
            moved, decoding = abs(settled - decoding), settled
            if moved <= _SETTLED_RATIO * settled or rounds == _ROUNDS:
                break
        if full:
            requests_per_s = decoding / decode_s
            ttft_s = concurrency / requests_per_s - decode_s
        else:
            requests_per_s = places / (arrival_s + decode_s)
            ttft_s = arrival_s + (concurrency - places) / requests_per_s
        return Performance(
            loop=self,
            requests_per_s=requests_per_s,
            ttft_s=ttft_s,
            prefill_s=turns * own_s,
            itl_s=step_s / self.per_pass,
            running=decoding,
            chunk_tokens=together,
            prefill_step_ratio=ratio,
            queueing=full or concurrency > places,
        )

    def serving(self, requests_per_s: float) -> tuple[float, Performance] | None:
        """The requests in flight at a rate, and the latencies. None if the rate is not served."""

        def too_few(concurrency: float) -> bool:
            return self.at(concurrency).requests_per_s < requests_per_s

        most = self.load.max_running
        if not math.isfinite(most) or too_few(most):
            return None
        concurrency = end_of(too_few, holds=0.0, falls=most, halvings=_HALVINGS)
        return concurrency, self.at(concurrency)


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
    request_s = efficiency.request_s + efficiency.prompt_token_s * load.input_tokens
    return ClosedLoop(costs, load, efficiency, step, request_s, fresh, per_pass, passes, factor)


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

    - `ttft_s`: time to the first token, including the wait for a place in the batch.
    - `prefill_s`: time from a prompt's first step to its first token.
    - `itl_s`: time between output tokens of one request, including prefills of others.
    - `running`: mean number of decoding requests.
    - `chunk_tokens`: prompt tokens of a step that has any.
    - `prefill_step_ratio`: share of the steps with a chunk of a prompt.
    - `queueing`: whether requests wait for a place in the batch, or the token budget delays them.
    """

    loop: ClosedLoop
    requests_per_s: float
    ttft_s: float
    prefill_s: float
    itl_s: float
    running: float
    chunk_tokens: float
    prefill_step_ratio: float
    queueing: bool

    @property
    def prefill_tokens_per_s(self) -> float:
        """Input tokens/s that the server could process if it did nothing else."""
        budget = self.loop.load.max_num_batched_tokens * self.loop.step.stages
        return budget / self.loop.step.total_s(0.0, budget)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens/s of all requests together."""
        return self.requests_per_s * self.loop.load.output_tokens

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per step and request; above 1 with drafts."""
        return self.loop.per_pass

    @property
    def decode_step(self) -> StepTime:
        """A step without prompts."""
        return self.loop.step.parts(max(self.running, 1.0))

    @property
    def prefill_step(self) -> StepTime:
        """A step with a chunk of a prompt."""
        return self.loop.step.parts(max(self.running, 1.0), self.chunk_tokens)

    @property
    def intensity(self) -> Intensity:
        """The arithmetic intensity of decode steps at the predicted load and mean context."""
        load, sequences = self.loop.load, max(self.running, 1.0)
        context = load.input_tokens + load.output_tokens / 2
        return intensity_of(self.loop.costs, context_tokens=context, sequences=sequences)

    @property
    def binding(self) -> str:
        """memory, compute, interconnect or host: the largest part of the mean step."""
        mixed = self.prefill_step_ratio > _HALF
        return (self.prefill_step if mixed else self.decode_step).binding

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
    return closed_loop(costs, load, efficiency).at(load.concurrency)


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
