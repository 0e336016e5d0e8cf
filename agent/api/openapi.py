"""The OpenAPI document: schemas, parameters, bodies and responses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, cast

import orjson

from kneewatch.agent.api import openapi_examples as examples
from kneewatch.agent.api.fleet import FLEET_FORMS
from kneewatch.agent.api.openapi_examples import ALERTS, ALERTS_EXAMPLE, ANSWER, ANSWER_EXAMPLE
from kneewatch.agent.api.responses import API, JSON, MARKDOWN, MEDIA_TYPES, PROBLEM_TYPE, TEXT
from kneewatch.agent.api.sizing import BY_NAME, LARGEST, LONGEST_TEXT, size_of
from kneewatch.agent.settings.options import SPAN
from kneewatch.agent.size.options import SWITCHES, Flag

COMPONENTS = "#/components/schemas/"
NAMED = {
    "Diagnosis": ("kneewatch.reports", "diagnosis.schema.json"),
    "Size": ("kneewatch.reports", "size.schema.json"),
    "Triage": ("kneewatch.agent.api", "triage.schema.json"),
}
DROPPED = ("$schema", "$id", "$defs")


def components() -> dict[str, Any]:
    """The schemas by name, with their own definitions as `Name_definition`."""
    schemas: dict[str, Any] = {}
    for name, place in NAMED.items():
        schema = _read(*place)
        for part, definition in schema.get("$defs", {}).items():
            schemas[f"{name}_{part}"] = _moved(definition, name)
        rest = {key: value for key, value in schema.items() if key not in DROPPED}
        schemas[name] = _moved(rest, name)
    return schemas


def fleet_schema() -> dict[str, Any]:
    """The schema of a fleet's document; it has no references."""
    schema = _read("kneewatch.reports", "fleet.schema.json")
    return {key: value for key, value in schema.items() if key not in DROPPED}


def _read(package: str, name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", orjson.loads((files(package) / name).read_bytes()))


def _moved(value: Any, name: str) -> Any:  # noqa: ANN401 - JSON
    """A schema with its references rewritten to the components section."""
    if isinstance(value, list):
        return [_moved(item, name) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    schema = cast("dict[str, Any]", value)
    moved = {key: _moved(item, name) for key, item in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        moved["$ref"] = reference.replace("#/$defs/", f"{COMPONENTS}{name}_").replace(
            "urn:kneewatch:diagnosis:1", f"{COMPONENTS}Diagnosis"
        )
    return moved


# --- The parameters of `/api/v1/size` -------------------------------------------------------------


EXAMPLE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu": "h100-sxm",
    "input_tokens": 1000,
    "output_tokens": 300,
    "concurrency": 32,
}


def size_parameters() -> list[dict[str, Any]]:
    """The query parameters, named like the flags of `kneewatch size`."""
    parameters = [
        {
            "name": flag.name.removeprefix("--"),
            "in": "query",
            "description": _words(flag),
            "schema": _schema(flag),
            **({"example": EXAMPLE[name]} if name in EXAMPLE else {}),
        }
        for name, flag in BY_NAME.items()
    ]
    parameters += [
        {
            "name": name.removeprefix("--"),
            "in": "query",
            "description": text,
            "schema": {"type": "boolean"},
        }
        for name, text in SWITCHES
    ]
    return parameters


def size_body() -> dict[str, Any]:
    """The request body: the parameters as a JSON object, with underscores in their names."""
    properties = {
        name: {**_schema(flag), "description": _words(flag)} for name, flag in BY_NAME.items()
    }
    switches = {
        name.removeprefix("--").replace("-", "_"): {"type": "boolean", "description": text}
        for name, text in SWITCHES
    }
    schema = {
        "type": "object",
        "properties": properties | switches,
        "additionalProperties": False,
    }
    return {"schema": schema, "example": EXAMPLE}


def size_example() -> dict[str, Any]:
    """The answer to EXAMPLE, shortened to two steps."""
    document = size_of(EXAMPLE)
    return {**document, "steps": document["steps"][:2]}


def _words(flag: Flag) -> str:
    if flag.name == "--model":
        return "A catalogue id."
    return flag.help + ("; seconds, or with a unit such as 50ms" if flag.kind is SPAN else "")


def _schema(flag: Flag) -> dict[str, Any]:
    if flag.kind is int:
        return {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
    if flag.kind is float:
        return {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    return {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT}


# --- The document ---------------------------------------------------------------------------------


Json = dict[str, Any]

ABOUT = (
    "Diagnosis of the watched vLLM servers: what is wrong, since when, the evidence, and what to "
    "change. Times are UTC. Where a token is set, send it as `Authorization: Bearer TOKEN` or as "
    "the password of Basic authentication. Errors are RFC 9457 problem documents; outside /api, "
    "browsers get an HTML page."
)
PLAIN, JSON_TYPE = MEDIA_TYPES[TEXT].partition(";")[0], MEDIA_TYPES[JSON]
MARKDOWN_TYPE = MEDIA_TYPES[MARKDOWN].partition(";")[0]
TIME_SCHEMA: Json = {"type": "string", "maxLength": 40}

PARAMETERS: Mapping[str, Json] = {
    "at": {
        "name": "at",
        "in": "query",
        "description": "A past moment: unix seconds, ISO 8601 (UTC without a zone), a time of day "
        "in UTC, or how long ago. Default: now.",
        "schema": TIME_SCHEMA,
        "examples": {
            "clock": {"value": "03:07"},
            "iso": {"value": "2026-11-21T03:07:00Z"},
            "unix": {"value": "1795219620"},
            "ago": {"value": "-2h"},
        },
    },
    "since": {
        "name": "since",
        "in": "query",
        "description": "Adds the stages, causes and health from this time to the moment; a "
        "duration counts back from `at`.",
        "schema": TIME_SCHEMA,
        "examples": {"ago": {"value": "-2h"}, "clock": {"value": "01:00"}},
    },
    "format": {
        "name": "format",
        "in": "query",
        "description": "Overrides the Accept header. Clients that accept anything get text; html "
        "redirects to the page.",
        "schema": {"type": "string", "enum": ["text", "json", "markdown", "html"]},
        "example": "json",
    },
}
PAGE_PARAMETERS: list[Json] = [
    {
        "name": "target",
        "in": "query",
        "description": "A target's name. Default: all targets.",
        "schema": {"type": "string"},
        "example": examples.TARGET,
    },
    {
        **PARAMETERS["at"],
        "description": "A past moment; the page shows an error if it is invalid.",
        "schema": {"type": "string"},
    },
    {
        "name": "since",
        "in": "query",
        "description": "Length of the timeline.",
        "schema": {"type": "string"},
        "examples": {"three hours": {"value": "3h"}, "a day": {"value": "24h"}},
    },
]


def completed(document: Json) -> Json:
    """FastAPI's document completed with parameters, bodies, responses and examples."""
    document["info"]["description"] = ABOUT
    paths: Json = document["paths"]
    _triage(paths["/api/v1/triage"]["get"], "All targets, worst first.")
    _triage(paths["/api/v1/triage/{target}"]["get"], "One target.", known=True)
    _size(paths["/api/v1/size"])
    _alerts(paths["/api/v1/alerts"]["post"])
    if "/api/v1/fleet" in paths:
        _fleet(paths["/api/v1/fleet"]["get"])
    _plain(paths)
    for path, operations in paths.items():
        for operation in operations.values():
            operation["responses"]["default"] = _problem(page=not path.startswith(API))
            operation.pop("summary", None)
            operation["security"] = [{}, {"bearer": []}, {"basic": []}]
    document["components"] = {
        "schemas": {**components(), "Problem": PROBLEM},
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic"},
        },
    }
    return document


PROBLEM: Json = {
    "description": "An error (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"description": "What to do about it.", "type": "string"},
    },
}


def _triage(operation: Json, words: str, *, known: bool = False) -> None:
    operation["description"] = (
        f"{words} With `at`, at a past moment. Text is for people and may change; JSON is stable."
    )
    operation.setdefault("parameters", []).extend(PARAMETERS.values())
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            parameter["example"] = examples.TARGET
            parameter["schema"] = {"type": "string", "minLength": 1}
    operation["responses"] = {
        "200": {
            "description": "The diagnoses.",
            "content": {
                JSON_TYPE: _content("Triage", examples.triage_json()),
                PLAIN: _text(examples.triage_told(TEXT)),
                MARKDOWN_TYPE: _text(examples.triage_told(MARKDOWN)),
            },
        },
        "307": {"description": "Redirect to the page for browsers, or to a fleet's past."},
        "404": _problem(
            "No stored data of that moment" + (", or no such target." if known else ".")
        ),
        "406": _problem("No format matches the Accept header."),
        "422": _problem("A parameter is wrong."),
        "503": _problem("The history cannot be read."),
    }


def _fleet(operation: Json) -> None:
    operation["description"] = (
        "The fleet that a metrics system monitors, with causes across replicas and the replicas "
        "that each tier needs. `health` is unknown while the metrics system does not answer. With "
        "`at` the metrics system is queried for that moment: one query at a time, cached for 60 s."
    )
    operation["parameters"] = [
        PARAMETERS["at"],
        {
            "name": "format",
            "in": "query",
            "description": "Overrides the Accept header. Clients that accept anything get text.",
            "schema": {"type": "string", "enum": list(FLEET_FORMS)},
            "example": JSON,
        },
    ]
    text: Json = {"schema": {"type": "string"}}
    operation["responses"] = {
        "200": {
            "description": "The newest diagnosis, or that of the moment.",
            "content": {
                JSON_TYPE: {"schema": fleet_schema()}, PLAIN: text, MARKDOWN_TYPE: text
            },
        },
        "404": _problem("No data of that moment."),
        "406": _problem("No format matches the Accept header."),
        "422": _problem("A parameter is wrong; `since` is not available for a fleet."),
        "503": _problem("The metrics system does not answer, or another query is running."),
        "504": _problem("The metrics system did not answer in time."),
    }  # fmt: skip


def _size(operations: Json) -> None:
    answer: Json = {
        "200": {
            "description": "The size; `fits` says whether the model fits.",
            "content": {JSON_TYPE: _content("Size", size_example())},
        },
        "422": _problem("A parameter is unknown or cannot be sized."),
    }
    words = (
        "Sizing as in `kneewatch size`: whether a model fits, its speed, the number of GPUs and "
        "the price. A model is a catalogue id; requests cannot open files."
    )
    operations["get"] |= {
        "description": words, "parameters": size_parameters(), "responses": answer
    }  # fmt: skip
    operations["post"] |= {
        "description": words,
        "requestBody": {"required": True, "content": {JSON_TYPE: size_body()}},
        "responses": {
            **answer,
            "400": _problem("The body is no JSON."),
            "415": _problem("The body is not application/json."),
        },
    }


def _alerts(operation: Json) -> None:
    operation["description"] = (
        "Alertmanager's webhook (version 4): each alert with the diagnosis of the matched servers, "
        "when it started and now. Configured receivers are notified. Requires the admin token "
        "where tokens are set."
    )
    operation["requestBody"] = {
        "required": True,
        "content": {JSON_TYPE: {"schema": ALERTS, "example": ALERTS_EXAMPLE}},
    }
    operation["responses"] = {
        "200": {
            "description": "Each alert with its diagnosis.",
            "content": {JSON_TYPE: {"schema": ANSWER, "example": ANSWER_EXAMPLE}},
        },
        "400": _problem("The body is no JSON."),
        "403": _problem("The token may only read."),
        "413": _problem("The body is too large."),
        "415": _problem("The body is not application/json."),
        "422": _problem("The payload is not one of Alertmanager's."),
        "503": _problem("The history cannot be read."),
    }


def _plain(paths: Json) -> None:
    """Complete the probes, the metrics and the triage page."""
    paths["/healthz"]["get"]["responses"] = {
        "200": {"description": "The process answers.", "content": {PLAIN: _text("ok\n")}}
    }
    ready: Json = {
        "type": "object",
        "required": ["ready"],
        "properties": {
            "ready": {"type": "boolean"},
            "reasons": {"type": "array", "items": {"type": "string"}},
            "restart_needed": {
                "description": "Changed settings that need a restart.",
                "type": "array",
                "items": {"type": "string"},
            },
        },
    }
    well: Json = {"ready": True, "reasons": [], "restart_needed": ["listen"]}
    not_yet: Json = {"ready": False, "reasons": [f"{examples.TARGET}: not scraped yet"]}
    rows: Mapping[str, tuple[str, Json]] = {
        "200": ("Every target was scraped.", well),
        "503": ("Not ready; the reasons need the read token.", not_yet),
    }
    paths["/readyz"]["get"]["responses"] = {
        status: {
            "description": words,
            "content": {JSON_TYPE: {"schema": ready, "example": example}},
        }
        for status, (words, example) in rows.items()
    }
    paths["/metrics"]["get"]["responses"] = {
        "200": {
            "description": "kneewatch's own metrics in Prometheus's text format.",
            "content": {PLAIN: _text(examples.METRICS)},
        }
    }
    page = paths["/triage"]["get"]
    page["parameters"] = PAGE_PARAMETERS
    page["responses"] = {
        "200": {
            "description": "The page for people; it works without JavaScript.",
            "content": PAGE,
        },
        "404": _problem("No such target.", page=True),
    }


def _content(schema: str, example: Json) -> Json:
    return {"schema": {"$ref": COMPONENTS + schema}, "example": example}


def _text(example: str) -> Json:
    return {"schema": {"type": "string"}, "example": example}


def _problem(words: str = "The request is refused.", *, page: bool = False) -> Json:
    example = {"type": "about:blank", "title": "...", "status": 400, "detail": words}
    content = {PROBLEM_TYPE: {"schema": {"$ref": f"{COMPONENTS}Problem"}, "example": example}}
    return {"description": words, "content": content | (PAGE if page else {})}


PAGE: Json = {"text/html": _text("<!doctype html> ...")}
