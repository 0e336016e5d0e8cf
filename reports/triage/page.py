"""The triage page as HTML. Pure: values in, text out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment

from kneewatch.diagnose.engine.diagnosis import SYMPTOMS
from kneewatch.reports.coverage import gaps
from kneewatch.reports.diagnosis_text import stage_words
from kneewatch.reports.formatting import date, moment, span
from kneewatch.reports.recommendation_text import advised
from kneewatch.reports.templates import environment, palette
from kneewatch.reports.triage.causes import (
    CauseView,
    ChangeView,
    FindingView,
    Reasons,
    VitalView,
    change_view,
)
from kneewatch.reports.triage.charts import TALL, WIDE, Axis, axis_of, tick_label
from kneewatch.reports.triage.timeline import Lanes, Strip, interval_name, lanes, strip
from kneewatch.reports.triage.verdict import Standing, standings, tally
from kneewatch.reports.triage.view_model import (
    SINCE,
    SINCE_DEFAULT,
    EngineView,
    IntervalView,
    TargetView,
    TriageView,
)

LEAPS: Sequence[tuple[str, float]] = (
    ("\u2212 1 h", -3600.0),
    ("\u2212 15 min", -900.0),
    ("+ 15 min", 900.0),
    ("+ 1 h", 3600.0),
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link; `current` marks what is shown already, an empty `href` what cannot be had."""

    words: str
    href: str
    current: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """The links of one page."""

    view: TriageView

    @property
    def target(self) -> str:
        """The one target of the page; empty on the overview."""
        return self.view.targets[0].name if self.view.one and self.view.targets else ""

    def page(self, *, target: str | None = None, at_s: float | None = None, since: str = "") -> str:
        """The page of a target ("": of all) at a moment (None: now)."""
        name = self.target if target is None else target
        since = since or self.view.since
        asked = {
            **({"target": name} if name else {}),
            **({} if at_s is None else {"at": stamp(at_s)}),
            **({} if since == SINCE_DEFAULT else {"since": since}),
        }
        return f"?{query(asked)}"

    def here(self, *, target: str | None = None, since: str = "") -> str:
        """The same moment of another target, or with another timeline."""
        return self.page(target=target, at_s=self.view.at_s, since=since)

    def moment(self, t_s: float) -> str:
        """The same target at another moment."""
        return self.page(at_s=t_s)

    def leaps(self) -> list[Link]:
        """Steps back and forth in time; there is none into the future."""
        view = self.view
        return [
            Link(words, self.moment(view.moment_s + by_s) if view.moment_s + by_s < view.now_s
                 else "")
            for words, by_s in LEAPS
        ]  # fmt: skip

    def sinces(self) -> list[Link]:
        """How much of the past the timeline may show."""
        return [Link(word, self.here(since=word), word == self.view.since) for word in SINCE]

    def document(self, form: str) -> str:
        """The same as text, JSON or Markdown."""
        name = f"/{quote(self.target, safe='', errors='replace')}" if self.target else ""
        at = {} if self.view.at_s is None else {"at": stamp(self.view.at_s)}
        return f"api/v1/triage{name}?{query({**at, 'format': form})}"


def query(values: Mapping[str, str]) -> str:
    """The query of a link."""
    return urlencode(values, errors="replace")


def stamp(t_s: float) -> str:
    """A moment for a link, 2026-11-21T03:07:12Z: the next whole second, when it has begun."""
    return f"{local_stamp(math.ceil(t_s))}Z"


def local_stamp(t_s: float) -> str:
    """The same as the form has it: without the zone, which is UTC."""
    return f"{datetime.fromtimestamp(t_s, tz=UTC):%Y-%m-%dT%H:%M:%S}"


# --- The parts of the page, made of the view: engines in full, targets in a row each --------------


LOG_ROWS = 40
GAPS_SHOWN = 1000
"""A page has room for all of them."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """An engine in full. `log` are its intervals, newest first, `more` how many are left out."""

    number: int
    standing: Standing
    stage: str
    lanes: Lanes
    causes: Sequence[CauseView]
    vitals: Sequence[VitalView]
    worse: Sequence[FindingView]
    notes: Sequence[FindingView]
    symptoms: Sequence[tuple[str, str]]
    gaps: Sequence[str]
    log: Sequence[IntervalView]
    more: int

    @property
    def title(self) -> str:
        """What the engine is called among others."""
        return self.standing.who or "no engine known"

    @property
    def seen(self) -> bool:
        """Whether there is anything to show of the few numbers, now or before."""
        now = self.standing.diagnosis is not None and self.standing.diagnosis.values
        return bool(now) or any(vital.chart for vital in self.vitals)


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A target in a row: how its engines stand, the worst first, and its past."""

    target: TargetView
    standings: Sequence[Standing]
    strip: Strip

    @property
    def worst(self) -> Standing:
        """The engine that stands worst."""
        return self.standings[0]


@dataclass(frozen=True, slots=True)
class First:
    """What to do first: a change with what it does, or in words."""

    change: ChangeView | None
    words: str


def engine_parts(target: TargetView, view: TriageView, axis: Axis) -> list[EnginePart]:
    """The engines of a target in full, worst first; none where none is known."""
    return [
        _engine_part(number, standing, standing.engine, axis, view.moment_s)
        for number, standing in enumerate(standings(target, view), 1)
        if standing.engine is not None
    ]


def _engine_part(
    number: int, standing: Standing, engine: EngineView, axis: Axis, moment_s: float
) -> EnginePart:
    reasons = Reasons(engine, axis, moment_s)
    found = engine.diagnosis
    log = sorted(standing.intervals, key=lambda one: (-one.start_s, one.kind))
    return EnginePart(
        number=number,
        standing=standing,
        stage=stage_words(found),
        lanes=lanes(standing.intervals, axis, moment_s),
        causes=reasons.causes(),
        vitals=reasons.vitals(),
        worse=reasons.findings("warning", "critical"),
        notes=reasons.findings("info"),
        symptoms=[(symptom, SYMPTOMS.get(symptom, "")) for symptom in found.symptoms],
        gaps=gaps(found, shown=GAPS_SHOWN),
        log=log[:LOG_ROWS],
        more=max(0, len(log) - LOG_ROWS),
    )


def target_parts(view: TriageView, axis: Axis) -> list[TargetPart]:
    """The targets in a row each, worst first; those alike stay in the order they came in."""
    parts: list[TargetPart] = []
    for target in view.targets:
        found = standings(target, view)
        past = strip([standing.intervals for standing in found], axis)
        parts.append(TargetPart(target, found, past))
    return sorted(parts, key=lambda part: -part.worst.rank)


def first(standing: Standing) -> First | None:
    """What to do first about an engine; None where nothing is to be done."""
    found = standing.diagnosis
    if found is None or not found.causes:
        return None
    cause = found.causes[0]
    made = advised(found, cause)
    return First(change_view(made[0]) if made else None, cause.lever)


def last_read(engine: EngineView, moment_s: float) -> IntervalView | None:
    """The stage that was known last, of an engine whose stage is not known now."""
    if engine.diagnosis.stage is not None:
        return None
    ended = [
        one
        for one in engine.intervals
        if one.kind == "stage" and one.end_s is not None and one.end_s <= moment_s
    ]
    return max(ended, key=lambda one: one.end_s or 0.0, default=None)


# --- The triage page as HTML. Pure: values in, text out; templates and files are read once --------


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
GLOBALS: dict[str, Any] = {"last_read": last_read, "tall": TALL, "wide": WIDE}


def render(view: TriageView) -> str:
    """The page; everything in it that came from elsewhere is text."""
    axis = axis_of(view)
    rows = target_parts(view, axis)
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
        engines=engine_parts(rows[0].target, view, axis) if alone else [],
        alone=alone,
        worst=worst,
        health=worst.health if worst else "unknown",
        title=_title(worst),
        first=first(worst) if worst else None,
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
