"""What to let in: queue depth, input and output limits. Pure. Guide 9.4."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure

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
