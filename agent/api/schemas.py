"""The promised JSON Schemas, and the same as components of the OpenAPI document. Pure: the files
are read from the package."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, cast

import orjson

COMPONENTS = "#/components/schemas/"
NAMED = {
    "Diagnosis": ("kneewatch.reports", "diagnosis.schema.json"),
    "Size": ("kneewatch.reports", "size.schema.json"),
    "Triage": ("kneewatch.agent.api", "triage.schema.json"),
}
DROPPED = ("$schema", "$id", "$defs")


def components() -> dict[str, Any]:
    """The schemas by name; their own definitions beside them as Name_definition."""
    made: dict[str, Any] = {}
    for name, place in NAMED.items():
        schema = _read(*place)
        for part, definition in schema.get("$defs", {}).items():
            made[f"{name}_{part}"] = _moved(definition, name)
        rest = {key: told for key, told in schema.items() if key not in DROPPED}
        made[name] = _moved(rest, name)
    return made


def fleet_schema() -> dict[str, Any]:
    """The schema of a fleet's document; it refers to no other."""
    schema = _read("kneewatch.reports", "fleet.schema.json")
    return {key: told for key, told in schema.items() if key not in DROPPED}


def _read(package: str, name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", orjson.loads((files(package) / name).read_bytes()))


def _moved(value: Any, name: str) -> Any:  # noqa: ANN401 - JSON
    """A schema whose references lead to where its definitions are now."""
    if isinstance(value, list):
        return [_moved(item, name) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    told = cast("dict[str, Any]", value)
    made = {key: _moved(item, name) for key, item in told.items()}
    reference = told.get("$ref")
    if isinstance(reference, str):
        made["$ref"] = reference.replace("#/$defs/", f"{COMPONENTS}{name}_").replace(
            "urn:kneewatch:diagnosis:1", f"{COMPONENTS}Diagnosis"
        )
    return made
