"""The JSON Schema that documents are promised to follow."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator


@cache
def schema() -> dict[str, Any]:
    """The schema as it is shipped."""
    return json.loads((files("kneewatch.reports") / "diagnosis.schema.json").read_text())


def problems(document: object) -> list[str]:
    """What is wrong with a document, by the schema."""
    validator = Draft202012Validator(schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
