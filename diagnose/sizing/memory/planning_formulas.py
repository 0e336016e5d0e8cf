"""The guide's planning model of GPU memory, as formulas of plain numbers. Pure.

It plans; `fitted` overheads predict what vLLM does. Bytes are bytes: GB and GiB are for printing.
Source: "Sizing LLM Inference for Production", chapters 2, 4 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within

BYTES_PER_VALUE: Mapping[str, float] = MappingProxyType(
    {
        "fp32": 4.0,
        "bf16": 2.0,
        "fp16": 2.0,
        "fp8": 1.0,
        "int8": 1.0,
        "int4": 0.5,
        "fp4": 0.5,
        # 4 bits and one 8-bit scale for each 16 values
        "nvfp4": 0.5625,
    }
)
"""Bytes that one stored value takes (guide 2.1; the scales of NVFP4 are left out there)."""

ACTIVATION_RATIO = 0.20
"""Activations over weight bytes, with FlashAttention (guide 2.3)."""
FRAMEWORK_LOW_RATIO, FRAMEWORK_HIGH_RATIO = 0.05, 0.10
"""What the serving framework takes of a GPU's memory (guide 2.4)."""
HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO = 0.30, 0.50
"""What to add to the calculated need before deploying (guide 2.6)."""
PADDING_LOW_RATIO, PADDING_HIGH_RATIO = 0.03, 0.08
"""Resident weights over what the formula gives, from alignment (guide 2.1)."""

_ROUNDING = 1e-9  # a need that fits exactly must not cost one more GPU


def bytes_per_value(dtype: str) -> float:
    """Bytes that one value of `dtype` takes.

    Raises:
        SizingError: an unknown dtype; the choices are listed.
    Source: guide 2.1.
    """
    try:
        return BYTES_PER_VALUE[dtype]
    except KeyError:
        choices = tuple(BYTES_PER_VALUE)
        message = f"dtype is {dtype!r}; choose one of {', '.join(choices)}"
        raise SizingError(message, name="dtype", choices=choices) from None


def weights_bytes(
    *, parameters: float, bytes_per_parameter: float, padding_ratio: float = 0.0
) -> float:
    """Bytes of a model's weights: parameters x bytes each, and the alignment on top.

    Source: guide 2.1; text 000 (recipe), 003 (capacity), 004 (weights).
    """
    positive("parameters", parameters)
    positive("bytes_per_parameter", bytes_per_parameter)
    not_negative("padding_ratio", padding_ratio)
    return parameters * bytes_per_parameter * (1 + padding_ratio)


def kv_bytes_per_token(
    *, layers: int, kv_heads: int, head_dim: int, bytes_per_element: float
) -> float:
    """Bytes of KV cache that one token takes over all GPUs: keys and values (2) x layers x ...

    Source: guide 2.2; text 000 and 004. Text 003 counts query heads instead, which is MHA.
    """
    positive("layers", layers)
    positive("kv_heads", kv_heads)
    positive("head_dim", head_dim)
    positive("bytes_per_element", bytes_per_element)
    return 2 * layers * kv_heads * head_dim * bytes_per_element


def mla_bytes_per_token(
    *, layers: int, kv_lora_rank: int, rope_head_dim: int, bytes_per_element: float
) -> float:
    """Bytes of latent cache that one token takes on *each* tensor-parallel GPU: no heads to split.

    Source: text 001, 4.10.1; replication: vLLM start-up logs of DeepSeek and Kimi models.
    """
    positive("layers", layers)
    positive("kv_lora_rank", kv_lora_rank)
    not_negative("rope_head_dim", rope_head_dim)
    positive("bytes_per_element", bytes_per_element)
    return layers * (kv_lora_rank + rope_head_dim) * bytes_per_element


def kv_bytes(*, bytes_per_token: float, tokens: float, concurrency: int = 1) -> float:
    """Bytes of KV cache that `concurrency` requests of `tokens` tokens hold (guide 2.2)."""
    positive("bytes_per_token", bytes_per_token)
    not_negative("tokens", tokens)
    not_negative("concurrency", concurrency)
    return bytes_per_token * tokens * concurrency


def kv_budget_bytes(
    *, vram_bytes: float, gpu_memory_utilization: float, weights_bytes: float
) -> float:
    """Bytes left for KV cache, all GPUs together: VRAM x utilization - weights; below 0: no fit.

    Source: text 000 (recipe). It leaves out activations, which vLLM takes from within.
    """
    positive("vram_bytes", vram_bytes)
    within("gpu_memory_utilization", gpu_memory_utilization, low=0.0, high=1.0)
    not_negative("weights_bytes", weights_bytes)
    return vram_bytes * gpu_memory_utilization - weights_bytes


def max_concurrency(*, free_bytes: float, bytes_per_request: float) -> int:
    """Requests whose KV cache fits in `free_bytes` at once; 0 where nothing is free.

    Source: text 000 (worked example) and 001, 4.10.2; a ceiling of memory, not of latency.
    """
    positive("bytes_per_request", bytes_per_request)
    if not math.isfinite(free_bytes):
        raise SizingError(f"free_bytes is {free_bytes:g}; it must be a number", name="free_bytes")
    return max(0, math.floor(free_bytes / bytes_per_request + _ROUNDING))


def concurrency_above_weights(*, weights_bytes: float, bytes_per_request: float) -> int:
    """The fewest requests whose KV cache is larger than the weights (guide 2.2, figure 2.2)."""
    positive("bytes_per_request", bytes_per_request)
    not_negative("weights_bytes", weights_bytes)
    return math.floor(weights_bytes / bytes_per_request) + 1


def activation_bytes(*, weights_bytes: float, ratio: float = ACTIVATION_RATIO) -> float:
    """Bytes to budget for activations.

    The guide's example keeps the 16-bit figure when the weights are quantized: activations stay
    in 16 bit, so pass the 16-bit weights for that reading.
    Source: guide 2.3.
    """
    not_negative("weights_bytes", weights_bytes)
    not_negative("ratio", ratio)
    return weights_bytes * ratio


def lora_adapter_bytes(
    *, rank: int, matrices: Sequence[tuple[int, int]], layers: int, bytes_per_element: float = 2.0
) -> float:
    """Bytes of one LoRA adapter: rank x (inputs + outputs) of each adapted matrix, every layer.

    `matrices` are (inputs, outputs) of the adapted matrices of one layer.
    Source: guide 2.5.
    """
    positive("rank", rank)
    positive("layers", layers)
    return rank * sum(i + o for i, o in matrices) * layers * bytes_per_element


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one deployment needs, in bytes over all of its GPUs (guide 2, 2.5 and 2.6)."""

    weights_bytes: float
    kv_bytes: float
    activation_bytes: float
    framework_bytes: float = 0.0
    simultaneous_adapters: int = 0
    adapter_bytes: float = 0.0

    @property
    def adapters_bytes(self) -> float:
        """Bytes of the adapters that are active at once, not of all that exist."""
        return self.simultaneous_adapters * self.adapter_bytes

    @property
    def total_bytes(self) -> float:
        """The sum of the components."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.activation_bytes
            + self.framework_bytes
            + self.adapters_bytes
        )


def min_gpus(*, needed_bytes: float, vram_bytes: float, framework_ratio: float = 0.0) -> int:
    """The fewest GPUs whose memory holds `needed_bytes`, whether or not that TP degree exists.

    Give the framework as bytes within `needed_bytes`, or as the share of each GPU: it grows with
    the number of GPUs, so it is taken from the memory instead of being added to the need.
    Source: guide 2.6 and 2.4.
    """
    positive("needed_bytes", needed_bytes)
    positive("vram_bytes", vram_bytes)
    within("framework_ratio", framework_ratio, low=0.0, high=0.99)
    return max(1, math.ceil(needed_bytes / (vram_bytes * (1 - framework_ratio)) - _ROUNDING))


def gpus_with_headroom(
    *, needed_bytes: float, vram_bytes: float, headroom_ratio: float = HEADROOM_HIGH_RATIO
) -> int:
    """GPUs to deploy: the calculated need and the headroom on top (guide 2.6)."""
    not_negative("headroom_ratio", headroom_ratio)
    return min_gpus(needed_bytes=needed_bytes * (1 + headroom_ratio), vram_bytes=vram_bytes)


def kv_quantization_gain(*, before: str, after: str) -> float:
    """How many times the tokens, and so the requests, fit the same KV budget (guide 4.3, 7.5)."""
    return bytes_per_value(before) / bytes_per_value(after)


def block_padding_tokens(*, tokens: int, block_tokens: int = 16) -> int:
    """Tokens of KV cache that a request reserves and does not use, in its last block.

    Source: guide 7.1.
    """
    not_negative("tokens", tokens)
    positive("block_tokens", block_tokens)
    return -tokens % block_tokens
