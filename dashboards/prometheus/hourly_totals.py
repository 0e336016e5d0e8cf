"""What counters and histograms gained, added up over each tier's engines: for long reports. Pure.

A week of a large fleet's histograms is billions of scraped samples; these are a few hundred series
with a sample every five minutes. Reports add them up by the hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.collector.signals.expr import Dialect
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
from kneewatch.dashboards.prometheus.rule_group import POOL_LABELS, Group, Plan, Record

STEP_S = 300.0
"""How often it is recorded, and over how long: needs a scrape every 150 s at least."""

COUNTERS: Mapping[str, tuple[str, str]] = {
    **{
        name: (name, "")
        for name in (
            "request_success",
            "num_preemptions",
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "admission_rejections",
        )
    },
    "computed_prompt_tokens": ("prompt_tokens_by_source", 'source="local_compute"'),
    "failed": ("request_success", 'finished_reason=~"error|abort"'),
}
"""Counters by what reports call them: metric, and which of its series."""

HISTOGRAMS = (TTFT, ITL, E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, OUTPUT_LENGTH,
              "kv_block_lifetime_seconds", XFER)  # fmt: skip

ENGINES = "tier:kneewatch_engines:count5m"
"""Number of engines in the sums: shows where they are complete."""

COUNTED_BY = "generation_tokens"


def increase(dialect: Dialect, key: str, part: str, by: Sequence[str]) -> str:
    """What a counter, or a histogram's `bucket`s, `sum` or `count`, gained, added up by labels."""
    series = _series(dialect, key, part)
    return f"sum by ({', '.join(by)}) (increase({series}[{dialect.range}]))"


def kept(key: str, part: str = "") -> str:
    """The recorded series of the same."""
    ending = f"_{part}" if part else ""
    return f"tier:kneewatch_{key}{ending}:increase{round(STEP_S / 60)}m"


def hourly_group(plan: Plan) -> Group:
    """The sums, each over the time since the one before."""
    dialect = Dialect(STEP_S, POOL_LABELS, plan.selector, {}, plan.prefix)
    totals = [(key, "", POOL_LABELS) for key in COUNTERS]
    for metric in HISTOGRAMS:
        totals += [(metric, "bucket", (*POOL_LABELS, "le")), (metric, "sum", POOL_LABELS)]
    rules = [Record(kept(key, part), increase(dialect, key, part, by)) for key, part, by in totals]
    counted = f"increase({_series(dialect, COUNTED_BY, '')}[{dialect.range}])"
    engines = f"count by ({', '.join(POOL_LABELS)}) ({counted})"
    return Group("kneewatch-hourly", (Record(ENGINES, engines), *rules), interval_s=STEP_S)


def _series(dialect: Dialect, key: str, part: str) -> str:
    if part:
        return dialect.series(key, f"_{part}")
    metric, only = COUNTERS[key]
    return dialect.series(metric, "_total", extra=only)
