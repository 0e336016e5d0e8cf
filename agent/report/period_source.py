"""Gathers a report's period: two sources, the history store and Prometheus, fill one model. Pure.

A source returns what each engine showed. What the report judges from it (which intervals form one
incident, which of them get evidence, which engines form a tier) is decided here, once.
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
    """The report's name of a tier: its `tier` label with the model, else model and GPU."""
    model = model or UNNAMED
    if tier:
        return tier if model in tier else f"{model} on {tier}"
    return f"{model}@{gpu}" if gpu else model


def check_names(
    kind: str, requested: Sequence[str], existing: Iterable[str], place: str, listed: Iterable[str]
) -> None:
    """Check that all names requested with `--target` or `--tier` exist.

    Raises:
        SettingsError: one does not; the message lists the first names of `listed`.
    """
    names = set(existing)
    for name in requested:
        if name not in names:
            some = ", ".join(sorted(set(listed))[:LISTED_MOST]) or "none"
            raise SettingsError(f"--{kind} {name}: no such {kind} in {place}; it has {some}")


# --- What the settings state about each target. I/O edge: settings may name files -----------------


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """A function that maps a target's name to the settings for its tier: those of the target's own
    table, else the general ones.

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
    """The workload of `report.profile`, else of the general profile; None without a profile."""
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
"""At most this many incidents per engine, the worst, get the diagnosis that explains them."""

ReportProgress = Callable[[int, int], None]
"""Called with the steps done and the total number of steps."""


class EnginePeriod(Struct, frozen=True):
    """One engine of the report, as its source observed it.

    `now` and `before` are the engine in the period and in the one before; None if it was absent
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


class Remarks(Struct, frozen=True):
    """A source's remarks on its data: fields as in `Observed`; `filters` are added to those of the
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
        """For both periods, the sums over a tier's engines that only the source can compute."""
        ...

    def targets(self) -> Iterable[TargetObserved]:
        """How each target was scraped in the period."""
        ...

    def remarks(self) -> Remarks:
        """What the reader must know about the data."""
        ...


class _TierEngines(Struct):
    """The engines of one tier; `first` names its model and GPU."""

    first: EnginePeriod
    now: list[EngineObserved] = field(default_factory=list[EngineObserved])
    before: list[EngineObserved] = field(default_factory=list[EngineObserved])


def gather(source: PeriodSource, request: ReportRequest) -> Observed:
    """The data of the period and of the period before, from one source.

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
