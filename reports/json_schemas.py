"""The JSON schemas of kneewatch's documents: from their records, or from a file of this package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any, cast

from msgspec.json import schema_components

from kneewatch.reports.weekly.report import SCHEMA, WeeklyReport

JsonObject = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REPORT = (
    "The output of `kneewatch report --format json`; the other formats show the same values. Times "
    "are unix seconds; a quantity's unit ends its key or is in `unit` beside it. null is unknown: "
    "`missing` gives the reason. Keys are only added within version 1."
)
SERVER = "What is known about one server: `kneewatch inspect --format json`."


@cache
def schema(document: str) -> JsonObject:
    """The schema of a document, such as diagnosis."""
    return SCHEMAS[document]()


def schema_files() -> dict[str, str]:
    """All schemas as text, by file name."""
    return {
        f"{document}.schema.json": json.dumps(schema(document), indent=2, ensure_ascii=False) + "\n"
        for document in SCHEMAS
    }


def _of_file(document: str) -> JsonObject:
    text = (files("kneewatch.reports") / f"{document}.schema.json").read_text("utf-8")
    return cast("JsonObject", json.loads(text))


def _server() -> JsonObject:
    """The key `server` of a diagnosis as a document of its own."""
    definitions = schema("diagnosis")["$defs"]
    server = definitions["server"]
    text = {"type": "string", "minLength": 1}
    return {
        "$schema": DIALECT,
        "$id": "urn:kneewatch:server:1",
        "title": "kneewatch.server/1",
        "description": SERVER,
        "type": "object",
        "required": ["schema", "t", "target", *server["required"]],
        "properties": {
            "schema": {"description": "The format and its version.", "const": "kneewatch.server/1"},
            "t": {"description": "When it was read, in Unix seconds.", "type": "number"},
            "target": {"description": "The target's name, without credentials.", **text},
            **server["properties"],
        },
        "$defs": {name: definitions[name] for name in ("fact", "missing_fact")},
    }


def _report() -> JsonObject:
    """The schema of the weekly report, from its records and their docstrings."""
    _, components = schema_components([WeeklyReport], ref_template="#/$defs/{name}")
    objects = {name: _object(schema) for name, schema in components.items()}
    whole = objects.pop(WeeklyReport.__name__)
    return {
        "$schema": DIALECT,
        "$id": "urn:kneewatch:report:1",
        "title": SCHEMA,
        "description": f"{REPORT} {whole['description']}",
        "type": "object",
        "required": ["schema", *whole["required"]],
        "properties": {"schema": {"const": SCHEMA}, **whole["properties"]},
        "additionalProperties": True,
        "$defs": dict(sorted(objects.items())),
    }


def _object(schema: JsonObject) -> JsonObject:
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


SCHEMAS: Mapping[str, Callable[[], JsonObject]] = {
    "diagnosis": partial(_of_file, "diagnosis"),
    "fleet": partial(_of_file, "fleet"),
    "report": _report,
    "server": _server,
    "size": partial(_of_file, "size"),
}
