"""Builds the report from the observed period. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.reports.formatting import percent
from kneewatch.reports.weekly.advice import track_record
from kneewatch.reports.weekly.data_quality import data_quality
from kneewatch.reports.weekly.figures import Period
from kneewatch.reports.weekly.guide_tables import tables
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.incidents import incidents
from kneewatch.reports.weekly.knee import curve, knee
from kneewatch.reports.weekly.observed import EngineObserved, Observed, TierObserved
from kneewatch.reports.weekly.report import EngineSpan, Incident, Tier, WeeklyReport
from kneewatch.reports.weekly.size_and_cost import money, replicas_present, sized
from kneewatch.reports.weekly.slo import slo
from kneewatch.reports.weekly.tier_workload import workload
from kneewatch.reports.weekly.trends import NOISE_TEST, TierPeriod, past
from kneewatch.reports.weekly.verdict import SEVERITY, TierSections, severity, verdict
from kneewatch.rules.rule import Severity

EMPTY = "nothing was watched in this period: the report is empty"
PARTIAL_RATIO = 0.98


def build(observed: Observed, *, made_s: float, version: str) -> WeeklyReport:
    """The report of an observed period; `made_s` is its time of creation."""
    stated = {tier.id: tier.stated for tier in observed.tiers}
    engines = {tier.id: tier.engines for tier in observed.tiers}
    all_incidents = incidents(observed.episodes, stated, observed.recommended, engines)
    sections = [_sections(tier, observed, all_incidents) for tier in observed.tiers]
    worst = max(map(severity, sections), default=Severity.OK)
    return WeeklyReport(
        made_s=made_s,
        version=version,
        source=observed.source,
        timezone=observed.grid.timezone,
        period=_period(observed.grid, observed.tiers, before=False),
        compared=None
        if observed.before_grid is None
        else _period(observed.before_grid, observed.tiers, before=True),
        filters=observed.filters,
        notices=_notices(observed),
        severity=worst.word,
        noise_test=NOISE_TEST,
        tiers=tuple(section.tier for section in sections),
        verdicts=tuple(map(verdict, sections)),
        incidents=all_incidents,
        tables=tuple(section.tables for section in sections),
        slo=tuple(section.slo for section in sections),
        knees=tuple(section.knee for section in sections),
        workloads=tuple(section.workload for section in sections),
        sizes=tuple(section.size for section in sections),
        money=tuple(section.money for section in sections),
        track_record=track_record(observed.recommended),
        data_quality=data_quality(observed),
    )


def _sections(
    tier: TierObserved, observed: Observed, all_incidents: Sequence[Incident]
) -> TierSections:
    now = past(observed.grid, tier.engines, tier.totals)
    before = (
        past(observed.before_grid, tier.before, tier.totals_before)
        if observed.before_grid
        else None
    )
    own = tuple(incident for incident in all_incidents if incident.tier == tier.id)
    worst = _worst(own)
    knee_curve = curve(tier, observed.grid.to_s)
    recommended = [
        recommendation for recommendation in observed.recommended if recommendation.tier == tier.id
    ]
    work = workload(tier, now, before)
    size = sized(tier, work, knee_curve, now, worst=worst, recommended=recommended)
    return TierSections(
        tier=_tier(tier, now),
        partial=observed.partial,
        tables=tables(
            tier.id,
            tier.stated,
            now,
            before,
            worst=worst,
            c_max=knee_curve.learned.c_max.expected if knee_curve else None,
        ),
        slo=slo(tier.id, tier.stated, now, before),
        knee=knee(tier, knee_curve, now),
        workload=work,
        size=size,
        money=money(tier, size, knee_curve, now, before, recommended),
        incidents=own,
    )


def _worst(own: Sequence[Incident]) -> Mapping[str, Severity]:
    """The worst severity per cause in the tier's incidents, including downstream effects."""
    worst: dict[str, Severity] = {}
    for incident in own:
        spans = [
            (incident.cause, incident.severity),
            *((span.id, span.severity) for span in incident.causes),
        ]
        for cause, word in spans:
            worst[cause] = max(worst.get(cause, Severity.OK), SEVERITY[word])
    return worst


def _tier(tier: TierObserved, now: TierPeriod | None) -> Tier:
    gpus, present = tier.stated.gpus, replicas_present(tier.engines)
    length_s = now.grid.to_s - now.grid.from_s if now is not None else 1.0
    return Tier(
        id=tier.id,
        model=tier.model,
        gpu=tier.gpu,
        engines=tuple(_engine(engine, length_s) for engine in tier.engines),
        engines_present=present,
        gpus=None if gpus is None else gpus * present,
    )


def _engine(engine: EngineObserved, length_s: float) -> EngineSpan:
    watched_s = sum(span.watched_s for span in engine.spans)
    return EngineSpan(
        target=engine.target,
        engine=engine.engine,
        replica=engine.replica,
        first_s=engine.first_s,
        last_s=engine.last_s,
        watched_ratio=min(1.0, watched_s / length_s),
    )


def _period(grid: Grid, tiers: Sequence[TierObserved], *, before: bool) -> Period:
    engines = [engine for tier in tiers for engine in (tier.before if before else tier.engines)]
    covered_s = 0.0
    for slot, *spans in zip(grid.slots, *(engine.spans for engine in engines), strict=True):
        watched_s = max((span.clock_s for span in spans), default=0.0)
        covered_s += min(watched_s, slot.end_s - slot.start_s)
    return Period(grid.from_s, grid.to_s, covered_s, grid.days)


def _notices(observed: Observed) -> tuple[str, ...]:
    """Warnings for the top of the report: empty or partial periods, missing comparison."""
    notices = list(observed.notices)
    length_s = observed.grid.to_s - observed.grid.from_s
    covered_s = _period(observed.grid, observed.tiers, before=False).covered_s
    if not any(tier.engines for tier in observed.tiers):
        notices.append(EMPTY)
    elif covered_s < PARTIAL_RATIO * length_s:
        notices.append(f"only {percent(covered_s / length_s)} of this period was watched")
    if observed.before_grid is not None and not any(tier.before for tier in observed.tiers):
        notices.append("nothing was watched in the period before: no comparison")
    return tuple(notices)
