"""Recording rules that sum counters and histograms over the engines of a tier. Reports on long
periods read them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.promql import Dialect
from kneewatch.collector.signals.table import (
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

# A week of a large fleet's histograms is billions of scraped samples; these are a few hundred
# series with a sample every five minutes. Reports add them up by the hour.

SUM_STEP_S = 300.0
"""Seconds between two sums, and seconds that each sum covers. Targets must be scraped at least
every 150 s."""

SUMMED_COUNTERS: Mapping[str, tuple[str, Where]] = {
    **{
        name: (name, ())
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
    "computed_prompt_tokens": ("prompt_tokens_by_source", (("source", "local_compute"),)),
    "failed": ("request_success", (("finished_reason", "error|abort"),)),
}
"""Counters by their names in reports: the metric, and labels of those of its series that count."""

SUMMED_HISTOGRAMS = (TTFT, ITL, E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, OUTPUT_LENGTH,
              "kv_block_lifetime_seconds", XFER)  # fmt: skip

SUMMED_ENGINES = "tier:kneewatch_engines:count5m"
"""The recorded number of engines in the sums. It shows whether the sums are complete."""

COUNTED_BY = "generation_tokens"


def increase(dialect: Dialect, key: str, part: str, by: Sequence[str]) -> str:
    """A PromQL expression for the increase of a counter, or of a part of a histogram (`bucket`,
    `sum` or `count`), summed by the labels `by`."""
    metric, where = (key, ()) if part else SUMMED_COUNTERS[key]
    words, suffix = f"increase({{}}[{dialect.range}])", f"_{part or 'total'}"
    return replace(dialect, by=tuple(by)).folded(words, metric, suffix, where)


def summed_series(key: str, part: str = "") -> str:
    """The name of the series in which the result of `increase` is recorded."""
    ending = f"_{part}" if part else ""
    return f"tier:kneewatch_{key}{ending}:increase{round(SUM_STEP_S / 60)}m"


def hourly_group(plan: Plan) -> Group:
    """Recording rules for the sums. Each evaluation sums over the SUM_STEP_S seconds before it."""
    dialect = Dialect(SUM_STEP_S, POOL_LABELS, plan.selector, {}, plan.prefix)
    totals = [(key, "", POOL_LABELS) for key in SUMMED_COUNTERS]
    for metric in SUMMED_HISTOGRAMS:
        totals += [(metric, "bucket", (*POOL_LABELS, "le")), (metric, "sum", POOL_LABELS)]
    rules = [
        Record(summed_series(key, part), increase(dialect, key, part, by))
        for key, part, by in totals
    ]
    counted = f"increase({dialect.series(COUNTED_BY, '_total')}[{dialect.range}])"
    engines = f"count by ({', '.join(POOL_LABELS)}) ({counted})"
    return Group(
        "kneewatch-hourly", (Record(SUMMED_ENGINES, engines), *rules), interval_s=SUM_STEP_S
    )
