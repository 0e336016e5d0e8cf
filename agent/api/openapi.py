"""HTTP endpoint: completes the OpenAPI document with what FastAPI cannot derive (the JSON schemas,
the answers, the descriptions of parameters, the inputs of `size` and the examples). I/O edge.

Examples are a file of the package. This module is imported at the first request for the
document, because most daemons never serve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import orjson
from fastapi.utils import deep_dict_update
from msgspec import Struct

from kneewatch.agent.api.alerts import AlertsAnswer
from kneewatch.agent.api.responses import API, COMPONENTS, HTML, JSON, MEDIA_TYPES, PROBLEM_TYPE
from kneewatch.agent.api.sizing import BY_NAME, LARGEST, LONGEST_TEXT
from kneewatch.agent.settings.table import COUNT, KINDS, SPAN
from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.deployment.vllm_flags import Flag
from kneewatch.reports.json_schemas import of_record
from kneewatch.reports.json_schemas import schema as document_schema

JsonObject = dict[str, Any]

DOCUMENTS = ("Diagnosis", "Fleet", "Size")
OF_REQUESTS = ("Accept", "Accepted", "Alertmanager", "Problem", "Readiness", "Triage")
"""Schemas that are files of this package."""

RECORDS: Mapping[str, type[Struct]] = {"Alerts": AlertsAnswer}
"""Documents of this package that are records."""

TYPES: Mapping[object, str] = {COUNT: "integer", float: "number", bool: "boolean"}
"""JSON types of flags by the type that click parses. Flags of other types are strings in JSON."""

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
    for path, operations in paths.items():
        for method, operation in operations.items():
            _document(operation, path, method)
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


def _document(operation: JsonObject, path: str, method: str) -> None:
    """Add the parameters, the answers and the body that endpoints.toml states for an endpoint."""
    every = packaged_tables("agent.api", "endpoints.toml")
    stated = every[path]
    for parameter in operation.get("parameters", ()):
        name, shared = parameter["name"], every["parameters"]
        if parameter["in"] == "path":
            shared = every["path_parameters"]
        row = stated.get("parameters", {}).get(name) or shared[name]
        title = parameter["schema"]["title"]
        parameter["schema"] = {"type": "string", **row.get("schema", {}), "title": title}
        parameter["description"] = row["description"]
        if "examples" in row:
            parameter["examples"] = {value: {"value": value} for value in row["examples"]}
    kinds = [PROBLEM_TYPE] if path.startswith(API) else [PROBLEM_TYPE, _media_type(HTML)]
    answers = dict(stated[method])
    if body := answers.pop("body", ""):
        content = _content([MEDIA_TYPES[JSON]], body)
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = responses = dict[str, JsonObject]()
    for status, answer in {**answers, "default": "The request was refused."}.items():
        if isinstance(answer, str):
            responses[status] = {"description": answer, "content": _content(kinds, "Problem")}
            continue
        description, schema, *forms = (*answer, "")[: max(2, len(answer))]
        responses[status] = {"description": description}
        if forms:
            responses[status]["content"] = _content(map(_media_type, forms), schema)


def _content(media_types: Iterable[str], schema: str) -> JsonObject:
    reference, text = {"$ref": COMPONENTS + schema}, {"type": "string"}
    return {
        media_type: {"schema": reference if media_type.endswith("json") else text}
        for media_type in media_types
    }


def _media_type(form: str) -> str:
    return MEDIA_TYPES[form].partition(";")[0]


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
    if kind in (COUNT, float):
        limits = {"minimum": -LARGEST, "maximum": LARGEST}
    elif kind is not bool:
        limits = {"minLength": 1, "maxLength": LONGEST_TEXT}
    text = "A catalogue id." if flag.name == "--model" else flag.help
    text += "; seconds, or with a unit such as 50ms" if kind is SPAN else ""
    return {"type": TYPES.get(kind, "string"), **limits, "description": text}
