"""The guide's planning model of GPU memory, as formulas of plain numbers. Pure.

It plans; `fitted` overheads predict what vLLM does. Bytes are bytes: GB and GiB are for printing.
Source: "Sizing LLM Inference for Production", chapters 2, 4 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def activation_bytes(*, weights_bytes: float, ratio: float = ACTIVATION_RATIO) -> float:
    """Bytes to budget for activations.

    The guide's example keeps the 16-bit figure when the weights are quantized: activations stay
    in 16 bit, so pass the 16-bit weights for that reading.
    Source: guide 2.3.
    """
    not_negative("weights_bytes", weights_bytes)
    not_negative("ratio", ratio)
    return weights_bytes * ratio


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
