"""Completes the OpenAPI document: FastAPI cannot derive the JSON schemas, the inputs of `size` and
the examples.

Examples are a file of the package. This module is imported at the first request for the
document, because most daemons never serve it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import orjson
from fastapi.utils import deep_dict_update
from msgspec import Struct

from kneewatch.agent.api.alerts import AlertsAnswer
from kneewatch.agent.api.responses import COMPONENTS, JSON, MEDIA_TYPES
from kneewatch.agent.api.sizing import BY_NAME, LARGEST, LONGEST_TEXT
from kneewatch.agent.settings.table import SPAN
from kneewatch.agent.size_options import KINDS
from kneewatch.diagnose.deployment.vllm_flags import Flag
from kneewatch.reports.json_schemas import of_record
from kneewatch.reports.json_schemas import schema as document_schema

JsonObject = dict[str, Any]

DOCUMENTS = ("Diagnosis", "Fleet", "Size")
OF_REQUESTS = ("Accept", "Accepted", "Alertmanager", "Problem", "Readiness", "Triage")
"""Schemas that are files of this package."""

RECORDS: Mapping[str, type[Struct]] = {"Alerts": AlertsAnswer}
"""Documents of this package that are records."""

TYPES: Mapping[object, str] = {int: "integer", float: "number", bool: "boolean"}
"""JSON types of flags by their Python type. Flags of other types are strings in JSON."""

LOCAL = ("$schema", "$id", "$defs")
"""Keys that are only valid in a schema's own file."""


def completed(document: JsonObject) -> JsonObject:
    """FastAPI's document with schemas, the inputs of `size`, security schemes and examples."""
    inputs = size_inputs()
    document["components"] = {
        "schemas": {**schemas(), "SizeInputs": inputs},
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic"},
        },
    }
    document["security"] = [{}, {"bearer": []}, {"basic": []}]
    paths: JsonObject = document["paths"]
    examples: JsonObject = orjson.loads(
        (files("kneewatch.agent.api") / "examples.json").read_bytes()
    )
    examples["/api/v1/triage/{target}"] = examples["/api/v1/triage"]
    size_answers = {"responses": examples["/api/v1/size"]["post"]["responses"]}
    examples["/api/v1/size"]["get"] = size_answers
    deep_dict_update(paths, {path: examples[path] for path in examples.keys() & paths.keys()})
    size = paths["/api/v1/size"]
    example: JsonObject = size["post"]["requestBody"]["content"][MEDIA_TYPES[JSON]]["example"]
    size["get"]["parameters"] = [
        {
            "name": name.replace("_", "-"),
            "in": "query",
            "description": schema["description"],
            "schema": schema,
            **({"example": example[name]} if name in example else {}),
        }
        for name, schema in inputs["properties"].items()
    ]
    return document


def schemas() -> JsonObject:
    """The JSON schemas by name. A definition in the `$defs` of a schema becomes
    `Name_definition`."""
    components: JsonObject = {}
    for name in sorted((*DOCUMENTS, *OF_REQUESTS, *RECORDS)):
        text = _schema(name).replace("#/$defs/", f"{COMPONENTS}{name}_")
        schema = orjson.loads(text.replace("urn:kneewatch:diagnosis:1", f"{COMPONENTS}Diagnosis"))
        for part, definition in schema.get("$defs", {}).items():
            components[f"{name}_{part}"] = definition
        components[name] = {key: value for key, value in schema.items() if key not in LOCAL}
    return components


def _schema(name: str) -> str:
    if name in DOCUMENTS:
        return orjson.dumps(document_schema(name.lower())).decode()
    if name in RECORDS:
        schema = of_record(RECORDS[name], name.lower())
        shared = {part: f"Diagnosis_{part}" for part in document_schema("diagnosis")["$defs"]}
        shared["Verdict"] = "Diagnosis"
        schema["$defs"] = {k: part for k, part in schema["$defs"].items() if k not in shared}
        text = orjson.dumps(schema).decode()
        for part, component in shared.items():
            text = text.replace(f'"#/$defs/{part}"', f'"{COMPONENTS}{component}"')
        return text
    return (files("kneewatch.agent.api") / f"{name.lower()}.schema.json").read_text("utf-8")


def size_inputs() -> JsonObject:
    """The schema of a JSON object with the flags of `kneewatch size`. The names have underscores
    instead of hyphens."""
    properties = {name: _property(flag) for name, flag in BY_NAME.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _property(flag: Flag) -> JsonObject:
    limits, kind = dict[str, Any](), KINDS[flag.kind]
    if kind in (int, float):
        limits = {"minimum": -LARGEST, "maximum": LARGEST}
    elif kind is not bool:
        limits = {"minLength": 1, "maxLength": LONGEST_TEXT}
    text = "A catalogue id." if flag.name == "--model" else flag.help
    text += "; seconds, or with a unit such as 50ms" if kind is SPAN else ""
    return {"type": TYPES.get(kind, "string"), **limits, "description": text}
