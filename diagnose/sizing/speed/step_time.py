"""How long one step of a server takes: the longer of reading and computing, and the rest. Pure.

Source: guide 3.3, 3.4, 5.1 and 5.2; text 001, 4.2, 4.3 and 4.8; text 003, Q4.
"""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.sizing.speed.costs import Costs
from kneewatch.diagnose.sizing.speed.efficiency import Efficiency
from kneewatch.diagnose.sizing.speed.parallelism import ALLREDUCES_PER_LAYER

_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step and its parts; `total_s` has the longer of memory and compute, and the rest.

    `kernels_s` is GPU time that no peak explains, `host_s` what the CPU adds to the step.
    """

    memory_s: float
    compute_s: float
    interconnect_s: float
    kernels_s: float
    host_s: float
    total_s: float

    @property
    def binding(self) -> str:
        """What takes the largest part: memory, compute, interconnect or host.

        Time between kernels counts to the host, which launches them.
        """
        by_memory = self.memory_s >= self.compute_s
        parts = {
            "memory" if by_memory else "compute": max(self.memory_s, self.compute_s),
            "interconnect": self.interconnect_s,
            "host": self.kernels_s + self.host_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A step's time as a function of its sequences and prompt tokens, at fixed lengths.

    Reading: weights once, the experts touched, each sequence's KV and state. Computing: two FLOP
    a parameter and token, and attention. All-reduces: two a layer, over the ring. Under pipeline
    parallelism the running sequences and prompt tokens are dealt evenly to as many micro-batches
    as there are stages, and a step is one pass through all stages.
    """

    weights_s: float
    experts_s: float
    """All routed experts; a step reads the share that its tokens touch."""
    untouched_ratio: float
    sequence_read_s: float
    sequence_compute_s: float
    prompt_token_compute_s: float
    token_link_s: float
    collectives_s: float
    """Fixed costs of a step's all-reduces and of passing from stage to stage."""
    layers_s: float
    sequence_s: float
    host_s: float
    prompt_step_s: float
    tokens_per_sequence: float
    stages: int

    def total_s(self, sequences: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of a step with so many decoding sequences and prompt tokens."""
        if self.stages > 1:
            sequences = max(min(sequences, 1.0), sequences / self.stages)
            prompt_tokens /= self.stages
        tokens = sequences * self.tokens_per_sequence + prompt_tokens
        read_s = self.weights_s + sequences * self.sequence_read_s
        if self.experts_s:
            read_s += self.experts_s * (1 - self.untouched_ratio**tokens)
        compute_s = (
            sequences * self.sequence_compute_s + prompt_tokens * self.prompt_token_compute_s
        )
        return (
            (read_s if read_s > compute_s else compute_s)
            + tokens * self.token_link_s
            + self.collectives_s
            + self.layers_s
            + sequences * self.sequence_s
            + (self.host_s + self.prompt_step_s if prompt_tokens else self.host_s)
        )

    def parts(self, sequences: float, prompt_tokens: float = 0.0) -> StepTime:
        """The same step with its parts."""
        total_s = self.total_s(sequences, prompt_tokens)
        if self.stages > 1:
            sequences = max(min(sequences, 1.0), sequences / self.stages)
            prompt_tokens /= self.stages
        tokens = sequences * self.tokens_per_sequence + prompt_tokens
        touched_ratio = 1 - self.untouched_ratio**tokens if self.experts_s else 0.0
        return StepTime(
            memory_s=self.weights_s
            + sequences * self.sequence_read_s
            + self.experts_s * touched_ratio,
            compute_s=sequences * self.sequence_compute_s
            + prompt_tokens * self.prompt_token_compute_s,
            interconnect_s=tokens * self.token_link_s + self.collectives_s,
            kernels_s=self.layers_s + sequences * self.sequence_s,
            host_s=self.host_s + (self.prompt_step_s if prompt_tokens else 0.0),
            total_s=total_s,
        )


def step_model(
    costs: Costs,
    efficiency: Efficiency,
    *,
    context_tokens: float,
    prompt_context_tokens: float,
    tokens_per_sequence: float = 1.0,
) -> StepModel:
    """The step's time at a mean context of the decodes, and of the prompt tokens in prefill.

    `tokens_per_sequence` is above 1 where drafted tokens are verified.
    """
    kv_bytes = costs.kv_bytes_per_token * context_tokens + costs.state_bytes
    pair_flop = costs.flop_per_pair * context_tokens
    prompt_pair_flop = costs.prefill_flop_per_pair * prompt_context_tokens
    for window in costs.windows:
        seen = min(context_tokens, window.tokens)
        kv_bytes += window.kv_bytes_per_token * seen
        pair_flop += window.flop_per_pair * seen
        prompt_pair_flop += window.flop_per_pair * min(prompt_context_tokens, window.tokens)
    read_per_s = costs.bandwidth_bytes_per_s * efficiency.mbu_ratio
    matrix_per_s = costs.flop_per_s * efficiency.mfu_ratio
    attention_per_s = costs.attention_flop_per_s * efficiency.attention_mfu_ratio
    token_flop = costs.body_flop_per_token + costs.head_flop_per_token
    degree, stages = costs.tensor_parallel, costs.pipeline_parallel
    link_per_s = costs.link_bytes_per_s * efficiency.link_ratio
    token_bytes = costs.hidden_size * _ACTIVATION_BYTES
    allreduces = ALLREDUCES_PER_LAYER * costs.layers if degree > 1 else 0
    sent_bytes = allreduces * 2 * (degree - 1) / degree * token_bytes
    sent_bytes += (stages - 1) * token_bytes / degree
    return StepModel(
        weights_s=costs.weights_bytes / read_per_s,
        experts_s=costs.experts_bytes / (costs.bandwidth_bytes_per_s * efficiency.expert_mbu_ratio),
        untouched_ratio=costs.untouched_ratio,
        sequence_read_s=kv_bytes / read_per_s,
        sequence_compute_s=tokens_per_sequence
        * (token_flop / matrix_per_s + pair_flop / attention_per_s),
        prompt_token_compute_s=costs.body_flop_per_token / matrix_per_s
        + prompt_pair_flop / attention_per_s,
        token_link_s=sent_bytes / link_per_s,
        collectives_s=(allreduces + stages - 1) * efficiency.allreduce_latency_s,
        layers_s=costs.layers * efficiency.layer_s,
        sequence_s=efficiency.sequence_s,
        host_s=efficiency.host_s,
        prompt_step_s=efficiency.prompt_step_s,
        tokens_per_sequence=tokens_per_sequence,
        stages=stages,
    )
