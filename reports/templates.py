"""The Jinja environment of the pages, and their colours. Pure; files are read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from kneewatch.rules.formatting import printable


def environment(
    read: Callable[[str], str], filters: Mapping[str, Any], names: Mapping[str, Any]
) -> Environment:
    """An environment that escapes all values and raises on undefined ones.

    `read` returns a template's text by its name; `names` are the globals of all templates.
    """
    environment = Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=_shown,
    )
    environment.filters.update(filters)
    environment.globals.update(names)
    return environment


def palette() -> str:
    """The colour stylesheet, which goes before each page's own."""
    return files("kneewatch.reports").joinpath("palette.css").read_text(encoding="utf-8")


def _shown(value: Any) -> Any:  # noqa: ANN401
    """A value as it is output: text without control characters."""
    if isinstance(value, str) and not isinstance(value, Markup) and not value.isprintable():
        return printable(" ".join(value.split()))
    return value
