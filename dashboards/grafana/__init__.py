"""Grafana dashboards for the recorded signals, described as data, and the panels of them for which
an engine of the fleet has the signals. `make docs` builds their JSON with Grafana's own SDK
(tests/dashboards/boards.py). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind
from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.packaged import packaged_tables
from kneewatch.dashboards.prometheus.rule_files import RECORDED, recorded_signals
from kneewatch.dashboards.prometheus.rule_group import Plan

COLUMNS = 24
Panel = dict[str, Any]
Signals = Mapping[str, frozenset[str] | None]
"""The recorded signals of each engine, by its title; None for vLLM, which has all."""


def _boards_for(kind: EngineKind) -> frozenset[str]:
    """The file names of the dashboards whose needed metric the engine has."""
    boards = packaged_tables("dashboards.grafana", "boards.toml")["board"]
    needs = {f"{board['uid']}.json": board.get("needs") for board in boards}
    return frozenset(name for name, metric in needs.items() if metric in (None, *kind.shows))


def boards_of(plan: Plan, boards: Mapping[str, str]) -> dict[str, str]:
    """Those of the dashboards, by file name, that have a panel for the plan's engines."""
    signals: Signals = {
        each.engine.title: None if each.engine is VLLM else frozenset(recorded_signals(each))
        for each in plan.by_engine
    }
    if [*signals] == [VLLM.title]:
        return dict(boards)
    needed = {name for each in plan.by_engine for name in _boards_for(each.engine)}
    kept = {
        name: _board(json.loads(text), signals)
        for name, text in sorted(boards.items())
        if VLLM.title in signals or name in needed
    }
    return {
        name: json.dumps(board, indent=1, sort_keys=True) + "\n"
        for name, board in kept.items()
        if board["panels"]
    }


def _board(board: dict[str, Any], signals: Signals) -> dict[str, Any]:
    panels: list[Panel] = board["panels"]
    lines = [board["description"]]
    for title, own in signals.items():
        lacking = dict.fromkeys(panel["title"] for panel in panels if not _shows(panel, own))
        lines += [f"{title} does not report: {', '.join(lacking)}."] * bool(lacking)
    for panel in panels:
        targets: list[dict[str, Any]] = panel.get("targets", [])
        panel["targets"] = [
            target
            for target in targets
            if any(_has(target["expr"], own) for own in signals.values())
        ]
    kept = [panel for panel in panels if panel["type"] == "row" or panel["targets"]]
    ends = [*kept[1:], {"type": "row"}]
    rows = [
        panel
        for panel, after in zip(kept, ends, strict=True)
        if panel["type"] != "row" or after["type"] != "row"
    ]
    tags = ["kneewatch", *(title.lower() for title in signals)]
    return board | {"panels": [*_laid_out(rows)], "description": " ".join(lines), "tags": tags}


def _shows(panel: Panel, signals: frozenset[str] | None) -> bool:
    return panel["type"] == "row" or any(_has(each["expr"], signals) for each in panel["targets"])


def _has(expr: str, signals: frozenset[str] | None) -> bool:
    own = signals is None or not any(prefix in expr for prefix in PREFIXES)
    return own and (signals is None or signals.issuperset(RECORDED.findall(expr)))


def _laid_out(panels: Sequence[Panel]) -> Iterator[Panel]:
    """Yields the panels in the order of reading, without gaps."""
    x = y = height = 0
    for panel in panels:
        place = panel["gridPos"]
        if panel["type"] == "row" or x + place["w"] > COLUMNS:
            x, y, height = 0, y + height, 0
        panel["gridPos"] = {**place, "x": x, "y": y}
        x, height = x + place["w"], max(height, place["h"])
        yield panel
