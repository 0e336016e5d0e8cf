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
    as_sentence,
    ending,
    followed,
    health,
    lasted,
    points,
    saved,
    sentence,
    share,
    size_verdict,
    with_unit,
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
    advice = row.advice
    return (
        f"{text(advice.summary)} {flags(advice.changes)}",
        f"{text(row.target)}, engine {text(row.engine)}",
        calendar.moment(advice.first_s),
        text(FATES.get(advice.fate, ("unknown", advice.fate))[1]),
        "; ".join(
            f"{code(pair.signal)} {quantity(pair.signal, pair.predicted)} predicted, "
            f"{quantity(pair.signal, pair.measured)} measured ({points(pair.off_ratio, '')})"
            for pair in row.comparisons
        ),
    )


def data_quality(report: WeeklyReport, calendar: Calendar) -> RecordLines:
    """How far the report can be trusted, and how its figures are computed."""
    quality = report.data_quality
    return sections(
        *([text(note)] for note in quality.notes),
        rows(
            ("Target", "Watched", "Scrapes", "Failed", "Gaps"),
            (_watched(target, calendar) for target in quality.targets[:ROWS_MOST]),
        ),
        _left_out(len(quality.targets)),
        rows(
            ("When", "Where", "What"),
            (_changed(change, calendar) for change in quality.changes[:ROWS_MOST]),
        ),
        _left_out(len(quality.changes)),
        rows(
            ("Signal without data", "Why"),
            ((code(unknown.signal), text(unknown.why)) for unknown in quality.unknown[:ROWS_MOST]),
        ),
        _left_out(len(quality.unknown)),
        [text(report.noise_test)],
        rows(
            ("Figure", "How"),
            ((text(method.figure), text(method.how)) for method in quality.methods),
        ),
    )


def _watched(target: TargetQuality, calendar: Calendar) -> tuple[str, ...]:
    gaps = [
        f"{calendar.stretch(gap.from_s, gap.to_s)} {text(gap.why)}".strip() for gap in target.gaps
    ] + ([f"{target.gaps_left_out} more"] if target.gaps_left_out else [])
    return (
        text(target.target),
        share(target.watched_ratio),
        number(target.scrapes),
        number(target.failed),
        "; ".join(gaps) or "none",
    )


def _changed(change: EngineChange, calendar: Calendar) -> tuple[str, ...]:
    differences = (
        f"{code(difference.key)} {text(difference.before) or '-'} → {text(difference.after) or '-'}"
        for difference in change.differences
    )
    return (
        calendar.moment(change.t_s),
        f"{text(change.target)}, engine {text(change.engine)}",
        f"{text(change.what)} {'; '.join(differences)}",
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
        *([f"> {text(as_sentence(notice))}"] for notice in report.notices),
    )


def _verdict(report: WeeklyReport) -> Lines:
    by_tier = {verdict.tier: verdict for verdict in report.verdicts}
    told_of = sorted(
        ((tier, by_tier.get(tier.id)) for tier in report.tiers),
        key=lambda pair: -RANKS[health(pair[1].health) if pair[1] else "unknown"],
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
    who = f"**{text(tier.id)}** ({plural(tier.engines_present, 'engine')}, {gpus})"
    if verdict is None:
        return who, f"**{HEALTH['unknown']}**", "-", "-", "-"
    trouble = f" In incidents for {span(verdict.incident_s)}." if verdict.incidents else ""
    size, why = size_verdict(verdict.size, verdict.size_text)
    action = verdict.action
    return (
        who,
        f"**{HEALTH[health(verdict.health)]}.** {text(as_sentence(verdict.health_text))}{trouble}",
        f"**{size}.** {text(why)}",
        text(as_sentence(verdict.money_text)),
        "Nothing to do."
        if action is None
        else f"**{text(as_sentence(action.text))}** {flags(action.changes)} "
        f"{text(as_sentence(action.why))}",
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
    for tier in (candidate for candidate in report.tiers if candidate.engines):
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


def _incident(incident: Incident, calendar: Calendar, docs_url: str) -> Lines:
    page = cause_page(docs_url, incident.cause)
    cause = f"[{code(incident.cause)}]({page})" if page else code(incident.cause)
    end_s = incident.last_s if incident.end_s is None else incident.end_s
    stages = (
        f"stage {stage.number} ({stage.name}) from {calendar.clock(stage.start_s, seconds=True)}"
        for stage in incident.stages
    )
    return sections(
        [f"### {text(incident.id)} {text(incident.title)} ({health(incident.severity)})"],
        [
            f"{text(incident.tier)}, {text(incident.where)}; "
            f"{calendar.stretch(incident.start_s, end_s)}, {lasted(incident.start_s, end_s)}, "
            f"{ending(incident.ended, goes_on=incident.end_s is None)}; {cause}. "
            f"{text(incident.lead_text)}".strip()
        ],
        bullets(
            [
                text("; ".join(stages)),
                _cost(incident),
                *(text(as_sentence(missing)) for missing in incident.cost.missing),
                *(_evidence(line) for line in incident.evidence),
                *(f"against: {_evidence(line)}" for line in incident.against),
                *(_advice(advice) for advice in incident.advice),
            ]
        ),
    )


def _cost(incident: Incident) -> str:
    cost = incident.cost
    return (
        f"cost: preempted {with_unit(cost.preemptions, 'requests')}; recomputed at least "
        f"{with_unit(cost.recomputed_tokens, 'tokens')}; first token late "
        f"{with_unit(cost.late_requests, 'requests')}; "
        f"not served {with_unit(cost.lost_requests, 'requests')}"
    )


def _evidence(line: EvidenceLine) -> str:
    if line.value is None:
        return text(line.text)
    bound = "" if line.threshold is None else f", threshold {quantity(line.signal, line.threshold)}"
    return f"{text(line.text)} {code(line.signal)} {quantity(line.signal, line.value)}{bound}"


def _advice(advice: Advice) -> str:
    fate = FATES.get(advice.fate, ("unknown", advice.fate))[1]
    hourly = advice.cost_usd_per_hour
    price = "" if hourly is None else f" Cost: {saved(-hourly, 'usd_per_hour')}."
    change = f"{text(advice.summary)} {flags(advice.changes)}{price}"
    return f"recommended: {change} {text(as_sentence(fate))}"
