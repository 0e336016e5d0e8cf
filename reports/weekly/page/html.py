"""The report as one self-contained HTML file. Pure."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.reports.formatting import duration, number, percent, plural, quantity, span
from kneewatch.reports.templates import environment, palette
from kneewatch.reports.weekly.page import formatting as formatting
from kneewatch.reports.weekly.page import formatting as moments
from kneewatch.reports.weekly.page import incident_chart as strip
from kneewatch.reports.weekly.page import parts
from kneewatch.reports.weekly.page import small_charts as heat
from kneewatch.reports.weekly.page import small_charts as sparks
from kneewatch.reports.weekly.page import svg as drawing
from kneewatch.reports.weekly.page.formatting import Calendar
from kneewatch.reports.weekly.page.parts import ROWS_MOST, SECTIONS, headline, title
from kneewatch.reports.weekly.report import WeeklyReport

FILTERS: dict[str, Any] = {
    "arrow": formatting.arrow,
    "bare": formatting.bare,
    "change": formatting.change,
    "duration": duration,
    "flag": formatting.flag,
    "health": formatting.health,
    "number": number,
    "percent": percent,
    "points": formatting.points,
    "quantity": formatting.quantity_of,
    "saved": formatting.saved,
    "share": formatting.share,
    "as_sentence": formatting.as_sentence,
    "sentence": formatting.sentence,
    "signal": quantity,
    "span": span,
    "spread": formatting.spread,
    "stamp": moments.stamp,
    "state": formatting.state,
    "with_unit": formatting.with_unit,
    "size_verdict": formatting.size_verdict,
    "tone": formatting.tone,
}
GLOBALS: dict[str, Any] = {
    "cause_page": cause_page,
    "COLUMNS": moments.WEEKDAYS,
    "FATES": formatting.FATES,
    "HEALTH": formatting.HEALTH,
    "PLAIN": formatting.PLAIN,
    "LATENCIES": formatting.LATENCIES,
    "LEVELS": heat.LEVELS,
    "ROWS_MOST": ROWS_MOST,
    "SIZES": formatting.SIZES,
    "SIZE_STATES": formatting.SIZE_STATES,
    "STATES": formatting.STATES,
    "drawing": drawing,
    "heat": heat,
    "sparks": sparks,
    "strip_labels_from": strip.LABEL_FROM,
    "followed": formatting.followed,
    "plural": plural,
}


def render(report: WeeklyReport, *, docs_url: str = "", plots: bool = True) -> str:
    """The HTML file. All values are escaped. With `docs_url` incidents link to their cause's
    page. `plots`: with the charts that matplotlib draws, which take half a second."""
    calendar = Calendar(report.timezone, report.period)
    tiers = parts.tier_parts(report, calendar, plots=plots)
    css = _stylesheet()
    return _environment().get_template("report.html.j2").render(
        report=report,
        docs_url=docs_url,
        calendar=calendar,
        tiers=[part for part in tiers if part.watched],
        worst_first=parts.worst_first(tiers),
        incidents=parts.incident_parts(report, calendar),
        methods=parts.methods(report),
        rest=[part for part in tiers if part.watched and not part.full],
        headline=headline(report),
        title=title(report),
        sections=SECTIONS,
        css=Markup(css),
        icons=Markup(_read("icons.html.j2", "kneewatch.reports.triage")),
        policy=_policy(css),
    )  # fmt: skip


def _policy(css: str) -> str:
    """The content security policy: allows the stylesheet, by its digest, and nothing else."""
    digest = b64encode(sha256(css.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        f"form-action 'none'"
    )


@cache
def _stylesheet() -> str:
    """The minified stylesheet, with a plain value before each use of a variable: many mail clients
    do not support variables and drop such declarations."""
    source = re.sub(r"/\*.*?\*/", "", palette() + _read("report.css"), flags=re.DOTALL)
    source = re.sub(r"\s*([{};,>])\s*", r"\1", re.sub(r"\s+", " ", source))
    light, _, _ = source.partition("@media")
    roles = dict(re.findall(r"--([\w-]+): ?([^;}]+)", light))
    return re.sub(
        r"[\w-]+: ?[^:;{}]*var\(--[^;{}]*",
        lambda value: (
            f"{re.sub(r'var[(]--([-a-z0-9]+)[)]', lambda role: roles[role[1]], value[0])}"
            f";{value[0]}"
        ),
        source,
    ).strip()


def _read(name: str, package: str = __package__ or "") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return environment(_read, FILTERS, GLOBALS)
