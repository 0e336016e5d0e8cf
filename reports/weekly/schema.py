"""The JSON schema kneewatch.report/1, made from the report's own types and their words. Pure."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from kneewatch.reports.weekly.model import SCHEMA, WeeklyReport

PLAIN: Mapping[object, str] = {float: "number", int: "integer", str: "string", bool: "boolean"}
ABOUT = (
    "What `kneewatch report --format json` prints, and all that the other formats show. Times are "
    "unix seconds; a quantity's unit ends its key, or is in `unit` beside it. null means that a "
    "figure cannot be had: `missing` says why. Keys are only ever added within version 1."
)


def report_schema() -> str:
    """The schema as text, with a line end."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """The schema; each type of the model is one of its definitions."""
    known: dict[str, Any] = {}
    whole = _object(WeeklyReport, known)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:kneewatch:report:1",
        "title": SCHEMA,
        **whole,
        "description": f"{ABOUT} {whole['description']}",
        "required": ["schema", *whole["required"]],
        "properties": {"schema": {"const": SCHEMA}, **whole["properties"]},
        "$defs": dict(sorted(known.items())),
    }


def _object(kind: type[Any], known: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "required": names,
        "properties": {name: _of(hints[name], known) for name in names},
        "additionalProperties": True,
    }


def _of(hint: Any, known: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - a type's own form
    """The schema of a field's type."""
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if is_dataclass(hint) and isinstance(hint, type):
        name = hint.__name__
        if name not in known:
            known[name] = {}
            known[name] = _object(hint, known)
        return {"$ref": f"#/$defs/{name}"}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return {"anyOf": [_of(one, known) for one in inner if one is not type(None)] + [_NULL]}
    if origin is tuple:
        return {"type": "array", "items": _of(inner[0], known)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(inner[1], known)}
    raise TypeError(f"no JSON is known of {hint}")


_NULL = {"type": "null"}
