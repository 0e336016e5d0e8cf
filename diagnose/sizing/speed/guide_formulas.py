"""The guide's closed formulas for arithmetic intensity and mixture-of-experts models. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within


def ridge_flop_per_byte(*, peak_flop_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """FLOP per byte at which compute and bandwidth take equally long (guide 3.1)."""
    positive("peak_flop_per_s", peak_flop_per_s)
    positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return peak_flop_per_s / bandwidth_bytes_per_s


def attainable_flop_per_s(
    *, intensity_flop_per_byte: float, peak_flop_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """FLOP/s under the roofline: the lower of the two ceilings (text 003, roofline)."""
    not_negative("intensity_flop_per_byte", intensity_flop_per_byte)
    return min(peak_flop_per_s, intensity_flop_per_byte * bandwidth_bytes_per_s)


def matmul_intensity_flop_per_byte(
    *, rows: int, inner: int, columns: int, bytes_per_element: float
) -> float:
    """FLOP per byte of [rows, inner] x [inner, columns], each matrix moved once.

    For many rows it tends to inner x columns / (inner + columns), in 16 bit.
    Source: text 003, arithmetic intensity of a matrix multiply.
    """
    for name, value in (("rows", rows), ("inner", inner), ("columns", columns)):
        positive(name, value)
    positive("bytes_per_element", bytes_per_element)
    elements = rows * inner + inner * columns + rows * columns
    return 2 * rows * inner * columns / (bytes_per_element * elements)


def decode_intensity_flop_per_byte(
    *, batch: float, parameters: float, weights_bytes: float, kv_bytes_per_request: float = 0.0
) -> float:
    """FLOP per byte of one decode step: two per parameter and request, over weights and KV read.

    `parameters` and `weights_bytes` are those that a step uses (a MoE's active ones at batch 1).
    Attention's own FLOP are left out, as in the guide.
    Source: guide 3.3 and 3.4; text 003, batch size.
    """
    positive("batch", batch)
    positive("parameters", parameters)
    positive("weights_bytes", weights_bytes)
    not_negative("kv_bytes_per_request", kv_bytes_per_request)
    return 2 * parameters * batch / (weights_bytes + batch * kv_bytes_per_request)


def batch_at_ridge(
    *,
    ridge_flop_per_byte: float,
    parameters: float,
    weights_bytes: float,
    kv_bytes_per_request: float = 0.0,
) -> float | None:
    """Requests per step at which decode becomes compute-bound.

    None where reading the KV cache keeps decode below the ridge at any batch.
    Source: guide 3.4 (figure 3.3.2 says never); text 003 (about 295 on an H100).
    """
    positive("ridge_flop_per_byte", ridge_flop_per_byte)
    positive("parameters", parameters)
    left = 2 * parameters - ridge_flop_per_byte * kv_bytes_per_request
    return ridge_flop_per_byte * weights_bytes / left if left > 0 else None


def prefill_flop(
    *, tokens: float, parameters: float, layers: int = 0, attention_width: int = 0
) -> float:
    """FLOP of one prompt's prefill: two per active parameter and token, and causal attention.

    `attention_width` is query heads x head_dim; leave it 0 for the guide's linear formula.
    Source: text 001, 4.8; attention: QK and PV at 2 FLOP per pair and width, half of it masked.
    """
    positive("tokens", tokens)
    positive("parameters", parameters)
    return 2 * parameters * tokens + 2 * layers * attention_width * tokens**2


def prefill_floor_s(
    *, flop: float, peak_flop_per_s: float, gpus: int = 1, efficiency_ratio: float = 1.0
) -> float:
    """Least seconds that `flop` take on `gpus` GPUs (guide 3.2; text 001, 4.8 and 4.9)."""
    positive("flop", flop)
    positive("peak_flop_per_s", peak_flop_per_s)
    positive("gpus", gpus)
    _efficiency(efficiency_ratio)
    return flop / (peak_flop_per_s * gpus * efficiency_ratio)


def decode_step_floor_s(
    *,
    read_bytes: float,
    bandwidth_bytes_per_s: float,
    gpus: int = 1,
    efficiency_ratio: float = 1.0,
) -> float:
    """Least seconds of one decode step: the bytes it reads over the bandwidth.

    Source: guide 3.3; text 001, 4.2; text 003 (the cost script takes 0.7 of the bandwidth).
    """
    positive("read_bytes", read_bytes)
    positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    positive("gpus", gpus)
    _efficiency(efficiency_ratio)
    return read_bytes / (bandwidth_bytes_per_s * gpus * efficiency_ratio)


def decode_ceiling_tokens_per_s(
    *,
    batch: float,
    weights_bytes: float,
    bandwidth_bytes_per_s: float,
    kv_bytes_per_request: float = 0.0,
    gpus: int = 1,
    efficiency_ratio: float = 1.0,
) -> float:
    """Most output tokens per second, all requests together, that the bandwidth allows.

    Source: guide 3.4; text 001, 4.2.
    """
    positive("batch", batch)
    not_negative("kv_bytes_per_request", kv_bytes_per_request)
    return batch / decode_step_floor_s(
        read_bytes=weights_bytes + batch * kv_bytes_per_request,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        gpus=gpus,
        efficiency_ratio=efficiency_ratio,
    )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times faster each phase becomes at its own ceiling."""

    prefill: float
    decode: float


def quantization_speedup(
    *,
    read_bytes: float,
    quantized_read_bytes: float,
    peak_flop_per_s: float,
    quantized_peak_flop_per_s: float,
) -> Speedup:
    """What quantization does to the two phases: decode follows bytes read, prefill the peak.

    Weight-only formats (W4A16) compute in 16 bit, so their peak stays; W8A8 doubles it on Hopper.
    Bytes read include the KV cache, which weight quantization leaves as it was.
    Source: guide 3.5, 4.1 and 4.2.
    """
    positive("quantized_read_bytes", quantized_read_bytes)
    positive("peak_flop_per_s", peak_flop_per_s)
    return Speedup(
        prefill=quantized_peak_flop_per_s / peak_flop_per_s,
        decode=read_bytes / quantized_read_bytes,
    )


def sparse_bytes_ratio(*, bits: int) -> float:
    """Bytes of 2:4 sparse weights over dense ones: half the values, 2 bits of place for each.

    Source: guide 4.4 (pattern); the metadata: NVIDIA's description of 2:4 sparsity.
    """
    positive("bits", bits)
    return (2 * bits + 2 * 2) / (4 * bits)


def _efficiency(ratio: float) -> None:
    positive("efficiency_ratio", ratio)
    within("efficiency_ratio", ratio, low=0.0, high=1.0)


# --- Mixture of experts: which experts a batch reads, and what spreading them costs. Pure ---------
#
# Source: guide 5.4; text 001, 4.3.


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
