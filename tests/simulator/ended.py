"""What vLLM observes of a request when it has ended."""

from __future__ import annotations

from tests.simulator.counters import Counters
from tests.simulator.requests import Request


def observe_end(counters: Counters, request: Request, now_s: float, request_s: float) -> None:
    """Count a request that was answered at `now_s`; `request_s` was spent outside the engine."""
    histograms, counts = counters.histograms, counters.counts
    reason = "length" if request.capped else "stop"
    counts[f"request_success_total|finished_reason={reason}"] += 1
    queue_s = request.scheduled_s - request.arrived_s
    prefill_s = request.first_s - request.scheduled_s
    decode_s = now_s - request.first_s
    seconds = (queue_s, prefill_s + decode_s, prefill_s, decode_s)
    for part, value_s in zip(("queue", "inference", "prefill", "decode"), seconds, strict=True):
        histograms[f"request_{part}_time_seconds"].add(value_s)
    e2e_s = sum(seconds[::2]) + decode_s + request_s
    histograms["e2e_request_latency_seconds"].add(e2e_s)
    between_s = decode_s / max(1, request.output_tokens - 1)
    histograms["request_time_per_output_token_seconds"].add(between_s)
    histograms["request_num_preemptions"].add(request.preempted)
    histograms["request_params_n"].add(1)
    histograms["request_prompt_tokens"].add(request.prompt_tokens)
    histograms["request_prefill_kv_computed_tokens"].add(request.prompt_tokens - request.hit_tokens)
    for name in ("generation_tokens", "max_num_generation_tokens", "params_max_tokens"):
        histograms[f"request_{name}"].add(request.output_tokens)
