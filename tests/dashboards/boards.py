"""The dashboards of boards.toml, independent of Grafana's file format. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.signals.promql import any_of
from kneewatch.dashboards.prometheus.rule_files import PREFIX
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import Severity

Kind = Literal["line", "number", "states", "rows"]

SELECTOR = (
    'cluster=~"$cluster", namespace=~"$namespace", tier=~"$tier", model_name=~"$model",'
    ' pod=~"$pod", instance=~"$replica"'
)
OF_REPLICA = "{{pod}} {{instance}}"
"""The legend for the series of a replica. A server outside of Kubernetes has only the instance."""
UNITS = (
    ("_ratio_per_s", "percentunit"),
    ("_ratio", "percentunit"),
    ("_tokens_per_s", "short"),
    ("_per_s", "short"),
    ("_bytes", "bytes"),
    ("_watts", "watt"),
    ("_celsius", "celsius"),
    ("_s", "s"),
)
"""Grafana's units by the suffix of a signal's key."""


class Query(Struct, frozen=True):
    """A PromQL expression, and the legend for its series."""

    expr: str
    legend: str


class Panel(Struct, frozen=True):
    """A panel. `bounds` are pairs of value and severity that are drawn, sorted by value."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "line"
    bounds: tuple[tuple[float, str], ...] = ()
    below: bool = False
    """Whether the signal is bad below its bounds."""
    width: int = 8
    triage: bool = False
    """Whether each series links to the triage page of its replica."""


class Row(Struct, frozen=True):
    """A heading with the panels below it."""

    title: str
    panels: tuple[Panel, ...]


class Board(Struct, frozen=True):
    """A dashboard. `uid` never changes, because links contain it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def unit_of(key: str) -> str:
    """Grafana's unit for a signal."""
    return next((unit for end, unit in UNITS if key.endswith(end)), "short")


def bounds_of(key: str) -> tuple[tuple[tuple[float, str], ...], bool]:
    """The bounds of the rules for a signal, and whether the signal is bad below them."""
    rules = [rule for rule in RULES if rule.signal == key]
    for rule in rules:
        shown = {
            bound.threshold: bound.severity.word
            for bound in rule.bounds
            if bound.threshold > 0 and bound.severity >= Severity.INFO
        }
        if shown:
            return tuple(sorted(shown.items())), rule.below
    return (), False


SELECTORS: Mapping[str, str] = {
    PREFIX: SELECTOR,
    "kneewatch_": 'model=~"$model"',
    "DCGM_FI_": 'Hostname=~"$node|"',
}
"""Label matchers for the chosen replicas, models or nodes, by the beginning of a metric's name."""

SERIES = re.compile(rf"\b({'|'.join(SELECTORS)})\w+")
ADAPTERS_INFO = any_of("__name__", (f"{prefix}lora_requests_info" for prefix in PREFIXES))


def chosen(expr: str) -> str:
    """An expression of boards.toml, restricted to what is chosen in the dashboard."""
    selected = SERIES.sub(lambda match: f"{match[0]}{{{SELECTORS[match[1]]}}}", expr)
    return selected.replace("<adapters_info>", ADAPTERS_INFO)


def _queries(table: Mapping[str, Any], legend: str) -> Iterator[tuple[str, str]]:
    """Yields the expressions of a panel, each with the legend for its series."""
    signals = table.get("signals", ())
    for key in signals:
        yield PREFIX + key, f"{key} {OF_REPLICA}" if len(signals) > 1 else OF_REPLICA
    if key := table.get("day_before", ""):
        yield PREFIX + key, f"now {OF_REPLICA}"
        yield f"{PREFIX}{key} offset 1d", f"a day earlier {OF_REPLICA}"
    if of := table.get("tail", ""):
        yield f"{PREFIX}{of}_p99_s / ({PREFIX}{of}_p50_s > 0)", OF_REPLICA
    if "expr" in table:
        yield table["expr"], table.get("legend", legend)
    for query in table.get("queries", ()):
        yield query["expr"], query["legend"]


def _panel(table: Mapping[str, Any], legend: str) -> Panel:
    queries = tuple(Query(chosen(expr), named) for expr, named in _queries(table, legend))
    shown = {key: table[key] for key in ("unit", "kind", "bounds", "width") if key in table}
    if "expr" not in table and "queries" not in table:
        shown |= _of_signals(table)
    texts = {"title": table["title"], "description": table["description"]}
    return msgspec.convert({**texts, "queries": queries, **shown}, Panel)


def _of_signals(table: Mapping[str, Any]) -> dict[str, Any]:
    """The unit of a panel of signals, and the bounds of the rule for the first of them."""
    if of := table.get("tail", ""):
        return {"bounds": bounds_of(f"{of}_p99_p50_ratio")[0], "triage": True}
    key = table["day_before"] if "day_before" in table else table["signals"][0]
    shown: dict[str, Any] = {"unit": unit_of(key), "triage": True}
    if "signals" in table:
        shown["bounds"], shown["below"] = bounds_of(key)
    return shown


def _board(table: Mapping[str, Any]) -> Board:
    legend = table.get("legend", OF_REPLICA)
    rows = tuple(
        Row(row["title"], tuple(_panel(panel, legend) for panel in row["panels"]))
        for row in table["row"]
    )
    return Board(table["uid"], table["title"], table["description"], rows)


BOARDS = tuple(
    _board(table) for table in packaged_tables("dashboards.grafana", "boards.toml")["board"]
)
