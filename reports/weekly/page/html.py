"""The report as one self-contained HTML file, as Markdown, and in brief. Pure."""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from msgspec import Struct

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.recommend.advice import REPLICAS
from kneewatch.reports.advice_text import signal_name
from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.health import RANKS
from kneewatch.reports.lines import first_sentence, usd
from kneewatch.reports.templates import environment, palette
from kneewatch.reports.weekly.figures import ReportedFlag, Trend, UnknownSignal
from kneewatch.reports.weekly.page import charts, formatting
from kneewatch.reports.weekly.page.formatting import HEALTH, Calendar, arrow, bare, flag, health
from kneewatch.reports.weekly.report import (
    Action,
    Incident,
    TableRow,
    Tier,
    TierMoney,
    WeeklyReport,
    WeeklyVerdict,
)
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

# --- The report on one page -----------------------------------------------------------------------


STEPS_MOST, CHANGES_MOST = 3, 8
ON_CALL, SERVING, CAPACITY = "who is on call", "who runs the engines", "who owns the GPUs"


def title(report: WeeklyReport) -> str:
    week = Calendar(report.timezone, report.period).week
    return "Weekly health report" if week else "Health report"


def headline(report: WeeklyReport) -> tuple[str, str]:
    """The worst health state, and a sentence with the number of tiers in each state, worst
    first."""
    counts = Counter(health(verdict.health) for verdict in report.verdicts)
    if not counts:
        return "unknown", "No target was watched in this period: health unknown."
    states = sorted(counts, key=lambda state: -RANKS[state])
    tally = ", ".join(f"{counts[state]} {HEALTH[state].lower()}" for state in states)
    return states[0], f"{plural(len(report.tiers), 'tier')}: {tally}."


class Step(Struct, frozen=True):
    """An action for people: what to do and why, whose work it is, what it saves and what it takes.

    `text` is the change, or the advice if it changes no setting. `saving` is money or requests;
    empty if neither is known. `effort` is empty if it is not known.
    """

    tier: str
    text: str
    why: str
    changes: tuple[ReportedFlag, ...]
    owner: str
    saving: str
    effort: str

    @property
    def command(self) -> str:
        """The flags to set; empty without one."""
        return " ".join(
            f"{change.flag} {change.after}"
            for change in self.changes
            if change.flag.startswith("--")
        )


def first_steps(report: WeeklyReport) -> tuple[Step, ...]:
    """The first action of each tier, the worst tier first; at most three."""
    order = sorted(
        zip(report.verdicts, report.tiers, report.money, strict=True),
        key=lambda row: -RANKS[health(row[0].health)],
    )
    steps = (
        _step(verdict.action, verdict, tier, money, report)
        for verdict, tier, money in order
        if verdict.action is not None
    )
    return tuple(step for step, _ in zip(steps, range(STEPS_MOST), strict=False))


def _step(
    action: Action, verdict: WeeklyVerdict, tier: Tier, money: TierMoney, report: WeeklyReport
) -> Step:
    flags = [change for change in action.changes if change.flag.startswith("--")]
    resizes = any(change.flag == REPLICAS for change in action.changes)
    if flags:
        owner, effort = SERVING, f"a restart of {_restarted(action, tier, report)}"
    elif resizes or (not action.recommendation and verdict.size in ("too small", "too large")):
        owner, effort = CAPACITY, "a change of replicas"
    else:
        owner, effort = ON_CALL, ""
    why = [first_sentence(action.text)] if action.changes else []
    return Step(
        tier.id,
        _changed(action.changes) or first_sentence(action.text),
        " ".join((*why, as_sentence(action.why))),
        action.changes,
        owner,
        _saving(action, tier, money, report),
        effort,
    )


def _changed(changes: Sequence[ReportedFlag]) -> str:
    """The changes as an order, such as "Set --flag fp8 (now auto)." Empty without one."""
    resized = {change.flag: change for change in changes}.get(REPLICAS)
    if resized is not None and len(changes) == 1:
        return f"Run {plural(int(resized.after), 'replica')} instead of {resized.before}."
    words = ", ".join(map(flag, changes))
    return as_sentence(f"set {words}" if words.startswith("--") else words)


def _restarted(action: Action, tier: Tier, report: WeeklyReport) -> str:
    """The replica of the action's incident, or the number of engines to restart."""
    replicas = next((each.replicas for each in report.incidents if each.id == action.incident), ())
    if len(replicas) == 1:
        return replicas[0]
    return plural(len(replicas), "replica") if replicas else plural(tier.engines_present, "engine")


def _saving(action: Action, tier: Tier, money: TierMoney, report: WeeklyReport) -> str:
    for saving in money.savings:
        if saving.id == action.recommendation and saving.saves_usd_per_month:
            return f"saves {usd(saving.saves_usd_per_month)} a month"
    harmed = sum(
        each.cost.harmed_requests
        for each in report.incidents
        if each.tier == tier.id and action.incident in ("", each.id)
    )
    return f"{number(round(harmed))} requests preempted, late or lost" if harmed >= 1 else ""


def changed(report: WeeklyReport) -> tuple[tuple[str, Trend], ...]:
    """The figures by tier that changed by more than the noise against the period before."""
    return tuple(
        (verdict.tier, trend)
        for verdict in report.verdicts
        for trend in verdict.trends
        if arrow(trend)
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
    "svg": charts,
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


# --- The report's page as Markdown, for a ticket or a mail ----------------------------------------


HIDDEN_TAGS = frozenset({"head", "svg", "figure", "nav"})
HIDDEN_CLASSES = frozenset(
    {"behind", "brand", "legend", "page-only", "paper-only", "skip", "swatch", "unseen"}
)
CONTAINERS = frozenset({"ul", "ol", "dl", "table", "thead", "tbody", "tr"})
BLOCKS = frozenset({"ul", "ol", "dl", "div", "section"})
UNCLOSED = frozenset({"br", "link", "meta"})
HEADINGS = {f"h{level}": "#" * level for level in range(1, 6)}
BOLD_CLASSES = frozenset({"badge", "headline", "name"})
NAME = re.compile(r"[\w.:/+-]+")
CELL, ROW, HEAD, CAPTION = "\ue000", "\ue001", "\ue002", "\ue003"
"""Ends of the parts of a table. The page has none of these, because they cannot be printed."""


def render_markdown(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The Markdown of the report's page: headings, paragraphs, lists and tables, without drawings,
    folded numbers and links within the page. All values are escaped."""
    converter = _Converter()
    converter.feed(render(report, docs_url=docs_url))
    lines = [" ".join(line.split()) for line in converter.text.splitlines()]
    text = "\n".join(re.sub(r" ([;,.])(?= |$)", r"\1", line) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


class _Converter(HTMLParser):
    """Turns each element into Markdown when it ends. Open elements have their tag, classes, link
    and the Markdown of what they contain."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, frozenset[str], str, list[str]]] = [("", frozenset(), "", [])]

    @property
    def text(self) -> str:
        """The Markdown so far."""
        return "".join(self._open[0][-1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element; `br` separates."""
        given = dict(attrs)
        if tag not in UNCLOSED:
            classes = frozenset((given.get("class") or "").split())
            self._open.append((tag, classes, given.get("href") or "", []))
        elif tag == "br":
            self._open[-1][-1].append("; ")

    def handle_data(self, data: str) -> None:
        """Add text, not the space between the parts of a list or table."""
        if data.isspace() and self._open[-1][0] in CONTAINERS:
            return
        self._open[-1][-1].append(escaped(re.sub(r"\s+", " ", data)))

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        if tag in UNCLOSED:
            return
        tag, classes, link, parts = self._open.pop()
        in_cell = any(other in ("td", "th") for other, *_ in self._open)
        if tag not in HIDDEN_TAGS and classes.isdisjoint(HIDDEN_CLASSES):
            self._open[-1][-1].append(_ended(tag, classes, link, "".join(parts), in_cell=in_cell))


def _ended(tag: str, classes: frozenset[str], link: str, inner: str, *, in_cell: bool) -> str:
    """An element as Markdown. In a cell of a table, everything is one line."""
    words = " ".join(inner.split(" ")).strip()
    if tag == "table":
        return _nested(inner) if in_cell else _markdown_table(inner)
    if ends := {"td": CELL, "th": CELL, "tr": ROW, "thead": HEAD, "caption": CAPTION}.get(tag):
        return words + ends
    if tag in ("strong", "b", "summary") or not classes.isdisjoint(BOLD_CLASSES):
        inner = words = f"**{words}**" if words else ""
    if tag == "code":
        return f"`{words}`" if NAME.fullmatch(words) else f"**{words}**"
    if tag == "a" and not link.startswith("#"):
        return f"[{words}]({link})"
    if "number" in classes and tag == "span":
        return f"{words}."
    if in_cell and tag in ("li", "p", "dd"):
        return f"{words}; " if tag == "li" else f"{words} "
    if tag in HEADINGS:
        return f"\n\n{HEADINGS[tag]} {words}\n\n"
    if tag in ("p", "summary"):
        return "\n\n" + re.sub(r"^(?=[#>+-])", r"\\", words) + "\n\n" if words else ""
    listed = {"li": f"- {words}\n", "dt": f"- {words}: ", "dd": f"{words}\n"}
    return listed.get(tag, f"\n\n{inner}\n\n" if tag in BLOCKS else inner)


def _rows(inner: str) -> tuple[str, list[str], list[list[str]]]:
    """The caption, the headings and the rows of a table."""
    caption, _, rest = inner.rpartition(CAPTION)
    head, _, body = rest.rpartition(HEAD)
    heads, *_ = _cells(head) or [list[str]()]
    return caption.strip(), heads, _cells(body)


def _cells(rows: str) -> list[list[str]]:
    return [
        [" ".join(cell.split()).strip("; ") for cell in row.split(CELL)[:-1]]
        for row in rows.split(ROW)[:-1]
    ]


def _markdown_table(inner: str) -> str:
    caption, heads, rows = _rows(inner)
    width = max(map(len, [heads, *rows]))
    filled = [(*row, *[""] * (width - len(row))) for row in rows]
    kept = [at for at in range(width) if any(row[at] for row in filled)]
    lines = [
        f"| {' | '.join(row[at] or '-' for at in kept)} |"
        for row in (heads or [""] * width, ["---"] * width, *filled)
    ]
    title = f"**{caption}**\n\n" if caption else ""
    return "\n\n" + title + "\n".join(lines) + "\n\n"


def _nested(inner: str) -> str:
    """A table within a cell, as text."""
    _, heads, rows = _rows(inner)
    return "; ".join(
        ", ".join(
            [row[0], *(f"{name} {cell}" for name, cell in zip(heads[1:], row[1:], strict=False))]
        )
        for row in rows
    )
