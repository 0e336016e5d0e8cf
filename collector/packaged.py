"""Files packaged beside the code that reads them. I/O edge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from threading import RLock
from typing import Any, TypeVar

import msgspec


def packaged_text(package: str, name: str) -> str:
    """The text of the file `name` in a folder of kneewatch."""
    return files(f"kneewatch.{package}").joinpath(name).read_text("utf-8")


@cache
def packaged_tables(package: str, name: str) -> Mapping[str, Any]:
    """The tables of the TOML file `name` in a folder of kneewatch; read on first use."""
    return tomllib.loads(packaged_text(package, name))


Read = TypeVar("Read")
_LEARNING = RLock()


def read_as(value: object, kind: type[Read]) -> Read:
    """A value of tables or JSON as a `kind`.

    One thread at a time: msgspec learns a type on its first use, and a thread that uses the type
    before the other has learned it ends the process.
    """
    with _LEARNING:
        return msgspec.convert(value, kind)


def decoder(kind: type[Read], *, strict: bool = True) -> msgspec.json.Decoder[Read]:
    """A decoder of JSON. One thread at a time, as `read_as`."""
    with _LEARNING:
        return msgspec.json.Decoder(kind, strict=strict)
