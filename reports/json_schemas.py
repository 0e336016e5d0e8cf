"""The JSON schemas of kneewatch's documents: keys and types from their records, descriptions from
the records' docstrings (`- `key`: description`), or all of it from a file of this package. I/O
edge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from inspect import cleandoc
from typing import Any, cast

from msgspec import NODEFAULT, Struct, inspect
from msgspec.json import schema_components
from msgspec.structs import fields

from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.ranking import CAUSES
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.weekly.report import SCHEMA, WeeklyReport

JsonObject = dict[str, Any]
Record = type[Struct]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OF_ALL = (
    "Times are Unix times in seconds, UTC. A quantity's unit ends its key. null means unknown, or "
    "that there is no value; there is no NaN and no infinity. Keys are only added within version "
    "1: readers must accept keys that they do not know."
)
SERVER = "The facts about one server: `kneewatch inspect --format json`."

NUMBER = {"type": ["number", "null"]}
UNITS = {
    "_s$": "Seconds; `_per_s`: per second.",
    "_gib$": "GiB.",
    "_(ratio|share)$": "A quotient without a unit; a share is 0 to 1.",
    "_ratio_per_s$": "A share per second.",
    "_points$": "A difference of two shares, -1 to 1.",
    "_sigmas$": "A difference from what chance gives, in standard deviations.",
    "_tokens(_p[0-9]+|_mean)?$": "Tokens.",
    "_tokens_per_s$": "Tokens per second.",
    "_bytes$": "Bytes.",
    "_bytes_per_s$": "Bytes per second.",
    "^flop_per_s$": "Floating-point operations per second and GPU.",
    "_per_gpu_hour$": "Per GPU and hour.",
    "_hz$": "Hertz.",
    "_watts$": "Watts.",
    "_c$": "Degrees Celsius.",
}
"""The units of signals by the end of their keys."""

DEFINITIONS: Mapping[str, JsonObject] = {
    "cause_id": {"type": "string", "enum": [record.id for record in CAUSES]},
    "signals": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"},
        "additionalProperties": NUMBER,
        "patternProperties": {
            unit: {"description": words, **NUMBER} for unit, words in UNITS.items()
        },
    },
}
"""Definitions that types of records refer to."""

_KEYS = re.compile(r"^- (`\w+`(?:, `\w+`)*): (.+?)(?=^- |^$|\Z)", re.MULTILINE | re.DOTALL)


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


def of_record(record: Record, document: str) -> JsonObject:
    """The schema of a document that is this record."""
    _, components = schema_components([record], ref_template="#/$defs/{name}")
    records = dict(_records(inspect.type_info(record)))
    objects = {
        name: _object(records[name], part) if name in records else _plain(part)
        for name, part in components.items()
    }
    whole = objects.pop(record.__name__)
    objects |= DEFINITIONS
    text = json.dumps([whole, *objects.values()])
    return {
        **_head(document, whole["description"]),
        **{key: part for key, part in whole.items() if key != "description"},
        "$defs": {
            name: part for name, part in sorted(objects.items()) if f'"#/$defs/{name}"' in text
        },
    }


def _head(document: str, description: str) -> JsonObject:
    return {
        "$schema": DIALECT,
        "$id": f"urn:kneewatch:{document}:1",
        "title": f"kneewatch.{document}/1",
        "description": f"{description} {OF_ALL}",
    }


def _records(kind: inspect.Type) -> Iterator[tuple[str, Record]]:
    """The records that a type contains, by name."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls.__name__, kind.cls
    inner = [field.type for field in getattr(kind, "fields", ())]
    inner += [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
    for name in ("type", "item_type", "value_type"):
        inner += [getattr(kind, name)] if hasattr(kind, name) else []
    for part in inner:
        yield from _records(part)


def _object(record: Record, part: JsonObject) -> JsonObject:
    described = _described(record)
    whole = cleandoc(record.__doc__ or "")
    omits = record.__struct_config__.omit_defaults
    required: list[str] = []
    properties: JsonObject = {}
    for field in fields(record):
        key = field.encode_name
        typed = part["properties"][key]
        if "not" in typed:  # internal
            continue
        omitted = omits and (
            field.default is not NODEFAULT or field.default_factory in (dict, list, set)
        )
        if not omitted:
            required.append(key)
        text = described.get(field.name)
        value = _plain(typed)
        properties[key] = {"description": text, **value} if text else value
    return {
        "description": " ".join(_KEYS.sub("", whole).split()),
        "type": "object",
        "required": required,
        "properties": properties,
    }


def _described(record: Record) -> dict[str, str]:
    """The descriptions of a record's fields, those of its bases included."""
    return {
        name: text[0].upper() + text[1:]
        for base in reversed(record.__mro__)
        if issubclass(base, Struct)
        for names, words in _KEYS.findall(cleandoc(base.__doc__ or ""))
        for name in re.findall(r"\w+", names)
        for text in [" ".join(words.split())]
    }


def _plain(value: object) -> Any:  # noqa: ANN401 - any part of a schema
    """A part without defaults and titles; a choice between plain types as a list of types."""
    if isinstance(value, list):
        return [_plain(part) for part in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    parts = cast("dict[str, Any]", value)
    if "$ref" in parts:
        return {"$ref": parts["$ref"]}
    if "anyOf" in parts:
        return _choice([_plain(part) for part in parts["anyOf"]])
    return {key: _plain(part) for key, part in parts.items() if key not in ("default", "title")}


def _choice(parts: list[JsonObject]) -> JsonObject:
    if {"type": "number"} in parts:
        parts = [part for part in parts if part.get("type") != "integer"]
    if len(parts) == 1:
        return parts[0]
    if all(part.keys() == {"type"} for part in parts):
        return {"type": [part["type"] for part in parts]}
    return {"anyOf": parts}


def _server() -> JsonObject:
    """The key `server` of a diagnosis as a document of its own."""
    diagnosis = schema("diagnosis")
    definitions = diagnosis["$defs"]
    server = definitions["Server"]
    return {
        **_head("server", SERVER),
        "type": "object",
        "required": ["schema", "t", "target", *server["required"]],
        "properties": {
            "schema": {**diagnosis["properties"]["schema"], "enum": ["kneewatch.server/1"]},
            "t": {**diagnosis["properties"]["t"], "description": "When the server was read."},
            "target": diagnosis["properties"]["target"],
            **server["properties"],
        },
        "$defs": {name: definitions[name] for name in ("KnownFact", "UnknownFact")},
    }


def _report() -> JsonObject:
    """The schema of the weekly report. Its record lacks the key `schema`."""
    document = of_record(WeeklyReport, "report")
    document["required"].insert(0, "schema")
    named = {"schema": {"description": "The name and version of this document.", "enum": [SCHEMA]}}
    document["properties"] = named | document["properties"]
    return document


SCHEMAS: Mapping[str, Callable[[], JsonObject]] = {
    "diagnosis": partial(of_record, Verdict, "diagnosis"),
    "fleet": partial(of_record, FleetVerdict, "fleet"),
    "report": _report,
    "server": _server,
    "size": partial(_of_file, "size"),
}
