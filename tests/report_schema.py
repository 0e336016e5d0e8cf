"""The JSON schema kneewatch.report/1, from the report's own types and their docstrings."""

from __future__ import annotations

import json
from typing import Any, cast

from msgspec.json import schema_components

from kneewatch.reports.weekly.report import SCHEMA, WeeklyReport

ABOUT = (
    "The output of `kneewatch report --format json`; the other formats show the same values. Times "
    "are unix seconds; a quantity's unit ends its key or is in `unit` beside it. null is unknown: "
    "`missing` gives the reason. Keys are only added within version 1."
)


def report_schema() -> str:
    """The schema as text, with a line end."""
    _, components = schema_components([WeeklyReport], ref_template="#/$defs/{name}")
    objects = {name: _object(schema) for name, schema in components.items()}
    whole = objects.pop(WeeklyReport.__name__)
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:kneewatch:report:1",
        "title": SCHEMA,
        "description": f"{ABOUT} {whole['description']}",
        "type": "object",
        "required": ["schema", *whole["required"]],
        "properties": {"schema": {"const": SCHEMA}, **whole["properties"]},
        "additionalProperties": True,
        "$defs": dict(sorted(objects.items())),
    }
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with every field required, since the report leaves none out, and the docstring on
    one line."""
    return {
        "description": " ".join(schema["description"].split()),
        "type": "object",
        "required": list(schema["properties"]),
        "properties": {key: _plain(value) for key, value in schema["properties"].items()},
        "additionalProperties": True,
    }


def _plain(value: object) -> Any:  # noqa: ANN401 - any part of a schema
    """A part without defaults and titles: the report states every value."""
    if isinstance(value, list):
        return [_plain(part) for part in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    parts = cast("dict[str, object]", value)
    return {key: _plain(part) for key, part in parts.items() if key not in ("default", "title")}
