"""Prometheus (or any server with its API) as a report's source, and the totals of its tiers by the
hour. I/O edge."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kneewatch.agent.fleet.config import source_settings
from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.snapshot import capacity_tokens
from kneewatch.agent.report.period_source import (
    EnginePeriod,
    Remarks,
    ReportProgress,
    ReportRequest,
)
from kneewatch.agent.report.prometheus.fleet_incidents import FleetIncidents
from kneewatch.agent.report.prometheus.incidents import IncidentSearch, targets
from kneewatch.agent.report.prometheus.inventory import TierEngine, fleet_engines
from kneewatch.agent.report.prometheus.notes import METHODS, notes_of, notices_of
from kneewatch.agent.report.prometheus.period import (
    Configs,
    PeriodData,
    PeriodReader,
    process_names,
)
from kneewatch.agent.report.prometheus.queries import Ranges, RowKey, Rows, Steps, resolution
from kneewatch.agent.report.series import Floats, Signals, in_flight, points
from kneewatch.agent.report.spans import GaugeSpans, gauge_spans, with_eviction
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import Key, LabelMap, label_map
from kneewatch.reports.weekly.hours import Grid
from kneewatch.reports.weekly.measures import EVICTED, PREEMPTIONS, RUNNING, WAITING
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Level,
    Span,
    TargetObserved,
    TierTotals,
)


def gauges_of(
    grid: Grid, at: Steps, keys: Sequence[RowKey], rows: Mapping[str, Rows]
) -> GaugeSpans:
    """The hourly gauges of the engines in `keys`; gauges that no engine exports are left out."""
    nothing = np.full(at.count, np.nan)
    values = {
        name: np.array([gauge_rows.get(key, nothing) for key in keys])
        for name, gauge_rows in rows.items()
        if name == RUNNING or any(key in gauge_rows for key in keys)
    }
    return gauge_spans(
        values,
        running=values[RUNNING],
        watched=~np.isnan(values[RUNNING]),
        seconds=np.full(at.count, at.step_s),
        span_of=_hours_of(grid, at),
        spans=len(grid.slots),
    )


def _hours_of(grid: Grid, at: Steps) -> npt.NDArray[np.intp]:
    """The index of the hour that each step is in. Shape: (steps,)."""
    return np.searchsorted(np.array(grid.edges_s), at.begins_s + 1e-3, side="right") - 1


def tier_spans(
    read: PeriodData,
    keys: Sequence[RowKey],
    groups: Sequence[RowKey],
    capacity_tokens: float | None,
) -> list[Span]:
    """The hours of a tier: gauges of the engines `keys`, counters and histograms of `groups`."""
    gauges = gauges_of(read.grid, read.at, keys, read.gauges)
    counts, tallies = read.counted(groups), read.tallies(groups)
    worst = _worst_eviction(read, keys)
    by_hour: list[Span] = []
    for at, gauge_levels in enumerate(gauges.levels):
        gained = {name: float(row[at]) for name, row in counts.items() if not math.isnan(row[at])}
        levels = with_eviction(gauge_levels, gained.get(PREEMPTIONS))
        if EVICTED in levels and worst is not None:
            mean = levels[EVICTED]
            top = max(mean.top, float(worst[at]))
            levels[EVICTED] = Level(mean.mean, top, mean.known_s, top)
        if capacity_tokens is not None and levels:
            levels["kv_capacity_tokens"] = Level(
                capacity_tokens, capacity_tokens, 1.0, capacity_tokens
            )
        by_hour.append(
            Span(
                counts=gained,
                tallies={name: tally for name, hours in tallies.items() if (tally := hours[at])},
                levels=levels,
            )
        )
    return by_hour


def _worst_eviction(read: PeriodData, keys: Sequence[RowKey]) -> Floats | None:
    """The highest preemption ratio of any of the engines per hour: preemptions/running/s."""
    if not read.preempted:
        return None
    hours = len(read.grid.slots)
    highest = np.zeros(hours)
    for key in keys:
        running_s = np.zeros(hours)
        running = np.nan_to_num(read.gauges[RUNNING][key]) * read.at.step_s
        np.add.at(running_s, _hours_of(read.grid, read.at), running)
        preempted = np.nan_to_num(read.preempted.get(key, np.zeros(hours)))
        ratios = np.divide(preempted, running_s, out=np.zeros(hours), where=running_s > 0)
        highest = np.maximum(highest, ratios)
    return highest


QUERIES = 60
"""Approximate number of queries per period, for the progress bar."""


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """What to query: selector, meaning of the labels, diagnosis profile, parallel queries."""

    selector: str
    names: LabelMap
    profile: Profile
    at_once: int


class MetricsSource:
    """Reads a report's periods from Prometheus: all series of a fleet at once, in steps."""

    def __init__(
        self,
        source: PrometheusSource,
        request: ReportRequest,
        config: SourceConfig,
        progress: ReportProgress,
    ) -> None:
        """Runs all queries, and replays the samples around signs of trouble.

        Raises:
            CollectError: the server does not answer, or has no vLLM series in the period.
            SettingsError: a requested target does not exist.
        """
        counter = _Progress(progress, QUERIES * (1 if request.before is None else 2))
        self._source, self._selector = source, config.selector
        self._ranges = Ranges(source, at_once=config.at_once, tell=counter)
        self._fleet = fleet_engines(self._ranges, request, config.selector, config.names)
        self._resolution = resolution(
            request.grid,
            engines=len(self._fleet.shape.members),
            scrape_s=self._fleet.scrape_s,
            window_s=request.window_s,
        )
        reader = PeriodReader(self._ranges, self._fleet, self._resolution)
        late_s = min(
            (
                target_s
                for engine in self._fleet.members
                if (target_s := request.stated(engine.target).targets.ttft_p99_s) is not None
            ),
            default=None,
        )
        self._now = reader.period(request.grid, late_s=late_s, closely=True)
        self._before = (
            reader.period(request.before, late_s=None, closely=False) if request.before else None
        )
        self._configs = Configs(self._now, process_names(self._fleet.asking.by))
        self._search = IncidentSearch(
            self._ranges, self._fleet, self._now, self._configs, config.profile, request
        )
        self._search.look(counter)
        self._of_fleet = FleetIncidents(
            self._ranges, config.selector, config.names, self._fleet, config.profile
        )
        self._of_fleet.look(self._now)
        progress(1, 1)

    @property
    def name(self) -> str:
        """The server's address."""
        return self._source.url

    def engines(self) -> Iterator[EnginePeriod]:
        """The requested engines of both periods, and the outages of whole pools."""
        now = self._observed(self._now, self._configs)
        before = self._observed(self._before) if self._before is not None else {}
        for engine in self._fleet.members:
            own = self._search.held(engine)
            yield EnginePeriod(
                target=engine.target,
                model=engine.member.model,
                tier=engine.tier,
                gpu=engine.gpu,
                evidence=self._of_fleet.evidence_of(engine, self._search.evidence_of(engine)),
                now=now.get(engine.key),
                before=before.get(engine.key),
                held=[*own, *self._of_fleet.held(engine, own)],
                recommended=self._search.recommended(engine),
                configured=self._configured(engine),
            )
        yield from self._of_fleet.pools()

    def totals(self, tier: str) -> tuple[TierTotals, TierTotals]:
        """Counters, histograms and gauges of a tier: the server adds up its engines."""
        members = self._fleet.of(tier)
        before = TierTotals() if self._before is None else self._totals(members, self._before)
        return self._totals(members, self._now, self._configs), before

    def targets(self) -> list[TargetObserved]:
        """Scrapes, failures and gaps of each replica, derived from the steps."""
        return targets(self._fleet, self._now)

    def remarks(self) -> Remarks:
        """How the data was read, and what is missing or partial."""
        problems = self._ranges.problems
        return Remarks(
            filters=(f"selector {self._selector}",) if self._selector else (),
            notices=notices_of(problems, self._search.left_out + self._of_fleet.left_out),
            notes=notes_of(self._fleet, self._resolution, self._now, self._source, self._search),
            methods=METHODS,
            partial=bool(problems.warnings or problems.failed),
        )

    def _observed(
        self, read: PeriodData, configs: Configs | None = None
    ) -> dict[Key, EngineObserved]:
        """The engines present in a period."""
        engines = [engine for engine in self._fleet.members if read.has(engine.key)]
        if not engines:
            return {}
        only = {key: read.gauges[key] for key in (RUNNING, WAITING)}
        gauges = gauges_of(read.grid, read.at, [engine.key for engine in engines], only)
        return {
            engine.key: _engine(engine, read, gauges.watched_s[at], gauges.idle_s[at], configs)
            for at, engine in enumerate(engines)
        }

    def _totals(
        self, members: Sequence[TierEngine], read: PeriodData, configs: Configs | None = None
    ) -> TierTotals:
        present = [engine for engine in members if read.has(engine.key)]
        if not present:
            return TierTotals()
        groups = [*{self._fleet.group(engine) for engine in present}]
        capacities = [
            tokens
            for engine in present
            if configs is not None and (tokens := capacity_tokens(configs.last(engine.member)))
        ]
        return TierTotals(
            spans=tier_spans(
                read, [engine.key for engine in present], groups,
                sum(capacities) / len(capacities) if capacities else None,
            ),
            minutes=read.minutes(groups),
        )  # fmt: skip

    def _configured(self, engine: TierEngine) -> list[Configured]:
        """Process starts with the configurations before and after."""
        return [
            Configured(
                t_s, engine.target, engine.engine, *self._configs.around(engine.member, t_s),
                "process_start_time_seconds",
            )
            for t_s in self._configs.starts(engine.member)
        ]  # fmt: skip


class _Progress:
    """Counts queries."""

    def __init__(self, progress: ReportProgress, expected: int) -> None:
        self._progress, self._done, self._expected = progress, 0, expected

    def more(self, queries: int) -> None:
        self._expected = self._done + queries

    def __call__(self, _name: str) -> None:
        self._done += 1
        self._progress(min(self._done, self._expected - 1), self._expected)


def _engine(
    engine: TierEngine, read: PeriodData, watched_s: Floats, idle_s: Floats, configs: Configs | None
) -> EngineObserved:
    at, running = read.at, read.gauges[RUNNING][engine.key]
    steps = np.flatnonzero(~np.isnan(running))
    times = at.begins_s + at.step_s
    curve = read.curve.get(engine.key)
    waiting = read.gauges[WAITING].get(engine.key, np.full(at.count, np.nan))
    load = Signals(times, {"running_avg": running, "waiting_avg": waiting})
    return EngineObserved(
        target=engine.target,
        engine=engine.engine,
        replica=engine.target,
        first_s=float(at.begins_s[steps[0]]),
        last_s=float(times[steps[-1]]),
        spans=[
            Span(engine_s=seconds, clock_s=seconds, watched_s=seconds, idle_s=idle)
            for seconds, idle in zip(watched_s.tolist(), idle_s.tolist(), strict=True)
        ],
        points=points(curve, window_s=at.step_s) if curve is not None else (),
        in_flight=in_flight(load, window_s=at.step_s) if configs is not None else None,
        config=configs.last(engine.member) if configs is not None else {},
    )


@contextmanager
def metrics_source(
    url: str, settings: Settings, selector: str, request: ReportRequest, progress: ReportProgress
) -> Generator[MetricsSource]:
    """The metrics system at `url`, read as the settings describe it.

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
        yield MetricsSource(source, request, config, progress)
