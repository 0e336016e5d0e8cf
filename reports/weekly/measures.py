"""The figures of a tier, each computed from a span. Pure.

Counters, histograms and gauges are named as vLLM's current versions do, without prefix.
"""

from __future__ import annotations

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
from kneewatch.reports.weekly.figures import DOWN, UP
from kneewatch.reports.weekly.hours import HOUR_S
from kneewatch.reports.weekly.observed import SERVING, Span
from kneewatch.reports.weekly.trends import Measure, Of

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
NO_SPECULATION = "no speculative decoding in this period"


def quantile(metric: str, q: float) -> Of:
    """A quantile of a histogram."""

    def read(span: Span) -> float | None:
        tally = span.tallies.get(metric)
        return None if tally is None else tally.quantile(q)

    return read


def mean(metric: str) -> Of:
    """A histogram's mean."""

    def read(span: Span) -> float | None:
        tally = span.tallies.get(metric)
        return None if tally is None else tally.mean

    return read


def per_s(count: str) -> Of:
    """A counter's rate per second of all engines, over the time in which any engine was covered."""
    return lambda span: over(span.counts.get(count), span.clock_s)


def ratio(part: str, whole: str) -> Of:
    """The ratio of two counters."""
    return lambda span: over(span.counts.get(part), span.counts.get(whole))


def level(key: str, *, serving: bool = False) -> Of:
    """A gauge's time-weighted mean over the engines; with `serving` while requests ran."""
    name = key + SERVING if serving else key

    def read(span: Span) -> float | None:
        level = span.levels.get(name)
        return level.mean if level is not None and level.known_s > 0 else None

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


def top(key: str, *, serving: bool = False) -> Of:
    """The highest mean of a gauge on one engine over one hour."""
    name = key + SERVING if serving else key

    def read(span: Span) -> float | None:
        level = span.levels.get(name)
        return level.top if level is not None and level.known_s > 0 else None

    return read


def over(part: float | None, whole: float | None) -> float | None:
    """`part` / `whole`; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole is not None and whole > 0 else None


def within(metric: str, bound: float | None) -> Of:
    """The share of observations up to the greatest bucket bound that is at most `bound`."""

    def read(span: Span) -> float | None:
        tally = span.tallies.get(metric)
        if tally is None or bound is None:
            return None
        kept = tally.within(bound)
        return over(0.0 if kept is None else kept[0], tally.count)

    return read


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

    def read(span: Span) -> float | None:
        return None if gpus is None else over(
            span.counts.get(GENERATED), span.engine_s / HOUR_S * gpus
        )  # fmt: skip

    return read


HIT_RATIO = Measure("prefix_hit_ratio", "", "ratio", ratio(PREFIX_HITS, PREFIX_QUERIES), UP,
                    missing="no prompt was looked up: prefix caching is off, or nothing was "
                    "asked")  # fmt: skip
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
SERVED = Measure("served_per_s", "requests served", "per_s", per_s(COMPLETED))
