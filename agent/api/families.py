"""Families of kneewatch's own metrics: their descriptions and samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kneewatch.agent.api.responses import clean
from kneewatch.collector.packaged import packaged_tables

Described = Mapping[str, tuple[str, Sequence[str]]]
"""Help text and label names of metrics, by metric name without the prefix `kneewatch_`. Names of
counters end in `_total`."""


def described(section: str) -> Described:
    rows = packaged_tables("agent.api", "metrics.toml")[section]
    return {name: (row["help"], row.get("labels", ())) for name, row in rows.items()}


class Families:
    """Metric families, to which samples are added."""

    def __init__(self, described: Described) -> None:
        self._families = {
            name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
                f"kneewatch_{name}", help_text, labels=labels
            )
            for name, (help_text, labels) in described.items()
        }

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample. A value of None adds nothing."""
        if value is not None:
            self._families[name].add_metric(tuple(map(clean, labels)), float(value))

    def add_labelled(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Add a sample that has its own label names instead of those of the family."""
        self._families[name].add_sample(f"kneewatch_{name}", dict(labels), value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())
