"""What the quick engine keeps of its requests, and what it counts when they end."""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct

from tests.simulator.counters import Counters
from tests.simulator.requests import Request

OF_ENDED = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_prefill_kv_computed_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_params_n",
)
"""What is observed of a request when it has ended."""


class QuickBooks(Struct):
    """What the page writer wants to know of a scheduler."""

    usage_ratio: float = 0.0
    waiting: range = range(0)
    running: range = range(0)
    longest_wait_s: float = 0.0
    deferred: int = 0
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0

    @property
    def blocks(self) -> QuickBooks:
        """The cache's books are here as well."""
        return self


class Active(Struct):
    """A request that decodes; `began` in turns. It ends after `output_tokens`, before its answer is
    complete if its client hangs up."""

    request: Request
    arrived_s: float
    scheduled_s: float
    first_s: float
    began: float
    fresh: int
    accepted: tuple[float, ...]
    pace: float
    output_tokens: int

    @property
    def hung_up(self) -> bool:
        """Whether the client did not wait for the whole answer."""
        return self.output_tokens < self.request.output_tokens


class Ended:
    """Counts requests that were answered; as `ended.py`, in a quarter of the time."""

    def __init__(self, counters: Counters) -> None:
        self._counts = counters.counts
        self._histograms = tuple(counters.histograms[name] for name in OF_ENDED)

    def observe(self, active: Active, now_s: float, request_s: float) -> None:
        """Count a request; `request_s` was spent outside the engine."""
        request, decode_s = active.request, now_s - active.first_s
        reason = "length" if request.capped else "stop"
        self._counts[f"request_success_total|finished_reason={reason}"] += 1
        length = request.output_tokens
        values = (
            active.scheduled_s - active.arrived_s,
            active.first_s - active.scheduled_s,
            decode_s,
            now_s - active.scheduled_s,
            now_s - active.arrived_s + request_s,
            decode_s / max(1, length - 1),
            request.prompt_tokens,
            active.fresh,
            *(length, length, length, 0, 1),
        )
        for histogram, value in zip(self._histograms, values, strict=True):
            histogram.own[bisect_left(histogram.edges, value)] += 1
            histogram.sum += value
