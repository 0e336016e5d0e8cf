"""The report as the JSON document kneewatch.report/1. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, cast

import orjson

from kneewatch.reports.weekly.model import SCHEMA, WeeklyReport


def document(report: WeeklyReport) -> dict[str, Any]:
    """The JSON document of a report: every field by its own name, no NaN, no infinities."""
    return {"schema": SCHEMA, **_plain(report)}


def render_json(report: WeeklyReport) -> str:
    """The document as text, with a line end."""
    return orjson.dumps(document(report), option=orjson.OPT_INDENT_2).decode() + "\n"


def _plain(value: object) -> Any:  # noqa: ANN401 - whatever JSON holds
    """A value of the model as JSON has it; a number that JSON cannot hold becomes null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): _plain(item) for key, item in items}
    return [_plain(item) for item in cast("Sequence[object]", value)]
