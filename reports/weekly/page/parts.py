"""The report's values arranged by section, tier and incident. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

from kneewatch.reports.weekly.page.charts import Charts, charts
from kneewatch.reports.weekly.page.formatting import RANKS, Calendar, bare, ending, health, lasted
from kneewatch.reports.weekly.page.incident_chart import Strip, strip
from kneewatch.reports.weekly.page.small_charts import SparkLine, spark_line
from kneewatch.reports.weekly.report import Incident, Tier, Verdict, WeeklyReport
from kneewatch.reports.weekly.tier_sections import (
    TableRow,
    TierKnee,
    TierMoney,
    TierSize,
    TierSlo,
    TierTables,
    TierWorkload,
)

SECTIONS = (
    ("verdict", "Verdict"),
    ("incidents", "Incidents"),
    ("tables", "The guide's tables"),
    ("slo", "Service levels"),
    ("knee", "The knee"),
    ("workload", "Workload"),
    ("size", "Size"),
    ("money", "Money"),
    ("track-record", "Track record"),
    ("data-quality", "Data quality"),
)
"""The sections in reading order: anchor and heading."""

ROWS_MOST = 100
"""Longer lists are cut, and say so: the JSON has all."""

WORDS = {
    "critical": ("was in trouble", "were in trouble"),
    "warning": ("needs attention", "need attention"),
    "unknown": ("cannot be judged", "cannot be judged"),
    "info": ("is healthy, with a note", "are healthy, with a note"),
    "ok": ("is healthy", "are healthy"),
}


def title(report: WeeklyReport) -> str:
    """What the report is called."""
    week = Calendar(report.timezone, report.period).week
    return "Weekly health report" if week else "Health report"


def headline(report: WeeklyReport) -> tuple[str, str]:
    """The worst health there is, and how many tiers stand how, the worst first."""
    by_tier = {verdict.tier: health(verdict.health) for verdict in report.verdicts}
    found = Counter(by_tier.get(tier.id, "unknown") for tier in report.tiers)
    if not found:
        return "unknown", "Nothing was watched in this time: nothing can be said of its health."
    words = sorted(found, key=lambda word: -RANKS[word])
    if len(words) == 1:
        count = found[words[0]]
        who = {1: "The one tier", 2: "Both tiers"}.get(count, f"All {count} tiers")
        return words[0], f"{who} {WORDS[words[0]][count > 1]}."
    parts = [f"{found[word]} {WORDS[word][found[word] > 1]}" for word in words]
    first, *rest = parts
    return words[0], f"Of {len(report.tiers)} tiers, {first}; {', '.join(rest)}."


# --- The report's values, put together for each tier and for each incident ------------------------


ALL_MOST, SOME, SOME_IN_FULL = 12, 8, 10
"""Up to so many tiers are all told in full, with their charts; of more, so many of those that stand
worst: a file that is sent by mail must stay small. A tier's own report (--tier) has all of it."""

INCIDENTS_IN_FULL = 20


class OfTier(Protocol):
    """A section's entry for a tier."""

    @property
    def tier(self) -> str:
        """The tier's id."""
        ...


Entry = TypeVar("Entry", bound=OfTier)


@dataclass(frozen=True, slots=True)
class RowPart:
    """A row of the guide's tables with its sparkline."""

    row: TableRow
    spark: SparkLine | None

    @property
    def known(self) -> bool:
        """Whether any of its figures is."""
        return any(trend.value is not None for trend in self.row.figures)


@dataclass(frozen=True, slots=True)
class SparkTable:
    """The values behind sparklines: heads, and by step its beginning and the values."""

    heads: tuple[str, ...]
    rows: tuple[tuple[float, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class TablePart:
    """One of the guide's tables; `behind` are the values of its sparklines."""

    name: str
    section: str
    rows: tuple[RowPart, ...]
    behind: tuple[SparkTable, ...]


@dataclass(frozen=True, slots=True)
class TierPart:
    """All that is said of a tier; None where a section does not know it. One that is not told in
    `full` has no charts."""

    number: int
    tier: Tier
    verdict: Verdict | None
    tables: tuple[TablePart, ...]
    slo: TierSlo | None
    knee: TierKnee | None
    workload: TierWorkload | None
    size: TierSize | None
    money: TierMoney | None
    charts: Charts
    full: bool

    @property
    def watched(self) -> bool:
        """Whether it was in this time; one that was before only stands in the verdict alone."""
        return bool(self.tier.engines)

    @property
    def rank(self) -> int:
        """How bad, the worst highest; a tier without a verdict is unknown."""
        return RANKS["unknown" if self.verdict is None else health(self.verdict.health)]


@dataclass(frozen=True, slots=True)
class IncidentPart:
    """An incident; `strip` is None where it is told in a line only.

    `stretch` says when it was, `length` how long, `ending` how it ended.
    """

    number: int
    incident: Incident
    stretch: str
    length: str
    ending: str
    strip: Strip | None


@dataclass(frozen=True, slots=True)
class How:
    """How a figure of the guide's tables is computed, and by which rules it is judged."""

    section: str
    subject: str
    how: str
    rules: tuple[str, ...]


def in_full(report: WeeklyReport) -> set[str]:
    """The tiers that are told with their charts."""
    if len(report.tiers) <= ALL_MOST:
        return {tier.id for tier in report.tiers}
    verdicts = sorted(report.verdicts, key=lambda one: -RANKS[health(one.health)])
    return {verdict.tier for verdict in verdicts[:SOME]}


def tier_parts(report: WeeklyReport, calendar: Calendar) -> list[TierPart]:
    """The tiers in the report's order."""
    full = in_full(report)
    verdicts, tables, slo = _by_tier(report.verdicts), _by_tier(report.tables), _by_tier(report.slo)
    knees, workloads = _by_tier(report.knees), _by_tier(report.workloads)
    sizes, money = _by_tier(report.sizes), _by_tier(report.money)
    made: list[TierPart] = []
    for number, tier in enumerate(report.tiers, 1):
        of = tier.id
        drawn = (
            charts(slo.get(of), knees.get(of), sizes.get(of), money.get(of), calendar)
            if of in full
            else Charts()
        )
        shown = _tables(tables.get(of), sparks=of in full)
        made.append(
            TierPart(
                number, tier, verdicts.get(of), shown, slo.get(of), knees.get(of),
                workloads.get(of), sizes.get(of), money.get(of), drawn, of in full,
            )
        )  # fmt: skip
    return made


def worst_first(parts: Sequence[TierPart]) -> list[TierPart]:
    """The tiers by how bad they are; those alike stay in their order."""
    return sorted(parts, key=lambda part: -part.rank)


def incident_parts(report: WeeklyReport, calendar: Calendar) -> list[IncidentPart]:
    """The incidents by their start; the worst of them in full."""
    worst = sorted(
        range(len(report.incidents)),
        key=lambda at: (-RANKS[health(report.incidents[at].severity)], at),
    )
    most = INCIDENTS_IN_FULL if len(report.tiers) <= ALL_MOST else SOME_IN_FULL
    drawn = set(worst[:most])
    parts: list[IncidentPart] = []
    for at, one in enumerate(report.incidents):
        end_s = one.last_s if one.end_s is None else one.end_s
        parts.append(
            IncidentPart(
                number=at + 1,
                incident=one,
                stretch=calendar.stretch(one.start_s, end_s),
                length=lasted(one.start_s, end_s),
                ending=ending(one.ended, goes_on=one.end_s is None),
                strip=strip(one, calendar) if at in drawn else None,
            )
        )
    return parts


def hows(report: WeeklyReport) -> list[How]:
    """How the tables' figures are computed; what is alike in all tiers is told once."""
    found: dict[How, None] = {}
    for tables in report.tables:
        for row in (*tables.monitoring, *tables.kv):
            if row.how:
                found[How(row.section, row.subject, row.how, row.rules)] = None
    return list(found)


def _by_tier(entries: Iterable[Entry]) -> Mapping[str, Entry]:
    return {entry.tier: entry for entry in entries}


def _tables(tables: TierTables | None, *, sparks: bool) -> tuple[TablePart, ...]:
    if tables is None:
        return ()
    both = (("Monitoring", "9.3", tables.monitoring), ("KV cache", "7.7", tables.kv))
    return tuple(_table(name, section, rows, sparks=sparks) for name, section, rows in both if rows)


def _table(name: str, section: str, rows: Sequence[TableRow], *, sparks: bool) -> TablePart:
    parts = tuple(
        RowPart(
            row,
            spark_line(row.spark, low=row.low, high=row.high) if row.spark and sparks else None,
        )
        for row in rows
    )
    drawn = sorted((part.row for part in parts if part.spark is not None), key=_steps)
    behind = tuple(_spark_table(list(group)) for _, group in groupby(drawn, _steps))
    return TablePart(name, section, parts, behind)


def _steps(row: TableRow) -> tuple[float, float, int]:
    """The steps of a row's sparkline: those on the same ones stand in one table."""
    return (row.spark.from_s, row.spark.step_s, len(row.spark.values)) if row.spark else (0, 0, 0)


def _spark_table(rows: Sequence[TableRow]) -> SparkTable:
    sparks = [row.spark for row in rows if row.spark is not None]
    first = sparks[0]
    return SparkTable(
        tuple(row.subject for row in rows),
        tuple(
            (
                first.from_s + at * first.step_s,
                tuple(bare(spark.values[at], spark.unit) for spark in sparks),
            )
            for at in range(len(first.values))
        ),
    )
