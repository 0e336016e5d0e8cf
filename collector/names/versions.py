"""Which vLLM versions a page fits, and why a metric is not on it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from kneewatch.collector.names.table import Metric, Spelling, metric_table

VersionRange = tuple[str | None, str | None]

_V0_LAST = "0.11.0"
_V1_FIRST = "0.8.5"  # before, V1 was a trial and showed less than the table's rows say


@dataclass(frozen=True, slots=True)
class _Era:
    """Names that one engine of one version can show, and those it always shows."""

    version: int
    engine: str
    possible: frozenset[str]
    expected: frozenset[str]


@dataclass(frozen=True, slots=True)
class PageFit:
    """The versions that a page's names fit, and the engine, v0 or v1, where that is known."""

    versions: VersionRange
    engine: str = ""


def fit(spelled: Collection[str]) -> PageFit:
    """The versions, from the first to the last, that these names fit.

    Absent names count as well, unless that leaves no version: then the scraper dropped some, Ray
    holds some back while they are 0, or the version lies between two that the table knows.
    """
    names = frozenset(spelled)
    eras = [e for e in _eras() if e.expected <= names <= e.possible]
    if eras:
        first, last = min(e.version for e in eras), max(e.version for e in eras)
        engines = {e.engine for e in eras}
    else:
        present = [s for _, s in _spellings() if s.name in names]
        first = max((_index(s.since) for s in present), default=0)
        last = min((_index(s.until) for s in present), default=_index(None))
        engines = {s.engine for s in present if s.engine}
        if first > _index(_V0_LAST):
            engines = {"v1"}
    engine = engines.pop() if len(engines) == 1 else ""
    if first > last:
        return PageFit((None, None), engine)  # engines of several versions on one page
    versions = metric_table().versions
    low = versions[first] if first else None
    return PageFit((low, None if last == _index(None) else versions[last]), engine)


def why_missing(metric: Metric, page: PageFit, *, lazy: bool = False) -> str:
    """Why such a page lacks a metric; `lazy` pages show no counter that is 0."""
    versions = metric_table().versions
    low = _index(page.versions[0]) if page.versions[0] else 0
    high = _index(page.versions[1])
    if metric.until is not None and _index(metric.until) < low:
        return f"removed in {versions[_index(metric.until) + 1]}"
    if metric.since is not None and _index(metric.since) > high:
        return f"new in {metric.since}"
    if page.engine and metric.engine not in ("", page.engine):
        return f"only on the {metric.engine.upper()} engine"
    if metric.needs:
        return f"needs {metric.needs}"
    hidden = metric.spellings[0].hidden
    if hidden is not None and _index(hidden) <= low:
        return "needs --show-hidden-metrics-for-version"
    return "not counted yet" if lazy and metric.kind == "counter" else "renamed?"


@cache
def _eras() -> tuple[_Era, ...]:
    versions = range(len(metric_table().versions))
    v0 = [_era(v, "v0") for v in versions if v <= _index(_V0_LAST)]
    v1 = [_era(v, "v1") for v in versions if v >= _index(_V1_FIRST)]
    return (*v0, *v1)


def _era(version: int, engine: str) -> _Era:
    possible: set[str] = set()
    expected: set[str] = set()
    for metric, spelling in _spellings():
        if spelling.engine not in ("", engine) or not _exists(spelling, version):
            continue
        possible.add(spelling.name)
        hidden = spelling.hidden is not None and version >= _index(spelling.hidden)
        # V0 shows a histogram once it has observed something; cache_config_info comes late.
        sure = metric.kind == "gauge" if engine == "v0" else metric.kind != "info"
        if sure and not hidden and not metric.needs:
            expected.add(spelling.name)
    return _Era(version, engine, frozenset(possible), frozenset(expected))


def _spellings() -> Iterator[tuple[Metric, Spelling]]:
    for metric in metric_table().metrics.values():
        for spelling in metric.spellings:
            if spelling.since is not None:
                yield metric, spelling


def _exists(spelling: Spelling, version: int) -> bool:
    return _index(spelling.since) <= version <= _index(spelling.until)


def _index(version: str | None) -> int:
    """The place of a version in the table; no version is the newest."""
    versions = metric_table().versions
    return len(versions) - 1 if version is None else versions.index(version)
