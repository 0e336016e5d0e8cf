"""The triage page as HTML. Pure: values in, text out; templates and files are read once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from kneewatch.reports.templates import environment, palette
from kneewatch.reports.triage import parts
from kneewatch.reports.triage.axis import axis_of, tick_label
from kneewatch.reports.triage.charts import TALL, WIDE
from kneewatch.reports.triage.lanes import interval_name
from kneewatch.reports.triage.links import Links, local_stamp, query
from kneewatch.reports.triage.standing import Standing, tally
from kneewatch.reports.triage.view import SINCE_DEFAULT, TriageView
from kneewatch.reports.words import date, moment, span

CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The content security policy that the page is made for."""

ASSETS = {
    "triage.css": "text/css; charset=utf-8",
    "triage.js": "text/javascript; charset=utf-8",
}
"""The page's files and their types; they are asked for as `triage/NAME`, relative to the page."""

REFRESH_WITHOUT_SCRIPT_S = 30
"""A page that loads anew loses one's place: without the script it does so less often."""

FILTERS: dict[str, Any] = {
    "date": date,
    "interval_name": interval_name,
    "local_stamp": local_stamp,
    "moment": moment,
    "query": query,
    "span": span,
    "tick_label": tick_label,
}
GLOBALS: dict[str, Any] = {"last_read": parts.last_read, "tall": TALL, "wide": WIDE}


def render(view: TriageView) -> str:
    """The page; everything in it that came from elsewhere is text."""
    axis = axis_of(view)
    rows = parts.target_parts(view, axis)
    alone = view.one and len(rows) == 1
    worst = rows[0].worst if rows else None
    return _environment().get_template("page.html.j2").render(
        view=view,
        live=view.at_s is None,
        axis=axis,
        cut=axis.since_s > view.since_s + 1,
        reach=span(axis.length_s).replace(".0 ", " "),
        links=Links(view),
        default_since=SINCE_DEFAULT,
        rows=rows,
        engines=parts.engine_parts(rows[0].target, view, axis) if alone else [],
        alone=alone,
        worst=worst,
        health=worst.health if worst else "unknown",
        title=_title(worst),
        first=parts.first(worst) if worst else None,
        counts=tally(row.worst for row in rows),
        ticks=axis.ticks(),
        reload_s=max(REFRESH_WITHOUT_SCRIPT_S, round(view.refresh_s)),
    )  # fmt: skip


def refusal(
    *, status: int, title: str, words: str, known: Sequence[str], more: int, up: str
) -> str:
    """The page in place of one that cannot be had: why, and of an address without a target the
    `known` ones, of which there are `more`. `up` leads from that address to the root."""
    return _environment().get_template("refusal.html.j2").render(
        status=status, title=title, words=words, known=known, more=more, up=up, health="unknown",
    )  # fmt: skip


@cache
def asset(name: str) -> bytes:
    """The content of one of ASSETS.

    Raises:
        KeyError: there is no such file.
    """
    if name not in ASSETS:
        raise KeyError(name)
    colours = palette() if name.endswith(".css") else ""
    return (colours + _read(name)).encode()


def _read(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _title(worst: Standing | None) -> str:
    """What a tab shows: the verdict before everything else."""
    if worst is None:
        return "no targets"
    found = worst.diagnosis
    cause = f" {found.headline}" if found and found.headline else ""
    return f"{worst.verdict}{cause} · {worst.target.name}"


@cache
def _environment() -> Environment:
    return environment(_read, FILTERS, GLOBALS)
