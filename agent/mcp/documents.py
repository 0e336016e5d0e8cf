"""What tools return besides text: kneewatch's documents cut to size, and their schemas. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from kneewatch.agent.api.openapi import schemas
from kneewatch.agent.api.responses import COMPONENTS
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS

JsonObject = dict[str, Any]

CORE_SIGNALS = (*CASCADE_SIGNALS, "generation_tokens_per_s")
"""Signals that every shortened diagnosis has, besides those of its evidence."""

UNKNOWN_MAX = 5
IN_BOUNDS = ("ok", "unknown")


def shortened(diagnosis: Mapping[str, Any]) -> JsonObject:
    """A `kneewatch.diagnosis/1` without what a verdict does not need: findings that are ok or
    unknown, signals that are no evidence, and most of the list of what is unknown."""
    cited = {row["signal"] for cause in diagnosis["causes"] for row in cause["evidence"]}
    shown_signals = cited.union(CORE_SIGNALS)
    return {
        **diagnosis,
        "findings": [row for row in diagnosis["findings"] if row["state"] not in IN_BOUNDS],
        "signals": {
            key: value for key, value in diagnosis["signals"].items() if key in shown_signals
        },
        "unknown": diagnosis["unknown"][:UNKNOWN_MAX],
    }


def shortened_triage(document: Mapping[str, Any], limit: int) -> JsonObject:
    """A `kneewatch.triage/1` with the `limit` worst engines, and how its targets are watched."""
    targets = [shortened(diagnosis) for diagnosis in document["targets"][:limit]]
    names = {diagnosis["target"] for diagnosis in targets}
    watching = [row for row in document["watching"] if row["target"] in names]
    return {**document, "targets": targets, "watching": watching}


def shortened_fleet(document: Mapping[str, Any], limit: int) -> JsonObject:
    """A `kneewatch.fleet/1` with the `limit` worst engines, their findings out of bounds and their
    core signals."""
    targets = [
        {
            **engine,
            "findings": [row for row in engine["findings"] if row["state"] not in IN_BOUNDS],
            "signals": {key: v for key, v in engine["signals"].items() if key in CORE_SIGNALS},
        }
        for engine in document["targets"][:limit]
    ]
    return {**document, "targets": targets, "gone": document["gone"][:limit]}


HISTORY = "kneewatch.signal_history/1"
HistoryRow = tuple[str, str, str, Sequence[float | None]]
"""Model, engine, signal, and a value for each time; None where it is unknown."""


def history_document(
    target: str, times_s: Sequence[float], rows: Iterable[HistoryRow]
) -> JsonObject:
    """Values of a target's signals over time."""
    return {
        "schema": HISTORY,
        "target": target,
        "times": list(times_s),
        "series": [
            {"model": model, "engine": engine, "signal": signal, "values": list(values)}
            for model, engine, signal, values in rows
        ],
    }


def history_text(document: Mapping[str, Any]) -> str:
    """The document as text: a line for each series, with its range and all its values."""
    lines = [f"{document['target']}: {len(document['times'])} times, oldest first; - is unknown"]
    for row in document["series"]:
        numbers = [value for value in row["values"] if value is not None]
        spread = f"{min(numbers):.4g} to {max(numbers):.4g}" if numbers else "unknown throughout"
        values = " ".join("-" if value is None else f"{value:.4g}" for value in row["values"])
        lines.append(f"{row['signal']} (engine {row['engine'] or '?'}): {spread}: {values}")
    return "\n".join(lines)


# --- Schemas --------------------------------------------------------------------------------------


REFERENCE = re.compile(rf'"\$ref":"{re.escape(COMPONENTS)}([^"]+)"')
TIME = {"type": "number", "minimum": 0}
TEXT = {"type": "string"}


def _object(required: Sequence[str], **properties: Any) -> JsonObject:  # noqa: ANN401 - JSON
    return {"type": "object", "required": list(required), "properties": properties}


def schema_of(name: str) -> JsonObject:
    """The schema of one of kneewatch's documents with the definitions that it refers to."""
    every = schemas()
    needed, left = dict[str, Any](), [name]
    while left:
        part = left.pop()
        if part not in needed:
            needed[part] = every[part]
            left += REFERENCE.findall(orjson.dumps(every[part]).decode())
    return {"type": "object", "$ref": COMPONENTS + name, "components": {"schemas": needed}}


def incidents_schema() -> JsonObject:
    """The schema of what `incidents` returns."""
    interval = schemas()["Triage_interval"]
    moment = schemas()["Triage_moment"]
    return {
        **_object(
            ("schema", "since", "t", "incidents", "left_out"),
            schema={"const": "kneewatch.incidents/1"},
            since=TIME,
            t=TIME,
            incidents={"type": "array", "items": {"$ref": COMPONENTS + "Triage_interval"}},
            left_out={"type": "integer", "minimum": 0},
        ),
        "components": {"schemas": {"Triage_interval": interval, "Triage_moment": moment}},
    }


HISTORY_SCHEMA = _object(
    ("schema", "target", "times", "series"),
    schema={"const": HISTORY},
    target=TEXT,
    times={"type": "array", "items": TIME},
    series={
        "type": "array",
        "items": _object(
            ("model", "engine", "signal", "values"),
            model=TEXT,
            engine=TEXT,
            signal=TEXT,
            values={"type": "array", "items": {"type": ["number", "null"]}},
        ),
    },
)
PAGE_SCHEMA = _object(
    ("id", "kind", "markdown"), id=TEXT, kind={"enum": ["cause", "rule"]}, markdown=TEXT
)
