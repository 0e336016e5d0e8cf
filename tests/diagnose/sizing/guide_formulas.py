"""Formulas of the texts behind the sizing, for checking their examples and the errata. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def kv_bytes_per_token(
    *, layers: int, kv_heads: int, head_dim: int, bytes_per_element: float
) -> float:
    """Bytes of keys and values of one token, over all GPUs (guide 2.2)."""
    return 2 * layers * kv_heads * head_dim * bytes_per_element


def mla_bytes_per_token(
    *, layers: int, kv_lora_rank: int, rope_head_dim: int, bytes_per_element: float
) -> float:
    """Bytes of latent cache of one token, on each tensor-parallel GPU (text 001, 4.10.1)."""
    return layers * (kv_lora_rank + rope_head_dim) * bytes_per_element


def kv_bytes(*, bytes_per_token: float, tokens: float, concurrency: int = 1) -> float:
    """Bytes of KV cache of `concurrency` requests of `tokens` tokens (guide 2.2)."""
    return bytes_per_token * tokens * concurrency


def kv_budget_bytes(
    *, vram_bytes: float, gpu_memory_utilization: float, weights_bytes: float
) -> float:
    """Bytes left for KV cache beside the weights, without activations (text 000, recipe)."""
    return vram_bytes * gpu_memory_utilization - weights_bytes


def max_concurrency(*, free_bytes: float, bytes_per_request: float) -> int:
    """Requests whose KV cache fits in `free_bytes` (text 000; text 001, 4.10.2)."""
    return math.floor(free_bytes / bytes_per_request)


def concurrency_above_weights(*, weights_bytes: float, bytes_per_request: float) -> int:
    """The fewest requests whose KV cache is larger than the weights (guide 2.2, figure 2.2)."""
    return math.floor(weights_bytes / bytes_per_request) + 1


def lora_adapter_bytes(
    *, rank: int, matrices: Sequence[tuple[int, int]], layers: int, bytes_per_element: float = 2.0
) -> float:
    """Bytes of one LoRA adapter of `matrices` (inputs, outputs) in each layer (guide 2.5)."""
    return rank * sum(i + o for i, o in matrices) * layers * bytes_per_element
