"""A report's inputs from the store. I/O edge.

Reads one engine after another: memory holds the numbers of one engine at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kneewatch.agent.report.engine import EngineHistory, unknown_of
from kneewatch.agent.report.history import History, target_observed
from kneewatch.agent.report.inventory import UNNAMED, Member, ReportRequest, members_of, seen
from kneewatch.agent.store.records import Interval
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.incidents import BRIDGED_S, episodes
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Episode,
    EpisodeObserved,
    Held,
    Observed,
    Recommended,
    TargetObserved,
    TierObserved,
)
from kneewatch.rules.rule import WORDS

DETAILED_MOST = 200
"""At most this many incidents per engine, the worst, get evidence."""

LOOKS = (0.5, 0.25, 0.75, 0.05, 0.95)
"""Positions in an incident (0-1) at which its stored diagnosis is looked up."""

SEVERITY = {word: severity for severity, word in WORDS.items()}


@dataclass(slots=True)
class _Results:
    """Results collected engine by engine."""

    engines: dict[str, list[EngineObserved]] = field(
        default_factory=dict[str, list[EngineObserved]]
    )
    before: dict[str, list[EngineObserved]] = field(default_factory=dict[str, list[EngineObserved]])
    episodes: list[EpisodeObserved] = field(default_factory=list[EpisodeObserved])
    recommended: list[Recommended] = field(default_factory=list[Recommended])
    configured: list[Configured] = field(default_factory=list[Configured])


ReportProgress = Callable[[int, int], None]
"""Called with the steps done and the total number of steps."""


def gather(
    history: History, request: ReportRequest, tell: ReportProgress = lambda _done, _all: None
) -> Observed:
    """The period and the one before, read from the store."""
    members = members_of(history, request)
    targets = dict.fromkeys(member.engine.target for member in members)
    results, steps = _Results(), len(members) + len(targets)
    for done, member in enumerate(members):
        tell(done, steps)
        _engine(history, member, request, results)
    watched: list[TargetObserved] = []
    for done, target in enumerate(targets, len(members)):
        tell(done, steps)
        watched += _target(history, target, members, request.grid)
    tell(steps, steps)
    return Observed(
        grid=request.grid,
        before_grid=request.before,
        source=f"kneewatch's own history ({history.path.name})",
        tiers=_tiers(members, results, request),
        episodes=sorted(results.episodes, key=lambda observed: observed.episode.start_s),
        recommended=sorted(results.recommended, key=lambda recommendation: recommendation.first_s),
        configured=sorted(results.configured, key=lambda change: change.t_s),
        targets=watched,
        filters=(
            *(f"target {name}" for name in request.targets),
            *(f"tier {name}" for name in request.tiers),
        ),
    )


def _engine(history: History, member: Member, request: ReportRequest, results: _Results) -> None:
    engine, grid = member.engine, request.grid
    if request.before is not None and seen(engine, request.before):
        before = EngineHistory.read(history, engine, request.before, request.window_s)
        if member.counts:
            results.before.setdefault(member.tier, []).append(before.observed({}, {}, curve=False))
    if not seen(engine, grid):
        return
    numbers = EngineHistory.read(history, engine, grid, request.window_s)
    changes = history.configs(engine.id, from_s=-1e18, to_s=grid.to_s)
    config: Mapping[str, str] = changes[-1].after if changes else {}
    if member.counts:
        results.engines.setdefault(member.tier, []).append(
            numbers.observed(config, unknown_of(member.document), curve=True)
        )
    results.configured += [
        Configured(
            change.t_s, engine.target, engine.engine, change.before, change.after, change.restart
        )
        for change in changes
        if change.t_s >= grid.from_s
    ]
    results.episodes += _episodes(history, member, numbers, grid)
    results.recommended += _recommended(history, member, grid)


def _episodes(
    history: History, member: Member, numbers: EngineHistory, grid: Grid
) -> list[EpisodeObserved]:
    rows = history.intervals(
        from_s=grid.from_s - BRIDGED_S,
        to_s=grid.to_s,
        engine_id=member.engine.id,
        kinds=("stage", "cause"),
    )
    incidents = episodes([_held(row) for row in rows], from_s=grid.from_s, to_s=grid.to_s)
    worst = sorted(
        incidents, key=lambda episode: (-episode.severity, episode.start_s - episode.until_s)
    )
    detailed = {id(episode) for episode in worst[:DETAILED_MOST]}
    return [
        numbers.episode(
            history,
            episode,
            _document(history, member.engine.id, episode) if id(episode) in detailed else None,
            member.tier,
        )
        for episode in incidents
    ]


def _held(row: Interval) -> Held:
    return Held(row.kind, row.id, row.severity, row.start_s, row.end_s, row.last_s, row.ended)


def _document(history: History, engine_id: int, episode: Episode) -> dict[str, Any] | None:
    """The stored diagnosis in which the incident's cause is at its worst; None without one."""
    best: dict[str, Any] | None = None
    best_rank = (-1, 0.0)
    own = [interval for interval in episode.causes if interval.id == episode.cause] or [
        *episode.stages
    ]
    longest = max(
        own, key=lambda interval: (interval.severity, interval.until_s - interval.start_s)
    )
    for look in LOOKS:
        at_s = longest.start_s + look * (longest.until_s - longest.start_s)
        document = history.document(engine_id, at_s)
        for cause in document["causes"] if document else ():
            rank = int(SEVERITY[cause["severity"]]), float(cause["confidence"])
            if cause["id"] == episode.cause and rank > best_rank:
                best, best_rank = document, rank
        if best_rank[0] >= longest.severity:
            break
    return best


def _recommended(history: History, member: Member, grid: Grid) -> list[Recommended]:
    engine = member.engine
    rows = history.recommendations(from_s=grid.from_s, to_s=grid.to_s, engine_id=engine.id)
    return [
        Recommended(
            tier=member.tier,
            target=engine.target,
            engine=engine.engine,
            document=row.document,
            fate=row.outcome,
            first_s=row.first_s,
            last_s=row.last_s,
            applied_s=row.applied_s,
            predicted=row.predicted,
            measured=row.measured,
        )
        for row in rows
    ]


def _target(
    history: History, target: str, members: Sequence[Member], grid: Grid
) -> Iterable[TargetObserved]:
    first_s = min(member.engine.first_s for member in members if member.engine.target == target)
    from_s = max(grid.from_s, first_s)
    if from_s >= grid.to_s:
        return
    scrapes = history.scrapes(target, from_s=from_s, to_s=grid.to_s)
    yield target_observed(target, scrapes, from_s=from_s, to_s=grid.to_s)


def _tiers(
    members: Sequence[Member], results: _Results, request: ReportRequest
) -> list[TierObserved]:
    tiers: list[TierObserved] = []
    for tier in sorted({member.tier for member in members}):
        own = [member for member in members if member.tier == tier]
        tiers.append(
            TierObserved(
                id=tier,
                model=own[0].engine.model or UNNAMED,
                gpu=own[0].gpu,
                stated=request.stated(own[0].engine.target),
                engines=results.engines.get(tier, []),
                before=results.before.get(tier, []),
            )
        )
    return tiers
