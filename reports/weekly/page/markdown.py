"""The report as Markdown, for a ticket or a mail: its figures and tables, without drawings and
without the numbers behind these. Pure."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.templates import environment
from kneewatch.reports.weekly.page.html import FILTERS, GLOBALS, read_template, template_values
from kneewatch.reports.weekly.report import WeeklyReport

NAME = re.compile(r"[\w.:/+-]+")


def render_markdown(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The report as Markdown. All values are escaped. With `docs_url`, incidents link to the pages
    of their causes."""
    values = template_values(report, docs_url=docs_url, plots=False)
    lines = _environment().get_template("report.md.j2").render(values).splitlines()
    text = "\n".join(map(_tidied, lines))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _tidied(line: str) -> str:
    """A line without spare spaces. An empty cell of a table becomes a dash."""
    line = re.sub(r" ([;,.])(?= |$)", r"\1", " ".join(line.split()))
    return re.sub(r"\|(?= \|)", "| -", line) if line.startswith("|") else line


def _shown(value: Any) -> Markup:  # noqa: ANN401
    """A value of the template as Markdown text on one line."""
    return value if isinstance(value, Markup) else Markup(escaped(re.sub(r"\s+", " ", str(value))))


def _code(name: str) -> Markup:
    """A name as code. A changed flag is bold instead, because a backtick in it would end the
    code."""
    return Markup(f"`{name}`" if NAME.fullmatch(name) else f"**{_shown(name)}**")


def _link(words: str, page: str) -> Markup:
    return Markup(f"[{_shown(words)}]({page})")


@cache
def _environment() -> Environment:
    return environment(read_template, {**FILTERS, "code": _code, "link": _link}, GLOBALS, _shown)
