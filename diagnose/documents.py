"""Reads documents that users write strictly into dataclasses, with pydantic. Pure.

A field's type says what its value must be, both to pydantic and in words: `Count`, `Ratio`,
`Annotated[float, number_to(3600)]`. pydantic is imported when the first document is read, because
most commands read none.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.spelling import did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Kind = TypeVar("Kind")
Place = Sequence[str | int]
LARGEST: Final = 1e15
STRICT: Final[Mapping[str, Any]] = {"extra": "forbid"}
"""The `__pydantic_config__` of a document's dataclass: unknown keys are errors."""


class _Handler(Protocol):
    def __call__(self, source: Any, /) -> Mapping[str, Any]: ...  # noqa: ANN401 - pydantic's


@dataclass(frozen=True, slots=True)
class Constraint:
    """A requirement for a value: in words, and as members of pydantic's core schema."""

    expected: str
    members: Mapping[str, Any] = field(hash=False)

    def __get_pydantic_core_schema__(self, source: object, handler: _Handler) -> dict[str, Any]:
        schema = handler(source)
        if "choices" in schema:  # labelled, so that an error's place has no words of pydantic's
            kinds = [({**kind, **self.members}, "") for kind in schema["choices"]]
            return {**schema, "choices": kinds}
        bounded = {**schema, **self.members}
        if schema["type"] != "int":
            return bounded
        function = {"type": "no-info", "function": _whole}
        return {"type": "function-before", "function": function, "schema": bounded}


def _whole(value: object) -> object:
    """Converts 1e6 and 8.0 to whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def count_to(limit: float) -> Constraint:
    """A whole number above 0, at most `limit`."""
    return Constraint(f"a whole number above 0 and at most {limit:g}", {"gt": 0, "le": limit})


def number_to(limit: float) -> Constraint:
    """A number above 0, at most `limit`."""
    return Constraint(f"a number above 0 and at most {limit:g}", {"gt": 0, "le": limit})


def ratio_to(limit: float) -> Constraint:
    """A ratio from 0 to `limit`, both included."""
    return Constraint(f"a ratio from 0 to {limit:g}", {"ge": 0, "le": limit})


def one_of(choices: Iterable[str]) -> Constraint:
    """A text that must be one of `choices`."""
    allowed = list(choices)
    return Constraint(f"one of {', '.join(allowed)}", {"type": "literal", "expected": allowed})


# Numbers are `int | float`, so that a whole number stays one in the documents made of it.
_ABOVE_0, _FROM_0 = {"gt": 0, "le": LARGEST}, {"ge": 0, "le": LARGEST}
Count = Annotated[int, Constraint("a whole number above 0", _ABOVE_0)]
CountOrZero = Annotated[int, Constraint("a whole number of 0 or more", _FROM_0)]
Number = Annotated[int | float, Constraint("a number above 0", _ABOVE_0)]
NumberOrZero = Annotated[int | float, Constraint("a number of 0 or more", _FROM_0)]
Ratio = Annotated[int | float, ratio_to(1)]
Text = Annotated[str, Constraint("a non-empty string", {"pattern": r"\S"})]
Texts = Annotated[tuple[Text, ...], Constraint("a non-empty list of strings", {"min_length": 1})]


def toml_document(text: str, origin: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        SettingsError: the text is not TOML; the message begins with `origin`.
    """
    try:
        return tomllib.loads(text)
    except ValueError as exc:
        raise SettingsError(f"{origin}: {exc}") from exc
    except RecursionError as exc:
        raise SettingsError(f"{origin}: is nested too deeply") from exc


def read(kind: type[Kind], document: Mapping[str, Any], *, origin: str) -> Kind:
    """The document as a value of the dataclass `kind`.

    Raises:
        SettingsError: keys are unknown or missing, or values are invalid. Each message has
            `origin`, the key's path, and the most similar key or what the value must be.
    """
    from pydantic import ValidationError

    # As JSON, because only there does strict mode take a table for a dataclass.
    text = json.dumps(document, default=_no_json)
    try:
        value: Kind = _adapter(cast("Hashable", kind)).validate_json(text, strict=True)
    except ValidationError as exc:
        mistakes = exc.errors(include_url=False, include_context=False)
    else:
        return value
    places = [[part for part in mistake["loc"] if part != ""] for mistake in mistakes]
    unknown = [
        place[:-1] for m, place in zip(mistakes, places, strict=True) if m["type"] == _UNKNOWN
    ]
    messages = [
        f"{origin}: {_described(kind, mistake['type'], place, mistake['input'])}"
        for mistake, place in zip(mistakes, places, strict=True)
        # A misspelled key is also reported as missing: report only that it is unknown.
        if mistake["type"] != "missing" or place[:-1] not in unknown
    ]
    raise SettingsError(*dict.fromkeys(messages))


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cast("Any", kind))


def _no_json(value: object) -> dict[str, str]:
    """Replaces a date or time of TOML by a value that no field accepts."""
    return {type(value).__name__: str(value)}


_UNKNOWN = "unexpected_keyword_argument"


def _described(kind: type[Any], trouble: str, place: Place, value: object) -> str:
    path = _path(place)
    if trouble == _UNKNOWN:
        table = _type_at(kind, place[:-1])
        keys = [*(field.name for field in fields(table)), *getattr(table, "other_keys", ())]
        return f"unknown key {path}; {did_you_mean(str(place[-1]), keys)}"
    expected = _type_at(kind, place)
    if trouble == "missing":
        return f"the table [{path}] is missing" if is_dataclass(expected) else f"{path} is missing"
    shown = json.dumps(value) if isinstance(value, bool) else repr(value)
    return f"{path} is {shown}; it must be {_expected(expected, path)}"


def _path(place: Place) -> str:
    """A key's path; positions in lists count from 1: `tiers[1].name` is the first tier's name."""
    parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _type_at(kind: Any, place: Place) -> Any:  # noqa: ANN401 - a type's own form
    """The type of the field at this path in `kind`; for an optional field, the type without
    None."""
    for part in place:
        if isinstance(part, int):
            listed = kind.__origin__ if get_origin(kind) is Annotated else kind
            kind = get_args(listed)[0]
        else:
            kind = get_type_hints(kind, include_extras=True)[part]
        options = get_args(kind)
        kind = options[0] if type(None) in options else kind
    return kind


def _expected(kind: Any, path: str) -> str:  # noqa: ANN401 - a type's own form
    if get_origin(kind) is Annotated:
        constraint: Constraint = kind.__metadata__[0]
        return constraint.expected
    if kind is bool:
        return "true or false"
    return f"a list of tables [[{path}]]" if get_origin(kind) is tuple else "a table"
