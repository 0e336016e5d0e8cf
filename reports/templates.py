"""What pages are made with: templates in which everything is escaped and what is undefined is an
error, and the colours. Pure; files are read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from kneewatch.reports.formatting import printable


def environment(
    read: Callable[[str], str], filters: Mapping[str, Any], names: Mapping[str, Any]
) -> Environment:
    """Where templates are compiled: `read` gives the text of a template by its name, `names` is
    what every template sees."""
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
    """The stylesheet of the colours, which every page's own begins with."""
    return files("kneewatch.reports").joinpath("palette.css").read_text(encoding="utf-8")


def _shown(value: Any) -> Any:  # noqa: ANN401
    """What a template puts out: text without control characters, as on a terminal."""
    if isinstance(value, str) and not isinstance(value, Markup) and not value.isprintable():
        return printable(" ".join(value.split()))
    return value
