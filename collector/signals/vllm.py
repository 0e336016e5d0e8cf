"""The catalogue of vLLM signals, and the signals that depend on settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.collector.engines.engine_kind import MFU_METRICS
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.signals.catalogue import STALL_EDGES_S, expression, expressions, signals
from kneewatch.collector.signals.expr import (
    Expr,
    Rate,
    ShareAtMost,
    complement,
    difference,
    product,
    scaled,
)
from kneewatch.collector.signals.signal import Signal

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
QUEUE = "request_queue_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
E2E = "e2e_request_latency_seconds"
PROMPT_LENGTH = "request_prompt_tokens"
OUTPUT_LENGTH = "request_generation_tokens"
XFER = "nixl_xfer_time_seconds"
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *STALL_EDGES_S)
"""The bucket bounds of ITL and, above, of TTFT, in seconds.

A target between two bounds is judged at the lower bound.
"""

_GROUPS = dict(packaged_tables("collector.signals", "vllm.toml"))
_EXPRESSIONS = expressions(_GROUPS.pop("expressions"))
VLLM_SIGNALS = tuple(signals(_GROUPS, _EXPRESSIONS))
SIGNAL_BY_KEY = {signal.key: signal for signal in VLLM_SIGNALS}
HTTP = "http_requests"
ONE_ENGINE, HOST_NEEDS = (str(_GROUPS[group]["needs"]) for group in ("http", "host"))
"""What the counters of HTTP calls and the metrics of the server's process need."""


def _within(metric: str, bounds_s: Sequence[float], target_s: float) -> ShareAtMost | None:
    """Share of a histogram's observations that are within the target; None if no bound is.

    The target is rounded down to a bucket bound.
    """
    kept_s = [bound_s for bound_s in bounds_s if bound_s <= target_s]
    return ShareAtMost(metric, kept_s[-1]) if kept_s else None


def within_ttft(target_s: float | None) -> ShareAtMost | None:
    """Share of requests whose first token arrives within the target.

    The target is rounded down to a bucket bound. None without a target, or if every bound is above
    it.
    """
    return _within(TTFT, TTFT_BOUNDS_S, target_s or 0.0)


def _goodput(ttft_target_s: float, itl_target_s: float | None) -> Expr | None:
    """Requests/s within the targets; None if a target is below every bucket bound.

    Computed as the request rate times (the share of requests whose first token is in time, minus
    the share of token gaps above the ITL target if one is set).

    vLLM counts slow gaps, not requests with a slow gap. As in the report, slow gaps are assumed to
    be spread evenly over the requests that are in time.
    """
    first = within_ttft(ttft_target_s)
    if first is None or itl_target_s is None:
        return first and product(first, _EXPRESSIONS["arrivals"])
    smooth = _within(ITL, ITL_BOUNDS_S, itl_target_s)
    return smooth and product(difference(first, complement(smooth)), _EXPRESSIONS["arrivals"])


def configured(
    *,
    ttft_slo_s: float | None = None,
    itl_slo_s: float | None = None,
    gpus: int | None = None,
    peak_flop_per_s: float | None = None,
    peak_bytes_per_s: float | None = None,
) -> tuple[Signal, ...]:
    """The signals that depend on settings: SLO, number of GPUs and the peaks of one GPU.

    Signals whose setting is missing are left out; `unconfigured` lists them.
    """
    signals: list[Signal] = []
    goodput = None if ttft_slo_s is None else _goodput(ttft_slo_s, itl_slo_s)
    if goodput is not None:
        signals.append(
            Signal(
                "goodput_per_s",
                goodput,
                "Requests/s within the targets: those with the first token in time, minus the "
                "share of token gaps above the ITL target, if one is set. Targets are rounded "
                "down to a bucket bound.",
            )
        )
    if gpus is not None:
        per_hour = Rate("generation_tokens")
        signals.append(
            Signal(
                "tokens_per_gpu_hour",
                scaled(per_hour, 3600 / gpus),
                "Generated tokens per GPU-hour at the current rate.",
            )
        )
    for key, metric, peak in (
        ("mfu_ratio", "estimated_flops_per_gpu", peak_flop_per_s),
        ("mbu_ratio", "estimated_read_bytes_per_gpu", peak_bytes_per_s),
    ):
        if peak is not None:
            signals.append(
                Signal(
                    key,
                    scaled(expression(f"rate({metric}) > 0", {}), 1 / peak),
                    "Achieved share of one GPU's peak, by vLLM's own estimate of the work.",
                    needs=MFU_METRICS,
                    optional=True,
                )
            )
    return tuple(signals)
