"""The table of vLLM's metrics: their names on a page through the versions. Pure.

It reads the packaged `vllm_metrics.toml` once; what the keys mean is said there.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Kind = Literal["gauge", "counter", "histogram", "info"]
Part = Literal["value", "bucket", "sum", "count", "created"]

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_", "vllm.")
"""What stands before vLLM's names, on pages and in metrics systems; vLLM's own spelling is first.

Ray puts ray_ in front and, by version, keeps the colon or not; KServe puts kserve_ in front;
OpenTelemetry and Datadog turn the colon into an underscore or a dot.
"""

VLLM_PREFIX = PREFIXES[0]

RATIO_MAX = 1.01
"""The most that a share may say: one, and what rounding adds."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name that a metric has or had, and from which version to which one."""

    name: str
    since: str | None
    until: str | None = None
    hidden: str | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table; `spellings` has the newest name first."""

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
        """The greatest value that is possible; the least is 0 for all metrics, for they count,
        measure or share something."""
        share = self.kind == "gauge" and self.unit == "ratio"
        return RATIO_MAX if share else sys.float_info.max

    @property
    def since(self) -> str | None:
        """The first version looked at that has the metric under any name."""
        return self.spellings[-1].since

    @property
    def until(self) -> str | None:
        """The last version looked at that has the metric; none while the newest has it."""
        return self.spellings[0].until

    @property
    def engine(self) -> str:
        """The engine that alone has the metric, v0 or v1; empty where both have it."""
        only = {spelling.engine for spelling in self.spellings}
        return only.pop() if len(only) == 1 else ""


@dataclass(frozen=True, slots=True)
class SampleName:
    """What a name on a page, less the page's prefix, stands for.

    The lower `rank` wins where one metric stands on a page twice: the newest name before former
    ones, and a counter with its _total before one without (Ray shows both).
    """

    metric: Metric
    spelling: str
    part: Part
    rank: int


@dataclass(frozen=True, slots=True)
class MetricTable:
    """All metrics by canonical name, and all sample names less the prefix."""

    versions: tuple[str, ...]
    metrics: Mapping[str, Metric]
    samples: Mapping[str, SampleName]


@cache
def metric_table() -> MetricTable:
    """The packaged table, read at the first call."""
    text = (
        resources.files("kneewatch.collector.names")
        .joinpath("vllm_metrics.toml")
        .read_text("utf-8")
    )
    return table_from(tomllib.loads(text))


def table_from(document: Mapping[str, Any]) -> MetricTable:
    """The table that a TOML document holds."""
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
