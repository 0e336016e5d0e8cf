"""The JSON Schema that documents are promised to follow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, cast

from jsonschema import Draft202012Validator, ValidationError


@cache
def schema() -> dict[str, Any]:
    """The schema as it is shipped."""
    text = (files("kneewatch.reports") / "diagnosis.schema.json").read_text()
    return cast("dict[str, Any]", json.loads(text))


@cache
def validator() -> Any:  # noqa: ANN401
    """The schema at work; jsonschema's stubs leave an argument that is not used here untyped."""
    return Draft202012Validator(schema())


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document, by the schema."""
    errors: Iterable[ValidationError] = validator().iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]
