"""How many replicas and GPUs a peak, or its prefill and decode token rates, need, and the limits
of what they let in (guide 9.4). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure

SAFETY_DEFAULT = 1.3
"""The guide's worked example (figure 8.2); 1.2 for stable traffic, 1.5 for new deployments, highly
variable inputs or severe SLO violations (guide 8.3)."""


def whole(name: str, value: float) -> int:
    """The count as an integer of 1 or more.

    Raises:
        SizingError: it is not one.
    """
    positive(name, value)
    if value != int(value):
        raise SizingError(f"{name} is {value:g}; it must be a whole number", name=name)
    return int(value)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """A fleet for a peak; the `_exact` figures are before any rounding up.

    `instances` carry the peak without margin, `instances_exact` of them would do. The guide gives
    the margin twice: on GPUs (8.3: `gpus_exact` = instances x GPUs each x safety, which need not
    be a whole instance) and on instances (9.1 step 11). `deployed_instances` rounds the second up,
    and `gpus` is what that takes: whole instances, so it is at least `gpus_exact`.
    `gpus_rounded_once` is the same with the margin taken before the first rounding: the fewest
    GPUs that still hold peak x safety.
    """

    instances_exact: float
    instances: int
    gpus_exact: float
    deployed_instances: int
    gpus: int
    gpus_rounded_once: int
    headroom_ratio: float
    spare_instances: int
    steps: tuple[Step, ...]


def size_fleet(
    *,
    peak_requests_per_s: float,
    usable_requests_per_s: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    safety: float = SAFETY_DEFAULT,
) -> FleetSize:
    """The fleet that carries the peak at the usable requests/s of one instance, with a margin.

    `safety` is a factor (1.3 adds 30 %). `headroom_ratio` is the deployed capacity above the
    peak; `spare_instances` may be missing at the peak without breaking the targets.

    Raises:
        SizingError: a rate or count is not positive, or the safety is below 1.
    Source: guide 8.3 step 3 and figure 8.2; 9.1 step 11.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    positive("usable_requests_per_s", usable_requests_per_s)
    gpus_each = whole("tensor_parallel", tensor_parallel) * whole(
        "pipeline_parallel", pipeline_parallel
    )
    if not 1 <= safety <= 10:
        raise SizingError(
            f"safety is {safety:g}; it must be a factor from 1 to 10 (1.3 adds 30%)",
            name="safety",
            choices=("1.2", "1.3", "1.5"),
        )
    needed = exact(peak_requests_per_s) / exact(usable_requests_per_s)
    instances = math.ceil(needed)
    deployed = math.ceil(instances * exact(safety))
    capacity = deployed * exact(usable_requests_per_s)
    return FleetSize(
        instances_exact=float(needed),
        instances=instances,
        gpus_exact=float(instances * gpus_each * exact(safety)),
        deployed_instances=deployed,
        gpus=deployed * gpus_each,
        gpus_rounded_once=math.ceil(needed * exact(safety)) * gpus_each,
        headroom_ratio=float(capacity / exact(peak_requests_per_s) - 1),
        spare_instances=deployed - instances,
        steps=_fleet_steps(
            f"ceil({figure(peak_requests_per_s)} / {figure(usable_requests_per_s)}) "
            f"= ceil({figure(float(needed))})",
            instances=instances,
            deployed=deployed,
            gpus_each=gpus_each,
            safety=safety,
        ),
    )


def _fleet_steps(
    quotient: str, *, instances: int, deployed: int, gpus_each: int, safety: float
) -> tuple[Step, ...]:
    by_gpus = float(instances * gpus_each * exact(safety))
    return (
        Step(
            title="Instances for the peak",
            formula="ceil(peak RPS / usable RPS)",
            values=quotient,
            result=f"{instances}",
            source="guide 8.3 step 3",
        ),
        Step(
            title="Instances with safety",
            formula="ceil(instances x safety)",
            values=f"ceil({instances} x {figure(safety)})",
            result=f"{deployed}",
            source="guide 9.1 step 11",
        ),
        Step(
            title="GPUs",
            formula="instances with safety x GPUs of one instance",
            values=f"{deployed} x {gpus_each}",
            result=f"{deployed * gpus_each} (not rounded to whole instances: {figure(by_gpus)})",
            source="guide 8.3 step 3, 9.1 step 11",
        ),
    )


# --- Replicas and pool sizes from token rates: prefill, decode and their ratio. Pure. Guide 6.5 ---


_SOURCE = "guide 6.5; capacity planning text, first-pass estimate"


def _work(tokens_per_request: float, requests_per_s: float, rate: float) -> Fraction:
    return exact(requests_per_s) * exact(tokens_per_request) / exact(rate)


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


# --- What to let in: queue depth, input and output limits. Pure. Guide 9.4 ------------------------


BREAKER_LOW_RATIO, BREAKER_HIGH_RATIO = 0.8, 0.9
"""Of the greatest safe depth: shed before the target breaks, not after (guide 9.4)."""

INPUT_LIMIT_LOW, INPUT_LIMIT_HIGH = 2.0, 3.0
"""Times the P95 input (guide 9.4)."""


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """Queue depths: `depth_exact` breaks the target, the breaker sits between the two others."""

    depth_exact: float
    low_requests: int
    high_requests: int
    steps: tuple[Step, ...]


def circuit_breaker(
    *,
    ttft_target_s: float,
    arrivals_per_s: float,
    served_per_s: float | None = None,
    quiet_ttft_s: float = 0.0,
) -> CircuitBreaker:
    """Requests that may wait before the queue alone breaks the TTFT target.

    The time that may be waited x the rate at which the queue moves. That rate is what the fleet
    serves: with `served_per_s` below the arrivals, the queue moves no faster than that. The guide
    takes the arrivals and the whole target; `quiet_ttft_s`, prefill without a queue, is part of
    the same target and leaves less to wait.

    Raises:
        SizingError: a number is not positive, or prefill alone exceeds the target.
    Source: guide 9.4; Little 1961.
    """
    served = arrivals_per_s if served_per_s is None else served_per_s
    positive("ttft_target_s", ttft_target_s)
    positive("arrivals_per_s", arrivals_per_s)
    positive("served_per_s", served)
    not_negative("quiet_ttft_s", quiet_ttft_s)
    if quiet_ttft_s >= ttft_target_s:
        raise SizingError(
            f"prefill alone takes {quiet_ttft_s:g} s of the TTFT target of {ttft_target_s:g} s: no "
            "queue is short enough",
            name="quiet_ttft_s",
        )
    rate = min(arrivals_per_s, served)
    depth = (exact(ttft_target_s) - exact(quiet_ttft_s)) * exact(rate)
    low, high = (
        math.floor(depth * exact(share)) for share in (BREAKER_LOW_RATIO, BREAKER_HIGH_RATIO)
    )
    waiting = f"({figure(ttft_target_s)} - {figure(quiet_ttft_s)}) s x {figure(rate)} /s"
    return CircuitBreaker(float(depth), low, high, _breaker_steps(waiting, float(depth), low, high))


def _breaker_steps(waiting: str, depth: float, low: int, high: int) -> tuple[Step, ...]:
    return (
        Step(
            title="Greatest safe queue depth",
            formula="(TTFT target - quiet TTFT) x requests/s served",
            values=waiting,
            result=f"{figure(depth)} requests",
            source="guide 9.4",
        ),
        Step(
            title="Circuit breaker (HTTP 429) from",
            formula="80-90% of the depth",
            values=f"0.8 to 0.9 x {figure(depth)}",
            result=f"{low} to {high} queued requests",
            source="guide 9.4",
        ),
    )


@dataclass(frozen=True, slots=True)
class InputLimit:
    """Input tokens to refuse beyond: between `low_tokens` and `high_tokens`.

    `cuts_p99`: even the higher one refuses more than 1 % of today's requests.
    """

    low_tokens: int
    high_tokens: int
    cuts_p99: bool
    steps: tuple[Step, ...]


def input_limit(
    *, p95_input_tokens: float, p99_input_tokens: float, max_model_len: int | None = None
) -> InputLimit:
    """`max_input_tokens` for the gateway: 2-3 times P95, not below P99, within the model.

    Raises:
        SizingError: a length is not positive, or P99 is below P95.
    Source: guide 9.4.
    """
    positive("p95_input_tokens", p95_input_tokens)
    positive("p99_input_tokens", p99_input_tokens)
    if p99_input_tokens < p95_input_tokens:
        raise SizingError(
            f"P99 input ({p99_input_tokens:g} tokens) is below P95 ({p95_input_tokens:g})",
            name="p99_input_tokens",
        )
    top = math.inf if max_model_len is None else float(max_model_len)
    low = min(top, max(math.ceil(INPUT_LIMIT_LOW * p95_input_tokens), math.ceil(p99_input_tokens)))
    high = min(top, max(math.ceil(INPUT_LIMIT_HIGH * p95_input_tokens), low))
    step = Step(
        title="Input limit",
        formula="2 to 3 x P95 input, at least P99, at most the model's length",
        values=f"2 to 3 x {figure(p95_input_tokens)}, P99 {figure(p99_input_tokens)}",
        result=f"{figure(low)} to {figure(high)} tokens",
        source="guide 9.4",
    )
    return InputLimit(int(low), int(high), high < p99_input_tokens, (step,))


def slot_occupancy_s(*, output_tokens: float, itl_s: float) -> float:
    """Seconds that a request holds its decode slot: output tokens x seconds per token.

    Raises:
        SizingError: a number is not positive.
    Source: guide 9.4, 1.4 (15-25 ms per token under moderate load).
    """
    positive("output_tokens", output_tokens)
    positive("itl_s", itl_s)
    return output_tokens * itl_s
