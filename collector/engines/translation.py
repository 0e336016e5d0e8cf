"""Translates the series of an engine's page to canonical ones, once per layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from kneewatch.collector.engines.engine_kind import EngineKind, Source
from kneewatch.collector.names.vllm_metrics import (
    Labels,
    Metric,
    PageNames,
    PageSeries,
    Part,
    SampleName,
    metric_table,
    process_start_of,
)
from kneewatch.collector.page import Layout, Page

PARTS: tuple[Part, ...] = ("bucket", "sum", "count")
DIVISOR = "divisor of "
"""Begins the key of a gauge that another one is divided by."""


class Summand(NamedTuple):
    """A summand: the values at these positions, divided by those of `over`, times `scale`; `less`
    is then subtracted, down to 0."""

    positions: tuple[int, ...]
    over: tuple[int, ...]
    scale: float
    less: float


class Combined(Struct, frozen=True):
    """A canonical value that a page does not have as it is: the sum or maximum of some terms."""

    terms: tuple[Summand, ...]
    is_max: bool

    def value(self, values: Sequence[float]) -> float:
        """The value on a page; NaN if it divides by zero."""
        parts: list[float] = []
        for positions, over, scale, less in self.terms:
            part = sum([values[at] for at in positions]) * scale
            if over:
                under = sum([values[at] for at in over])
                part = part / under if under > 0 else math.nan
            parts.append(max(0.0, part - less) if less else part)
        return max(parts) if self.is_max else sum(parts)


class Translated(Struct, frozen=True):
    """A page's canonical series, and the values that are appended to the page's own."""

    names: PageNames
    computed: tuple[Combined, ...] = ()

    def with_others(self, other: Translated) -> Translated:
        """These series, and those of `other` whose metric these lack."""
        own = {series.sample.metric.name for series in self.names.identified}
        more = [each for each in other.names.identified if each.sample.metric.name not in own]
        names = self.names
        names = PageNames(names.prefix, (*names.identified, *more), names.process_start)
        return Translated(names, (*self.computed, *other.computed))


def canonical_metric(name: str, kind: EngineKind) -> Metric:
    """The canonical metric of that name, which may be one that only this kind of engine has."""
    metric = metric_table().metrics.get(name)
    if metric is not None:
        return metric
    quantity = kind.quantities[name]
    return Metric(name, quantity.kind, quantity.unit, (name,), labels=quantity.labels)


def completed(page: Page, computed: Sequence[Combined]) -> Page:
    """The page with the computed values behind its own."""
    values = page.values
    more = [each.value(values) for each in computed]
    return Page(page.layout, [*values, *more], page.timestamps_s, page.host, page.gpus)


def translate(layout: Layout, kind: EngineKind, prefix: str, before: int = 0) -> Translated:
    """The canonical series of a page of this engine.

    `before` computed values are appended to the page before those of this translation."""
    groups = _groups(layout, kind, prefix)
    identified: list[PageSeries] = []
    computed: list[Combined] = []
    for key, sources in groups.items():
        if key.metric.startswith(DIVISOR):
            continue
        metric = canonical_metric(key.metric, kind)
        sample = SampleName(metric, key.metric, key.part, 0)
        position, value = _value_of(key, sources, groups)
        if value is not None:
            position = len(layout.series) + before + len(computed)
            computed.append(value)
        identified.append(PageSeries(position, sample, key.labels))
    names = PageNames(prefix, tuple(identified), process_start_of(layout))
    return Translated(names, tuple(computed))


class _Key(NamedTuple):
    """A canonical series."""

    metric: str
    part: Part
    labels: Labels


_Groups = dict[_Key, dict[Source, list[int]]]
"""The positions of each source of each canonical series."""


def _groups(layout: Layout, kind: EngineKind, prefix: str) -> _Groups:
    """The sources of each canonical series; those of other processes that repeat it left out."""
    names = {series.name for series in layout.series}
    samples = _samples(kind, lambda source: source.is_for(names, prefix))
    groups: dict[_Key, dict[Source, dict[tuple[int, ...], list[int]]]] = {}
    for position, series in enumerate(layout.series):
        if position in layout.repeated or not series.name.startswith(prefix):
            continue
        labels = dict(series.labels)
        for source, part in samples.get(series.name[len(prefix) :], ()):
            if source.selects(labels):
                key = _Key(source.metric, part, _canonical(labels, kind, source))
                rank = tuple(_number(labels.get(name, "")) for name in kind.ranks)
                by_rank = groups.setdefault(key, {}).setdefault(source, {})
                by_rank.setdefault(rank, []).append(position)
    return {
        key: {source: by_rank[min(by_rank)] for source, by_rank in sources.items()}
        for key, sources in groups.items()
    }


def _samples(
    kind: EngineKind, is_used: Callable[[Source], bool]
) -> Mapping[str, Sequence[tuple[Source, Part]]]:
    """The sources of a sample, by its name without prefix."""
    by_sample: dict[str, list[tuple[Source, Part]]] = {}
    for source in filter(is_used, kind.all_sources):
        for name, part in sample_names(source, kind):
            by_sample.setdefault(name, []).append((source, part))
    for name in {source.over for source in kind.all_sources} - {""}:
        by_sample.setdefault(name, []).append((Source(name, DIVISOR + name), "value"))
    return by_sample


def sample_names(source: Source, kind: EngineKind) -> Iterator[tuple[str, Part]]:
    """The sample names of a source, each with the part of the canonical metric that it is."""
    metric_kind = canonical_metric(source.metric, kind).kind
    if metric_kind == "histogram":
        for part in PARTS:
            yield f"{source.name}_{part}", part
        return
    yield source.name, "value"
    if metric_kind == "counter":
        yield f"{source.name}_total", "value"


def _canonical(labels: Mapping[str, str], kind: EngineKind, source: Source) -> Labels:
    """The labels of the canonical series."""
    kept = {
        source.renamed.get(name, name): text
        for name, text in labels.items()
        if name not in source.where
    }
    kept = kind.canonical(kept) | source.labels
    if source.scale != 1.0 and "le" in kept:
        kept["le"] = repr(float(kept["le"]) * source.scale)
    return tuple(sorted(kept.items()))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _value_of(
    key: _Key, sources: Mapping[Source, Sequence[int]], groups: _Groups
) -> tuple[int, Combined | None]:
    """The position of a canonical series, or how its value is computed."""
    usable: dict[Source, tuple[int, ...]] = {}
    for source in sources:
        divisors = groups.get(_Key(DIVISOR + source.over, "value", key.labels), {})
        over = tuple(at for positions in divisors.values() for at in positions)
        if over or not source.over:
            usable[source] = over
    youngest = min((source.age for source in usable), default=0)
    chosen = {source: over for source, over in usable.items() if source.age == youngest}
    terms = tuple(
        Summand(
            tuple(sources[source]),
            over,
            1.0 if key.part in ("bucket", "count") else source.scale,
            source.less,
        )
        for source, over in chosen.items()
    )
    positions = [at for term in terms for at in term.positions]
    if len(positions) == 1 and terms[0][1:] == ((), 1.0, 0.0):
        return positions[0], None
    return -1, Combined(terms, any(source.fold == "max" for source in chosen))
