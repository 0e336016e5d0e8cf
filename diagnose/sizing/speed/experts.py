"""Mixture of experts: which experts a batch reads, and what spreading them costs. Pure.

Source: guide 5.4; text 001, 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kneewatch.diagnose.sizing.inputs import SizingError, not_negative, positive, within


def touched_experts_ratio(*, experts: int, experts_per_token: int, tokens: float) -> float:
    """Expected share of the routed experts that a batch of `tokens` uses: 1 - (1 - k/E)^B.

    For even and independent routing; real routing is uneven and touches fewer.
    Source: text 001, 4.3 (tokens share expert reads); the expectation is elementary.
    """
    positive("experts", experts)
    within("experts_per_token", experts_per_token, low=1, high=experts)
    not_negative("tokens", tokens)
    return 1 - math.pow(1 - experts_per_token / experts, tokens)


def step_weights_bytes(
    *,
    dense_bytes: float,
    routed_bytes: float,
    experts: int,
    experts_per_token: int,
    tokens: float,
) -> float:
    """Weight bytes that one step reads: the dense part and shared experts, and what is touched.

    At one token it is the active parameters' bytes, at many it is all of them.
    Source: text 001, 4.2 and 4.3.
    """
    not_negative("dense_bytes", dense_bytes)
    not_negative("routed_bytes", routed_bytes)
    ratio = touched_experts_ratio(
        experts=experts, experts_per_token=experts_per_token, tokens=tokens
    )
    return dense_bytes + routed_bytes * ratio


def expert_parallel_bytes_per_gpu(
    *, dense_bytes: float, routed_bytes: float, experts: int, gpus: int
) -> float:
    """Weight bytes on the fullest GPU: dense part and shared experts on each, experts dealt out.

    Source: guide 5.4 (all experts are stored; shared ones are on every GPU).
    """
    positive("experts", experts)
    positive("gpus", gpus)
    per_gpu = -(-experts // gpus)
    return dense_bytes + routed_bytes * per_gpu / experts


def all_to_all_bytes(
    *,
    tokens: float,
    hidden_size: int,
    experts_per_token: int,
    gpus: int,
    bytes_per_element: float = 2.0,
) -> float:
    """Bytes that leave their GPU in one MoE layer, dispatch and return, over the whole group.

    Source: guide 5.4; a token's expert is on another GPU with probability 1 - 1/gpus.
    """
    not_negative("tokens", tokens)
    positive("gpus", gpus)
    moved = tokens * experts_per_token * hidden_size * bytes_per_element
    return 2 * moved * (1 - 1 / gpus)


def imbalance_throughput_ratio(*, expert_tokens: Sequence[float]) -> float:
    """Share of the even-load throughput that is left: mean over busiest expert.

    Raises:
        SizingError: no tokens at all.
    Source: guide 5.4 (the group is as fast as its busiest expert).
    """
    total = sum(expert_tokens)
    if not total > 0:
        raise SizingError("expert_tokens has no tokens", name="expert_tokens")
    return total / len(expert_tokens) / max(expert_tokens)


def expert_capacity_tokens(
    *, tokens: float, experts: int, experts_per_token: int, capacity_factor: float
) -> float:
    """Tokens that one expert takes per batch before tokens overflow (guide 5.4)."""
    positive("experts", experts)
    positive("capacity_factor", capacity_factor)
    return capacity_factor * tokens * experts_per_token / experts


def overflow_ratio(*, expert_tokens: Sequence[float], capacity_tokens: float) -> float:
    """Share of routed tokens beyond their expert's capacity; they lose quality silently.

    Source: guide 5.4.
    """
    not_negative("capacity_tokens", capacity_tokens)
    total = sum(expert_tokens)
    return sum(max(0.0, t - capacity_tokens) for t in expert_tokens) / total if total else 0.0
