"""Builds the report from the observations of a period, with sections on data quality and methods.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, kind_named
from kneewatch.diagnose.engine.wording import spelled
from kneewatch.diagnose.engine_history import ConfigChange
from kneewatch.reports.weekly.advice import track_record
from kneewatch.reports.weekly.figures import (
    ConfigDifference,
    DataQuality,
    EngineChange,
    Period,
    UnknownSignal,
    methods,
)
from kneewatch.reports.weekly.guide_tables import tables
from kneewatch.reports.weekly.incidents import incidents
from kneewatch.reports.weekly.knee import curve, faults, knee
from kneewatch.reports.weekly.measures import NOISE_TEST, past
from kneewatch.reports.weekly.observed import (
    EngineObserved,
    EnginesObserved,
    Grid,
    Observed,
    TierObserved,
)
from kneewatch.reports.weekly.report import EngineSpan, Incident, Tier, WeeklyReport
from kneewatch.reports.weekly.size_and_cost import money, replicas_present, sized
from kneewatch.reports.weekly.slo_and_workload import slo, workload
from kneewatch.reports.weekly.verdict import TierSections, severity, verdict, watched_words
from kneewatch.rules.rule import BY_WORD, Severity

Value = TypeVar("Value")
METHODS = methods("history", noise_test=NOISE_TEST)


# --- Gaps, restarts, unknown signals, version changes ---------------------------------------------


def data_quality(observed: Observed) -> DataQuality:
    """The data-quality section of the report."""
    own_methods = {method.figure: method for method in observed.methods}
    return DataQuality(
        targets=tuple(observed.targets),
        changes=tuple(_change(change) for change in observed.configured),
        unknown=_unknown(observed.tiers),
        notes=(*observed.notes, *_bucket_notes(observed.tiers)),
        methods=tuple(own_methods.get(method.figure, method) for method in METHODS),
    )


def _change(change: ConfigChange) -> EngineChange:
    differences = tuple(
        ConfigDifference(key, change.before.get(key, ""), change.after.get(key, ""))
        for key in dict.fromkeys((*change.before, *change.after))
        if change.before and change.before.get(key) != change.after.get(key)
    )
    return EngineChange(
        t_s=change.t_s,
        target=change.target,
        engine=change.engine,
        what=_what(change, differences),
        restart=change.restart,
        differences=differences,
    )


def _what(change: ConfigChange, differences: Sequence[ConfigDifference]) -> str:
    if not change.before and not change.restart:
        return "first seen"
    if any(
        (key in change.before) != (key in change.after) for key in (*change.before, *change.after)
    ):
        return "restarted with different labels: probably another version of vLLM"
    if differences:
        return "restarted, configuration changed" if change.restart else "configuration changed"
    return "restarted, configuration unchanged"


def _unknown(tiers: Sequence[TierObserved]) -> tuple[UnknownSignal, ...]:
    """Signals without data, each with the reason and the engines."""
    engines: dict[tuple[str, str], list[str]] = {}
    for engine in (engine for tier in tiers for engine in tier.now.engines):
        for signal, why in engine.unknown.items():
            engines.setdefault((signal, why), []).append(f"{engine.target}, engine {engine.engine}")
    return tuple(
        UnknownSignal(signal, why, tuple(sorted(names)))
        for (signal, why), names in sorted(engines.items())
    )


def _bucket_notes(tiers: Sequence[TierObserved]) -> list[str]:
    """Notes on histograms whose buckets changed, or differ between engines of the same tier."""
    notes: list[str] = []
    for tier in tiers:
        layouts: dict[str, set[tuple[float, ...]]] = {}
        for span in (
            *(span for engine in tier.now.engines for span in engine.spans),
            *tier.now.spans,
        ):
            for metric, tally in span.tallies.items():
                if tally.count > 0:
                    layouts.setdefault(metric, set()).add(tally.bounds)
        for metric, bounds in layouts.items():
            if len(bounds) > 1:
                common = set[float].intersection(*(set(engine_bounds) for engine_bounds in bounds))
                notes.append(
                    f"{tier.id}: {metric} had {len(bounds)} different sets of buckets; its "
                    f"percentiles use the {len(common)} bounds that they share"
                )
    return notes


# --- The report -----------------------------------------------------------------------------------


EMPTY = "nothing was watched in this period: the report is empty"
PARTIAL_RATIO = 0.98


def build(observed: Observed, *, made_s: float, version: str) -> WeeklyReport:
    """Build the report of a period. `made_s` is the Unix time at which the report is made."""
    stated = {tier.id: tier.stated for tier in observed.tiers}
    engines = {tier.id: tier.now.engines for tier in observed.tiers}
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
    now = past(observed.grid, tier.now)
    # A tier that was not watched is not compared.
    seen_before = tier.before if tier.now.engines else EnginesObserved()
    before = past(observed.before_grid or observed.grid, seen_before)
    own = tuple(incident for incident in all_incidents if incident.tier == tier.id)
    roots = [(incident.cause, incident.severity) for incident in own]
    effects = [(span.id, span.severity) for incident in own for span in incident.causes]
    worst = _worst([*roots, *effects])
    knee_curve = curve(tier, observed.grid.to_s, faults(own))
    recommended = [
        recommendation for recommendation in observed.recommended if recommendation.tier == tier.id
    ]
    work = workload(tier, now, before)
    size = sized(tier, work, knee_curve, now, roots=_worst(roots), recommended=recommended)
    sections = TierSections(
        tier=_tier(tier, observed.grid),
        period=_period(observed.grid, [tier], before=False),
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
    kind = kind_named(tier.program)
    return sections if kind is VLLM else in_words_of(kind, sections)


def in_words_of(kind: EngineKind, value: Value) -> Value:
    """A part of the report with the texts in it in the words of an engine."""
    if isinstance(value, str):
        return cast("Value", spelled(value, kind))
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return cast("Value", tuple(in_words_of(kind, each) for each in items))
    if isinstance(value, Struct):
        fields = {name: in_words_of(kind, getattr(value, name)) for name in value.__struct_fields__}
        return replace(value, **fields)
    return value


def _worst(causes: Iterable[tuple[str, str]]) -> Mapping[str, Severity]:
    """The worst severity of each cause, from causes with the words of their severities."""
    worst: dict[str, Severity] = {}
    for cause, word in causes:
        worst[cause] = max(worst.get(cause, Severity.OK), BY_WORD[word])
    return worst


def _tier(tier: TierObserved, grid: Grid) -> Tier:
    gpus, present = tier.stated.server.engine_gpus, replicas_present(tier.now.engines)
    return Tier(
        id=tier.id,
        model=tier.model,
        gpu=tier.gpu,
        engines=tuple(_engine(engine, grid.length_s) for engine in tier.now.engines),
        engines_present=present,
        gpus=None if gpus is None else gpus * present,
        is_router=tier.router_s is not None,
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
    engines = [engine for tier in tiers for engine in (tier.before if before else tier.now).engines]
    covered_s = 0.0
    for slot, *spans in zip(grid.slots, *(engine.spans for engine in engines), strict=True):
        watched_s = max((span.clock_s for span in spans), default=0.0)
        covered_s += min(watched_s, slot.end_s - slot.start_s)
    routers_s = 0.0 if before else max((tier.router_s or 0.0 for tier in tiers), default=0.0)
    covered_s = max(covered_s, routers_s)
    return Period(grid.from_s, grid.to_s, covered_s, grid.days)


def _notices(observed: Observed) -> tuple[str, ...]:
    """Warnings for the top of the report: the period is empty or partial, or there is no period to
    compare with."""
    notices = list(observed.notices)
    period = _period(observed.grid, observed.tiers, before=False)
    if not period.covered_s:
        notices.append(EMPTY)
    elif period.covered_s < PARTIAL_RATIO * (period.to_s - period.from_s):
        notices.append(watched_words(period))
    if observed.before_grid is not None and not any(tier.before.engines for tier in observed.tiers):
        notices.append("nothing was watched in the period before: no comparison")
    return tuple(notices)
