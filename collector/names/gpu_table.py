"""The table of DCGM's fields: names on a page, units, which of them a diagnosis wants. Pure.

It reads the packaged `dcgm_metrics.toml` once; what the keys mean is said there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Field:
    """A row of the table; a value in `unit` is the page's value times its name's scale."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    csv: str
    one_of: str
    labels: tuple[str, ...]
    wide: bool
    note: str


@dataclass(frozen=True, slots=True)
class FieldName:
    """What a name on a page stands for; of several for one field the lowest `rank` wins."""

    field: Field
    scale: float
    rank: int


@dataclass(frozen=True, slots=True)
class FieldTable:
    """All fields by canonical name, and all names that they have on pages."""

    fields: Mapping[str, Field]
    names: Mapping[str, FieldName]


@cache
def field_table() -> FieldTable:
    """The packaged table, read at the first call."""
    text = (
        resources.files("kneewatch.collector.names")
        .joinpath("dcgm_metrics.toml")
        .read_text("utf-8")
    )
    fields: dict[str, Field] = {}
    names: dict[str, FieldName] = {}
    for name, row in tomllib.loads(text)["fields"].items():
        field = fields[name] = _field(name, row)
        scale = float(row.get("scale", 1))
        spellings = [(newer["name"], newer.get("scale", 1)) for newer in row.get("newer", ())]
        spellings += [(old, scale) for old in (name, *row.get("former", ()))]
        for rank, (spelling, factor) in enumerate(spellings):
            names[spelling] = FieldName(field, float(factor), rank)
    return FieldTable(fields, names)


def _field(name: str, row: Mapping[str, Any]) -> Field:
    return Field(
        name=name,
        kind=row["kind"],
        unit=row["unit"],
        help=row["help"],
        csv=row.get("csv", ""),
        one_of=row.get("one_of", ""),
        labels=tuple(row.get("labels", ())),
        wide=row.get("wide", False),
        note=row.get("note", ""),
    )
