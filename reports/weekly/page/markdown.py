"""The report as Markdown, for a ticket or a mail: the same sections, without charts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kneewatch.reports.weekly.figures import Advice, EvidenceLine
from kneewatch.reports.weekly.model import Incident, Tier, Verdict, WeeklyReport
from kneewatch.reports.weekly.page import markdown_records as records
from kneewatch.reports.weekly.page import markdown_tiers as tiers
from kneewatch.reports.weekly.page.headline import SECTIONS, headline, title
from kneewatch.reports.weekly.page.markdown_lines import (
    bullets,
    code,
    flags,
    rows,
    sections,
    text,
)
from kneewatch.reports.weekly.page.moments import Calendar, lasted
from kneewatch.reports.weekly.page.parts import OfTier
from kneewatch.reports.weekly.page.telling import (
    FATES,
    HEALTH,
    RANKS,
    ending,
    health,
    said,
    saved,
    sentence,
    told,
    told_size,
)
from kneewatch.reports.words import plural, quantity, span

Lines = list[str]


def render_markdown(report: WeeklyReport) -> str:
    """The document; everything in it that came from elsewhere is text."""
    calendar = Calendar(report.timezone, report.period)
    bodies: tuple[Lines, ...] = (
        _verdict(report),
        _incidents(report, calendar),
        _each(report, tiers.tables, report.tables, calendar),
        _each(report, tiers.slo, report.slo, calendar),
        _each(report, tiers.knee, report.knees, calendar),
        _each(report, tiers.workload, report.workloads, calendar),
        _each(report, tiers.size, report.sizes, calendar),
        _each(report, tiers.money, report.money, calendar),
        records.track_record(report, calendar),
        records.data_quality(report, calendar),
    )
    lines = _head(report, calendar)
    for place, ((_, name), body) in enumerate(zip(SECTIONS, bodies, strict=True), 1):
        lines += ["", f"## {place}. {name}", "", *body]
    return "\n".join(lines) + "\n"


def _head(report: WeeklyReport, calendar: Calendar) -> Lines:
    other = calendar.days(report.compared) if report.compared else "nothing"
    return sections(
        [f"# {title(report)}, {calendar.title}"],
        [
            f"{calendar.length} ({text(report.timezone)} time), watched for "
            f"{span(report.period.covered_s)}; compared with {other}. From {text(report.source)}. "
            f"Made {calendar.dated(report.made_s)} by kneewatch {text(report.version)}."
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
    heads = ("Tier", "Health", "Size", "Money", "The one thing to do")
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
    trouble = f" In trouble for {span(verdict.incident_s)}." if verdict.incidents else ""
    size, why = told_size(verdict.size, verdict.size_text)
    action = verdict.action
    return (
        who,
        f"**{HEALTH[health(verdict.health)]}.** {text(said(verdict.health_text))}{trouble}",
        f"**{size}.** {text(why)}",
        text(said(verdict.money_text)),
        "Nothing this time."
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
        body = ["Nothing is known of it."] if entry is None else told_of(entry, calendar)
        parts.append([f"### {text(tier.id)}", "", *body])
    return sections(*parts) or ["Nothing was watched."]


def _incidents(report: WeeklyReport, calendar: Calendar) -> Lines:
    if report.incidents:
        return sections(*(_incident(incident, calendar) for incident in report.incidents))
    if report.tiers:
        return ["No incident: no cascade and no cause in this time."]
    return ["Nothing was watched: whether there was an incident is not known."]


def _incident(one: Incident, calendar: Calendar) -> Lines:
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
            f"{ending(one.ended, goes_on=one.end_s is None)}; {code(one.cause)}. "
            f"{text(one.lead_text)}".strip()
        ],
        bullets(
            [
                text("; ".join(stages)),
                _cost(one),
                *(text(said(missing)) for missing in one.cost.missing),
                *(_evidence(line) for line in one.evidence),
                *(f"against it: {_evidence(line)}" for line in one.against),
                *(_advice(made) for made in one.advice),
            ]
        ),
    )


def _cost(one: Incident) -> str:
    cost = one.cost
    return (
        f"cost: preempted {told(cost.preemptions, 'requests')}; computed again at least "
        f"{told(cost.recomputed_tokens, 'tokens')}; first token late "
        f"{told(cost.late_requests, 'requests')}; not served {told(cost.lost_requests, 'requests')}"
    )


def _evidence(line: EvidenceLine) -> str:
    if line.value is None:
        return text(line.text)
    bound = "" if line.threshold is None else f", bound {quantity(line.signal, line.threshold)}"
    return f"{text(line.text)} {code(line.signal)} {quantity(line.signal, line.value)}{bound}"


def _advice(made: Advice) -> str:
    fate = FATES.get(made.fate, ("unknown", made.fate))[1]
    hourly = made.cost_usd_per_hour
    price = "" if hourly is None else f" It {saved(-hourly, 'usd_per_hour')}."
    return f"advised: {text(made.summary)} {flags(made.changes)}{price} {text(said(fate))}"
