"""Incidents: grouped from intervals, with lead time, cost, causes and advice. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kneewatch.collector.signals.vllm import PROMPT_LENGTH, TTFT
from kneewatch.diagnose.causes.ranking import BY_ID, EXPLAINS
from kneewatch.reports.formatting import duration
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import EvidenceLine, Line
from kneewatch.reports.weekly.observed import (
    Episode,
    EpisodeObserved,
    Held,
    Recommended,
    TierStated,
)
from kneewatch.reports.weekly.report import CauseSpan, Incident, IncidentCost, StageSpan
from kneewatch.reports.weekly.track_record import advised
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.rule import Severity


def title(cause: str) -> str:
    """A cause in a few words."""
    return BY_ID[cause].title if cause in BY_ID else cause.replace("_", " ")


# Intervals of an engine put together to incidents: a cascade with its causes, a cause alone.
# Pure.
#
# What follows from a cause is told with it (diagnose/causes, EXPLAINS): a queue that begins half
# a minute before the preemptions that make it is no incident of its own. Notes are none either.


BRIDGED_S = 900.0
"""The same cause again within this long is the same incident."""

CASCADE_BRIDGED_S = 300.0
NEAR_S = 180.0
"""An explained cause may begin so much before what explains it, or end so much after."""

FILLING_SHOWN_S = 1800.0
"""Of the filling before a cascade no more is shown."""

EVICTING = 2
NOTED = frozenset({"engine_restarted"})
"""Causes that are told also as notes."""

CASCADE_CAUSE = "kv_pressure"


def _ranks() -> dict[str, int]:
    """Causes in an order in which each comes after all that explain it."""
    order: list[str] = []
    left = list(dict.fromkeys((*EXPLAINS, *(one for after in EXPLAINS.values() for one in after))))
    while left:
        first = next(
            one for one in left if not any(one in EXPLAINS.get(other, ()) for other in left)
        )
        order.append(first)
        left.remove(first)
    return {cause: at for at, cause in enumerate(order)}


RANK = _ranks()


@dataclass(slots=True)
class _Group:
    """Intervals that are one incident."""

    cause: str
    held: list[Held]
    stages: list[Held] = field(default_factory=list[Held])

    @property
    def start_s(self) -> float:
        first = (*self.held, *(one for one in self.stages if int(one.id) >= EVICTING))
        return min(one.start_s for one in first)

    @property
    def until_s(self) -> float:
        return max(one.until_s for one in (*self.held, *self.stages))

    @property
    def severity(self) -> Severity:
        return max(one.severity for one in (*self.held, *self.stages))


def episodes(intervals: Sequence[Held], *, from_s: float, to_s: float) -> list[Episode]:
    """The incidents of one engine that reach into a time, by their start."""
    stages = sorted((one for one in intervals if one.kind == "stage"), key=_by_start)
    causes = sorted((one for one in intervals if one.kind == "cause"), key=_by_start)
    groups = sorted([*_cascades(stages), *_causes(causes)], key=lambda group: group.start_s)
    found = [_episode(group, stages) for group in _folded(groups) if _is_told(group)]
    inside = [one for one in found if one.start_s < to_s and one.until_s >= from_s]
    return sorted(inside, key=lambda one: (one.start_s, one.cause))


def _cascades(stages: Sequence[Held]) -> list[_Group]:
    """Stretches of eviction; short pauses do not end one."""
    groups: list[_Group] = []
    for one in stages:
        if int(one.id) < EVICTING:
            continue
        if groups and one.start_s - groups[-1].until_s <= CASCADE_BRIDGED_S:
            groups[-1].stages.append(one)
        else:
            groups.append(_Group(CASCADE_CAUSE, [], [one]))
    return groups


def _causes(causes: Sequence[Held]) -> list[_Group]:
    """Each cause's intervals; repeats within a while are one."""
    newest: dict[str, _Group] = {}
    groups: list[_Group] = []
    for one in causes:
        group = newest.get(one.id)
        if group is not None and one.start_s - group.until_s <= BRIDGED_S:
            group.held.append(one)
        else:
            newest[one.id] = group = _Group(one.id, [one])
            groups.append(group)
    return groups


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """Groups with those that follow from them. What explains comes before what it explains."""
    kept: list[_Group] = []
    for group in sorted(groups, key=lambda one: RANK.get(one.cause, len(RANK))):
        owner = next((other for other in kept if _belongs(group, other)), None)
        if owner is None:
            kept.append(group)
        else:
            owner.held += group.held
            owner.stages += group.stages
            owner.stages.sort(key=_by_start)
    return kept


def _belongs(group: _Group, other: _Group) -> bool:
    """Whether a group is told with another one; a note does not hide what is worse."""
    near = group.start_s <= other.until_s + NEAR_S and group.until_s >= other.start_s - NEAR_S
    if not near or (other.severity < Severity.WARNING <= group.severity):
        return False
    if group.cause == other.cause:
        return True
    if group.cause not in EXPLAINS.get(other.cause, ()):
        return False
    apart_s = max(0.0, other.start_s - group.start_s) + max(0.0, group.until_s - other.until_s)
    return apart_s <= max(2 * NEAR_S, 0.5 * (group.until_s - group.start_s))


def _is_told(group: _Group) -> bool:
    return group.severity >= Severity.WARNING or group.cause in NOTED


def _episode(group: _Group, stages: Sequence[Held]) -> Episode:
    kind = "cascade" if group.stages else "cause"
    last = max((*group.held, *group.stages), key=lambda one: (one.end_s is None, one.until_s))
    return Episode(
        kind=kind,
        cause=group.cause,
        severity=group.severity,
        start_s=group.start_s,
        end_s=last.end_s,
        last_s=max(one.last_s for one in (*group.held, *group.stages)),
        ended=last.ended,
        stages=_strip(group, stages) if kind == "cascade" else (),
        causes=tuple(sorted(group.held, key=_by_start)),
    )


def _strip(group: _Group, stages: Sequence[Held]) -> tuple[Held, ...]:
    """The stages of a cascade: the filling right before it, and all in it."""
    evicting = [one for one in group.stages if int(one.id) >= EVICTING]
    start_s = min(one.start_s for one in evicting)
    until_s = max(one.until_s for one in evicting)
    strip = [one for one in stages if one.start_s < until_s and one.until_s > start_s]
    filling = [
        one for one in stages if one.id == "1" and 0 <= start_s - one.until_s <= 1 and one.end_s
    ]
    shown = [replace(one, start_s=max(one.start_s, start_s - FILLING_SHOWN_S)) for one in filling]
    return tuple(sorted([*shown, *strip], key=_by_start))


def _by_start(one: Held) -> float:
    return one.start_s


# --- Incidents as the report tells them: stages, how early, what it cost, why, what to do ---------


POINTS_MOST = 60
STAGE_EVICTING, QUEUEING = "2", "3"
STOPPED = frozenset({"target_down", "engine_stalled"})
"""Causes in which nothing is served: what was served before is lost."""

UNITS = (("_ratio_per_s", "ratio_per_s"), ("_tokens_per_s", "tokens_per_s"), ("_per_s", "per_s"),
         ("_ratio", "ratio"), ("_s", "s"), ("_tokens", "tokens"), ("_bytes", "bytes"))  # fmt: skip
"""Units by the end of a signal's name."""

PLAIN = ("running", "waiting")


def incidents(
    observed: Sequence[EpisodeObserved],
    stated: Mapping[str, TierStated],
    recommended: Sequence[Recommended],
) -> tuple[Incident, ...]:
    """All incidents in order of their start, numbered. `stated` is by tier."""
    order = sorted(observed, key=lambda one: (one.episode.start_s, one.target, one.engine))
    return tuple(
        _incident(f"I{number}", one, stated[one.tier], recommended)
        for number, one in enumerate(order, 1)
    )


def _incident(
    name: str,
    one: EpisodeObserved,
    stated: TierStated,
    recommended: Sequence[Recommended],
) -> Incident:
    episode, cause = one.episode, _cause(one)
    budget_s = stated.targets.ttft_p99_s
    stage2_s = _stage_s(episode, STAGE_EVICTING)
    late_s = _late_s(one, budget_s)
    lead_s, lead_text = _lead(episode, stage2_s, late_s, budget_s)
    return Incident(
        id=name,
        kind=episode.kind,
        tier=one.tier,
        target=one.target,
        engine=one.engine,
        cause=episode.cause,
        title=title(episode.cause),
        severity=episode.severity.word,
        start_s=episode.start_s,
        end_s=episode.end_s,
        last_s=episode.last_s,
        ended=episode.ended,
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
        cost=cost(one, budget_s),
        evidence=_evidence(cause.get("evidence", ())),
        against=_evidence(cause.get("against", ())),
        advice=advised(one, recommended),
        lines=tuple(
            _line(key, times, values) for key, (times, values) in one.series.items()
            if any(value == value for value in values)
        ),
        guide=tuple(cause.get("guide", ())),
    )  # fmt: skip


def _cause(one: EpisodeObserved) -> Mapping[str, Any]:
    """The cause as the diagnosis told it at its worst; empty where that is not known."""
    causes: Sequence[Mapping[str, Any]] = one.document["causes"] if one.document else ()
    for cause in causes:
        if cause["id"] == one.episode.cause:
            return cause
    return {}


def _stage_s(episode: Episode, number: str) -> float | None:
    return min((held.start_s for held in episode.stages if held.id >= number), default=None)


def _late_s(one: EpisodeObserved, budget_s: float | None) -> float | None:
    """When TTFT P99 first left its budget, from a little before the incident on."""
    times, values = one.series.get("ttft_p99_s", ((), ()))
    if budget_s is None:
        return None
    return next(
        (
            t_s
            for t_s, value in zip(times, values, strict=True)
            if value > budget_s and t_s <= one.episode.until_s
        ),
        None,
    )


def _lead(
    episode: Episode, stage2_s: float | None, late_s: float | None, budget_s: float | None
) -> tuple[float | None, str]:
    """How much before TTFT left its budget eviction was seen, and the same in words."""
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
        return lead_s, "preemption started at the same scrape at which TTFT P99 passed its target"
    if lead_s > 0:
        return lead_s, f"preemption started {duration(lead_s)} before TTFT P99 passed its target"
    return lead_s, f"TTFT P99 passed its target {duration(-lead_s)} before preemption started"


def cost(one: EpisodeObserved, budget_s: float | None) -> IncidentCost:
    """What was preempted, what came late, what was not served."""
    during, missing = one.during, list[str]()
    preemptions = during.counts.get(m.PREEMPTIONS)
    if preemptions is None:
        missing.append("preemptions: not exported in this period")
    prompt = m.mean(PROMPT_LENGTH)(during) or m.mean(PROMPT_LENGTH)(one.hour_before)
    kept = m.within(TTFT, budget_s)(during)
    begun = during.tallies[TTFT].count if TTFT in during.tallies else 0.0
    late = None if kept is None else (1 - kept) * begun
    if budget_s is None:
        missing.append("late requests: no TTFT target set (slo.ttft_p99_s)")
    return IncidentCost(
        preemptions=preemptions,
        recomputed_tokens=preemptions * prompt if preemptions is not None and prompt else None,
        late_requests=late,
        lost_requests=_lost(one),
        missing=tuple(missing),
    )


def _lost(one: EpisodeObserved) -> float | None:
    """What the hour before served in as much time, less what was served; only where all stood
    still: a slower engine's requests wait, they are not lost."""
    if one.episode.cause not in STOPPED:
        return None
    served_per_s = m.per_s(m.COMPLETED)(one.hour_before)
    if served_per_s is None:
        return None
    lasted_s = math.fsum(
        held.until_s - held.start_s for held in one.episode.causes if held.id in STOPPED
    )
    return max(0.0, served_per_s * lasted_s - one.during.counts.get(m.COMPLETED, 0.0))


def _evidence(items: Sequence[Mapping[str, Any]]) -> tuple[EvidenceLine, ...]:
    return tuple(
        EvidenceLine(str(item["signal"]), item["value"], item["threshold"], str(item["text"]))
        for item in items
    )


def unit_of(signal: str) -> str:
    """A signal's unit, from its name."""
    if signal.startswith(PLAIN) and not signal.endswith(("_s", "_ratio")):
        return "requests"
    return next((unit for end, unit in UNITS if signal.endswith(end)), "")


def _line(signal: str, times: Sequence[float], values: Sequence[float]) -> Line:
    """A signal thinned to what a chart shows; of each part its highest value stays."""
    each = max(1, math.ceil(len(times) / POINTS_MOST))
    shown: list[tuple[float, float | None]] = []
    for at in range(0, len(times), each):
        known = [place for place in range(at, min(at + each, len(times))) if values[place] ==
                 values[place]]  # fmt: skip
        best = max(known, key=lambda place: values[place], default=None)
        shown.append((times[at], None) if best is None else (times[best], values[best]))
    return Line(
        signal,
        unit_of(signal),
        tuple(t_s for t_s, _ in shown),
        tuple(value for _, value in shown),
    )
