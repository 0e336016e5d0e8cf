"""The report as one self-contained HTML file. Pure."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.reports.advice_text import signal_name
from kneewatch.reports.health import RANKS
from kneewatch.reports.lines import first_sentence
from kneewatch.reports.templates import environment, palette
from kneewatch.reports.weekly.figures import UnknownSignal
from kneewatch.reports.weekly.page import charts, formatting, svg
from kneewatch.reports.weekly.page.formatting import Calendar, bare, health
from kneewatch.reports.weekly.page.summary import changed, first_steps, headline, title
from kneewatch.reports.weekly.report import Incident, WeeklyReport, WeeklyVerdict
from kneewatch.reports.weekly.tier_sections import TableRow
from kneewatch.reports.weekly.verdict import saving_words
from kneewatch.rules.formatting import (
    as_sentence,
    duration,
    number,
    percent,
    plural,
    quantity,
    span,
    stamp,
    stated_duration,
)

SECTIONS = (
    ("verdict", "Verdict"),
    ("incidents", "Incidents"),
    ("tables", "Metrics against targets"),
    ("slo", "Service levels"),
    ("knee", "The knee"),
    ("workload", "Workload"),
    ("size", "Size"),
    ("money", "Money"),
    ("track-record", "Track record"),
    ("data-quality", "Data quality"),
)
"""The sections in reading order: the anchor and the heading of each."""

ROWS_MOST = 100
"""Maximum number of rows in a list. A longer list is cut, with a remark; the JSON document has all
rows."""


# --- The report's values by tier and by incident --------------------------------------------------


ALL_MOST, SOME, SOME_IN_FULL = 12, 8, 10
"""Up to ALL_MOST tiers are shown in full. If there are more tiers, only the SOME worst tiers and
SOME_IN_FULL incidents are: the file is sent by mail and must stay small. A report on a single tier
(--tier) has everything."""

INCIDENTS_IN_FULL = 20


def _badness(verdict: WeeklyVerdict) -> int:
    return RANKS[health(verdict.health)]


def tier_parts(report: WeeklyReport, calendar: Calendar) -> list[dict[str, Any]]:
    """The sections of each tier by name, in the order of the report. Only tiers shown in full have
    charts."""
    worst = sorted(report.verdicts, key=_badness, reverse=True)
    full = worst if len(worst) <= ALL_MOST else worst[:SOME]
    sections = zip(
        report.tiers, report.verdicts, report.tables, report.slo, report.knees, report.workloads,
        report.sizes, report.money, strict=True,
    )  # fmt: skip
    return [
        {
            "number": place,
            "tier": tier,
            "verdict": verdict,
            "tables": (
                _table("Monitoring", tables.monitoring, sparks=verdict in full),
                _table("KV cache", tables.kv, sparks=verdict in full),
            ),
            "slo": slo,
            "knee": knee,
            "workload": workload,
            "size": size,
            "money": money,
            "charts": charts.charts(slo, knee, calendar) if verdict in full else {},
            "full": verdict in full,
        }
        for place, (tier, verdict, tables, slo, knee, workload, size, money) in enumerate(
            sections, 1
        )
    ]


def incidents_in_full(report: WeeklyReport) -> list[str]:
    """The ids of the incidents that are shown in full. They are those with the worst severity and
    the most harm, the worst first."""
    worst = sorted(
        report.incidents,
        key=lambda incident: (-RANKS[health(incident.severity)], -incident.cost.harmed_requests),
    )
    most = INCIDENTS_IN_FULL if len(report.tiers) <= ALL_MOST else SOME_IN_FULL
    return [incident.id for incident in worst[:most]]


NEEDS = re.compile(r"on the page \((needs .+)\)$")
"""Matches the reason that a server exports a signal's metrics only if it uses a feature."""


def unknown_groups(
    unknown: Sequence[UnknownSignal],
) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """The signals without data: a reason, engines, and the signals that have no data for that
    reason on these engines. All metrics of an optional feature get the same reason."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in unknown:
        needs = NEEDS.search(row.why)
        groups.setdefault((needs[1] if needs else row.why, row.engines), []).append(row.signal)
    return [(why, engines, keys) for (why, engines), keys in groups.items()]


ENDINGS = {
    "restarted": "ended by a restart",
    "unwatched": "ended while not watched",
}
DATA_ENDS_S = 300.0
"""If the last scrape of an open incident is more than this many seconds before the end of the
period, it is unknown whether the incident went on."""


def ending(incident: Incident, calendar: Calendar) -> str:
    """A text on how an incident ended."""
    if incident.end_s is not None:
        return ENDINGS.get(incident.ended, "ended")
    if calendar.period.to_s - incident.last_s <= DATA_ENDS_S:
        return "ongoing at the end of the period"
    return f"no data after {calendar.moment(incident.last_s)}; still active then"


def methods(report: WeeklyReport) -> list[TableRow]:
    """Table rows for the section on methods. Of rows with the same text, only one is kept."""
    rows = (row for tables in report.tables for row in (*tables.monitoring, *tables.kv))
    return list({(row.section, row.subject, row.how, row.rules): row for row in rows}.values())


def _table(name: str, stated: Sequence[TableRow], *, sparks: bool) -> dict[str, Any]:
    """A metric table: its rows with their sparklines, the values of these, and the rows without
    data."""
    rows = [row for row in stated if any(figure.value is not None for figure in row.figures)]
    empty = tuple(row for row in stated if row not in rows)
    lines = [
        charts.spark_line(row.spark, low=row.low, high=row.high) if row.spark and sparks else None
        for row in rows
    ]
    drawn = sorted((row for row, line in zip(rows, lines, strict=True) if line), key=_steps)
    behind = tuple(_spark_table(list(group)) for _, group in groupby(drawn, _steps))
    return {
        "name": name,
        "rows": list(zip(rows, lines, strict=True)),
        "behind": behind,
        "empty": empty,
    }


def _steps(row: TableRow) -> tuple[float, float, int]:
    """The start, step length and number of steps of a row's sparkline. Rows with the same start,
    length and number share a table of values."""
    return (row.spark.from_s, row.spark.step_s, len(row.spark.values)) if row.spark else (0, 0, 0)


def _spark_table(rows: Sequence[TableRow]) -> tuple[list[str], list[tuple[float, list[str]]]]:
    """The values behind sparklines: headings and, for each step, its start and the values."""
    sparks = [row.spark for row in rows if row.spark is not None]
    first = sparks[0]
    return [row.subject for row in rows], [
        (first.from_s + at * first.step_s, [bare(s.values[at], s.unit) for s in sparks])
        for at in range(len(first.values))
    ]


# --- Rendering ------------------------------------------------------------------------------------


FILTERS: dict[str, Any] = {
    "signal": quantity,
    "signal_name": signal_name,
    **{
        function.__name__: function
        for function in (
            as_sentence, duration, first_sentence, number, percent, span, stamp, stated_duration,
        )
    },
    **{
        function.__name__: function
        for function in (
            formatting.arrow, formatting.bare, formatting.change,
            formatting.flag, formatting.has_number, formatting.health, formatting.outcome,
            formatting.points, formatting.request_count, formatting.saved, formatting.sentence,
            formatting.share, formatting.size_name, formatting.size_state,
            formatting.size_verdict, formatting.spent, formatting.spread,
            formatting.state, formatting.tone, formatting.with_unit, charts.heat_level,
            charts.heat_words, charts.alternative_text, charts.axis_of,
            charts.placed, charts.signal_chart, charts.signal_rows, charts.time_ticks,
        )
    },
}  # fmt: skip
GLOBALS: dict[str, Any] = {
    **{name: getattr(formatting, name) for name in ("HEALTH", "LATENCIES", "PLAIN", "STATES")},
    "ROWS_MOST": ROWS_MOST,
    "WEEKDAYS": formatting.WEEKDAYS,
    "cause_page": cause_page,
    "ending": ending,
    "followed": formatting.followed,
    "plural": plural,
    "saving_words": saving_words,
    "LEVELS": charts.LEVELS,
    "SPARK": (charts.WIDE, charts.TALL),
    "svg": svg,
    "unknown_groups": unknown_groups,
}


def render(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The report as an HTML file. All values are escaped.

    With `docs_url`, incidents link to the pages of their causes.
    """
    css = _stylesheet()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            template_values(report, docs_url=docs_url),
            css=Markup(css),
            icons=Markup(read_template("icons.html.j2", "kneewatch.reports.triage")),
            policy=_policy(css),
        )
    )


def template_values(report: WeeklyReport, *, docs_url: str) -> dict[str, Any]:
    """What the templates show, by name."""
    calendar = Calendar(report.timezone, report.period)
    tiers = tier_parts(report, calendar)
    in_full = incidents_in_full(report)
    watched = [part for part in tiers if part["tier"].engines]
    worst_first = sorted(tiers, key=lambda part: _badness(part["verdict"]), reverse=True)
    return {
        "report": report,
        "docs_url": docs_url,
        "calendar": calendar,
        "tiers": watched,
        "worst_first": worst_first,
        "week": next((p for p in worst_first if p["tier"].engines and p["full"]), None),
        "in_full": in_full,
        "printed": next(iter(in_full), ""),
        "methods": methods(report),
        "rest": [part for part in watched if not part["full"]],
        "headline": headline(report),
        "steps": first_steps(report),
        "differences": changed(report),
        "title": title(report),
        "sections": SECTIONS,
    }


def _policy(css: str) -> str:
    """The content security policy. It allows the stylesheet, identified by its digest, and nothing
    else."""
    digest = b64encode(sha256(css.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        f"form-action 'none'"
    )


@cache
def _stylesheet() -> str:
    """The minified stylesheet. Many mail clients drop declarations with variables. Each of these is
    therefore preceded by the same declaration with a plain value."""
    source = re.sub(r"/\*.*?\*/", "", palette() + read_template("report.css"), flags=re.DOTALL)
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


def read_template(name: str, package: str = __package__ or "") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return environment(read_template, FILTERS, GLOBALS)
