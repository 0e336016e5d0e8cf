"""The figures of a tier, each computed from a span. Pure.

Counters, histograms and gauges are named as vLLM's current versions do, without prefix.
"""

from __future__ import annotations

from collections.abc import Callable

from kneewatch.collector.signals.vllm import (
    DECODE,
    E2E,
    ITL,
    OUTPUT_LENGTH,
    PREFILL,
    PROMPT_LENGTH,
    QUEUE,
    TTFT,
    XFER,
)
from kneewatch.reports.weekly.figures import DOWN, UP, Trend
from kneewatch.reports.weekly.hours import HOUR_S
from kneewatch.reports.weekly.observed import SERVING, Level, Span, Tally
from kneewatch.reports.weekly.trends import NO_REQUEST, Measure, Of, TierPeriod, trend

COMPLETED, PREEMPTIONS = "request_success", "num_preemptions"
PROMPT, GENERATED, COMPUTED = "prompt_tokens", "generation_tokens", "computed_prompt_tokens"
PREFIX_QUERIES, PREFIX_HITS = "prefix_cache_queries", "prefix_cache_hits"
DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
FAILED = "failed"
"""Finished requests with reason error or abort."""

RESIDENCY = "kv_block_lifetime_seconds"

COUNTS = (
    COMPLETED,
    PREEMPTIONS,
    PROMPT,
    GENERATED,
    PREFIX_QUERIES,
    PREFIX_HITS,
    DRAFTED,
    ACCEPTED,
    "admission_rejections",
)
"""Counters that are read, each summed over its labels; COMPUTED and FAILED are parts of two."""

TALLIES = (TTFT, ITL, E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, OUTPUT_LENGTH, RESIDENCY, XFER)
"""Histograms that are read."""

RUNNING, WAITING, KV_USAGE = "running", "waiting", "kv_usage_ratio"
GPU_MEMORY, GPU_BUSY = "gpu_memory_used_ratio", "gpu_engine_active_ratio"
DEFERRED, ADAPTER_CHANGES = "waiting_deferred", "lora_change_per_s"
LEVELS = (
    RUNNING,
    WAITING,
    KV_USAGE,
    GPU_MEMORY,
    GPU_BUSY,
    DEFERRED,
    ADAPTER_CHANGES,
    "kv_capacity_tokens",
)
"""Gauges that are read."""

EVICTED = "preemption_ratio_per_s"
"""Preemptions over running requests and seconds, kept as a level: its mean is exact."""

SERVED_ONLY = (KV_USAGE, GPU_BUSY)
"""Gauges that are also aggregated over the time in which requests ran only."""

GPU_SOURCE = (
    "pass the DCGM exporter's URL (--gpu-metrics), run the sidecar on the GPU node, or let the "
    "metrics system scrape the exporter"
)
GPU_MISSING = f"no GPU source: {GPU_SOURCE}"
PERCENTS = (50, 95, 99)
NO_SPECULATION = "no speculative decoding in this period"


def quantile(metric: str, q: float) -> Of:
    """A quantile of a histogram."""
    return _of_tally(metric, lambda tally: tally.quantile(q))


def mean(metric: str) -> Of:
    """A histogram's mean."""
    return _of_tally(metric, lambda tally: tally.mean)


def _of_tally(metric: str, figure: Callable[[Tally], float | None]) -> Of:
    def read(span: Span) -> float | None:
        tally = span.tallies.get(metric)
        return None if tally is None else figure(tally)

    return read


def percentiles(
    key: str,
    metric: str,
    unit: str,
    now: TierPeriod | None,
    before: TierPeriod | None,
    *,
    ending: str = "",
    good: str = "",
    missing: str = NO_REQUEST,
) -> dict[str, Trend]:
    """P50, P95, P99 and mean of a histogram, by name: p50, p95, p99, mean. The key of each begins
    with `key` and ends with `ending`."""
    figures = {f"p{percent}": quantile(metric, percent / 100) for percent in PERCENTS}
    return {
        name: trend(
            Measure(f"{key}_{name}{ending}", name.replace("p", "P"), unit, of, good, missing),
            now,
            before,
        )
        for name, of in {**figures, "mean": mean(metric)}.items()
    }


def per_s(count: str) -> Of:
    """A counter's rate per second of all engines, over the time in which any engine was covered."""
    return lambda span: over(span.counts.get(count), span.clock_s)


def ratio(part: str, whole: str) -> Of:
    """The ratio of two counters."""
    return lambda span: over(span.counts.get(part), span.counts.get(whole))


def level(key: str, *, serving: bool = False) -> Of:
    """A gauge's time-weighted mean over the engines; with `serving` while requests ran."""
    return _of_level(key, lambda level: level.mean, serving=serving)


def top(key: str, *, serving: bool = False) -> Of:
    """The highest mean of a gauge on one engine over one hour."""
    return _of_level(key, lambda level: level.top, serving=serving)


def _of_level(key: str, figure: Callable[[Level], float], *, serving: bool) -> Of:
    name = key + SERVING if serving else key

    def read(span: Span) -> float | None:
        level = span.levels.get(name)
        return figure(level) if level is not None and level.known_s > 0 else None

    return read


def share_of_time(part: str) -> Of:
    """The share of requests' time that one phase took."""

    def read(span: Span) -> float | None:
        stage, whole = span.tallies.get(part), span.tallies.get(E2E)
        return None if stage is None or whole is None else over(stage.sum, whole.sum)

    return read


def saved(span: Span) -> float | None:
    """The share of prompt tokens that came from the prefix cache."""
    computed = over(span.counts.get(COMPUTED), span.counts.get(PROMPT))
    return None if computed is None else 1 - computed


def over(part: float | None, whole: float | None) -> float | None:
    """`part` / `whole`; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole is not None and whole > 0 else None


def within(metric: str, bound: float | None) -> Of:
    """The share of observations up to the greatest bucket bound that is at most `bound`."""

    def share(tally: Tally) -> float | None:
        kept = None if bound is None else tally.within(bound)
        return None if bound is None else over(0.0 if kept is None else kept[0], tally.count)

    return _of_tally(metric, share)


def goodput(ttft_target_s: float | None, itl_target_s: float | None) -> Of:
    """Requests served per second within the targets: those with the first token in time, less the
    share of token gaps above the ITL target, where one is set.

    vLLM counts gaps, not requests with a slow one: late gaps are taken to be spread over requests
    that were in time.
    """
    first, gaps = within(TTFT, ttft_target_s), within(ITL, itl_target_s)
    served = per_s(COMPLETED)

    def read(span: Span) -> float | None:
        in_time, all_per_s = first(span), served(span)
        smooth = 1.0 if itl_target_s is None else gaps(span)
        if in_time is None or all_per_s is None or smooth is None:
            return None
        return max(0.0, in_time + smooth - 1) * all_per_s

    return read


def per_gpu(key: str, gpus: float | None) -> Of:
    """A counter per second and GPU, or per second and any other share of an engine."""

    def read(span: Span) -> float | None:
        return None if gpus is None else over(span.counts.get(key), span.engine_s * gpus)

    return read


def tokens_per_gpu_hour(gpus: int | None) -> Of:
    """Generated tokens per hour of a GPU, whether busy or idle."""
    return per_gpu(GENERATED, None if gpus is None else gpus / HOUR_S)


HIT_RATIO = Measure("prefix_hit_ratio", "", "ratio", ratio(PREFIX_HITS, PREFIX_QUERIES), UP,
                    missing="no cache queries: prefix caching off, or no requests")  # fmt: skip
KV_MEAN = Measure("kv_usage_ratio", "while serving", "ratio", level(KV_USAGE, serving=True))
KV_PEAK = Measure("kv_usage_peak_ratio", "busiest hour of an engine", "ratio",
                  top(KV_USAGE, serving=True))  # fmt: skip
EVICTION = Measure("preemption_ratio_per_s", "", "ratio_per_s", level(EVICTED), DOWN,
                   missing="preemptions or running requests are not on the page")  # fmt: skip
EVICTION_PEAK = Measure("preemption_ratio_peak_per_s", "worst hour of an engine", "ratio_per_s",
                        top(EVICTED), DOWN, missing=EVICTION.missing)  # fmt: skip
TTFT_P50 = Measure("ttft_p50_s", "P50", "s", quantile(TTFT, 0.5), DOWN)
TTFT_P99 = Measure("ttft_p99_s", "P99", "s", quantile(TTFT, 0.99), DOWN)
ITL_P50 = Measure("itl_p50_s", "P50", "s", quantile(ITL, 0.5), DOWN)
ITL_P99 = Measure("itl_p99_s", "P99", "s", quantile(ITL, 0.99), DOWN)
SERVED = Measure("served_per_s", "throughput", "per_s", per_s(COMPLETED))
