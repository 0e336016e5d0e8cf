"""Every signal as kneewatch computes it and as a real Prometheus does: they agree to 1e-6."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import gt
from typing import cast

import pytest
from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.scrape_history import History
from kneewatch.collector.signals import expr
from kneewatch.collector.signals.expr import Expr, FirstValue, HereOnly
from kneewatch.collector.signals.promql import Dialect, promql
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.table import TTFT, VLLM_SIGNALS, configured
from tests.collector.oracle import Prometheus, Target, running
from tests.collector.oracle_compare import Comparison, Feed
from tests.collector.oracle_targets import captured, generated, grown, on_edges, paged, spellings
from tests.programs import require

RANGES_MS = (15_000, 60_000, 300_000)
START_MS = 1_795_219_000_000
CATALOGUE = (
    *VLLM_SIGNALS,
    *configured(
        ttft_slo_s=2.5, itl_slo_s=0.05, gpus=2, peak_flop_per_s=1e15, peak_bytes_per_s=3e12
    ),
)
WITHOUT_PROMQL = (
    expr.InfoLabel,
    expr.BitShare,
    expr.HereOnly,
    expr.SumOfKnown,
)
"""Numbers and names inside labels, which PromQL cannot count, bits, which it cannot test, and what
names no engine."""

CAPTURES = ("lora_thrash", "spec_mixed", "kv_pressure_cascade", "prefix_churn", "restart_mid_run")
UNASKED = ("cache_config_info", "lmcache_", "http_requests", "process_resident", "process_open")
"""What PromQL says nothing of is not generated: the signals beside it would differ from it."""

STAGES = "num_requests_kv_fetch_by_stage"
DIRECTIONS = "kv_offload_size"
BARE = "corrupted_requests"
KINDS: dict[str, Expr] = {
    "gauge": expr.Gauge(STAGES),
    "gauge_where": expr.Gauge(STAGES, (("stage", "in_progress"),)),
    **{f"across_{fold}": expr.Gauge(STAGES, fold=fold) for fold in ("avg", "min", "max", "sum")},
    **{f"{fold}_over_time": expr.OverTime(STAGES, fold) for fold in ("avg", "min", "max")},
    "slope": expr.Slope(STAGES),
    "rate": expr.Rate("request_success"),
    "rate_where": expr.Rate("request_success", (("finished_reason", "stop"),)),
    "rate_bare": expr.Rate(BARE, suffix=""),
    "count": expr.Count("request_success"),
    "count_where": expr.Count("request_success", (("finished_reason", "stop"),)),
    "count_bare": expr.Count(BARE, suffix=""),
    **{f"{part}_rate": expr.Rate(DIRECTIONS, suffix=f"_{part}") for part in ("sum", "count")},
    **{f"quantile_{q}": expr.Quantile(DIRECTIONS, q) for q in (0.0, 0.01, 0.5, 0.95, 1.0)},
    **{f"ttft_{q}": expr.Quantile(TTFT, q) for q in (0.05, 0.5, 0.9, 0.99)},
    "share": expr.ShareAtMost(DIRECTIONS, 2.0),
    "above": expr.AboveRate(DIRECTIONS, 2.0),
    "slow": expr.SlowTimeShare(DIRECTIONS, (2.0, 5.0, 100.0)),
    "slow_beyond_the_buckets": expr.SlowTimeShare(TTFT, (1.0, 2.5, 80.0)),
    "info_changes": expr.InfoChanges("lora_requests_info"),
    "complement": expr.complement(expr.Gauge("kv_cache_usage_perc")),
    "difference": expr.difference(
        expr.Rate(TTFT, suffix="_count"), expr.Rate(DIRECTIONS, suffix="_count")
    ),
    "product": expr.product(expr.Rate("num_preemptions"), expr.Gauge(STAGES)),
    "sum": expr.total(expr.Rate("num_preemptions"), expr.Gauge(STAGES)),
    "positive": expr.kept_if(expr.Rate("num_preemptions"), ">", gt, 0),
    "first": expr.FirstValue((expr.Quantile(TTFT, 0.5), expr.Quantile(DIRECTIONS, 0.5))),
    "beside": expr.Beside(expr.Rate("num_preemptions"), expr.Rate("lmcache_num_hit_tokens"), "max"),
    "scaled": expr.scaled(expr.ratio(expr.Rate("num_preemptions"), expr.Gauge(STAGES)), 0.6),
}


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with running(require("prometheus")) as server:
        yield server


# What was recorded


@pytest.mark.parametrize("name", CAPTURES)
def test_every_signal_of_a_capture(prometheus: Prometheus, name: str) -> None:
    target = captured(name)
    times = [t_ms for t_ms, page in target.scrapes if page is not None]
    back = [t_ms for (_, lost), (t_ms, page) in pairwise(target.scrapes) if page and not lost]
    at_scrapes = {times[0], times[1], times[len(times) // 2], times[-1], *back}
    between = {times[1] + 777, times[len(times) // 3] + 777, *(t_ms + 5_500 for t_ms in back)}
    instants = sorted({*at_scrapes, *between, times[-1] + 14_000})
    comparison = compare(prometheus, target, instants, RANGES_MS)
    assert comparison.valued.total() > 1_000


@pytest.mark.parametrize(
    "page",
    [
        *("0.8.5-rendered", "0.10.0-rendered", "0.11.2-rendered", "0.14.0-rendered"),
        *("0.17.0-rendered", "0.24.0-rendered", "0.32.0-kv-metrics"),
    ],
)
def test_every_signal_by_the_names_of_a_version(prometheus: Prometheus, page: str) -> None:
    target = grown(page, f"vllm-{page}.txt.gz", start_ms=START_MS, scrapes=12)
    instants = [START_MS, START_MS + 2_000, START_MS + 9_300, START_MS + 22_000]
    comparison = compare(prometheus, target, instants, RANGES_MS[:2])
    assert comparison.valued.total() > 300


@pytest.mark.parametrize("version", ["0.27.0", "0.28.0"])
def test_every_signal_of_successive_pages(prometheus: Prometheus, version: str) -> None:
    pages = [f"vllm-{version}-{state}.txt.gz" for state in ("fresh", "during", "loaded")]
    target = paged(version, pages, start_ms=START_MS)
    comparison = compare(prometheus, target, [START_MS + 2_000, START_MS + 4_500], RANGES_MS[:2])
    assert comparison.valued.total() > 200


def test_after_a_restart_nothing_before_it_counts(prometheus: Prometheus) -> None:
    target = replace(captured("restart_mid_run"), instance="restarted")
    prometheus.load([target])
    feed = Feed(target, CATALOGUE, History)
    feed.until(target.scrapes[0][0])
    (history,) = feed.histories.values()
    comparison = Comparison(prometheus, CATALOGUE)
    for t_ms, page in target.scrapes[::3]:
        feed.until(t_ms)
        observed_ms = t_ms - round(1000 * history.first_s)
        if page is not None and observed_ms:
            comparison.at([feed], t_ms, dialect_of(target, min(60_000, observed_ms)))
    comparison.check()
    assert history.restarts == 1
    assert comparison.valued.total() > 500


def compare(
    prometheus: Prometheus, target: Target, instants: Sequence[int], ranges_ms: Sequence[int]
) -> Comparison:
    """All signals of the catalogue on a target alone, which Prometheus sees without restarts."""
    prometheus.load([target])
    feed = Feed(target, CATALOGUE)
    comparison = Comparison(prometheus, CATALOGUE)
    for t_ms in instants:
        feed.until(t_ms)
        for range_ms in ranges_ms:
            comparison.at([feed], t_ms, dialect_of(target, range_ms))
    comparison.check()
    return comparison


def dialect_of(target: Target, range_ms: int) -> Dialect:
    """How to ask for a target alone, by the names on its pages."""
    layout = next(page.layout for _, page in reversed(target.scrapes) if page is not None)
    return Dialect(
        range_ms / 1000, selector=f'instance="{target.instance}"', names=spellings(layout)
    )


# What was made up


def test_every_kind_of_expression_on_generated_targets(prometheus: Prometheus) -> None:
    signals = [Signal(key, kind, "", "") for key, kind in KINDS.items()]
    instants_s = (0, 10, 45.5, 60, 95.5, 150, 225, 301.234, 450, 900)
    comparison = compare_generated(prometheus, signals, range(30), instants_s)
    assert set(comparison.valued) == set(KINDS)
    assert comparison.compared > 40_000


def test_every_signal_on_generated_targets(prometheus: Prometheus) -> None:
    comparison = compare_generated(prometheus, CATALOGUE, range(100, 108), (30, 150, 333.3))
    of_vllm = metric_table().metrics.keys()
    asked = {
        signal.key
        for signal in CATALOGUE
        if promql(signal.expr, Dialect(60.0)) is not None
        and not of_vllm.isdisjoint(metrics_of([signal]))
    }
    assert set(comparison.valued) == asked


@pytest.mark.parametrize("name", ["edges-a", "edges-b", "edges-c"])
def test_quantiles_on_the_edge_of_a_bucket(prometheus: Prometheus, name: str) -> None:
    signals = [Signal(f"p{5 * n}", expr.Quantile(TTFT, n / 20), "", "") for n in range(1, 20)]
    target = on_edges(name, start_ms=START_MS, scrapes=40)
    prometheus.load([target])
    feed = Feed(target, signals)
    comparison = Comparison(prometheus, signals)
    for t_ms, _ in target.scrapes[1::3]:
        feed.until(t_ms)
        for range_ms in (*RANGES_MS, 37_501):
            comparison.at([feed], t_ms, dialect_of(target, range_ms))
    comparison.check()
    assert comparison.valued.total() > 500


def compare_generated(
    prometheus: Prometheus,
    signals: Sequence[Signal],
    seeds: Iterable[int],
    instants_s: Sequence[float],
) -> Comparison:
    """Signals on targets of all seeds, which are asked for together."""
    metrics = [metric for metric in metrics_of(signals) if not metric.startswith(UNASKED)]
    targets = [generated(seed, metrics, start_ms=START_MS, scrapes=45) for seed in seeds]
    prometheus.load(targets)
    selector = f'instance=~"{"|".join(target.instance for target in targets)}"'
    feeds = [Feed(target, signals) for target in targets]
    comparison = Comparison(prometheus, signals)
    for t_ms in (START_MS + round(1000 * since_s) for since_s in instants_s):
        for feed in feeds:
            feed.until(t_ms)
        for range_ms in (*RANGES_MS, 37_501):
            comparison.at(feeds, t_ms, Dialect(range_ms / 1000, selector=selector))
    comparison.check()
    return comparison


def metrics_of(signals: Iterable[Signal]) -> list[str]:
    """The metrics that signals read."""
    metrics: dict[str, None] = {}

    def has(metric: str) -> bool:
        metrics[metric] = None
        return False

    for signal in signals:
        signal.expr.lacking(has)
    return list(metrics)


# What is compared


def test_every_kind_of_expression_is_among_those_compared() -> None:
    compared_kinds = {
        member
        for _, member in inspect.getmembers(expr, inspect.isclass)
        if issubclass(member, Struct) and hasattr(member, "bind")
    }
    used = {type(part) for kind in KINDS.values() for part in parts_of(kind)}
    assert compared_kinds == used.union(WITHOUT_PROMQL)


def test_only_what_labels_spell_or_bits_say_has_no_promql() -> None:
    for signal in CATALOGUE:
        has_promql = promql(signal.expr, Dialect(60.0)) is not None
        spelled = {type(part) for part in parts_of(signal.expr)}.intersection(WITHOUT_PROMQL)
        assert has_promql != bool(spelled), signal.key


def parts_of(expression: Expr) -> Iterator[Expr]:
    """An expression and those it is made of, without what only other engines than vLLM show."""
    yield expression
    assert isinstance(expression, Struct)
    for value in astuple(expression):
        for part in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            other_engines = isinstance(expression, FirstValue) and isinstance(part, HereOnly)
            if hasattr(part, "bind") and not other_engines:
                yield from parts_of(cast("Expr", part))
