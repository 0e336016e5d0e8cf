"""Prometheus, or a server with the same API, as a source for reports. Includes notes on the data.
I/O edge."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kneewatch.agent.fleet.snapshot import (
    FleetConfig,
    capacity_tokens,
    fleet_config,
    source_settings,
)
from kneewatch.agent.report.period_source import (
    EnginePeriod,
    Remarks,
    ReportProgress,
    ReportRequest,
)
from kneewatch.agent.report.prometheus.incidents import (
    REPLAYED_MOST,
    REPLAYED_S,
    IncidentSearch,
    QueryProgress,
)
from kneewatch.agent.report.prometheus.inventory import FleetEngines, TierEngine, fleet_engines
from kneewatch.agent.report.prometheus.period import (
    CURVES_MOST,
    Configs,
    PeriodData,
    PeriodReader,
    process_names,
    targets,
)
from kneewatch.agent.report.prometheus.queries import (
    GPUS,
    QueryProblems,
    Ranges,
    Resolution,
    RowKey,
    Rows,
    Steps,
    resolution,
)
from kneewatch.agent.report.prometheus.suspect_spans import FleetIncidents
from kneewatch.agent.report.series import (
    Floats,
    GaugeSpans,
    Signals,
    gauge_spans,
    in_flight,
    points,
    with_eviction,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.dashboards.prometheus.hourly_sums import SUM_STEP_S
from kneewatch.diagnose.fleet.inventory import Key
from kneewatch.reports.weekly.figures import Method
from kneewatch.reports.weekly.measures import EVICTED, PREEMPTIONS, RUNNING, WAITING
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Grid,
    Level,
    Span,
    TargetObserved,
    TierTotals,
)
from kneewatch.rules.formatting import duration, plural

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the series' label `tier`, else the GPU that DCGM "
        "names, else that of the settings. No figure combines two tiers.",
        ("9.5",),
    ),
    Method(
        "counters",
        "Prometheus's increase() over each local hour, or the 5-minute sums of it that recording "
        "rules keep, summed by tier on the server. A counter that decreases restarted from 0.",
        (),
    ),
    Method(
        "gauges",
        "Means over steps, per engine; the busiest (or worst) hour is the local hour with the "
        "highest mean.",
        (),
    ),
    Method(
        "incidents",
        "Each engine's steps are searched for suspect periods. Of these (the "
        f"{REPLAYED_MOST} with most harm; of long ones the first {duration(REPLAYED_S)}) the raw "
        "samples are read and diagnosed as the sidecar diagnoses its scrapes; further outages, "
        "cascades and stalls are reported from the steps alone. A pool without replicas is "
        "judged as `diagnose --prometheus --at` judges it then. Restarts are those of "
        "process_start_time_seconds. "
        "Repeats within 15 minutes count as one incident; downstream effects are reported under "
        "their root cause.",
        ("7.4", "8.5"),
    ),
    Method(
        "knee",
        "One point per step, for some engines of each tier: requests in flight, throughput and "
        "latency over a window at the step's end; grouped by concurrency in steps of the square "
        "root of two. With latency targets C_max is the last step that meets them in most of its "
        "windows; without, the step with the most tokens/s divided by the time per token. Only "
        "loads that occurred count.",
        ("8.1", "8.3"),
    ),
    Method(
        "track record",
        "A metrics system's series do not show whether a recommendation was applied.",
        ("9.1",),
    ),
)


# --- Notices and notes of a report from Prometheus ------------------------------------------------


PROBLEMS_SHOWN_MAX = 4


def notices_of(problems: QueryProblems, left_out: int) -> tuple[str, ...]:
    """Warnings for the top of the report: partial answers, failed queries, and suspect spans that
    were not examined. `left_out` is the number of these spans."""
    notices: list[str] = []
    if problems.warnings:
        shown = "; ".join([*problems.warnings][:PROBLEMS_SHOWN_MAX])
        notices.append(f"the server reports partial answers: {shown}")
    if problems.failed:
        shown = "; ".join(
            f"{name}: {error}" for name, error in [*problems.failed.items()][:PROBLEMS_SHOWN_MAX]
        )
        queries = plural(len(problems.failed), "query", "queries")
        notices.append(f"{queries} failed, and their figures are unknown: {shown}")
    if left_out:
        times = plural(left_out, "more suspect period")
        notices.append(
            f"{times} not analysed, so the list of incidents is incomplete: use --tier or a "
            "shorter --since"
        )
    return tuple(notices)


def notes_of(
    fleet: FleetEngines,
    resolved: Resolution,
    now: PeriodData,
    source: PrometheusSource,
    search: IncidentSearch,
) -> tuple[str, ...]:
    """Notes on how the data was read, and on data that the metrics system does not contain."""
    again = f", {source.retried} of them retried" if source.retried else ""
    return (
        f"read from a metrics system that scrapes every {duration(resolved.scrape_s)}: counters "
        f"and histograms by the hour, gauges as means of {duration(resolved.step_s)}, arrivals in "
        f"steps of {duration(resolved.begun_s)}; highest values are the highest of these means",
        *_summed(now),
        f"{plural(search.replayed, 'suspect period')} (failed scrapes, preemptions, queues, no "
        "tokens, late first tokens) read sample by sample and diagnosed as the "
        "sidecar does; a cause without such a sign is missed",
        f"the latency curve uses at most {CURVES_MOST} engines per tier",
        *_without_samples(search),
        "whether recommendations were applied is unknown: only kneewatch run tracks them",
        _gpus(fleet, now),
        f"{plural(source.pace.asked, 'query', 'queries')}{again}",
        *_missing(fleet, now),
    )  # fmt: skip


def _without_samples(search: IncidentSearch) -> Iterator[str]:
    """Yields notes on suspect periods that are reported without the samples around them."""
    if search.coarse:
        yield (
            f"{plural(search.coarse, 'more suspect period')} reported from the steps alone: "
            "without evidence, stages and advice"
        )
    if search.unread:
        yield (
            f"{plural(search.unread, 'suspect period')} could not be read sample by sample: "
            "reported from the steps alone"
        )


def _gpus(fleet: FleetEngines, now: PeriodData) -> str:
    """A note on how many engines have GPU signals from DCGM."""
    with_gpus = {key for figure in GPUS for key in now.gauges.get(figure, {})}
    covered = sum(engine.key in with_gpus for engine in fleet.members)
    if not covered:
        return "GPU figures: the server has no DCGM series of these engines' pods or nodes"
    return (
        f"GPU figures of {covered} of {plural(len(fleet.members), 'engine')}, from DCGM: the pod's "
        "GPUs where the series name the pod, else all GPUs of the node"
    )


def _summed(now: PeriodData) -> list[str]:
    """A note on where counters and histograms come from: recording rules or raw series."""
    hours = len(now.grid.slots)
    if not now.summed:
        return [
            "counters and histograms: from raw series; the sums that recording rules keep "
            "(kneewatch-hourly) are missing for all hours, or do not separate these engines from "
            "others"
        ]
    rest = "" if now.summed == hours else "; the other hours from raw series"
    return [
        f"counters and histograms: {now.summed} of {plural(hours, 'hour')} from the sums that "
        f"recording rules keep (kneewatch-hourly), which may end {duration(SUM_STEP_S)} before the "
        f"hour does{rest}"
    ]


def _missing(fleet: FleetEngines, now: PeriodData) -> list[str]:
    """Notes on series that no engine of a tier has."""
    lines: list[str] = []
    for tier in fleet.tiers():
        groups = {fleet.group(engine) for engine in fleet.of(tier)}
        had: Mapping[str, object] = {**now.counted([*groups]), **now.tallies([*groups])}
        lacking = [name for name in (*now.counts, *now.histograms) if name not in had]
        if lacking:
            lines.append(f"no series of {', '.join(lacking)} ({tier})")
    return lines


# Prometheus (or any server with its API) as a report's source, and the totals of its tiers by the
# hour. I/O edge.


def gauges_of(
    grid: Grid, at: Steps, keys: Sequence[RowKey], rows: Mapping[str, Rows]
) -> GaugeSpans:
    """The hourly gauges of the engines in `keys`. Gauges that no engine exports are left out."""
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
    """The index of the hour that contains each step. Shape: (steps,)."""
    return np.searchsorted(np.array(grid.edges_s), at.begins_s + 1e-3, side="right") - 1


def tier_spans(
    read: PeriodData,
    keys: Sequence[RowKey],
    groups: Sequence[RowKey],
    capacity_tokens: float | None,
) -> list[Span]:
    """The hours of a tier: gauges of the engines in `keys`, counters and histograms of `groups`."""
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
    """For each hour, the highest preemption ratio of any engine: preemptions per second and running
    request."""
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
"""Assumed number of queries per period, for the progress bar."""


class MetricsSource:
    """Reads the periods of a report from Prometheus. Each query reads a series of all engines at
    once, in steps."""

    def __init__(
        self,
        source: PrometheusSource,
        request: ReportRequest,
        config: FleetConfig,
        progress: ReportProgress,
        *,
        at_once: int,
    ) -> None:
        """Send all queries, and replay the samples around signs of trouble.

        Raises:
            CollectError: the server does not answer, or has no vLLM series in the period.
            SettingsError: a requested target does not exist.
        """
        counter = QueryProgress(progress, QUERIES * (1 if request.before is None else 2))
        self._source, self._selector = source, config.selector
        self._ranges = Ranges(source, at_once=at_once, tell=counter)
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
        self._of_fleet = FleetIncidents(self._ranges, config, self._fleet)
        self._of_fleet.look(self._now)
        progress(1, 1)

    @property
    def name(self) -> str:
        """The server's address."""
        return self._source.url

    def engines(self) -> Iterator[EnginePeriod]:
        """Yields the requested engines of both periods, and an entry for each outage of a whole
        pool."""
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
        """Counters, histograms and gauges of a tier for both periods. The server sums them over the
        tier's engines."""
        members = self._fleet.of(tier)
        before = TierTotals() if self._before is None else self._totals(members, self._before)
        return self._totals(members, self._now, self._configs), before

    def targets(self) -> list[TargetObserved]:
        """The scrapes, failures and gaps of each replica, computed from the steps."""
        return targets(self._fleet, self._now)

    def remarks(self) -> Remarks:
        """Remarks on how the data was read, and on what is missing or partial."""
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
        """The engines that were present in a period."""
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
        """The starts of an engine's process, each with the configurations before and after it."""
        return [
            Configured(
                t_s, engine.target, engine.engine, *self._configs.around(engine.member, t_s),
                "process_start_time_seconds",
            )
            for t_s in self._configs.starts(engine.member)
        ]  # fmt: skip


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
    """A context with the metrics system at `url` as a source for reports.

    Raises:
        CollectError: the server does not answer, or has no vLLM series in the period.
        SettingsError: the selector or `fleet.labels` is not valid.
    """
    config = replace(
        fleet_config(settings, selector), profile=settings.profile(stated=stated(settings))
    )
    at_once: int = settings["fleet.queries_at_once"]
    with PrometheusSource(url, source_settings(settings)) as source:
        yield MetricsSource(source, request, config, progress, at_once=at_once)
