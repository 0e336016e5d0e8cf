"""TOML tables read strictly: every key known, every value of its kind and range. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from kneewatch.collector.base import SettingsError

_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a table: its kind, and what a value must be.

    `kind` is number, count, ratio, flag, text or texts. A number is above 0, or 0 too with
    `zero`; a ratio is from 0 to `most`.
    """

    name: str
    kind: str
    needed: bool = False
    zero: bool = False
    most: float = _LARGEST
    choices: tuple[str, ...] = ()


def known_keys(
    table: Mapping[str, object], *, known: Sequence[str], place: str, origin: str
) -> None:
    """Refuse keys that mean nothing there.

    Raises:
        SettingsError: naming the key, the nearest known one and all that there are.
    """
    for name in table:
        if name in known:
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise SettingsError(f"{origin}: {_path(place, name)} is not known; {hint}")


def read_table(table: object, keys: Sequence[Key], *, place: str, origin: str) -> dict[str, Any]:
    """The values of a table by key, those left out left out.

    Raises:
        SettingsError: an unknown or missing key, or a value that cannot be; it is named.
    """
    if not isinstance(table, Mapping):
        raise SettingsError(f"{origin}: {place} is {table!r}; it must be a table")
    values = cast("Mapping[str, object]", table)
    known_keys(values, known=[key.name for key in keys], place=place, origin=origin)
    found: dict[str, Any] = {}
    for key in keys:
        path = _path(place, key.name)
        if key.name in values:
            found[key.name] = _checked(key, values[key.name], path, origin)
        elif key.needed:
            raise SettingsError(f"{origin}: {path} is missing")
    return found


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _checked(key: Key, value: object, path: str, origin: str) -> object:
    trouble = _trouble(key, value)
    if trouble:
        raise SettingsError(f"{origin}: {path} is {_shown(value)}; it must be {trouble}")
    if key.kind == "texts":
        return tuple(cast("list[str]", value))
    if key.kind == "count":
        return int(cast("float", value))
    return value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _trouble(key: Key, value: object) -> str:
    """What the value must be instead; empty where it will do."""
    if key.kind == "flag":
        return "" if isinstance(value, bool) else "true or false"
    if key.kind == "text":
        return _text_trouble(key, value)
    if key.kind == "texts":
        items = cast("list[object]", value) if isinstance(value, list) else []
        listed = bool(items) and all(isinstance(item, str) and item.strip() for item in items)
        return "" if listed else "a list of texts that is not empty"
    return _number_trouble(key, value)


def _text_trouble(key: Key, value: object) -> str:
    if key.choices:
        return "" if value in key.choices else f"one of {', '.join(key.choices)}"
    return "" if isinstance(value, str) and value.strip() else "a text that is not empty"


def _number_trouble(key: Key, value: object) -> str:
    floor = "0 or more" if key.zero else "above 0"
    wanted = f"a number {floor}"
    if key.kind == "ratio":
        wanted = f"a ratio from 0 to {key.most:g}"
    elif key.kind == "count":
        wanted = f"a whole number {floor}"
    elif key.most < _LARGEST:
        wanted = f"{wanted} and at most {key.most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return wanted
    if key.kind == "count" and value != int(value):
        return wanted
    low_enough = value <= key.most
    high_enough = value >= 0 if key.zero or key.kind == "ratio" else value > 0
    return "" if low_enough and high_enough else wanted
