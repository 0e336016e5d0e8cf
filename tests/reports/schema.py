"""The JSON Schema that documents are promised to follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from kneewatch.reports.json_schemas import schema as schema_of


@cache
def schema() -> dict[str, Any]:
    """The schema of a diagnosis."""
    return schema_of("diagnosis")


@cache
def validator() -> Any:  # noqa: ANN401
    """The schema at work; jsonschema's stubs leave an argument that is not used here untyped."""
    return Draft202012Validator(schema())


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document, by the schema."""
    errors: Iterable[ValidationError] = validator().iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]
