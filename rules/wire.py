"""Records that are JSON documents: their fields, numbers and decoding errors. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.packaged import read_as

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

SHOWN = 60
_TYPES = {
    "str": "text",
    "int": "a finite number",
    "float": "a finite number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "datetime": "a time such as 2026-11-21T03:07:00Z",
}
_SAID = {
    "Number out of range": "a finite number",
    "Invalid RFC3339 encoded datetime": _TYPES["datetime"],
}
_PARTS = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `([^`]+)`( [<>]=? \S+| matching .*)?")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


class DocumentError(KneewatchError):
    """The document is not what it should be. The message names the wrong key."""


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


def read(
    decoder: msgspec.json.Decoder[Kind],
    data: bytes | str,
    *,
    schema: str,
    words: Mapping[str, Iterable[str]],
) -> Kind:
    """A document of this schema as a record. `words` are the allowed words of keys.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        try:
            mistake = _mistake(str(exc), msgspec.json.decode(data), words)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            mistake = "it is not JSON"
        raise DocumentError(f"not a {schema} document: {mistake}") from exc


def converted(
    document: object, kind: type[Kind], *, schema: str, words: Mapping[str, Iterable[str]]
) -> Kind:
    """Parsed JSON as a record of this kind. `words` are the allowed words of keys.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    try:
        return read_as(document, kind)
    except msgspec.ValidationError as exc:
        raise DocumentError(
            f"not a {schema} document: {_mistake(str(exc), document, words)}"
        ) from exc


def _mistake(error: str, document: object, words: Mapping[str, Iterable[str]]) -> str:
    if not isinstance(document, dict):
        return f"{_shown(document)} is not a JSON object"
    what, _, path = error.partition(" - at `$")
    place, value = _place(path.rstrip("`"), document)
    if missing := _MISSING.match(what):
        return f"{place}{'.' if place else ''}{missing[1]} is missing"
    key = place.rpartition(".")[2]
    if expected := _EXPECTED.match(what):
        kinds = [_TYPES.get(kind, kind) for kind in expected[1].split(" | ")]
        must = " or ".join(dict.fromkeys(kinds)) + (expected[2] or "")
    elif what in _SAID:
        must = _SAID[what]
    else:
        must = f"one of {', '.join(words.get(key, ()))}"
    return f"{place} must be {must}, it is {_shown(value)}"


def _place(path: str, document: Any) -> tuple[str, object]:  # noqa: ANN401 - JSON
    """A path of msgspec as words, and the value there. Keys of mappings are filled in."""
    place, value = "", document
    for name, index in _PARTS.findall(path):
        if index == "...":
            name = max(value, key=lambda key: _strangeness(value[key]))
        if index.isdecimal():
            place, value = f"{place}[{index}]", value[int(index)]
        else:
            place, value = f"{place}{'.' if place else ''}{name}", value[name]
    return place, value


def _strangeness(value: object) -> int:
    """A rank of values of a mapping: the highest one is the one that is no number or text."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return 0
    if isinstance(value, str):
        return 1
    return 2 if value is None else 3


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
