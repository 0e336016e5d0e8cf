"""The JSON schema kneewatch.report/1, from the report's own types and their docstrings."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kneewatch.reports.weekly.report import SCHEMA, WeeklyReport

ABOUT = (
    "The output of `kneewatch report --format json`; the other formats show the same values. Times "
    "are unix seconds; a quantity's unit ends its key or is in `unit` beside it. null is unknown: "
    "`missing` gives the reason. Keys are only added within version 1."
)


class Schema(GenerateJsonSchema):
    """Without titles, and with every field required: the report leaves none out."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401 - pydantic's
        """No field has a title: its key says it."""
        del schema
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """No default: the report states every value."""
        return self.generate_inner(schema["schema"])

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """Keys in the order of the fields."""
        del parent_key
        return value

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        """An object, with the docstring on one line."""
        kind = schema["cls"]
        return {
            "description": " ".join((kind.__doc__ or "").split()),
            "type": "object",
            "required": [field.name for field in fields(kind)],
            "properties": super().dataclass_schema(schema)["properties"],
            "additionalProperties": True,
        }


def report_schema() -> str:
    """The schema as text, with a line end."""
    whole = TypeAdapter(WeeklyReport).json_schema(schema_generator=Schema, mode="serialization")
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:kneewatch:report:1",
        "title": SCHEMA,
        "description": f"{ABOUT} {whole['description']}",
        "type": "object",
        "required": ["schema", *whole["required"]],
        "properties": {"schema": {"const": SCHEMA}, **whole["properties"]},
        "additionalProperties": True,
        "$defs": dict(sorted(whole["$defs"].items())),
    }
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"
