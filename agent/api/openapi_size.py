"""The parameters of `/api/v1/size` for the OpenAPI document, from the table of flags. Pure."""

from __future__ import annotations

from typing import Any

from kneewatch.agent.api.sizing import BY_NAME, LARGEST, LONGEST_TEXT, size_of
from kneewatch.agent.options import SPAN
from kneewatch.agent.size_options import SWITCHES, Flag

EXAMPLE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu": "h100-sxm",
    "input_tokens": 1000,
    "output_tokens": 300,
    "concurrency": 32,
}


def size_parameters() -> list[dict[str, Any]]:
    """The query's parameters, named as the flags are."""
    made = [
        {
            "name": flag.name.removeprefix("--"),
            "in": "query",
            "description": _words(flag),
            "schema": _schema(flag),
            **({"example": EXAMPLE[name]} if name in EXAMPLE else {}),
        }
        for name, flag in BY_NAME.items()
    ]
    made += [
        {
            "name": name.removeprefix("--"),
            "in": "query",
            "description": told,
            "schema": {"type": "boolean"},
        }
        for name, told in SWITCHES
    ]
    return made


def size_body() -> dict[str, Any]:
    """The same as a JSON object, with underscores."""
    properties = {
        name: {**_schema(flag), "description": _words(flag)} for name, flag in BY_NAME.items()
    }
    switches = {
        name.removeprefix("--").replace("-", "_"): {"type": "boolean", "description": told}
        for name, told in SWITCHES
    }
    schema = {
        "type": "object",
        "properties": properties | switches,
        "additionalProperties": False,
    }
    return {"schema": schema, "example": EXAMPLE}


def size_example() -> dict[str, Any]:
    """The answer to EXAMPLE; some of its steps stand for all."""
    told = size_of(EXAMPLE)
    return {**told, "steps": told["steps"][:2]}


def _words(flag: Flag) -> str:
    if flag.name == "--model":
        return "A catalogue id."
    return flag.help + ("; seconds, or such as 50ms" if flag.kind is SPAN else "")


def _schema(flag: Flag) -> dict[str, Any]:
    if flag.kind is int:
        return {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
    if flag.kind is float:
        return {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    return {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT}
