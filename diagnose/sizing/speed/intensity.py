"""The arithmetic intensity of decode steps, and the ridge of the roofline. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kneewatch.diagnose.catalogue.inputs import not_negative, positive
from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.speed.roofline_inputs import Costs


def ridge_flop_per_byte(*, peak_flop_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """FLOP per byte at which compute and bandwidth take equally long (guide 3.1)."""
    positive("peak_flop_per_s", peak_flop_per_s)
    positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return peak_flop_per_s / bandwidth_bytes_per_s


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


@dataclass(frozen=True, slots=True)
class Intensity:
    """What binds the decode steps of a launch at one batch.

    `batch_at_ridge` is None where reading the KV cache keeps decode below the ridge at any batch.
    """

    ridge_flop_per_byte: float
    decode_flop_per_byte: float
    batch_at_ridge: float | None
    step: Step


def intensity_of(costs: Costs, *, context_tokens: float, sequences: float) -> Intensity:
    """The intensity of one decode step of `sequences` requests with that much context, on one GPU.

    At the ridge a batch is taken to read every expert. Source: guide 3.1 to 3.4.
    """
    ridge = ridge_flop_per_byte(
        peak_flop_per_s=costs.flop_per_s, bandwidth_bytes_per_s=costs.bandwidth_bytes_per_s
    )
    parameters = (costs.body_flop_per_token + costs.head_flop_per_token) / 2
    read = costs.kv_bytes_per_token * context_tokens + costs.state_bytes
    read += sum(min(w.tokens, context_tokens) * w.kv_bytes_per_token for w in costs.windows)
    touched_bytes = costs.experts_bytes * (1 - costs.untouched_ratio**sequences)
    weights_bytes = costs.weights_bytes + touched_bytes
    decode_flop_per_byte = decode_intensity_flop_per_byte(
        batch=sequences,
        parameters=parameters,
        weights_bytes=weights_bytes,
        kv_bytes_per_request=read,
    )
    batch = batch_at_ridge(
        ridge_flop_per_byte=ridge,
        parameters=parameters,
        weights_bytes=costs.weights_bytes + costs.experts_bytes,
        kv_bytes_per_request=read,
    )
    bound = "compute" if decode_flop_per_byte >= ridge else "bandwidth"
    until = (
        "at any batch of this context"
        if batch is None
        else f"until {figure(ceil(batch))} requests a batch"
    )
    step = Step(
        title="Intensity of a decode step",
        formula="2 x parameters x batch / (weights + batch x KV of a request), ridge: FLOP/s / "
        "bandwidth",
        values=f"2 x {figure(parameters / 1e9)}e9 x {figure(sequences)} / "
        f"({figure(weights_bytes / 1e9)} + {figure(sequences)} x {figure(read / 1e9)} GB), "
        f"ridge {figure(ridge)}",
        result=f"{figure(decode_flop_per_byte)} FLOP per byte: bound by {bound}"
        + (f" {until}" if bound == "bandwidth" else ""),
        source="guide 3.1 to 3.4",
    )
    return Intensity(ridge, decode_flop_per_byte, batch, step)
