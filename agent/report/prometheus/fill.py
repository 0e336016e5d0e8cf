"""Fills a history from Prometheus, or a server with the same API, for the report's reader. Includes
notes on the data. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec.structs import replace

from kneewatch.agent.fleet.queries import AnswerLog
from kneewatch.agent.fleet.snapshot import FleetConfig, fleet_config, source_settings
from kneewatch.agent.report.history import (
    MARGIN_S,
    READ,
    EngineHistory,
    History,
    Member,
    ReportProgress,
    ReportRequest,
)
from kneewatch.agent.report.prometheus.incidents import REPLAYED_MOST, REPLAYED_S, IncidentSearch
from kneewatch.agent.report.prometheus.inventory import ReportedFleet, TierEngine, fleet_engines
from kneewatch.agent.report.prometheus.period import (
    CURVES_MOST,
    PeriodData,
    PeriodReader,
    late_bound_s,
)
from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    GPUS,
    LATE,
    PREEMPTED,
    Ranges,
    Resolution,
    resolution,
)
from kneewatch.agent.report.prometheus.suspect_spans import FleetIncidents
from kneewatch.agent.report.series import (
    METRICS,
    NO_TIMES,
    POINT_SIGNALS,
    Increases,
    Signals,
    counted,
    counter_spans,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.store.encoding import EngineName
from kneewatch.agent.store.ingest import StoreFill
from kneewatch.agent.store.records import Scrapes, StoredEngine
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.table import TTFT
from kneewatch.dashboards.prometheus.rule_group import (
    SUM_STEP_S,
    SUMMED_COUNTERS,
    SUMMED_HISTOGRAMS,
)
from kneewatch.diagnose.deployment.deployment import config_capacity_tokens
from kneewatch.diagnose.engine_history import ConfigChange, PastAdvice
from kneewatch.diagnose.fleet.inventory import Key
from kneewatch.reports.weekly.figures import methods
from kneewatch.reports.weekly.measures import PREEMPTIONS, RUNNING, WAITING
from kneewatch.reports.weekly.observed import EnginesObserved, Episode, Grid, Observed, Span
from kneewatch.rules.formatting import duration, plural

UNKNOWN_OUTCOME = "unknown"

METHODS = methods("prometheus", most=REPLAYED_MOST, replayed=duration(REPLAYED_S))


# --- Notices and notes of a report from Prometheus ------------------------------------------------


PROBLEMS_SHOWN_MAX = 4


def notices_of(problems: AnswerLog, left_out: int) -> tuple[str, ...]:
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
    fleet: ReportedFleet,
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
        "tokens, failed requests, late first tokens) read sample by sample and diagnosed as the "
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


def _gpus(fleet: ReportedFleet, now: PeriodData) -> str:
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


def _missing(fleet: ReportedFleet, now: PeriodData) -> list[str]:
    """Notes on series that no engine of a tier has."""
    lines: list[str] = []
    for tier in fleet.tiers():
        had = {column.metric for column in now.counters(map(fleet.group, fleet.of(tier)))}
        lacking = [name for name in (*SUMMED_COUNTERS, *SUMMED_HISTOGRAMS) if name not in had]
        if lacking:
            lines.append(f"no series of {', '.join(lacking)} ({tier})")
    return lines


QUERIES = 60
"""Assumed number of queries per period, for the progress bar."""


class FilledHistory(History):
    """The history of a fleet's engines, filled from Prometheus.

    The verdicts and the signals around them are in a store, as a sidecar would have written them.
    The steps of both periods are in memory.
    """

    def __init__(
        self,
        path: Path,
        source: PrometheusSource,
        request: ReportRequest,
        config: FleetConfig,
        progress: ReportProgress,
        *,
        at_once: int,
    ) -> None:
        """Send all queries, and write a new store at `path`.

        Raises:
            CollectError: the server does not answer, or has no vLLM series in the period.
            SettingsError: a requested target does not exist.
        """
        expected = QUERIES * (1 if request.before is None else 2)
        self._source, self._selector, self._grid = source, config.selector, request.grid
        self._ranges = Ranges(source, progress, expected=expected, at_once=at_once)
        self._fleet = fleet_engines(self._ranges, request, config.selector, config.names)
        self._resolution = resolution(
            request.grid,
            engines=len(self._fleet.shape.members),
            scrape_s=self._fleet.scrape_s,
            window_s=request.window_s,
        )
        reader = PeriodReader(self._ranges, self._fleet, self._resolution)
        self._late_s = late_bound_s(
            request.stated(engine.target).profile.targets.ttft_p99_s
            for engine in self._fleet.members
        )
        self._now = reader.period(request.grid, late_s=self._late_s, closely=True)
        self._before = (
            reader.period(request.before, late_s=None, closely=False) if request.before else None
        )
        self._of_fleet = FleetIncidents(self._ranges, config, self._fleet)
        self._of_fleet.look(self._now)
        self._search = IncidentSearch(self._ranges, self._fleet, self._now, config.profile, request)
        self._members: list[Member] = []
        self._engines: dict[int, TierEngine] = {}
        self._fill(path)
        super().__init__(path)

    def _fill(self, path: Path) -> None:
        fill = StoreFill(path)
        names: dict[Key, EngineName] = {}
        for engine in self._fleet.members:
            target, model = engine.target, engine.member.model
            name = names[engine.key] = EngineName(target, model, engine.engine, target)
            first_s, last_s = self._present_s(engine)
            engine_id = fill.engine(name, first_s)
            labels = engine.member.labels
            stored = StoredEngine(
                engine_id, target, model, engine.engine, target, labels, first_s, last_s
            )
            self._members.append(Member(stored, engine.tier, engine.gpu, None))
            self._engines[engine_id] = engine
        self._search.look(fill, names, self._of_fleet.known)
        for pool, known in self._of_fleet.outages.items():
            # If a job serves several models, it is unknown which of them a target would serve.
            engine = max(
                self._fleet.members,
                key=lambda e: (
                    e.member.pool == pool,
                    pool.endswith(e.member.labels.get("job", "?")),
                ),
            )
            name = EngineName(pool, engine.member.model, "", "")
            engine_id = fill.engine(name, self._grid.from_s)
            self._search.timeline(fill, name, known).finish()
            stored = StoredEngine(
                engine_id, pool, name.model, "", "", {}, self._grid.from_s, self._grid.to_s
            )
            self._members.append(Member(stored, engine.tier, engine.gpu, None, counts=False))
        fill.close()

    def _present_s(self, engine: TierEngine) -> tuple[float, float]:
        """When an engine was first and last present in both periods, in Unix seconds; twice 0 if it
        was in none."""
        times = [
            t_s
            for read in (self._before, self._now)
            if read is not None and read.has(engine.key)
            for steps in (np.flatnonzero(~np.isnan(read.gauges[RUNNING][engine.key])),)
            for t_s in (
                float(read.at.begins_s[steps[0]]),
                float(read.at.begins_s[steps[-1]]) + read.at.step_s,
            )
        ]
        return min(times, default=0.0), max(times, default=0.0)

    @property
    def name(self) -> str:
        """The server's address."""
        return self._source.url

    def members(self, request: ReportRequest) -> list[Member]:
        """The requested engines of both periods, and an entry for each pool that lost all its
        replicas."""
        return self._members

    def numbers(self, engine: StoredEngine, grid: Grid, window_s: float) -> EngineHistory:
        """The steps of an engine over a period as signals and counters. The counters of a whole
        page are known only as totals of the tier."""
        own = self._engines.get(engine.id)
        read = self._now if grid is self._grid else self._before
        if own is None or read is None or not read.has(own.key):
            nothing = Signals(NO_TIMES, dict.fromkeys(READ, NO_TIMES))
            empty = Increases((), restarts_s=())
            return EngineHistory(engine, grid, nothing, empty, nothing, window_s, summed=True)
        at, is_now = read.at, read is self._now
        unknown = np.full(at.count, np.nan)
        rows = {key: gauge[own.key] for key, gauge in read.gauges.items() if own.key in gauge}
        rows["running_avg"] = rows[RUNNING]
        rows["waiting_avg"] = rows.get(WAITING, unknown)
        if is_now and (tokens := config_capacity_tokens(read.config(own.member))):
            rows["kv_capacity_tokens"] = np.full(at.count, tokens)
        there = ~np.isnan(rows[RUNNING])
        signals = Signals(
            at.begins_s[there], {key: rows.get(key, unknown)[there] for key in READ}, at.step_s
        )
        restarts = read.process_starts(own.member) if is_now else []
        columns = {
            column: read.signs[sign][own.key]
            for column, sign in self._counters
            if own.key in read.signs[sign]
        }
        parts = [counted(columns, at.begins_s, at.begins_s + at.step_s, restarts)]
        curve = read.curve.get(own.key, Signals(NO_TIMES, dict.fromkeys(POINT_SIGNALS, NO_TIMES)))
        increases = Increases(parts, restarts_s=restarts)
        return EngineHistory(engine, grid, signals, increases, curve, at.step_s, summed=True)

    @property
    def _counters(self) -> list[tuple[Column, str]]:
        """The counters that are known for each engine, and the signs of trouble that contain their
        increases."""
        counters = [
            (Column(PREEMPTIONS, ()), PREEMPTED),
            (Column(TTFT, (), "+Inf"), BEGUN),
            (Column(TTFT, (), "sum"), BEGUN),
        ]
        if self._late_s is not None:
            counters.append((Column(TTFT, (), str(self._late_s)), LATE))
        return counters

    def closely(self, numbers: EngineHistory, episode: Episode) -> EngineHistory:
        """The scrapes of an engine during an incident, if they were replayed to its end."""
        own = self._engines.get(numbers.engine.id)
        windows = self._search.windows.get(own.key, ()) if own is not None else ()
        until_s = episode.until_s
        if not any(w.from_s <= episode.start_s and until_s <= w.to_s for w in windows):
            return numbers
        engine = numbers.engine
        span = {"from_s": episode.start_s - MARGIN_S, "to_s": until_s + MARGIN_S}
        counters = self.counter_arrays(engine.id, METRICS, **span)
        signals = self.signal_arrays(engine.id, READ, **span)
        return replace(numbers, signals=signals, increases=Increases(counters, restarts_s=()))

    def configs(self, engine_id: int, *, from_s: float, to_s: float) -> list[ConfigChange]:
        """The starts of an engine's process, each with the configurations before and after it. The
        first entry is the configuration at the begin."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return []
        member, now = engine.member, self._now
        last = now.config(member)
        changes = [ConfigChange(0.0, {}, last, "")]
        for t_s in now.process_starts(member):
            before, after = now.configs_around(member, t_s)
            changes.append(ConfigChange(t_s, before, after or last, "process_start_time_seconds"))
        return [change for change in changes if from_s <= change.t_s <= to_s]

    def recommendations(
        self, *, from_s: float, to_s: float, engine_id: int | None = None
    ) -> list[PastAdvice]:
        """The recommendations of the replays. Whether they were applied is unknown."""
        rows = super().recommendations(from_s=from_s, to_s=to_s, engine_id=engine_id)
        return [replace(row, outcome=UNKNOWN_OUTCOME, applied_s=None, measured={}) for row in rows]

    def scrapes(self, target: str, *, from_s: float, to_s: float) -> Scrapes:
        """The scrapes of a target, from the share of failed scrapes in each step."""
        engine = next((e for e in self._fleet.members if e.target == target), None)
        if engine is None or not self._now.has(engine.key):
            return Scrapes(array("d"), {})
        return self._now.scrapes(engine.member)

    def totals(self, tier: str) -> tuple[EnginesObserved, EnginesObserved]:
        """Counters and histograms of a tier by the hour, and its arrivals, for both periods. The
        server sums them over the tier's engines."""
        return self._totals(tier, self._now), self._totals(tier, self._before)

    def _totals(self, tier: str, read: PeriodData | None) -> EnginesObserved:
        if read is None:
            return EnginesObserved()
        groups = {self._fleet.group(e) for e in self._fleet.of(tier) if read.has(e.key)}
        if not groups:
            return EnginesObserved()
        columns = read.counters(groups)
        edges_s = np.array(read.grid.edges_s)
        increases = Increases([counted(columns, edges_s[:-1], edges_s[1:])], restarts_s=())
        spans = counter_spans(increases, edges_s)
        if columns:
            unwatched = np.isnan(np.array(list(columns.values()))).all(axis=0)
            for at in np.flatnonzero(unwatched).tolist():
                spans[at] = Span()
        return EnginesObserved(spans=spans, minutes=read.minutes(groups))

    def with_remarks(self, observed: Observed) -> Observed:
        """The data with remarks on how it was read, and on what is missing or partial."""
        problems, selector = self._ranges.problems, self._selector
        return replace(
            observed,
            filters=(*observed.filters, *([f"selector {selector}"] if selector else ())),
            notices=notices_of(problems, self._search.left_out + self._of_fleet.left_out),
            notes=notes_of(self._fleet, self._resolution, self._now, self._source, self._search),
            methods=METHODS,
            partial=bool(problems.warnings or problems.failed),
        )


@contextmanager
def filled_history(
    url: str, settings: Settings, selector: str, request: ReportRequest, progress: ReportProgress
) -> Generator[FilledHistory]:
    """A context with a history that is filled from the metrics system at `url`.

    Raises:
        CollectError: the server does not answer, or has no vLLM series in the period.
        SettingsError: the selector or `fleet.labels` is not valid.
    """
    config = replace(
        fleet_config(settings, selector), profile=settings.profile(stated=stated(settings))
    )
    at_once: int = settings["fleet.queries_at_once"]
    with (
        PrometheusSource(url, source_settings(settings)) as source,
        TemporaryDirectory(prefix="kneewatch-") as folder,
        closing(
            FilledHistory(
                Path(folder) / "report.db", source, request, config, progress, at_once=at_once
            )
        ) as history,
    ):
        yield history
