"""Files packaged beside the code that reads them. I/O edge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


def packaged_text(package: str, name: str) -> str:
    """The text of the file `name` in a folder of kneewatch."""
    return files(f"kneewatch.{package}").joinpath(name).read_text("utf-8")


@cache
def packaged_tables(package: str, name: str) -> Mapping[str, Any]:
    """The tables of the TOML file `name` in a folder of kneewatch; read on first use."""
    return tomllib.loads(packaged_text(package, name))
