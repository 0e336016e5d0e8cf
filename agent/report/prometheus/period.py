"""Reads one period of a fleet from Prometheus: series, GPUs, process starts. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.presence import namespace_of, pod_of
from kneewatch.agent.fleet.queries import QueryScope
from kneewatch.agent.fleet.snapshot import Place, places, places_of
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import Part, ReportedFleet, TargetScrapes, frozen
from kneewatch.agent.report.prometheus.queries import (
    KeyOf,
    Query,
    Ranges,
    Resolution,
    RowKey,
    Rows,
    Steps,
    steps,
)
from kneewatch.agent.report.series import POINT_SIGNALS, Floats, Signals, Truths, arrived
from kneewatch.agent.store.records import Scrapes
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.promql import any_of
from kneewatch.collector.signals.table import TTFT, within_ttft
from kneewatch.dashboards.prometheus.rule_group import (
    SUM_STEP_S,
    SUMMED_COUNTERS,
    SUMMED_HISTOGRAMS,
)
from kneewatch.diagnose.fleet.inventory import Key, Labels, Member, of_process
from kneewatch.reports.weekly.knee import evenly
from kneewatch.reports.weekly.measures import RUNNING
from kneewatch.reports.weekly.observed import Grid
from kneewatch.rules.rule import MINUTE_S

FAILED = "the scrape failed (up is 0)"


def by_engine(rows: Rows, members: Iterable[Member]) -> Rows:
    """For each engine, the mean over its GPUs. `rows` is keyed by all GPU labels. Engines without
    GPU data are left out."""
    by_place: dict[Place, list[Floats]] = {}
    for labels, row in rows.items():
        for place in places(dict(labels)):
            by_place.setdefault(place, []).append(row)
    means = {place: _mean(gpu_rows) for place, gpu_rows in by_place.items()}
    engine_rows: Rows = {}
    for member in members:
        at = next((place for place in places_of(member) if place in means), None)
        if at is not None:
            engine_rows[member.key] = means[at]
    return engine_rows


def _mean(rows: list[Floats]) -> Floats:
    if len(rows) == 1:
        return rows[0]
    whole = np.array(rows)
    counts = (~np.isnan(whole)).sum(axis=0)
    return np.where(counts > 0, np.nansum(whole, axis=0) / np.maximum(counts, 1), np.nan)


# --- The data of one period -----------------------------------------------------------------------


class PeriodData(Struct, frozen=True):
    """The data of a period.

    The keys of rows: an engine in `gauges` and `signs`; a process, by its labels `process_names`,
    in `starts` and `configs` (the labels of cache_config_info, by hour); a target in `up` and
    `failed`; a pod in `deleted`; a tier's labels in `hourly` and `begun`, the increases of counters
    and histograms, and in `queued`, the requests queued at the end of each step of `begun`.
    `summed` is the number of hours whose `hourly` comes from recording rules.
    """

    grid: Grid
    at: Steps
    gauges: Mapping[str, Rows]
    summed: int
    hourly: Mapping[str, Rows]
    begun: Rows
    queued: Rows
    begun_at: Steps
    signs: Mapping[str, Rows]
    up: Rows
    failed: Rows
    deleted: Rows
    scrape_s: float
    starts: Rows
    configs: Mapping[Key, Sequence[tuple[Labels, Floats]]]
    process_names: tuple[str, ...]
    curve: Mapping[Key, Signals]

    def has(self, key: Key) -> bool:
        """Whether an engine was present in the period."""
        row = self.gauges[RUNNING].get(key)
        return row is not None and not np.isnan(row).all()

    def scrapes_of(self, labels: Labels) -> TargetScrapes | None:
        """The scrapes of the target to which an engine with these labels belongs. None if `up` has
        no series for it."""
        target = scrape_of(labels)
        up = self.up.get(target)
        if up is None:
            return None
        failed = self.failed.get(target, np.full(self.at.count, np.nan))
        cluster, *place = pod_key(labels)
        deleted = self.deleted.get((cluster, *place), self.deleted.get(("", *place)))
        return TargetScrapes(up, failed, self.scrape_s, deleted)

    def counters(self, groups: Iterable[RowKey]) -> dict[Column, Floats]:
        """The hourly increases of the counters and parts of histograms that `groups` have, as
        columns of a page. Shape of each: (slots,)."""
        wanted = {group: (("group", repr(group)),) for group in groups}
        columns: dict[Column, Floats] = {}
        for name in SUMMED_COUNTERS:
            for group, row in self.hourly[name].items():
                if group in wanted:
                    columns[Column(name, wanted[group])] = row
        for metric in SUMMED_HISTOGRAMS:
            for (group, bound), row in self.hourly[f"{metric}_bucket"].items():
                if group in wanted:
                    columns[Column(metric, wanted[group], bound)] = row
            for group, row in self.hourly[f"{metric}_sum"].items():
                if group in wanted:
                    columns[Column(metric, wanted[group], "sum")] = row
        return columns

    def minutes(self, groups: Collection[RowKey]) -> list[float]:
        """The number of requests that arrived in each minute. If a step has several minutes, its
        requests are spread evenly."""
        rows = [self.begun[group] for group in groups if group in self.begun]
        if not rows:
            return []
        table = np.array(rows)
        summed = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(table, axis=0))
        queues = [self.queued[group] for group in groups if group in self.queued]
        if queues:
            queued = np.nansum(queues, axis=0)
            summed = arrived(summed, np.concatenate((queued[:1], queued)))
        minutes_per_step = int(self.begun_at.step_s // MINUTE_S)
        spread: list[float] = np.repeat(summed / minutes_per_step, minutes_per_step).tolist()
        return spread

    def scrapes(self, member: Member) -> Scrapes:
        """The scrapes of a target, spread evenly over each step. Of a step in which some failed,
        those next to the other failed steps failed."""
        at, running = self.at, self.gauges[RUNNING][member.key]
        scrapes = self.scrapes_of(member.labels)
        there, missed = ~np.isnan(running), np.zeros(at.count)
        if scrapes is not None:
            missed = np.where(scrapes.down(at), np.nan_to_num(1 - scrapes.up), 0.0)
        count = max(1, round(at.step_s / self.scrape_s))
        failing = np.rint(missed * count).astype(np.intp)
        follows = np.concatenate(([False], failing[:-1] > 0))[:, None]
        places = np.arange(count)[None]
        failed = np.where(follows, places < failing[:, None], places >= count - failing[:, None])
        times = at.begins_s[:, None] + places * (at.step_s / count)
        seen = (there | (failing > 0))[:, None] & np.ones_like(failed)
        failures = dict.fromkeys(np.flatnonzero(failed[seen]).tolist(), FAILED)
        return Scrapes(array("d", times[seen]), failures)

    def config(self, member: Member) -> Labels:
        """The newest configuration of an engine. Empty if unknown."""
        return self._config(member, len(self.grid.slots) - 1, step=-1)

    def configs_around(self, member: Member, t_s: float) -> tuple[Labels, Labels]:
        """The configurations of an engine before and after the hour that contains `t_s`."""
        hour = int(np.searchsorted(np.array(self.grid.edges_s), t_s, side="right")) - 1
        return self._config(member, hour - 1, step=-1), self._config(member, hour + 1, step=1)

    def process_starts(self, member: Member) -> list[float]:
        """Unix times in the period at which the engine's process was replaced."""
        row = self.starts.get(process_key(member.labels, self.process_names))
        if row is None:
            return []
        started_s, grid = row[~np.isnan(row)], self.grid
        return [
            then
            for was, then in pairwise(started_s.tolist())
            if then > was and grid.from_s <= then < grid.to_s
        ]

    def _config(self, member: Member, hour: int, *, step: int) -> Labels:
        """The configuration of an hour. If the hour has none: that of the nearest hour in the
        direction of `step` (-1 or 1)."""
        rows = self.configs.get(process_key(member.labels, self.process_names), ())
        own = member.labels.get("engine")
        hours = len(self.grid.slots)
        for at in range(min(max(hour, 0), hours - 1), -1 if step < 0 else hours, step):
            for labels, row in rows:
                if not np.isnan(row[at]) and labels.get("engine") in (own, None):
                    return {k: v for k, v in labels.items() if k not in member.labels}
        return {}

    def engine(self, key: Key) -> dict[str, Floats]:
        """All rows of one engine: gauges and signs of trouble. Shape of each: (steps,)."""
        all_rows = {**self.gauges, **self.signs}
        return {name: rows[key] for name, rows in all_rows.items() if key in rows}


def late_bound_s(targets_s: Iterable[float | None]) -> float | None:
    """The largest bound of vLLM's TTFT histogram within all TTFT targets. None without targets."""
    share = within_ttft(min((s for s in targets_s if s is not None), default=None))
    return None if share is None else share.bound


def scrape_of(labels: Labels) -> RowKey:
    """The labels that identify a scrape target: job and instance."""
    return labels.get("job", ""), labels.get("instance", "")


def pod_key(labels: Labels) -> RowKey:
    """The cluster, namespace and name of the pod of a series."""
    return labels.get("cluster", ""), namespace_of(labels), pod_of(labels)


def process_key(labels: Labels, names: Sequence[str]) -> Key:
    """The process of a series: its values of the labels `names`."""
    return tuple(labels.get(name, "") for name in names)


# --- Reading a period -----------------------------------------------------------------------------


CURVES_MOST = 24
"""Maximum number of engines per tier that are queried for the latency curve."""


BUCKETS = 20
"""Assumed number of buckets of a vLLM histogram, to estimate the size of a query's answer."""

WHOLE = 0.95
"""The recorded sums of an hour are used if they cover at least this share of the tier's
engine-time."""

PART = "#"
"""Separates the name of a query from the number of a part of the fleet."""

ENGINES = "engines in the recorded sums"
Text = Callable[[QueryScope, Sequence[str], float], str]


class PeriodReader:
    """Reads periods of a fleet's engines."""

    def __init__(self, ranges: Ranges, fleet: ReportedFleet, resolved: Resolution) -> None:
        self._ranges, self._fleet, self._found = ranges, fleet, resolved
        self._engines = len(fleet.shape.members)
        self._groups = len({fleet.group(engine) for engine in fleet.members})

    def period(self, grid: Grid, *, late_s: float | None, closely: bool) -> PeriodData:
        """Read a period. First tokens after `late_s` seconds are late; None: not known. `closely`:
        also read signs of trouble and the latency curve."""
        ranges, asking = self._ranges, self._fleet.asking
        at = steps(grid, self._found.step_s)
        begun_at = steps(grid, self._found.begun_s)
        gauges = ranges.steps(
            {key: self._of_engine(partial(queries.gauges, asking, key)) for key in queries.GAUGES},
            at,
        )
        hourly, summed = self._hourly(grid, gauges[RUNNING], at)
        configs = {"configs": self._per_engine(partial(queries.configs, asking), frozen)}
        begun = self._of_parts("begun", partial(queries.gained, TTFT, "count"), 1)
        counts = ranges.steps({**begun, **self._of_parts("queued", queries.queued, 1)}, begun_at)
        arrivals = merge_parts(counts)
        finely = ranges.steps(self._finely(late_s) if closely else self._preempted(), at)
        curve = self._curve(steps(grid, self._found.curve_s)) if closely else {}
        names, by_process = of_process(asking.by), dict[Key, list[tuple[Labels, Floats]]]()
        for key, row in ranges.slots(configs, grid.slots)["configs"].items():
            labels: dict[str, str] = dict(key)
            by_process.setdefault(process_key(labels, names), []).append((labels, row))
        return PeriodData(
            grid=grid,
            at=at,
            gauges={**gauges, **self._gpus(at)},
            summed=summed,
            hourly=hourly,
            begun=arrivals["begun"],
            queued=arrivals["queued"],
            begun_at=begun_at,
            signs={
                **{key: finely.get(key, {}) for key in SIGNS},
                queries.OPEN: self._of_processes(finely.get(queries.OPEN, {}), names),
            },
            up=finely.get("up", {}),
            failed=finely.get("failed", {}),
            deleted=finely.get("deleted", {}),
            scrape_s=self._found.scrape_s,
            starts=finely.get("starts", {}),
            configs=by_process,
            process_names=names,
            curve=curve,
        )

    def _hourly(self, grid: Grid, running: Rows, at: Steps) -> tuple[dict[str, Rows], int]:
        """The hourly increases, by counter or part of a histogram, and the number of hours that
        were read from recorded sums.

        `running` shows when each engine was present.
        """
        whole = self._whole(grid, running, at)
        slots = grid.slots
        hourly: dict[str, Rows] = {name: {} for name in self._named(queries.gained)}
        for text, hours in ((queries.gained_kept, whole), (queries.gained, ~whole)):
            places = np.flatnonzero(hours)
            if len(places) == 0:
                continue
            batch: dict[str, Query] = {}
            for name, (query_text, series) in self._named(text).items():
                batch |= self._of_parts(name, query_text, series, kept=text is queries.gained_kept)
            rows = merge_parts(self._ranges.slots(batch, [slots[at] for at in places.tolist()]))
            for name, part in rows.items():
                for key, row in part.items():
                    hourly[name].setdefault(key, np.full(len(slots), np.nan))[places] = row
        return hourly, int(whole.sum())

    def _of_parts(
        self, name: str, text: Text, series: int, *, kept: bool = False
    ) -> dict[str, Query]:
        """One query per part of the fleet. `series` is the number of series per engine.

        With `kept` the queries read recorded sums instead of raw series.
        """
        fleet = self._fleet
        by_part: dict[str, Query] = {}
        for at, part in enumerate(fleet.parts):
            only = (part.kept or "") if kept else part.only
            engines_per_s = len(fleet.members) / self._found.scrape_s
            by_part[f"{name}{PART}{at}"] = Query(
                partial(text, queries.narrowed(fleet.asking, only), part.by),
                partial(_bucket, part) if series > 1 else part.key,
                self._groups * series,
                series * (self._groups / SUM_STEP_S if kept else engines_per_s),
            )
        return by_part

    def _named(self, text: Callable[..., str]) -> dict[str, tuple[Text, int]]:
        """For each query, by name: a function that returns its PromQL, and the number of series per
        engine."""
        named: dict[str, tuple[Text, int]] = {
            key: (partial(text, key, ""), 1) for key in SUMMED_COUNTERS
        }
        for metric, part in product(SUMMED_HISTOGRAMS, ("bucket", "sum")):
            named[f"{metric}_{part}"] = (
                partial(text, metric, part), BUCKETS if part == "bucket" else 1
            )  # fmt: skip
        return named

    def _whole(self, grid: Grid, running: Rows, at: Steps) -> Truths:
        """Mask of the hours whose recorded sums include all engines for the whole hour. Shape:
        (slots,)."""
        slots = grid.slots
        if any(part.kept is None for part in self._fleet.parts):
            return np.zeros(len(slots), dtype=np.bool_)
        batch = self._of_parts(ENGINES, queries.engines_kept, 1, kept=True)
        summed = merge_parts(self._ranges.slots(batch, slots))[ENGINES]
        if not summed:
            return np.zeros(len(slots), dtype=np.bool_)
        nothing = np.zeros(len(slots))
        whole = np.ones(len(slots), dtype=np.bool_)
        for group, there_s in self._there_s(grid, running, at).items():
            told_s = np.nan_to_num(summed.get(group, nothing)) * SUM_STEP_S
            whole &= np.abs(told_s - there_s) <= (1 - WHOLE) * there_s
        return whole

    def _there_s(self, grid: Grid, running: Rows, at: Steps) -> Mapping[RowKey, Floats]:
        """Seconds for which engines were present in each hour, summed over the engines of a group.
        Shape of each row: (slots,)."""
        edges_s = np.array(grid.edges_s)
        slot = np.searchsorted(edges_s, at.begins_s + 1e-3, side="right") - 1
        present_s: dict[RowKey, Floats] = {}
        for engine in self._fleet.members:
            row = running.get(engine.key)
            if row is not None:
                sums = present_s.setdefault(self._fleet.group(engine), np.zeros(len(edges_s) - 1))
                np.add.at(sums, slot, ~np.isnan(row) * at.step_s)
        return present_s

    def _gpus(self, at: Steps) -> dict[str, Rows]:
        members = [engine.member for engine in self._fleet.members]
        rows = self._ranges.steps(
            {key: self._per_engine(partial(queries.gpus, key), frozen) for key in queries.GPUS},
            at,
        )
        return {key: by_engine(gpu_rows, members) for key, gpu_rows in rows.items()}

    def _preempted(self) -> dict[str, Query]:
        text = partial(queries.watched, self._fleet.asking, queries.PREEMPTED, None)
        return {queries.PREEMPTED: self._of_engine(text)}

    def _finely(self, late_s: float | None) -> dict[str, Query]:
        fleet, asking = self._fleet, self._fleet.asking
        jobs = sorted({engine.member.labels.get("job", "") for engine in fleet.members} - {""})
        keys = [key for key in SIGNS if key != queries.LATE or late_s is not None]
        by_name = {
            key: self._of_engine(partial(queries.watched, asking, key, late_s)) for key in keys
        }
        for name, text in (("up", queries.up), ("failed", queries.failed_scrapes)):
            by_name[name] = self._per_engine(partial(text, jobs), scrape_of)
        namespaces = sorted({namespace_of(engine.member.labels) for engine in fleet.members} - {""})
        by_name["deleted"] = self._per_engine(partial(queries.deleted, namespaces), pod_key)
        names = of_process(asking.by)
        by_process = partial(process_key, names=names)
        by_name["starts"] = self._per_engine(partial(queries.starts, asking), by_process)
        by_name[queries.OPEN] = self._per_engine(partial(queries.open_files, asking), by_process)
        return by_name

    def _of_processes(self, rows: Rows, names: Sequence[str]) -> Rows:
        members = (engine.member for engine in self._fleet.members)
        by_engine = ((m.key, rows.get(process_key(m.labels, names))) for m in members)
        return {key: row for key, row in by_engine if row is not None}

    def _curve(self, at: Steps) -> dict[Key, Signals]:
        """The windows for the latency curve, for some engines of each tier."""
        fleet = self._fleet
        chosen = [
            engine for tier in fleet.tiers() for engine in evenly(fleet.of(tier), CURVES_MOST)
        ]
        only = ",".join(
            any_of(name, [engine.member.labels.get(name, "") for engine in chosen])
            for name in fleet.asking.by
        )
        asking = replace(fleet.asking, window_s=self._found.window_s)
        rows = self._ranges.steps(
            {
                f"curve {key}": Query(
                    partial(queries.curve, asking, key, only),
                    fleet.shape.key,
                    len(chosen),
                    self._scraped(BUCKETS if "p99" in key else 1),
                )
                for key in POINT_SIGNALS
            },
            at,
        )
        nothing = np.full(at.count, np.nan)
        times = at.begins_s + at.step_s
        return {
            engine.key: Signals(
                times, {key: rows[f"curve {key}"].get(engine.key, nothing) for key in POINT_SIGNALS}
            )
            for engine in chosen
        }

    def _of_engine(self, text: Callable[[float], str]) -> Query:
        return self._per_engine(text, self._fleet.shape.key)

    def _per_engine(self, text: Callable[[float], str], key: KeyOf) -> Query:
        """A query whose answer has about one row per engine, and which scans one raw series per
        engine."""
        return Query(text, key, self._engines, self._scraped(1))

    def _scraped(self, parts: int) -> float:
        return self._engines * parts / self._found.scrape_s


def merge_parts(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows of each query, merged over the parts of the fleet."""
    merged: dict[str, Rows] = {}
    for name, part_rows in rows.items():
        merged.setdefault(name.partition(PART)[0], {}).update(part_rows)
    return merged


def _bucket(part: Part, labels: Labels) -> RowKey:
    return part.key(labels), labels["le"]


SIGNS = (
    queries.PREEMPTED,
    queries.GENERATED_TOKENS,
    queries.LATE,
    queries.BEGUN,
    queries.ERRORS,
    queries.ITL_MEAN,
)
