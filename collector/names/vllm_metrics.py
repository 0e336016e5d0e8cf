"""The table of vLLM's metrics: names, prefixes and versions. Pure."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Kind = Literal["gauge", "counter", "histogram", "info"]
Part = Literal["value", "bucket", "sum", "count", "created"]

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_", "vllm.")
"""Prefixes of vLLM's names, on pages and in metrics systems; vLLM's own is first.

Ray adds ray_ and, by version, keeps the colon or not; KServe adds kserve_; OpenTelemetry and
Datadog turn the colon into an underscore or a dot.
"""

VLLM_PREFIX = PREFIXES[0]

RATIO_MAX = 1.01
"""Largest valid ratio: one plus rounding."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name of a metric, with the first and last version that used it."""

    name: str
    since: str | None
    until: str | None = None
    hidden: str | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table; `spellings` starts with the newest name."""

    name: str
    kind: Kind
    unit: str
    help: str
    core: bool
    rare: bool
    needs: str
    scope: str
    labels: tuple[str, ...]
    replaced_by: tuple[str, ...]
    source: str
    note: str
    spellings: tuple[Spelling, ...]

    @property
    def most(self) -> float:
        """The largest possible value; the smallest is 0 for every metric."""
        share = self.kind == "gauge" and self.unit == "ratio"
        return RATIO_MAX if share else sys.float_info.max

    @property
    def since(self) -> str | None:
        """The first examined version that has the metric, under any name."""
        return self.spellings[-1].since

    @property
    def until(self) -> str | None:
        """The last examined version that has the metric; None while the newest has it."""
        return self.spellings[0].until

    @property
    def engine(self) -> str:
        """The only engine that has the metric, v0 or v1; empty if both have it."""
        only = {spelling.engine for spelling in self.spellings}
        return only.pop() if len(only) == 1 else ""


@dataclass(frozen=True, slots=True)
class SampleName:
    """The meaning of a name on a page, without the page's prefix.

    If a page has a metric twice, the lower `rank` wins: the newest name before former ones, and a
    counter with _total before one without (Ray exports both).
    """

    metric: Metric
    spelling: str
    part: Part
    rank: int


@dataclass(frozen=True, slots=True)
class MetricTable:
    """All metrics by canonical name, and all sample names without prefix."""

    versions: tuple[str, ...]
    metrics: Mapping[str, Metric]
    samples: Mapping[str, SampleName]


@cache
def metric_table() -> MetricTable:
    """The packaged table; read on first use."""
    text = (
        resources.files("kneewatch.collector.names")
        .joinpath("vllm_metrics.toml")
        .read_text("utf-8")
    )
    return table_from(tomllib.loads(text))


def table_from(document: Mapping[str, Any]) -> MetricTable:
    """The table of a TOML document."""
    metrics = {name: _metric(name, row) for name, row in document["metrics"].items()}
    samples: dict[str, SampleName] = {}
    for name, row in document["metrics"].items():
        metric = metrics[name]
        shown = row.get("sample")
        if shown is not None:
            samples.update(_samples(metric, Spelling(shown, None), 0))
        else:
            for age, spelling in enumerate(metric.spellings):
                samples.update(_samples(metric, spelling, age))
    return MetricTable(tuple(document["versions"]), metrics, samples)


def _metric(name: str, row: Mapping[str, Any]) -> Metric:
    engine: str = row.get("engine", "")
    newest = Spelling(name, row.get("since"), row.get("until"), row.get("hidden"), engine)
    return Metric(
        name=name,
        kind=row["kind"],
        unit=row["unit"],
        help=row["help"],
        core=row.get("core", False),
        rare=row.get("rare", False),
        needs=row.get("needs", ""),
        scope=row.get("scope", "engine"),
        labels=tuple(row.get("labels", ())),
        replaced_by=tuple(row.get("replaced_by", ())),
        source=row["source"],
        note=row.get("note", ""),
        spellings=(newest, *(Spelling(**former) for former in row.get("former", ()))),
    )


def _samples(metric: Metric, spelling: Spelling, age: int) -> dict[str, SampleName]:
    name, rank = spelling.name, 2 * age

    def sample(part: Part, rank: int = rank) -> SampleName:
        return SampleName(metric, name, part, rank)

    if metric.kind == "histogram":
        parts: tuple[Part, ...] = ("bucket", "sum", "count", "created")
        return {f"{name}_{part}": sample(part) for part in parts}
    if metric.kind == "counter":
        return {
            f"{name}_total": sample("value"),
            name: sample("value", rank + 1),
            f"{name}_created": sample("created"),
        }
    return {name: sample("value")}


# --- Which vLLM versions a page fits, and why a metric is not on it -------------------------------


VersionRange = tuple[str | None, str | None]

_V0_LAST = "0.11.0"
_V1_FIRST = "0.8.5"  # before, V1 was a trial and showed less than the table's rows say


@dataclass(frozen=True, slots=True)
class _Era:
    """The names that one engine of one version can export, and those it always exports."""

    version: int
    engine: str
    possible: frozenset[str]
    expected: frozenset[str]


@dataclass(frozen=True, slots=True)
class PageFit:
    """The versions that match a page's names, and its engine, v0 or v1, if known."""

    versions: VersionRange
    engine: str = ""


def fit(spelled: Collection[str]) -> PageFit:
    """The first and last version that match these names.

    Absent names count too, unless no version would be left: then the scraper dropped some, Ray
    holds back counters at 0, or the version lies between two of the table.
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
    """Why such a page lacks a metric; `lazy` pages omit counters at 0."""
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
    """The position of a version in the table; None counts as the newest."""
    versions = metric_table().versions
    return len(versions) - 1 if version is None else versions.index(version)
