"""Records that are JSON documents: their fields, numbers and decoding errors. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

Kind = TypeVar("Kind")

LATEST_S = 253_402_300_799.0
"""The end of the year 9999 in Unix seconds. Later times cannot be formatted."""

UnixTime = Annotated[float, Meta(ge=0, le=LATEST_S)]
"""A Unix time in seconds."""

Figure = Annotated[int, Meta(ge=-(2**62), le=2**62)] | float
"""A finite number. A whole number stays one when a document is decoded and encoded again."""

CauseId = Annotated[str, Meta(extra_json_schema={"$ref": "#/$defs/cause_id"})]
"""The id of a cause. The documents' schemas list the ids."""

Internal = Annotated[Kind, Meta(extra_json_schema={"not": {}})]
"""A field that is never in documents."""

DIGITS = 6
"""Significant digits of numbers in documents. The values of histograms are not more precise."""


def written(default: Kind) -> Kind:
    """A field that is always encoded, also with its default, in a record that omits defaults.

    The default is for documents of older versions, which lack the key.
    """
    return msgspec.field(default_factory=lambda: default)


def written_as(name: str, default: Kind) -> Kind:
    """As `written`, under the key `name`."""
    return msgspec.field(default_factory=lambda: default, name=name)


def rounded(value: float | None) -> float | None:
    """A number rounded to six significant digits. None for a number that JSON cannot represent."""
    if value is None or not isfinite(value):
        return None
    return value if value % 1 == 0 else float(f"{value:.{DIGITS}g}")


def to_ms(t_s: float) -> float:
    """A time or duration rounded to milliseconds."""
    return round(t_s, 3)
