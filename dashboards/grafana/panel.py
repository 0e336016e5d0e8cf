"""What a dashboard shows, apart from how Grafana writes it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kneewatch.rules.facts import recorded
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import Severity

Kind = Literal["line", "number", "states", "rows"]

SELECTOR = (
    'cluster=~"$cluster", namespace=~"$namespace", tier=~"$tier", model_name=~"$model",'
    ' pod=~"$pod", instance=~"$replica"'
)
REPLICA = "{{pod}} {{instance}}"
"""How a replica's series are named: a server outside of Kubernetes has no pod."""
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
"""Grafana's unit by the end of a key."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and how its series are named."""

    expr: str
    legend: str = REPLICA


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `bounds` are drawn: (value, severity word), by rising value."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "line"
    bounds: tuple[tuple[float, str], ...] = ()
    below: bool = False
    """Bounds are crossed downwards."""
    width: int = 8
    triage: bool = False
    """Series link to the triage page of their replica."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; `uid` is stable, links lead to it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def signal(key: str) -> str:
    """A recorded signal of the chosen replicas."""
    return f"{recorded(key)}{{{SELECTOR}}}"


def unit_of(key: str) -> str:
    """Grafana's unit for a signal."""
    return next((unit for end, unit in UNITS if key.endswith(end)), "short")


def bounds_of(key: str) -> tuple[tuple[tuple[float, str], ...], bool]:
    """The bounds of the rules about a signal, and whether they are crossed downwards."""
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


def lines(
    title: str,
    description: str,
    *keys: str,
    legend: str = REPLICA,
    width: int = 8,
) -> Panel:
    """A panel of one signal or several, with the bounds of the first one's rule."""
    bounds, below = bounds_of(keys[0])
    named = len(keys) > 1
    return Panel(
        title,
        description,
        tuple(Query(signal(key), f"{key} {legend}" if named else legend) for key in keys),
        unit_of(keys[0]),
        bounds=bounds,
        below=below,
        width=width,
        triage=True,
    )
