"""Tables packaged as TOML beside the code that reads them. I/O edge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def packaged_tables(package: str, name: str) -> Mapping[str, Any]:
    """The tables of the TOML file `name` in a folder of kneewatch; read on first use."""
    return tomllib.loads(files(f"kneewatch.{package}").joinpath(name).read_text("utf-8"))
