"""A report's inputs from Prometheus, as the settings describe it. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.deployment import stated
from kneewatch.agent.fleet.config import source_settings
from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.snapshot import capacity_tokens
from kneewatch.agent.report.engine import in_flight, points
from kneewatch.agent.report.history import Signals
from kneewatch.agent.report.inventory import ReportRequest
from kneewatch.agent.report.prometheus.aggregation import Gauges, spans
from kneewatch.agent.report.prometheus.incidents import IncidentSearch, targets
from kneewatch.agent.report.prometheus.inventory import FleetEngines, TierEngine, fleet_engines
from kneewatch.agent.report.prometheus.notes import METHODS, notes_of, notices_of
from kneewatch.agent.report.prometheus.period import (
    Configs,
    PeriodData,
    PeriodReader,
    process_names,
)
from kneewatch.agent.report.prometheus.queries import Ranges
from kneewatch.agent.report.prometheus.resolution import Floats, resolution
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import LabelMap, label_map
from kneewatch.reports.weekly.aggregation import Span
from kneewatch.reports.weekly.measures import RUNNING, WAITING
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Observed,
    TierObserved,
    TierTotals,
)

NOTHING: Mapping[str, float] = {}

ReportProgress = Callable[[int, int], None]
"""Called with the steps done and the total number of steps."""

QUERIES = 60
"""Approximate number of queries per period, for the progress bar."""


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """What to query: selector, meaning of the labels, diagnosis profile, parallel queries."""

    selector: str
    names: LabelMap
    profile: Profile
    at_once: int


def gather(
    source: PrometheusSource,
    request: ReportRequest,
    config: SourceConfig,
    tell: ReportProgress = lambda _done, _all: None,
) -> Observed:
    """The period and the one before, read from a metrics system. `partial` is set if the server
    reports partial answers or a query failed.

    Raises:
        CollectError: the server does not answer, or has no vLLM series in the period.
    """
    progress = _Progress(tell, QUERIES * (1 if request.before is None else 2))
    ranges = Ranges(source, at_once=config.at_once, tell=progress)
    fleet = fleet_engines(ranges, request, config.selector, config.names)
    resolved = resolution(
        request.grid,
        engines=len(fleet.shape.members),
        scrape_s=fleet.scrape_s,
        window_s=request.window_s,
    )
    reading = PeriodReader(ranges, fleet, resolved)
    late_s = min(
        (
            target_s
            for engine in fleet.members
            if (target_s := request.stated(engine.target).targets.ttft_p99_s) is not None
        ),
        default=None,
    )
    now = reading.period(request.grid, late_s=late_s, closely=True)
    before = (
        reading.period(request.before, late_s=None, closely=False)
        if request.before is not None
        else None
    )
    configs = Configs(now, process_names(fleet.asking.by))
    search = IncidentSearch(ranges, fleet, now, configs, config.profile, request)
    search.look(progress)
    tiers = [_tier(tier, fleet, request, now, before, configs) for tier in fleet.tiers()]
    tell(1, 1)
    return Observed(
        grid=request.grid,
        before_grid=request.before,
        source=source.url,
        tiers=tiers,
        episodes=search.episodes,
        recommended=search.recommended,
        configured=_configured(fleet, now, configs),
        targets=targets(fleet, now),
        filters=(
            *(f"target {name}" for name in request.targets),
            *(f"tier {name}" for name in request.tiers),
            *([f"selector {config.selector}"] if config.selector else []),
        ),
        notices=notices_of(ranges.problems, search),
        notes=notes_of(fleet, resolved, now, source, search),
        methods=METHODS,
        partial=bool(ranges.problems.warnings or ranges.problems.failed),
    )


class _Progress:
    """Counts queries."""

    def __init__(self, tell: ReportProgress, expected: int) -> None:
        self._tell, self._done, self._expected = tell, 0, expected

    def more(self, queries: int) -> None:
        self._expected = self._done + queries

    def __call__(self, _name: str) -> None:
        self._done += 1
        self._tell(min(self._done, self._expected - 1), self._expected)


def _tier(
    tier: str,
    fleet: FleetEngines,
    request: ReportRequest,
    now: PeriodData,
    before: PeriodData | None,
    configs: Configs,
) -> TierObserved:
    members = fleet.of(tier)
    engines, together = _engines(members, fleet, now, configs)
    was, together_was = ([], TierTotals()) if before is None else _engines(members, fleet, before)
    return TierObserved(
        id=tier,
        model=members[0].member.model,
        gpu=members[0].gpu,
        stated=request.stated(members[0].target),
        engines=engines,
        before=was,
        totals=together,
        totals_before=together_was,
    )


def _engines(
    members: Sequence[TierEngine],
    fleet: FleetEngines,
    read: PeriodData,
    configs: Configs | None = None,
) -> tuple[list[EngineObserved], TierTotals]:
    """A tier's engines present in a period, and the tier's totals."""
    running = read.gauges[RUNNING]
    present = [
        engine
        for engine in members
        if engine.key in running and not np.isnan(running[engine.key]).all()
    ]
    if not present:
        return [], TierTotals()
    gauges = Gauges.of(read.grid, read.at, [engine.key for engine in present], read.gauges)
    idle_s = gauges.idle_s()
    engines = [
        _engine(engine, read, gauges.watched_s[at], idle_s[at], configs)
        for at, engine in enumerate(present)
    ]
    groups = [*{fleet.group(engine) for engine in present}]
    nothing = np.full(len(read.grid.slots), np.nan)
    preempted = np.array([read.preempted.get(engine.key, nothing) for engine in present])
    capacities = [
        tokens
        for engine in present
        if configs is not None and (tokens := capacity_tokens(configs.last(engine.member)))
    ]
    together = TierTotals(
        spans=spans(
            gauges,
            read.counted(groups),
            read.tallies(groups),
            preempted if read.preempted else None,
            sum(capacities) / len(capacities) if capacities else None,
        ),
        minutes=read.minutes(groups),
    )
    return engines, together


def _engine(
    engine: TierEngine, read: PeriodData, watched_s: Floats, idle_s: Floats, configs: Configs | None
) -> EngineObserved:
    at = read.at
    steps = np.flatnonzero(~np.isnan(read.gauges[RUNNING][engine.key]))
    times = at.begins_s + at.step_s
    curve = read.curve.get(engine.key)
    nothing = np.full(at.count, np.nan)
    load = Signals(
        times,
        {
            "running_avg": read.gauges[RUNNING][engine.key],
            "waiting_avg": read.gauges[WAITING].get(engine.key, nothing),
        },
    )
    return EngineObserved(
        target=engine.target,
        engine=engine.engine,
        replica=engine.target,
        first_s=float(at.begins_s[steps[0]]),
        last_s=float(times[steps[-1]]),
        spans=[
            Span(
                engine_s=seconds, clock_s=seconds, watched_s=seconds, idle_s=idle,
                counts=NOTHING, tallies={}, levels={},
            )
            for seconds, idle in zip(watched_s.tolist(), idle_s.tolist(), strict=True)
        ],
        points=points(curve, window_s=at.step_s) if curve is not None else (),
        in_flight=in_flight(load, window_s=at.step_s) if configs is not None else None,
        config=configs.last(engine.member) if configs is not None else {},
    )  # fmt: skip


def _configured(fleet: FleetEngines, now: PeriodData, configs: Configs) -> list[Configured]:
    """Process starts with the configurations before and after, ordered by time."""
    starts: list[Configured] = []
    for engine in fleet.members:
        for t_s in configs.starts(engine.member):
            was, then = configs.around(engine.member, t_s)
            starts.append(
                Configured(
                    t_s, engine.target, engine.engine, was, then, "process_start_time_seconds"
                )
            )
    return sorted(starts, key=lambda start: start.t_s)


# --- With settings --------------------------------------------------------------------------------


def gather_prometheus(
    url: str, settings: Settings, selector: str, request: ReportRequest, tell: ReportProgress
) -> Observed:
    """A report's inputs from the metrics system at `url`, as the settings describe it.

    Raises:
        CollectError: the server does not answer, or has no vLLM series in the period.
        SettingsError: the selector or `fleet.labels` is not valid.
    """
    config = SourceConfig(
        checked_selector(selector, "--selector"),
        label_map(settings["fleet.labels"] or {}, settings.origin("fleet.labels")),
        settings.profile(stated=stated(settings)),
        settings["fleet.queries_at_once"],
    )
    with PrometheusSource(url, source_settings(settings)) as source:
        return gather(source, request, config, tell)
