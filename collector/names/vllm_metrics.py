"""The table of vLLM's metrics: names and prefixes. Pure."""

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
"""Prefixes of vLLM's names, on pages and in metrics systems; vLLM's own is first.

Ray adds ray_ and, by version, keeps the colon or not; KServe adds kserve_; OpenTelemetry and
Datadog turn the colon into an underscore or a dot.
"""

VLLM_PREFIX = PREFIXES[0]

RATIO_MAX = 1.01
"""Largest valid ratio: one plus rounding."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. `scope` is what the metric is of: engine, model or page. `names` are all
    its names in vLLM's versions, the newest first."""

    name: str
    kind: Kind
    unit: str
    core: bool
    scope: str
    labels: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def most(self) -> float:
        """The largest possible value; the smallest is 0 for every metric."""
        share = self.kind == "gauge" and self.unit == "ratio"
        return RATIO_MAX if share else sys.float_info.max


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
        shown = row.get("sample")
        names = metrics[name].names if shown is None else (shown,)
        for age, spelling in enumerate(names):
            samples.update(_samples(metrics[name], spelling, age))
    return MetricTable(metrics, samples)


def _metric(name: str, row: Mapping[str, Any]) -> Metric:
    former = (spelling["name"] for spelling in row.get("former", ()))
    return Metric(
        name,
        row["kind"],
        row["unit"],
        row.get("core", False),
        row.get("scope", "engine"),
        tuple(row.get("labels", ())),
        (name, *former),
    )


def _samples(metric: Metric, name: str, age: int) -> dict[str, SampleName]:
    rank = 2 * age

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
