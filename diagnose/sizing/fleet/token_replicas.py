"""Replicas and pool sizes from token rates: prefill, decode and their ratio. Pure. Guide 6.5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kneewatch.diagnose.sizing.inputs import SizingError, positive
from kneewatch.diagnose.sizing.steps import Step, exact, figure

_SOURCE = "guide 6.5; capacity planning text, first-pass estimate"


@dataclass(frozen=True, slots=True)
class TokenReplicas:
    """Replicas by tokens; the `_exact` figures are replica-seconds of work per second.

    `prefill` and `decode` count each phase alone, as two pools. `colocated` is for replicas that
    do both in turn: their work adds up. None where a phase's rate was not given.
    """

    prefill_exact: float | None
    decode_exact: float
    prefill: int | None
    decode: int
    colocated: int | None
    steps: tuple[Step, ...]


def _work(tokens_per_request: float, requests_per_s: float, rate: float) -> Fraction:
    return exact(requests_per_s) * exact(tokens_per_request) / exact(rate)


def _step(phase: str, tokens: str, values: str, work: Fraction) -> Step:
    return Step(
        title=f"Replicas for {phase}",
        formula=f"ceil(peak RPS x {tokens} / {phase} tokens/s of one replica)",
        values=f"ceil({values}) = ceil({figure(float(work))})",
        result=f"{math.ceil(work)}",
        source=_SOURCE,
    )


def token_replicas(
    *,
    peak_requests_per_s: float,
    output_tokens: float,
    decode_tokens_per_s: float,
    input_tokens: float | None = None,
    prefill_tokens_per_s: float | None = None,
    prefix_hit_ratio: float = 0.0,
) -> TokenReplicas:
    """Replicas that the peak's output tokens need, and its input tokens where both are given.

    Tokens are averages per request; rates are of one replica, measured in each phase alone.
    Of the input, the share `prefix_hit_ratio` is already cached and costs no prefill.
    A first estimate: it knows no queue, no length distribution and no target.

    Raises:
        SizingError: a number is not positive, or the hit ratio is not in 0..1 (1 excluded).
    Source: guide 6.5 (work of a phase); the fourth text's capacity planning (decode, rounded up).
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("output_tokens", output_tokens)
    positive("decode_tokens_per_s", decode_tokens_per_s)
    if not 0 <= prefix_hit_ratio < 1:
        raise SizingError(
            f"prefix_hit_ratio is {prefix_hit_ratio:g}; it must be 0 or more and below 1",
            name="prefix_hit_ratio",
        )
    decode = _work(output_tokens, peak_requests_per_s, decode_tokens_per_s)
    peak = figure(peak_requests_per_s)
    values = f"{peak} x {figure(output_tokens)} / {figure(decode_tokens_per_s)}"
    decode_step = _step("decode", "output tokens", values, decode)
    if input_tokens is None or prefill_tokens_per_s is None:
        return TokenReplicas(None, float(decode), None, math.ceil(decode), None, (decode_step,))
    positive("input_tokens", input_tokens)
    positive("prefill_tokens_per_s", prefill_tokens_per_s)
    prefill = _work(input_tokens, peak_requests_per_s, prefill_tokens_per_s)
    prefill *= 1 - exact(prefix_hit_ratio)
    share = figure(1 - prefix_hit_ratio)
    values = f"{peak} x {figure(input_tokens)} x {share} / {figure(prefill_tokens_per_s)}"
    prefill_step = _step("prefill", "input tokens x (1 - hit ratio)", values, prefill)
    return TokenReplicas(
        prefill_exact=float(prefill),
        decode_exact=float(decode),
        prefill=math.ceil(prefill),
        decode=math.ceil(decode),
        colocated=math.ceil(prefill + decode),
        steps=(prefill_step, decode_step),
    )


@dataclass(frozen=True, slots=True)
class PrefillDecodeRatio:
    """GPUs of the two pools of a disaggregated fleet; `ratio` is prefill over decode.

    `text` writes it as the guide does, `1:2.3`.
    """

    ratio: float
    prefill_gpus_exact: float
    decode_gpus_exact: float
    prefill_gpus: int
    decode_gpus: int
    text: str
    steps: tuple[Step, ...]


def prefill_decode_ratio(
    *,
    peak_requests_per_s: float,
    input_tokens: float,
    output_tokens: float,
    prefill_tokens_per_s_per_gpu: float,
    decode_tokens_per_s_per_gpu: float,
) -> PrefillDecodeRatio:
    """Prefill GPUs to decode GPUs for the workload; rates are of one GPU, each phase alone.

    The peak cancels in the ratio and counts only for the pools' sizes.

    Raises:
        SizingError: a number is not positive.
    Source: guide 6.5.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("input_tokens", input_tokens)
    positive("output_tokens", output_tokens)
    positive("prefill_tokens_per_s_per_gpu", prefill_tokens_per_s_per_gpu)
    positive("decode_tokens_per_s_per_gpu", decode_tokens_per_s_per_gpu)
    prefill = _work(input_tokens, peak_requests_per_s, prefill_tokens_per_s_per_gpu)
    decode = _work(output_tokens, peak_requests_per_s, decode_tokens_per_s_per_gpu)
    ratio, peak = float(prefill / decode), figure(peak_requests_per_s)
    text = f"{figure(ratio)}:1" if ratio >= 1 else f"1:{figure(1 / ratio)}"
    step = Step(
        title="P:D ratio",
        formula="(RPS x input / prefill tokens/s) / (RPS x output / decode tokens/s), per GPU",
        values=f"({peak} x {figure(input_tokens)} / {figure(prefill_tokens_per_s_per_gpu)}) / "
        f"({peak} x {figure(output_tokens)} / {figure(decode_tokens_per_s_per_gpu)})",
        result=text,
        source="guide 6.5",
    )
    return PrefillDecodeRatio(
        ratio=ratio,
        prefill_gpus_exact=float(prefill),
        decode_gpus_exact=float(decode),
        prefill_gpus=math.ceil(prefill),
        decode_gpus=math.ceil(decode),
        text=text,
        steps=(step,),
    )
