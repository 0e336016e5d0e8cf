"""Gathers a report's period: two sources, the history store and Prometheus, fill one model. Pure.

A source returns what each engine showed. What the report judges from it (which intervals form one
incident, which of them get evidence, which engines form a tier) is decided here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kneewatch.agent.report.request import UNNAMED, ReportRequest
from kneewatch.reports.weekly.figures import Method
from kneewatch.reports.weekly.incidents import episodes
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
    TierTotals,
)

DETAILED_MOST = 200
"""At most this many incidents per engine, the worst, get the diagnosis that explains them."""

ReportProgress = Callable[[int, int], None]
"""Called with the steps done and the total number of steps."""


@dataclass(frozen=True, slots=True)
class EnginePeriod:
    """What a source has about one engine of the report.

    `now` and `before` are the engine in the period and in the one before; None where it was absent
    or does not count as an engine. `held` are the intervals of its stages and causes. `evidence`
    returns an incident with what was observed around it; its flag asks for the diagnosis too.
    """

    target: str
    model: str
    tier: str
    gpu: str
    evidence: Callable[[Episode, bool], EpisodeObserved]
    now: EngineObserved | None = None
    before: EngineObserved | None = None
    held: Sequence[Held] = ()
    recommended: Sequence[Recommended] = ()
    configured: Sequence[Configured] = ()


@dataclass(frozen=True, slots=True)
class Remarks:
    """What a source says about its data: fields as in `Observed`; `filters` beside those of the
    request."""

    filters: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    partial: bool = False


class PeriodSource(Protocol):
    """Reads the periods of one report. `engines` is read to its end first."""

    @property
    def name(self) -> str:
        """Where the figures come from, as the report states it."""
        ...

    def engines(self) -> Iterable[EnginePeriod]:
        """The requested engines of both periods."""
        ...

    def totals(self, tier: str) -> tuple[TierTotals, TierTotals]:
        """What is known only in sum over a tier's engines: in the period, in the one before."""
        ...

    def targets(self) -> Iterable[TargetObserved]:
        """How each target was scraped in the period."""
        ...

    def remarks(self) -> Remarks:
        """What the reader must know about the data."""
        ...


@dataclass(slots=True)
class _TierEngines:
    """The engines of one tier; `first` names its model and GPU."""

    first: EnginePeriod
    now: list[EngineObserved] = field(default_factory=list[EngineObserved])
    before: list[EngineObserved] = field(default_factory=list[EngineObserved])


def gather(source: PeriodSource, request: ReportRequest) -> Observed:
    """The period and the one before, as a source has them.

    Raises:
        KneewatchError: the source cannot be read.
    """
    tiers: dict[str, _TierEngines] = {}
    incidents: list[EpisodeObserved] = []
    recommended: list[Recommended] = []
    configured: list[Configured] = []
    for engine in source.engines():
        tier = tiers.setdefault(engine.tier, _TierEngines(engine))
        tier.now += [engine.now] if engine.now is not None else []
        tier.before += [engine.before] if engine.before is not None else []
        incidents += _incidents(engine, request)
        recommended += engine.recommended
        configured += engine.configured
    targets = list(source.targets())
    tiers_observed = [
        _tier(tier, tiers[tier], source.totals(tier), request) for tier in sorted(tiers)
    ]
    remarks = source.remarks()
    return Observed(
        grid=request.grid,
        before_grid=request.before,
        source=source.name,
        tiers=tiers_observed,
        episodes=sorted(incidents, key=lambda incident: incident.episode.start_s),
        recommended=sorted(recommended, key=lambda recommendation: recommendation.first_s),
        configured=sorted(configured, key=lambda change: change.t_s),
        targets=targets,
        filters=(
            *(f"target {name}" for name in request.targets),
            *(f"tier {name}" for name in request.tiers),
            *remarks.filters,
        ),
        notices=remarks.notices,
        notes=remarks.notes,
        methods=remarks.methods,
        partial=remarks.partial,
    )


def _incidents(engine: EnginePeriod, request: ReportRequest) -> list[EpisodeObserved]:
    """An engine's incidents, the worst DETAILED_MOST with their diagnosis."""
    grid = request.grid
    incidents = episodes(engine.held, from_s=grid.from_s, to_s=grid.to_s)
    worst = sorted(
        incidents, key=lambda episode: (-episode.severity, episode.start_s - episode.until_s)
    )
    detailed = {id(episode) for episode in worst[:DETAILED_MOST]}
    return [engine.evidence(episode, id(episode) in detailed) for episode in incidents]


def _tier(
    tier: str,
    engines: _TierEngines,
    totals: tuple[TierTotals, TierTotals],
    request: ReportRequest,
) -> TierObserved:
    now, before = totals
    return TierObserved(
        id=tier,
        model=engines.first.model or UNNAMED,
        gpu=engines.first.gpu,
        stated=request.stated(engines.first.target),
        engines=engines.now,
        before=engines.before,
        totals=now,
        totals_before=before,
    )
