"""Collects the data of a report's period. The history store and Prometheus are two sources for the
same model. Pure.

A source returns the observations of each engine. This module draws the conclusions for both
sources: which intervals form one incident, which incidents get evidence, and which engines form a
tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from msgspec import Struct, field

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import PROFILE_SETTING, named_profile, stated
from kneewatch.agent.targets import table_specs
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.sizing.plan.plan_result import (
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.reports.weekly.figures import Method
from kneewatch.reports.weekly.incidents import episodes
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Episode,
    EpisodeObserved,
    Grid,
    Held,
    Observed,
    Recommended,
    TargetObserved,
    TierObserved,
    TierStated,
    TierTotals,
    WorkloadStated,
)
from kneewatch.rules.rule import WINDOW_S

# --- What a report covers: period, targets, tiers, and what the settings state of them ------------


UNNAMED = "unknown model"
LISTED_MOST = 20


class ReportRequest(Struct, frozen=True):
    """What a report covers. Empty `tiers` or `targets` mean all."""

    grid: Grid
    before: Grid | None
    stated: Callable[[str], TierStated]
    targets: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    window_s: float = WINDOW_S


def tier_name(model: str, tier: str, gpu: str) -> str:
    """The name of a tier in the report: its `tier` label with the model; without the label, the
    model and GPU."""
    model = model or UNNAMED
    if tier:
        return tier if model in tier else f"{model} on {tier}"
    return f"{model}@{gpu}" if gpu else model


def check_names(
    kind: str, requested: Sequence[str], existing: Iterable[str], place: str, listed: Iterable[str]
) -> None:
    """Check that all names given by `--target` or `--tier` exist.

    Raises:
        SettingsError: a name does not exist; the message lists the first names of `listed`.
    """
    names = set(existing)
    for name in requested:
        if name not in names:
            some = ", ".join(sorted(set(listed))[:LISTED_MOST]) or "none"
            raise SettingsError(f"--{kind} {name}: no such {kind} in {place}; it has {some}")


# --- What the settings state about each target. I/O edge: settings may name files -----------------


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """A function from a target's name to the settings of its tier. They come from the target's own
    table if it has one, else from the general settings.

    Raises:
        SettingsError: a model, GPU, file or table is not valid.
    """
    own = {spec.name: spec.settings for spec in table_specs(settings)}
    cached = cache(_stated)
    cached(settings)  # fail on invalid settings before anything is read
    return lambda target: cached(own.get(target, settings))


def _stated(settings: Settings) -> TierStated:
    deployment_stated = stated(settings)
    profile = settings.profile(stated=deployment_stated)
    price, source = settings["usd_per_gpu_hour"], "stated (usd_per_gpu_hour)"
    if price is None and deployment_stated.gpu is not None:
        price, source = (
            deployment_stated.gpu.usd_per_hour,
            f"the catalogue's price of {deployment_stated.gpu.id}",
        )
    return TierStated(
        targets=profile.targets,
        gpus=settings["gpus"] or deployment({}, deployment_stated).gpus,
        usd_per_gpu_hour=price,
        price_source=source if price is not None else "",
        benchmark_ttft_p99_s=settings["benchmark.ttft_p99_s"],
        benchmark_gpu_ratio=settings["benchmark.gpu_ratio"],
        stated=deployment_stated,
        workload=_workload(settings),
        rules=profile.rules(),
    )


def _workload(settings: Settings) -> WorkloadStated | None:
    """The workload of the setting `report.profile`, else that of `profile`. None if neither
    is set."""
    key = PROFILE_SETTING if settings["report.profile"] is None else "report.profile"
    profile = named_profile(settings, key)
    if profile is None:
        return None
    lengths = call_lengths(profile.lengths, profile.session)
    return WorkloadStated(
        input_mean_tokens=lengths.mean_input_tokens,
        # Of a session only the last call's length is known, not the distribution over all calls.
        input_p95_tokens=None if profile.session else float(lengths.input_p95_tokens),
        output_mean_tokens=lengths.mean_output_tokens,
        output_p95_tokens=float(lengths.output_p95_tokens),
        average_requests_per_s=average_requests_per_s(profile),
        peak_requests_per_s=planned_peak_per_s(profile),
    )


# --- What a source found --------------------------------------------------------------------------


DETAILED_MOST = 200
"""Maximum number of incidents per engine for which the diagnosis is read; the worst ones are
chosen."""

ReportProgress = Callable[[int, int], None]
"""Called with the number of steps done and the total number of steps."""


class EnginePeriod(Struct, frozen=True):
    """One engine of the report, with the observations of its source.

    `now` is the engine in the period, `before` the engine in the previous period; None if it was
    absent or does not count as an engine. `held` are the intervals of its stages and causes.
    `evidence` returns an incident with the observations around it; its second argument asks for the
    diagnosis too.
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


class Remarks(Struct, frozen=True):
    """A source's remarks on its data. The fields are those of `Observed`; `filters` are added to
    the filters of the request."""

    filters: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    partial: bool = False


class PeriodSource(Protocol):
    """A source of the periods of one report. `engines` must be read to its end before the other
    methods are called."""

    @property
    def name(self) -> str:
        """The source of the data, as the report names it."""
        ...

    def engines(self) -> Iterable[EnginePeriod]:
        """The requested engines of both periods."""
        ...

    def totals(self, tier: str) -> tuple[TierTotals, TierTotals]:
        """Sums over the engines of a tier, for the period and for the previous one. They contain
        only values that the source itself can sum."""
        ...

    def targets(self) -> Iterable[TargetObserved]:
        """The scrapes, failures and gaps of each target in the period."""
        ...

    def remarks(self) -> Remarks:
        """What a reader of the report must know about the data."""
        ...


class _TierEngines(Struct):
    """The engines of one tier. The tier's model and GPU are those of `first`."""

    first: EnginePeriod
    now: list[EngineObserved] = field(default_factory=list[EngineObserved])
    before: list[EngineObserved] = field(default_factory=list[EngineObserved])


def gather(source: PeriodSource, request: ReportRequest) -> Observed:
    """The data of both periods, from one source.

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
    """The incidents of an engine. The worst DETAILED_MOST of them include their diagnosis."""
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
