"""Recording and alerting rules, and the plan from which they are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import EngineKind, kind_of
from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.promql import Dialect, range_s
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
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.doc_links import DEFAULT_DOCS
from kneewatch.diagnose.fleet.inventory import DEFAULTS, GROUPS

LABELS = (
    "cluster",
    "namespace",
    "job",
    "pod",
    "instance",
    "tier",
    "model_name",
    "engine",
)
"""Labels that distinguish engines, and labels by which people find engines. A label that does not
exist does no harm."""

POOL_LABELS = tuple(dict.fromkeys(("job", *(name for part in GROUPS for name in DEFAULTS[part]))))
"""Labels that distinguish tiers, models and pools, but not the engines of a pool. A label that does
not exist does no harm."""


class Plan(Profile, frozen=True):
    """The profile for which rules are made, and the labels and names of their series.

    `interval_s` is the evaluation interval, `scrape_s` the scrape interval. `objective_ratio` is
    the share of requests that must meet the targets. `prefix` is the prefix of the engine's metric
    names; `other_prefixes` are those of further engines.

    `triage_url` is the start of a triage page's address; a target's `instance` is appended.
    `grafana_url` is the base address of Grafana's pages, `docs_url` that of the pages about causes
    and rules.

    `gpu_selector` restricts DCGM's series. `lean`: alerts only, no recorded series.
    """

    interval_s: float = 15.0
    scrape_s: float = 15.0
    objective_ratio: float = 0.99
    labels: tuple[str, ...] = LABELS
    prefix: str = VLLM_PREFIX
    other_prefixes: tuple[str, ...] = ()
    selector: str = ""
    triage_url: str = ""
    grafana_url: str = ""
    docs_url: str = ""
    gpu_selector: str = ""
    lean: bool = False

    @property
    def range_s(self) -> float:
        """The range over which rules look back, in seconds: the configured window, but at least
        four scrapes."""
        return range_s(self.window_s, self.scrape_s)

    def serves(self, fixed_s: float) -> bool:
        """Whether a range of `fixed_s` seconds contains at least four scrapes."""
        return range_s(fixed_s, self.scrape_s) <= fixed_s

    @property
    def settles_s(self) -> float:
        """Seconds that an alert's condition must hold before it fires: a window, and at least two
        scrapes."""
        return max(self.window_s, 2 * self.scrape_s)

    @property
    def runbooks(self) -> str:
        """The base address of the pages about causes and rules: `docs_url`, else the daemon's own
        pages, which are at their default address if no other is known."""
        if self.docs_url or not self.triage_url:
            return self.docs_url or DEFAULT_DOCS
        return f"{self.triage_url.rstrip('/').removesuffix('/triage')}/docs"

    @property
    def dialect(self) -> Dialect:
        """The dialect for compiling PromQL expressions: labels, range, selector and prefix."""
        return Dialect(self.range_s, self.labels, self.selector, {}, self.prefix)

    @property
    def by_engine(self) -> tuple[Plan, ...]:
        prefixes = (self.prefix, *self.other_prefixes)
        return tuple(replace(self, prefix=prefix, other_prefixes=()) for prefix in prefixes)

    @property
    def engine(self) -> EngineKind:
        """The kind of engine that `prefix` names."""
        return kind_of(self.prefix)

    @property
    def pool(self) -> str:
        """The labels that all replicas of a pool share, joined to a text for `by` and `on`."""
        return ", ".join(label for label in self.labels if label in POOL_LABELS)


class Record(Struct, frozen=True):
    """A recording rule."""

    name: str
    expr: str
    labels: Mapping[str, str] = {}


class Alert(Struct, frozen=True):
    """An alerting rule. It fires once `expr` has had a value for `for_s` seconds."""

    name: str
    expr: str
    for_s: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Group(Struct, frozen=True):
    """Rules that are evaluated one after the other.

    `interval_s` is the evaluation interval in seconds; None for that of the plan.
    """

    name: str
    rules: tuple[Record | Alert, ...]
    interval_s: float | None = None


def span(seconds: float) -> str:
    """A PromQL duration in the largest unit that gives a whole number: `2m`, `90s`."""
    for unit, length_s in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length_s and seconds % length_s == 0:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{max(1, round(1000 * seconds))}ms"


# --- Recording rules that sum counters and histograms over the engines of a tier ------------------


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
