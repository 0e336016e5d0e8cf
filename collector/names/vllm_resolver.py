"""Resolves a page's series to canonical vLLM metrics, once per layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, engine_kinds
from kneewatch.collector.engines.translation import Combined, Translated, completed, translate
from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_metrics import (
    EngineKey,
    Engines,
    HistogramSlots,
    Labels,
    MetricTable,
    PageSeries,
    find_engines,
    find_prefix,
    is_unowned,
    metric_table,
    read_histograms,
    read_names,
)
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.page import Layout, Page


class ValueSlot(Struct, frozen=True):
    """The position of a value in `Page.values`, and the metric's own labels, such as `reason`."""

    position: int
    labels: Labels = ()


class EngineBinding(Struct, frozen=True):
    """The positions of one engine's values, by canonical metric name.

    - `infos`: info metrics, whose labels carry the information.
    - `created`: the positions of `_created` times, which change at a restart.
    - `shared`: metrics that other engines of the page have as well.
    - `zeros`: core counters that are 0 and therefore not on the page.
    - `kind`: the engine's kind.
    """

    key: EngineKey
    gauges: Mapping[str, tuple[ValueSlot, ...]]
    counters: Mapping[str, tuple[ValueSlot, ...]]
    histograms: Mapping[str, tuple[HistogramSlots, ...]]
    infos: Mapping[str, tuple[ValueSlot, ...]]
    created: tuple[int, ...]
    shared: frozenset[str]
    zeros: frozenset[str] = frozenset()
    kind: EngineKind = VLLM

    def info(self, name: str, values: Sequence[float]) -> Mapping[str, str]:
        """The labels of an info metric; empty if the page has none.

        Of several series, the newest is used: the one with the greatest value.
        """
        slots = [s for s in self.infos.get(name, ()) if not math.isnan(values[s.position])]
        newest = max(slots, key=lambda slot: values[slot.position], default=ValueSlot(-1))
        return dict(newest.labels)


class Binding(Struct, frozen=True):
    """The positions of all values in a page layout, and values to compute and append to it."""

    prefix: str
    engines: tuple[EngineBinding, ...]
    process_start: int | None
    computed: tuple[Combined, ...] = ()

    def completed(self, page: Page) -> Page:
        """The page with the computed values, to which positions may refer."""
        return completed(page, self.computed) if self.computed else page


# --- One engine's own KV blocks where several share a page. Pure ----------------------------------
#
# vLLM's front end adds up `num_gpu_blocks` over the data-parallel engines that it starts and
# writes the sum on the row of each; `kv_cache_size_tokens` is one engine's. Of tensor-parallel
# ranks an engine takes the smallest pool for all.
#
# Source: vllm/v1/engine/core_client.py (`_apply_ready_response`) and
# vllm/v1/core/kv_cache_utils.py (`min_num_blocks`) of 0.32; older ones add up in
# vllm/v1/engine/utils.py.


CONFIG = "cache_config_info"
BLOCKS = "num_gpu_blocks"


def own_pools(engines: Sequence[EngineBinding]) -> Iterator[EngineBinding]:
    """The engines of a page, each with its own number of KV blocks.

    On some pages every engine shows the sum of all engines' blocks; the sum is then divided.
    """
    beside: dict[tuple[str, str], list[EngineBinding]] = {}
    for engine in engines:
        beside.setdefault((engine.key.model, engine.key.replica), []).append(engine)
    for engine in engines:
        group = beside[engine.key.model, engine.key.replica]
        own = [
            member for member in group if member.infos.get(CONFIG) and CONFIG not in member.shared
        ]
        rows = [dict(member.infos[CONFIG][0].labels) for member in own]
        blocks = own_blocks(rows) if len(rows) == len(group) else None
        yield engine if blocks is None else _with_blocks(engine, blocks)


def _with_blocks(engine: EngineBinding, blocks: str) -> EngineBinding:
    rows = tuple(
        replace(
            row,
            labels=tuple(
                (label, blocks if label == BLOCKS else value) for label, value in row.labels
            ),
        )
        for row in engine.infos[CONFIG]
    )
    return replace(engine, infos={**engine.infos, CONFIG: rows})


def own_blocks(rows: Sequence[Mapping[str, str]]) -> str | None:
    """The KV blocks of one engine, from the cache_config_info rows of all engines of a page.

    If every row shows the sum of all engines, the result is the mean. None if each row already
    shows its own engine's number.
    """
    shown = {row.get(BLOCKS, "") for row in rows}
    if len(rows) < 2 or len(shown) > 1:
        return None
    total, fixed = _count(rows[0], BLOCKS), _count(rows[0], f"{BLOCKS}_override")
    block, size = _count(rows[0], "block_size"), _count(rows[0], "kv_cache_size_tokens")
    if not total or total == fixed or (block and size == total * block):
        return None
    each = total // len(rows)
    return str(each) if each else None


def _count(row: Mapping[str, str], label: str) -> int | None:
    text = row.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


# What vLLM calls a metric on this page: names, prefixes and labels, resolved once per layout. Pure.
#
# vLLM renames metrics, deployments prefix and relabel them. `resolve` finds for each engine on a
# page where the values of each metric stand, under the metric's newest name.
#
# A metric without an engine label is given to every engine that it may belong to, and named in
# `EngineBinding.shared`. Metrics of LMCache and of the HTTP server count what one engine does: if a
# page has several engines, none of them gets these metrics.


_ENGINE_LABELS = frozenset({"model_name", "engine", "le"})


_bindings: WeakKeyDictionary[Layout, Binding | CollectError] = WeakKeyDictionary()
"""The bindings of the layouts in use, or why a layout has none."""


def resolve(layout: Layout) -> Binding:
    """Positions of the values of vLLM's metrics on pages of this layout; cached per layout.

    Raises:
        CollectError: of kind `no_vllm`, if the page has none of vLLM's core metrics; too_large, if
            it has too many engines.
    """
    binding = _bindings.get(layout)
    if binding is None:
        try:
            binding = _resolved(layout)
        except CollectError as error:
            binding = error
        _bindings[layout] = binding
    if isinstance(binding, CollectError):
        raise binding.detached()
    return binding


def _resolved(layout: Layout) -> Binding:
    kind, page = _translated(layout, metric_table())
    names = page.names
    engines = find_engines(names.identified)
    bound = [
        _bind(key, mine, shared, engines.target_labels, kind)
        for key, mine, shared in _by_engine(names.identified, engines)
    ]
    present = {series.name for series in layout.series}
    # Ray shows a counter only once it is not 0, and so do some engines.
    if names.prefix.startswith("ray") or names.prefix + (kind.zeros_with or " ") in present:
        bound = [_with_zeros(engine) for engine in bound]
    return Binding(names.prefix, tuple(own_pools(bound)), names.process_start, page.computed)


def bound_as(layout: Layout, kind: EngineKind) -> Binding:
    """A page of a program that is no engine, as a single one with the metrics of `kind`."""
    page = translate(layout, kind, "")
    series: dict[str, list[PageSeries]] = {}
    for each in page.names.identified:
        series.setdefault(each.sample.metric.name, []).append(each)
    bound = _bind(EngineKey(kind.title, ""), series, frozenset(), frozenset(), kind)
    return Binding("", (bound,), page.names.process_start, page.computed)


ANY_LATENCY = "time_to_first_token_seconds_count"
"""A sample of each of vLLM's pages, and of no router's."""


def _translated(layout: Layout, table: MetricTable) -> tuple[EngineKind, Translated]:
    """The kind of the engines of a page, and the page's canonical series."""
    names = {series.name for series in layout.series}
    prefix, kind = find_prefix(names, table), VLLM
    if not names.isdisjoint(STACK_ROUTER) and f"{prefix}{ANY_LATENCY}" not in names:
        raise _not_vllm(layout)
    if prefix is not None:
        page = Translated(read_names(layout, prefix, table))
    else:
        own = ((each, each.prefix_of(names)) for each in engine_kinds())
        kind, prefix = next((row for row in own if row[1] is not None), (VLLM, None))
        if prefix is None:
            raise _not_vllm(layout)
        page = translate(layout, kind, prefix)
    for program in engine_kinds():
        if program.beside and any(name.startswith(program.beside) for name in names):
            added = translate(layout, program, prefix, len(page.computed))
            return kind.served_by(program), page.with_others(added)
    return kind, page


def _by_engine(
    page_series: Sequence[PageSeries], engines: Engines
) -> Iterator[tuple[EngineKey, Mapping[str, list[PageSeries]], frozenset[str]]]:
    """Yields each engine with its series by metric, and those of its metrics that other engines
    share."""
    series: list[dict[str, list[PageSeries]]] = [{} for _ in engines.keys]
    shared: list[set[str]] = [set() for _ in engines.keys]
    for f, owners in zip(page_series, engines.owners, strict=True):
        name = f.sample.metric.name
        for index in owners:
            series[index].setdefault(name, []).append(f)
            if len(owners) > 1:
                shared[index].add(name)
    for key, mine, others in zip(engines.keys, series, shared, strict=True):
        yield key, mine, frozenset(others)


def _bind(
    key: EngineKey,
    series: Mapping[str, Sequence[PageSeries]],
    shared: frozenset[str],
    target_labels: frozenset[str],
    kind: EngineKind,
) -> EngineBinding:
    """The binding of one engine, from its series by metric."""
    slots: dict[str, dict[str, tuple[ValueSlot, ...]]] = {"gauge": {}, "counter": {}, "info": {}}
    histograms: dict[str, tuple[HistogramSlots, ...]] = {}
    created: list[int] = []
    drop = _ENGINE_LABELS | target_labels
    for name, all_spellings in series.items():
        kept, times = _newest(all_spellings)
        # The HTTP server may be another process, which outlives its engine.
        created += [] if is_unowned(all_spellings[0]) else times
        metric = all_spellings[0].sample.metric
        not_own = drop.difference(metric.labels)
        labelled = [(f, tuple([p for p in f.labels if p[0] not in not_own])) for f in kept]
        if metric.kind == "histogram":
            if good := read_histograms(labelled):
                histograms[name] = good
        elif kept:
            slots[metric.kind][name] = tuple(ValueSlot(f.position, own) for f, own in labelled)
    return EngineBinding(
        key=key,
        gauges=slots["gauge"],
        counters=slots["counter"],
        histograms=histograms,
        infos=slots["info"],
        created=tuple(sorted(created)),
        shared=shared,
        kind=kind,
    )


def _with_zeros(engine: EngineBinding) -> EngineBinding:
    """The engine with `zeros` set, for a page that leaves out counters that are 0.

    Every core counter that the page lacks then counts as 0, or those that its kind names.
    """
    core = {
        metric.name
        for metric in metric_table().metrics.values()
        if metric.core and metric.kind == "counter" and not metric.labels
    }
    counters = engine.kind.zeros or core
    return replace(engine, zeros=frozenset(counters - engine.counters.keys()))


def _newest(metric_series: Sequence[PageSeries]) -> tuple[list[PageSeries], list[int]]:
    """The series of one metric under its best-ranked name, and the positions of its `_created`
    times."""
    values = [f for f in metric_series if f.sample.part != "created"]
    best = min((f.sample.rank for f in values), default=0)
    kept = [f for f in values if f.sample.rank == best]
    return kept, [f.position for f in metric_series if f.sample.part == "created"]


# --- Pages of other programs. Pure ----------------------------------------------------------------


STACK_ROUTER = ("vllm:current_qps", "vllm:healthy_pods_total")
"""Metrics of the production-stack router. It also has some of vLLM's, of each server behind it."""


def _not_vllm(layout: Layout) -> CollectError:
    """The error for a page without vLLM's core metrics.

    It names the program that serves the page, if known, and what to try.
    """
    names = sorted({*(series.name for series in layout.series), *layout.types})
    for program in packaged_tables("collector.engines", "other_programs.toml")["programs"]:
        if any(name.startswith(tuple(program["names"])) for name in names):
            message = f"no vLLM metrics on this page: it is a page of {program['title']}"
            return CollectError(message, kind="no_vllm", hint=program["hint"])
    message, hint = (
        "no vLLM metrics on this page",
        ("check that this is vLLM's own /metrics, and that vLLM runs without --disable-log-stats"),
    )
    partial = sorted({series.name for series in layout.series if "vllm" in series.name})
    if partial:
        metrics = "1 vLLM metric" if len(partial) == 1 else f"{len(partial)} vLLM metrics"
        named = ", ".join(
            [*partial[:_NAMES_SHOWN], *(["..."] if len(partial) > _NAMES_SHOWN else [])]
        )
        message = f"only {metrics} on this page ({named}), none about load, tokens or latency"
        hint = (
            "keep all names that start with vllm: in the scraper's relabelling rules; "
            "for a router, give the addresses of the servers behind it"
        )
    elif any("vllm" in name for name in names):
        hint = "send vLLM a request: it has no metrics before the first one"
    return CollectError(message, kind="no_vllm", hint=hint)


_NAMES_SHOWN = 3
