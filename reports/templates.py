"""The Jinja environment for pages, and the colours of pages. Pure, except that files are read
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from kneewatch.reports.lines import printable


def environment(
    read: Callable[[str], str],
    filters: Mapping[str, Any],
    names: Mapping[str, Any],
) -> Environment:
    """A Jinja environment that escapes all values and raises an error for an undefined one.

    `read` returns the text of a template by name. `names` are available in all templates.
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
    """The stylesheet with the colours. It is placed before a page's own stylesheet."""
    return files("kneewatch.reports").joinpath("palette.css").read_text(encoding="utf-8")


def _shown(value: Any) -> Any:  # noqa: ANN401
    """The value for output. Control characters are removed from text."""
    if isinstance(value, str) and not isinstance(value, Markup) and not value.isprintable():
        return printable(" ".join(value.split()))
    return value
