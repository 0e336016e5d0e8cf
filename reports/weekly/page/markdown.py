"""The report as Markdown, for a ticket or a mail. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.reports.formatting import number, plural, quantity, span
from kneewatch.reports.weekly.figures import Advice, EngineChange, EvidenceLine, TargetQuality
from kneewatch.reports.weekly.page import markdown_tiers as tiers
from kneewatch.reports.weekly.page.formatting import (
    FATES,
    HEALTH,
    RANKS,
    Calendar,
    ending,
    followed,
    health,
    lasted,
    points,
    said,
    saved,
    sentence,
    share,
    told,
    told_size,
)
from kneewatch.reports.weekly.page.markdown_tiers import bullets, code, flags, rows, sections, text
from kneewatch.reports.weekly.page.parts import ROWS_MOST, SECTIONS, OfTier, headline, title
from kneewatch.reports.weekly.report import Incident, Tier, TrackRow, Verdict, WeeklyReport

RecordLines = list[str]


def track_record(report: WeeklyReport, calendar: Calendar) -> RecordLines:
    """The recommendations and their outcomes."""
    record = report.track_record
    if not record.made and not record.rows:
        return ["No recommendations in this period, and no earlier one was applied."]
    heads = ("Recommendation", "Where", "Recommended", "Outcome", "Predicted and measured")
    return sections(
        [followed(record)],
        rows(heads, (_followed(row, calendar) for row in record.rows[:ROWS_MOST])),
        _left_out(len(record.rows)),
    )


def _followed(row: TrackRow, calendar: Calendar) -> tuple[str, ...]:
    made = row.advice
    return (
        f"{text(made.summary)} {flags(made.changes)}",
        f"{text(row.target)}, engine {text(row.engine)}",
        calendar.moment(made.first_s),
        text(FATES.get(made.fate, ("unknown", made.fate))[1]),
        "; ".join(
            f"{code(one.signal)} {quantity(one.signal, one.predicted)} predicted, "
            f"{quantity(one.signal, one.measured)} measured ({points(one.off_ratio, '')})"
            for one in row.comparisons
        ),
    )


def data_quality(report: WeeklyReport, calendar: Calendar) -> RecordLines:
    """How far the report can be trusted, and how its figures are computed."""
    quality = report.data_quality
    return sections(
        *([text(note)] for note in quality.notes),
        rows(
            ("Target", "Watched", "Scrapes", "Failed", "Gaps"),
            (_watched(one, calendar) for one in quality.targets[:ROWS_MOST]),
        ),
        _left_out(len(quality.targets)),
        rows(
            ("When", "Where", "What"),
            (_changed(one, calendar) for one in quality.changes[:ROWS_MOST]),
        ),
        _left_out(len(quality.changes)),
        rows(
            ("Signal without data", "Why"),
            ((code(one.signal), text(one.why)) for one in quality.unknown[:ROWS_MOST]),
        ),
        _left_out(len(quality.unknown)),
        [text(report.noise_test)],
        rows(
            ("Figure", "How"),
            ((text(method.figure), text(method.how)) for method in quality.methods),
        ),
    )


def _watched(one: TargetQuality, calendar: Calendar) -> tuple[str, ...]:
    gaps = [
        f"{calendar.stretch(gap.from_s, gap.to_s)} {text(gap.why)}".strip() for gap in one.gaps
    ] + ([f"{one.gaps_left_out} more"] if one.gaps_left_out else [])
    return (
        text(one.target),
        share(one.watched_ratio),
        number(one.scrapes),
        number(one.failed),
        "; ".join(gaps) or "none",
    )


def _changed(one: EngineChange, calendar: Calendar) -> tuple[str, ...]:
    made = (
        f"{code(made.key)} {text(made.before) or '-'} → {text(made.after) or '-'}"
        for made in one.differences
    )
    return (
        calendar.moment(one.t_s),
        f"{text(one.target)}, engine {text(one.engine)}",
        f"{text(one.what)} {'; '.join(made)}",
    )


def _left_out(count: int) -> RecordLines:
    return [f"{count - ROWS_MOST} more in the JSON."] if count > ROWS_MOST else []


# --- Sections -------------------------------------------------------------------------------------


Lines = list[str]


def render_markdown(report: WeeklyReport, *, docs_url: str = "") -> str:
    """The Markdown document; all values are escaped. `docs_url`: link incidents to their cause."""
    calendar = Calendar(report.timezone, report.period)
    bodies: tuple[Lines, ...] = (
        _verdict(report),
        _incidents(report, calendar, docs_url),
        _each(report, tiers.tables, report.tables, calendar),
        _each(report, tiers.slo, report.slo, calendar),
        _each(report, tiers.knee, report.knees, calendar),
        _each(report, tiers.workload, report.workloads, calendar),
        _each(report, tiers.size, report.sizes, calendar),
        _each(report, tiers.money, report.money, calendar),
        track_record(report, calendar),
        data_quality(report, calendar),
    )
    lines = _head(report, calendar)
    for place, ((_, name), body) in enumerate(zip(SECTIONS, bodies, strict=True), 1):
        lines += ["", f"## {place}. {name}", "", *body]
    return "\n".join(lines) + "\n"


def _head(report: WeeklyReport, calendar: Calendar) -> Lines:
    compared = f"; compared with {calendar.days(report.compared)}" if report.compared else ""
    return sections(
        [f"# {title(report)}, {calendar.title}"],
        [
            f"{calendar.length} ({text(report.timezone)} time), watched for "
            f"{span(report.period.covered_s)}{compared}. From {text(report.source)}. "
            f"Created {calendar.dated(report.made_s)} by kneewatch {text(report.version)}."
        ],
        [f"Only {text(', '.join(report.filters))}."] if report.filters else [],
        *([f"> {text(said(notice))}"] for notice in report.notices),
    )


def _verdict(report: WeeklyReport) -> Lines:
    by_tier = {verdict.tier: verdict for verdict in report.verdicts}
    told_of = sorted(
        ((tier, by_tier.get(tier.id)) for tier in report.tiers),
        key=lambda one: -RANKS[health(one[1].health) if one[1] else "unknown"],
    )
    heads = ("Tier", "Health", "Size", "Money", "Do first")
    return sections(
        [f"**{headline(report)[1]}**"],
        rows(heads, (_line(tier, verdict) for tier, verdict in told_of)),
        bullets(
            text(f"{tier.id}: {'; '.join(sentence(trend) for trend in verdict.trends)}.")
            for tier, verdict in told_of
            if verdict and verdict.trends
        ),
    )


def _line(tier: Tier, verdict: Verdict | None) -> tuple[str, ...]:
    gpus = "number of GPUs not stated" if tier.gpus is None else plural(tier.gpus, "GPU")
    who = f"**{text(tier.id)}** ({plural(len(tier.engines), 'engine')}, {gpus})"
    if verdict is None:
        return who, f"**{HEALTH['unknown']}**", "-", "-", "-"
    trouble = f" In incidents for {span(verdict.incident_s)}." if verdict.incidents else ""
    size, why = told_size(verdict.size, verdict.size_text)
    action = verdict.action
    return (
        who,
        f"**{HEALTH[health(verdict.health)]}.** {text(said(verdict.health_text))}{trouble}",
        f"**{size}.** {text(why)}",
        text(said(verdict.money_text)),
        "Nothing to do."
        if action is None
        else f"**{text(said(action.text))}** {flags(action.changes)} {text(said(action.why))}",
    )


def _each(
    report: WeeklyReport,
    told_of: Callable[..., Lines],
    entries: Iterable[OfTier],
    calendar: Calendar,
) -> Lines:
    """A section that has a part for each tier."""
    by_tier = {entry.tier: entry for entry in entries}
    parts: list[Lines] = []
    for tier in (one for one in report.tiers if one.engines):
        entry = by_tier.get(tier.id)
        body = ["No data."] if entry is None else told_of(entry, calendar)
        parts.append([f"### {text(tier.id)}", "", *body])
    return sections(*parts) or ["Nothing was watched."]


def _incidents(report: WeeklyReport, calendar: Calendar, docs_url: str) -> Lines:
    if report.incidents:
        return sections(*(_incident(incident, calendar, docs_url) for incident in report.incidents))
    if report.tiers:
        return ["No incidents in this period."]
    return ["Nothing was watched: incidents are unknown."]


def _incident(one: Incident, calendar: Calendar, docs_url: str) -> Lines:
    page = cause_page(docs_url, one.cause)
    cause = f"[{code(one.cause)}]({page})" if page else code(one.cause)
    end_s = one.last_s if one.end_s is None else one.end_s
    stages = (
        f"stage {stage.number} ({stage.name}) from {calendar.clock(stage.start_s, seconds=True)}"
        for stage in one.stages
    )
    return sections(
        [f"### {text(one.id)} {text(one.title)} ({health(one.severity)})"],
        [
            f"{text(one.tier)}, {text(one.target)}, engine {text(one.engine)}; "
            f"{calendar.stretch(one.start_s, end_s)}, {lasted(one.start_s, end_s)}, "
            f"{ending(one.ended, goes_on=one.end_s is None)}; {cause}. "
            f"{text(one.lead_text)}".strip()
        ],
        bullets(
            [
                text("; ".join(stages)),
                _cost(one),
                *(text(said(missing)) for missing in one.cost.missing),
                *(_evidence(line) for line in one.evidence),
                *(f"against: {_evidence(line)}" for line in one.against),
                *(_advice(made) for made in one.advice),
            ]
        ),
    )


def _cost(one: Incident) -> str:
    cost = one.cost
    return (
        f"cost: preempted {told(cost.preemptions, 'requests')}; recomputed at least "
        f"{told(cost.recomputed_tokens, 'tokens')}; first token late "
        f"{told(cost.late_requests, 'requests')}; not served {told(cost.lost_requests, 'requests')}"
    )


def _evidence(line: EvidenceLine) -> str:
    if line.value is None:
        return text(line.text)
    bound = "" if line.threshold is None else f", threshold {quantity(line.signal, line.threshold)}"
    return f"{text(line.text)} {code(line.signal)} {quantity(line.signal, line.value)}{bound}"


def _advice(made: Advice) -> str:
    fate = FATES.get(made.fate, ("unknown", made.fate))[1]
    hourly = made.cost_usd_per_hour
    price = "" if hourly is None else f" Cost: {saved(-hourly, 'usd_per_hour')}."
    return f"recommended: {text(made.summary)} {flags(made.changes)}{price} {text(said(fate))}"
