"""Incidents: groups intervals into incidents and adds lead time, cost, causes and advice. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from kneewatch.collector.signals.table import PROMPT_LENGTH, TTFT
from kneewatch.diagnose.change import BRIDGED_S, Interval
from kneewatch.diagnose.engine_history import PastAdvice
from kneewatch.diagnose.ranking import BY_ID, ENGINE_RESTARTED, EXPLAINS
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.advice import advised
from kneewatch.reports.weekly.figures import Line
from kneewatch.reports.weekly.observed import (
    EngineObserved,
    Episode,
    EpisodeObserved,
    TierStated,
    ends_last,
)
from kneewatch.reports.weekly.report import CauseSpan, Incident, IncidentCost, StageSpan
from kneewatch.rules.cascade import EVICTS, NAMES
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import Severity


def title(cause: str) -> str:
    return BY_ID[cause].title if cause in BY_ID else cause.replace("_", " ")


# --- Grouping: the intervals of one engine become incidents --------------------------------------
#
# Downstream effects are reported under their root cause (EXPLAINS in diagnose/ranking.py):
# a queue that starts 30 s before the preemptions that caused it is not a separate incident.
# Causes below warning are not incidents, except those in NOTED.


CASCADE_BRIDGED_S = 300.0
EFFECT_MARGIN_S = 180.0
"""Seconds by which a downstream effect may start before its cause, or end after it."""

FILLING_SHOWN_S = 1800.0
"""Maximum seconds of stage 1 (filling) that are drawn before a cascade."""

DOWN = "target_down"
NOTED = frozenset({ENGINE_RESTARTED})
"""Causes that are reported as incidents even below warning."""

CASCADE_CAUSE = "kv_pressure"
STOPPED = frozenset({DOWN, "engine_stalled"})
"""Causes during which no request is served. Requests that would have been served in that time are
lost."""

WITH_OUTAGE = STOPPED | NOTED | {"metrics_missing"}
"""Causes that an outage explains also if they began first: the engine was failing already."""


def _causes_first() -> dict[str, int]:
    """The rank of each cause, in an order in which root causes precede their effects."""
    order: list[str] = []
    left = list(
        dict.fromkeys((*EXPLAINS, *(cause for after in EXPLAINS.values() for cause in after)))
    )
    while left:
        first = next(
            cause for cause in left if not any(cause in EXPLAINS.get(other, ()) for other in left)
        )
        order.append(first)
        left.remove(first)
    return {cause: at for at, cause in enumerate(order)}


RANK = _causes_first()


def _is_loop(episode: Episode) -> bool:
    """Whether processes ended again and again, so that the target was down in between."""
    return episode.cause == ENGINE_RESTARTED and episode.severity >= Severity.WARNING


def _rank(episode: Episode) -> float:
    """The place in an order in which root causes precede their effects."""
    return RANK[DOWN] - 0.5 if _is_loop(episode) else RANK.get(episode.cause, len(RANK))


def _effects(episode: Episode) -> Sequence[str]:
    return (DOWN, *EXPLAINS[DOWN]) if _is_loop(episode) else EXPLAINS.get(episode.cause, ())


def episodes(intervals: Sequence[Interval], *, from_s: float, to_s: float) -> list[Episode]:
    """The incidents of one engine that overlap [from_s, to_s), sorted by start."""
    stages = sorted((interval for interval in intervals if interval.kind == "stage"), key=_by_start)
    causes = sorted((interval for interval in intervals if interval.kind == "cause"), key=_by_start)
    groups = sorted([*_cascades(stages), *_causes(causes)], key=lambda group: group.start_s)
    inside = [
        group
        for group in _merge_effects(groups)
        if group.severity >= Severity.WARNING or group.cause in NOTED
        if group.start_s < to_s and group.until_s >= from_s
    ]
    for group in inside:
        group.causes.sort(key=_by_start)
        group.stages = _stages_shown(group.stages, stages)
    return sorted(inside, key=lambda episode: (episode.start_s, episode.cause))


def _cascades(stages: Sequence[Interval]) -> list[Episode]:
    """Preemption cascades. A pause of up to CASCADE_BRIDGED_S seconds does not end a cascade."""
    groups: list[Episode] = []
    for stage in stages:
        if int(stage.id) < EVICTS:
            continue
        if groups and stage.start_s - groups[-1].until_s <= CASCADE_BRIDGED_S:
            groups[-1].stages.append(stage)
        else:
            groups.append(Episode(CASCADE_CAUSE, [], [stage]))
    return groups


def _causes(causes: Sequence[Interval]) -> list[Episode]:
    """The intervals grouped by cause. If a cause returns within BRIDGED_S seconds, it stays in the
    same group."""
    newest: dict[str, Episode] = {}
    groups: list[Episode] = []
    for cause in causes:
        group = newest.get(cause.id)
        if group is not None and cause.start_s - group.until_s <= BRIDGED_S:
            group.causes.append(cause)
        else:
            newest[cause.id] = group = Episode(cause.id, [cause])
            groups.append(group)
    return groups


def _merge_effects(groups: Sequence[Episode]) -> list[Episode]:
    """The groups, with each downstream effect merged into the group of its root cause."""
    kept: list[Episode] = []
    for group in sorted(groups, key=_rank):
        owners = [other for other in kept if _belongs(group, other)]
        owner = min(owners, key=lambda other: other.cause != group.cause, default=None)
        if owner is None:
            kept.append(group)
        else:
            owner.causes += group.causes
            owner.stages += group.stages
            owner.stages.sort(key=_by_start)
    return kept


def _belongs(group: Episode, other: Episode) -> bool:
    """Whether `group` is reported under `other`. A group at warning or worse is never reported
    under a group below warning."""
    near = (
        group.start_s <= other.until_s + EFFECT_MARGIN_S
        and group.until_s >= other.start_s - EFFECT_MARGIN_S
    )
    if not near or (other.severity < Severity.WARNING <= group.severity):
        return False
    if group.cause == other.cause:
        return True
    if group.cause not in _effects(other):
        return False
    if other.cause == DOWN and group.cause not in WITH_OUTAGE and group.start_s < other.start_s:
        return False  # an outage is not why the engine was overloaded before it
    apart_s = max(0.0, other.start_s - group.start_s) + max(0.0, group.until_s - other.until_s)
    return apart_s <= max(2 * EFFECT_MARGIN_S, 0.5 * (group.until_s - group.start_s))


def _stages_shown(preempting: list[Interval], stages: Sequence[Interval]) -> list[Interval]:
    """The stages to draw: all stages of the cascade, and the filling stage just before it."""
    if not preempting:
        return []
    start_s = min(stage.start_s for stage in preempting)
    until_s = max(stage.until_s for stage in preempting)
    strip = [
        stage
        for stage in stages
        if (stage.start_s < until_s and stage.until_s > start_s) or stage in preempting
    ]
    filling = [
        stage
        for stage in stages
        if stage.id == "1" and 0 <= start_s - stage.until_s <= 1 and stage.end_s
    ]
    shown = [
        replace(stage, start_s=max(stage.start_s, start_s - FILLING_SHOWN_S)) for stage in filling
    ]
    return sorted([*shown, *strip], key=_by_start)


def _by_start(interval: Interval) -> float:
    return interval.start_s


# --- The report's incidents: stages, lead time, cost, evidence, advice ---------------------------


POINTS_MOST = 60
STAGE_PREEMPTING, QUEUEING = str(EVICTS), str(EVICTS + 1)

UNITS = (("_ratio_per_s", "ratio_per_s"), ("_tokens_per_s", "tokens_per_s"), ("_per_s", "per_s"),
         ("_ratio", "ratio"), ("_s", "s"), ("_tokens", "tokens"), ("_bytes", "bytes"),
         ("_requests", "requests"))  # fmt: skip
"""The unit that belongs to each suffix of a signal's name."""

PLAIN = ("running", "waiting")


def incidents(
    observed: Sequence[EpisodeObserved],
    stated: Mapping[str, TierStated],
    recommended: Sequence[PastAdvice],
    engines: Mapping[str, Sequence[EngineObserved]],
) -> tuple[Incident, ...]:
    """All incidents, numbered and sorted by start. `stated` and `engines` are keyed by tier id.

    If several replicas of a tier have the same cause at the same time, they form one incident.
    """
    return tuple(
        _incident(f"I{number}", together, stated[tier], recommended, engines.get(tier, ()))
        for number, together in enumerate(_of_tiers(observed), 1)
        for tier in (together[0].tier,)
    )


def _of_tiers(observed: Sequence[EpisodeObserved]) -> list[list[EpisodeObserved]]:
    """The observed incidents in groups. Incidents form a group if they have the same tier and
    cause, overlap in time, and are on different engines."""
    groups: list[list[EpisodeObserved]] = []
    newest: dict[tuple[str, str], list[EpisodeObserved]] = {}
    for row in sorted(observed, key=lambda row: (row.episode.start_s, row.target, row.engine)):
        key = row.tier, row.episode.cause
        group = newest.get(key, [])
        again = (row.target, row.engine) in {(other.target, other.engine) for other in group}
        until_s = max((other.episode.until_s for other in group), default=-math.inf)
        if again or row.episode.start_s > until_s:
            group = newest[key] = list[EpisodeObserved]()
            groups.append(group)
        group.append(row)
    return groups


def _incident(
    name: str,
    together: Sequence[EpisodeObserved],
    stated: TierStated,
    recommended: Sequence[PastAdvice],
    engines: Sequence[EngineObserved],
) -> Incident:
    """One incident of one or more engines. Its target, stages, evidence and lead time are those of
    the worst engine. Its costs are the sum over all engines."""
    observed = max(together, key=_badness)
    episode, cause = observed.episode, observed.cause
    start_s = min(row.episode.start_s for row in together)
    last_s = max(row.episode.last_s for row in together)
    replicas = tuple(dict.fromkeys(row.target for row in together))
    present = {
        engine.target for engine in engines if engine.first_s <= last_s and engine.last_s >= start_s
    }.union(replicas)
    budget_s = stated.profile.targets.ttft_p99_s
    stage2_s = _stage_s(episode, STAGE_PREEMPTING)
    late_s = _late_s(observed, budget_s)
    lead_s, lead_text = _lead(episode, stage2_s, late_s, budget_s)
    goes_on = any(row.episode.last.end_s is None for row in together)
    last = max((row.episode.last for row in together), key=ends_last)
    return Incident(
        id=name,
        kind=episode.kind,
        tier=observed.tier,
        target=observed.target,
        engine=observed.engine,
        cause=episode.cause,
        title=title(episode.cause),
        severity=episode.severity.word,
        start_s=start_s,
        end_s=None if goes_on else last.end_s,
        last_s=last_s,
        ended=last.ended,
        stages=tuple(
            StageSpan(int(held.id), NAMES[int(held.id)], held.severity.word, held.start_s,
                      held.end_s)
            for held in episode.stages
        ),
        causes=tuple(
            CauseSpan(held.id, held.severity.word, held.start_s, held.end_s)
            for held in episode.causes
        ),
        stage2_s=stage2_s,
        late_s=late_s,
        budget_s=budget_s,
        lead_s=lead_s,
        lead_text=lead_text,
        cost=_added([cost(row, budget_s) for row in together]),
        evidence=cause.evidence if cause else (),
        against=cause.against if cause else (),
        advice=advised(observed, recommended, len(present)),
        lines=tuple(
            _line(key, times, values) for key, (times, values) in observed.series.items()
            if any(value == value for value in values)
        ),
        guide=cause.guide if cause else (),
        replicas=replicas,
        replicas_present=len(present),
    )  # fmt: skip


def _badness(observed: EpisodeObserved) -> tuple[Severity, bool, float]:
    episode = observed.episode
    has_diagnosis = observed.cause is not None
    return episode.severity, has_diagnosis, episode.until_s - episode.start_s


def _stage_s(episode: Episode, number: str) -> float | None:
    return min((held.start_s for held in episode.stages if held.id >= number), default=None)


def _late_s(observed: EpisodeObserved, budget_s: float | None) -> float | None:
    """Unix time at which TTFT P99 first exceeded its target, shortly before the incident or during
    it. None if it did not."""
    times, values = observed.series.get("ttft_p99_s", ((), ()))
    if budget_s is None:
        return None
    return next(
        (
            t_s
            for t_s, value in zip(times, values, strict=True)
            if value > budget_s and t_s <= observed.episode.until_s
        ),
        None,
    )


def _lead(
    episode: Episode, stage2_s: float | None, late_s: float | None, budget_s: float | None
) -> tuple[float | None, str]:
    """Seconds between the first preemption and TTFT P99 exceeding its target, and a sentence about
    that."""
    if stage2_s is None:
        return None, ""
    if budget_s is None:
        stage3_s = _stage_s(episode, QUEUEING)
        if stage3_s is None:
            return None, "no TTFT target set (slo.ttft_p99_s), and no queue grew"
        ahead_s = stage3_s - stage2_s
        when = f"{duration(ahead_s)} before the queue grew" if ahead_s else "as the queue grew"
        return None, f"preemption started {when}; no TTFT target set (slo.ttft_p99_s)"
    if late_s is None:
        return None, "TTFT P99 stayed within its target"
    lead_s = late_s - stage2_s
    if lead_s == 0:
        return lead_s, "preemption started in the same scrape in which TTFT P99 passed its target"
    if lead_s > 0:
        return lead_s, f"preemption started {duration(lead_s)} before TTFT P99 passed its target"
    return lead_s, f"TTFT P99 passed its target {duration(-lead_s)} before preemption started"


def cost(observed: EpisodeObserved, budget_s: float | None) -> IncidentCost:
    """The preemptions, recomputed tokens, late requests and lost requests of an incident."""
    during, missing = observed.during, list[str]()
    preemptions = during.counts.get(m.PREEMPTIONS)
    if preemptions is None:
        missing.append("preemptions: not exported in this period")
    prompt = m.mean(PROMPT_LENGTH)(during) or m.mean(PROMPT_LENGTH)(observed.hour_before)
    kept = m.within(TTFT, budget_s)(during)
    begun = during.tallies[TTFT].count if TTFT in during.tallies else 0.0
    late = None if kept is None else (1 - kept) * begun
    if budget_s is None:
        missing.append("late requests: no TTFT target set (slo.ttft_p99_s)")
    return IncidentCost(
        preemptions=preemptions,
        recomputed_tokens=preemptions * prompt if preemptions is not None and prompt else None,
        late_requests=late,
        lost_requests=_lost(observed),
        missing=tuple(missing),
    )


def _added(costs: Sequence[IncidentCost]) -> IncidentCost:
    """The sum of the costs of several engines. A cost for which no engine has a value is None."""

    def total(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return math.fsum(numbers) if numbers else None

    return IncidentCost(
        preemptions=total(cost.preemptions for cost in costs),
        recomputed_tokens=total(cost.recomputed_tokens for cost in costs),
        late_requests=total(cost.late_requests for cost in costs),
        lost_requests=total(cost.lost_requests for cost in costs),
        missing=tuple(dict.fromkeys(text for cost in costs for text in cost.missing)),
    )


def _lost(observed: EpisodeObserved) -> float | None:
    """Number of lost requests: the rate in the hour before, multiplied by the length of the outage,
    minus the requests served in it.

    None if the engine still served, because requests to a slow engine wait and are not lost.
    """
    if observed.episode.cause not in STOPPED:
        return None
    served_per_s = m.per_s(m.COMPLETED)(observed.hour_before)
    if served_per_s is None:
        return None
    lasted_s = math.fsum(
        held.until_s - held.start_s for held in observed.episode.causes if held.id in STOPPED
    )
    return max(0.0, served_per_s * lasted_s - observed.during.counts.get(m.COMPLETED, 0.0))


def unit_of(signal: str) -> str:
    """The unit of a signal, derived from its name. Empty if unknown."""
    if signal.startswith(PLAIN) and not signal.endswith(("_s", "_ratio")):
        return "requests"
    return next((unit for end, unit in UNITS if signal.endswith(end)), "")


def _line(signal: str, times: Sequence[float], values: Sequence[float]) -> Line:
    """A signal reduced to POINTS_MOST points. Each point is the maximum of its part of the
    signal."""
    stride = max(1, math.ceil(len(times) / POINTS_MOST))
    shown: list[tuple[float, float | None]] = []
    for at in range(0, len(times), stride):
        places = [place for place in range(at, min(at + stride, len(times))) if values[place] ==
                 values[place]]  # fmt: skip
        best = max(places, key=lambda place: values[place], default=None)
        shown.append((times[at], None) if best is None else (times[best], values[best]))
    return Line(
        signal,
        unit_of(signal),
        tuple(t_s for t_s, _ in shown),
        tuple(value for _, value in shown),
    )
