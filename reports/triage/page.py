"""The triage page as HTML. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment
from markupsafe import Markup, escape
from msgspec import Struct

from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.doc_links import cause_page, rule_page
from kneewatch.reports.advice_text import (
    advised,
    args_words,
    besides,
    command,
    do_first_label,
    doubt,
    gist,
    moved,
    of_load,
    replaced,
    stop_gap_steps,
)
from kneewatch.reports.coverage import gaps
from kneewatch.reports.diagnosis_text import (
    changed_words,
    latency_basis,
    server_words,
    stage_words,
    summary_words,
    symptoms_shown,
)
from kneewatch.reports.health import counted, stage_known
from kneewatch.reports.lines import moment, printable
from kneewatch.reports.templates import environment, palette
from kneewatch.reports.triage.charts import TALL, WIDE, Axis, axis_of, first_s, tick_label
from kneewatch.reports.triage.engine import EnginePart, cost, interval_name, keyed, strip, title
from kneewatch.reports.triage.view_model import (
    SINCE,
    SINCE_DEFAULT,
    EngineView,
    Standing,
    TargetView,
    TriageView,
    standings,
)
from kneewatch.rules.formatting import date, span, stamp

TIME_STEPS: Sequence[tuple[str, float]] = (
    ("\u2212 1 h", -3600.0),
    ("\u2212 15 min", -900.0),
    ("+ 15 min", 900.0),
    ("+ 1 h", 3600.0),
)


class Links(Struct, frozen=True):
    """The links of one page."""

    view: TriageView

    @property
    def target(self) -> str:
        """The name of the page's target. Empty on the overview of all targets."""
        return self.view.targets[0].name if self.view.single and self.view.targets else ""

    def page(self, *, target: str | None = None, at_s: float | None = None, since: str = "") -> str:
        """The link to the page of a target ("" for all targets) at a moment (None for now)."""
        name = self.target if target is None else target
        since = since or self.view.since
        parameters = {
            **({"target": name} if name else {}),
            **({} if at_s is None else {"at": stamp(math.ceil(at_s))}),
            **({} if since == SINCE_DEFAULT else {"since": since}),
        }
        return f"?{query(parameters)}"

    def here(self, *, target: str | None = None, since: str = "") -> str:
        """The link to another target at the same moment, or to the same target with another
        timeline."""
        return self.page(target=target, at_s=self.view.at_s, since=since)

    def moment(self, t_s: float) -> str:
        """The link to the same target at another moment."""
        return self.page(at_s=t_s)

    def time_steps(self) -> list[tuple[str, str]]:
        """Earlier and later moments: words, and the link, which is empty for the future."""
        view = self.view
        times_s = [(words, view.moment_s + by_s) for words, by_s in TIME_STEPS]
        return [(words, self.moment(t_s) if t_s < view.now_s else "") for words, t_s in times_s]

    def document(self, form: str) -> str:
        """The link to the same content as text, JSON or Markdown."""
        name = f"/{quote(self.target, safe='', errors='replace')}" if self.target else ""
        at = {} if self.view.at_s is None else {"at": stamp(math.ceil(self.view.at_s))}
        return f"api/v1/triage{name}?{query({**at, 'format': form})}"


def query(values: Mapping[str, str]) -> str:
    """A query string, percent-encoded."""
    return urlencode(values, errors="replace")


def local_stamp(t_s: float) -> str:
    """A UTC time without zone, such as 2026-11-21T03:07:12, for the input field of the form."""
    return stamp(t_s).removesuffix("Z")


# --- Parts of the page: engines in full, targets in a row each ------------------------------------


LOG_ROWS = 40
GAPS_SHOWN = 1000
"""Maximum number of gaps on the page. It is reached only if something is wrong: the page should
show all gaps."""


def engine_parts(target: TargetView, view: TriageView, axis: Axis) -> list[EnginePart]:
    """The engines of a target that are shown in full, worst first."""
    return [
        EnginePart(number, standing, standing.engine, axis, view.moment_s)
        for number, standing in enumerate(standings(target, view), 1)
        if standing.engine is not None
    ]


def target_rows(view: TriageView) -> list[list[Standing]]:
    """The engines of each target, worst first, and the targets worst first too. Equally bad targets
    keep their order."""
    rows = [standings(target, view) for target in view.targets]
    return sorted(rows, key=lambda row: -row[0].rank)


def past_health(row: Sequence[Standing], axis: Axis) -> tuple[Mapping[str, str], str]:
    """The strip with the past health of a target: paths by health state, and its words."""
    return strip([standing.intervals for standing in row], axis)


def last_read(engine: EngineView, moment_s: float) -> Interval | None:
    """The last known stage of an engine whose stage is unknown now. None for other engines."""
    if engine.diagnosis.stage.number is not None:
        return None
    ended = [
        interval
        for interval in engine.intervals
        if interval.kind == "stage" and interval.end_s is not None and interval.end_s <= moment_s
    ]
    return max(ended, key=lambda interval: interval.end_s or 0.0, default=None)


# --- Rendering ------------------------------------------------------------------------------------


CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The content security policy that is sent with the page."""

ASSETS = {
    "triage.css": "text/css; charset=utf-8",
    "triage.js": "text/javascript; charset=utf-8",
}
"""The files of the page with their media types. The page links to them as `triage/NAME`."""

REFRESH_WITHOUT_SCRIPT_S = 30
"""Seconds after which a page without JavaScript reloads. It reloads rarely, because the reader
loses the scroll position."""

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def unbroken(text: str) -> Markup:
    """The text as HTML in which no line breaks within a flag."""
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(printable(text)))))


FILTERS: dict[str, Any] = {
    filtered.__name__: filtered
    for filtered in (
        args_words, besides, changed_words, command, cost, date, doubt, gist, of_load,
        gaps, interval_name, keyed, latency_basis, local_stamp, moment, moved, query,
        replaced, server_words, span, stage_known, stage_words, summary_words, symptoms_shown,
        tick_label, unbroken,
    )
} | {"change_title": title}  # fmt: skip
GLOBALS: dict[str, Any] = {
    "advised": advised,
    "stop_gap_steps": stop_gap_steps,
    "do_first_label": do_first_label,
    "gaps_shown": GAPS_SHOWN,
    "log_rows": LOG_ROWS,
    "time_ranges": tuple(SINCE),
    "cause_page": cause_page,
    "rule_page": rule_page,
    "last_read": last_read,
    "past_health": past_health,
    "tall": TALL,
    "wide": WIDE,
}


def render(view: TriageView) -> str:
    """The HTML of the page. All values are escaped."""
    axis = axis_of(view)
    rows = target_rows(view)
    alone = view.single and len(rows) == 1
    worst = rows[0][0] if rows else None
    return _environment().get_template("page.html.j2").render(
        view=view,
        live=view.at_s is None,
        axis=axis,
        first_s=first_s(view) if axis.since_s > view.since_s + 1 else None,
        reach=span(axis.length_s).replace(".0 ", " "),
        links=Links(view),
        default_since=SINCE_DEFAULT,
        rows=rows,
        engines=engine_parts(rows[0][0].target, view, axis) if alone else [],
        alone=alone,
        worst=worst,
        health=worst.health if worst else "unknown",
        title=_title(worst),
        counts=counted(row[0].health for row in rows),
        ticks=axis.ticks(),
        reload_s=max(REFRESH_WITHOUT_SCRIPT_S, round(view.refresh_s)),
    )  # fmt: skip


def refusal(
    *, status: int, title: str, words: str, names: Sequence[str], more: int, up: str
) -> str:
    """The HTML of an error page. `words` is the reason.

    For an unknown target, `names` are some known targets and `more` is the number of further ones.
    `up` is the relative path to the root.
    """
    return _environment().get_template("refusal.html.j2").render(
        status=status, title=title, words=words, names=names, more=more, up=up, health="unknown",
    )  # fmt: skip


@cache
def asset(name: str) -> bytes:
    """The content of a file in ASSETS.

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
    """The title of the browser tab. It starts with the verdict."""
    if worst is None:
        return "no targets"
    diagnosis = worst.diagnosis
    cause = f" {diagnosis.headline}" if diagnosis and diagnosis.headline else ""
    return f"{worst.verdict}{cause} · {worst.target.name}"


@cache
def _environment() -> Environment:
    return environment(_read, FILTERS, GLOBALS)
