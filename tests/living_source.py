"""A metrics system in memory that has scraped a living fleet: what it answers at a moment.

It answers the questions of the fleet daemon by their names, not their PromQL: hours of a fleet's
life are played in seconds. `tests/agent/fleet/test_living.py` asks a real Prometheus the same.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import msgspec
from msgspec import Raw

from kneewatch.agent.fleet import snapshot
from kneewatch.agent.fleet.engines import FleetEngines
from kneewatch.agent.fleet.queries import AnswerLog, QueryScope
from kneewatch.collector.prometheus.client import Clock, PrometheusSource
from kneewatch.collector.prometheus.responses import Answer, RawSeries, Sample, Track
from kneewatch.collector.prometheus.scraped_pages import Target, page_names, target_of
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.reader import decides
from kneewatch.diagnose.fleet.inventory import Member, Past, Shape, Usual
from tests import living_player
from tests.living_fleet import LivingFleet, Series
from tests.living_player import Follow, Player, Told, unfollowed

LOOKBACK_S = 300.0
RUNNING = "vllm:num_requests_running"
WANTED = frozenset({"kube_deployment_spec_replicas", "kube_statefulset_replicas"})
READ = re.compile(page_names(decides, ("vllm:",)))


class Row:
    """One series: times in Unix seconds, values; None where it ended."""

    __slots__ = ("labels", "metric", "times", "values")

    def __init__(
        self, series: Series, samples: Sequence[tuple[float, float | None]], at: float
    ) -> None:
        self.labels = dict(series)
        self.metric = Raw(msgspec.json.encode(self.labels))
        self.times = [at + t_s for t_s, _ in samples]
        self.values = [value for _, value in samples]

    def at(self, t_s: float) -> float | None:
        """Its value at a moment; None without one."""
        place = bisect_right(self.times, t_s) - 1
        if place < 0 or t_s - self.times[place] > LOOKBACK_S:
            return None
        return self.values[place]

    def over(self, t_s: float, span_s: float) -> list[tuple[float, float]]:
        """Its samples of the last seconds."""
        first, last = bisect_right(self.times, t_s - span_s), bisect_right(self.times, t_s)
        pairs = zip(self.times[first:last], self.values[first:last], strict=True)
        return [(at, value) for at, value in pairs if value is not None]


class Scraped:
    """All that was scraped of a fleet between two moments of its life."""

    def __init__(self, fleet: LivingFleet, *, from_s: float, to_s: float) -> None:
        self._by_name: dict[str, list[Row]] = {}
        self.by_target: dict[Target, list[Row]] = {}
        for rows in fleet.scraped(from_s=from_s, to_s=to_s):
            for series, samples in rows.items():
                self.add(Row(series, samples, fleet.epoch_s))

    def add(self, row: Row) -> Row:
        """Add a series."""
        name = row.labels["__name__"]
        self._by_name.setdefault(name, []).append(row)
        if READ.fullmatch(name):
            self.by_target.setdefault(target_of(row.labels), []).append(row)
        return row

    def named(self, name: str) -> list[Row]:
        """All series of a name."""
        return self._by_name.get(name, [])

    def now(self, name: str, t_s: float) -> list[Sample]:
        """The values of a name's series at a moment."""
        return [
            Sample(row.labels, value)
            for row in self.named(name)
            if (value := row.at(t_s)) is not None
        ]


class SimulatedMoment:
    """Answers the questions of one moment, as a QueryMoment does."""

    def __init__(self, scraped: Scraped, at_s: float) -> None:
        self._scraped, self.at_s = scraped, at_s
        self.source, self.log = SimulatedSource(scraped), AnswerLog()

    def instants(self, queries: Mapping[str, str]) -> dict[str, Sequence[Sample]]:
        """The samples of each question."""
        return {key: self._answer(key) for key in queries}

    def _answer(self, key: str) -> Sequence[Sample]:
        scraped, at_s = self._scraped, self.at_s
        match key:
            case "presence":
                return scraped.now(RUNNING, at_s)
            case "vanished":
                return [
                    Sample(row.labels, points[-1][0])
                    for row in scraped.named(RUNNING)
                    if row.at(at_s) is None and (points := row.over(at_s, 3600.0))
                ]
            case "scrapes":
                started = scraped.now("process_start_time_seconds", at_s)
                young = {target_of(each.labels) for each in started if at_s - each.value < 300.0}
                return [
                    Sample(row.labels, float(len(row.over(at_s, 300.0))))
                    for row in scraped.named(RUNNING)
                    if row.at(at_s) is not None and row.at(at_s - 300.0) is not None
                    if target_of(row.labels) not in young
                ]
            case "running_hour_avg":
                return [
                    Sample(row.labels, fmean(value for _, value in points))
                    for row in scraped.named(RUNNING)
                    if row.at(at_s) is not None and (points := row.over(at_s, 3600.0))
                ]
            case "up":
                return scraped.now("up", at_s)
            case "deleted pods":
                return scraped.now("kube_pod_deletion_timestamp", at_s)
            case "workloads":
                return [sample for name in WANTED for sample in scraped.now(name, at_s)]
            case "zero":
                return [
                    Sample(row.labels, max(none_s))
                    for name in WANTED
                    for row in scraped.named(name)
                    if (none_s := [at for at, value in row.over(at_s, 900.0) if not value])
                ]
            case "any scrapes":
                scraped_lately = (row.over(at_s, 300.0) for row in scraped.named("up"))
                return [Sample({}, 1.0)] if any(len(s) >= 3 for s in scraped_lately) else []
            case "sm_clock_mhz" | "gpus":
                clocks = scraped.now("DCGM_FI_DEV_SM_CLOCK", at_s)
                one = key == "gpus"
                return [Sample(each.labels, 1.0 if one else each.value) for each in clocks]
            case "usual_clock_mhz":
                rows = scraped.named("DCGM_FI_DEV_SM_CLOCK")
                over = ((row, [value for _, value in row.over(at_s, 86_400.0)]) for row in rows)
                return [Sample(row.labels, max(values)) for row, values in over if values]
            case "temperature_c":
                return scraped.now("DCGM_FI_DEV_GPU_TEMP", at_s)
            case "xid" | "xid_new":
                xids = scraped.named("DCGM_FI_DEV_XID_ERRORS")
                recent = {id(row): [v for _, v in row.over(at_s, 120.0)] for row in xids}
                return [
                    Sample(row.labels, max(recent[id(row)]))
                    for row in xids
                    if max(recent[id(row)], default=0.0) > 0
                ]
            case "xid_worked":
                clocks = scraped.now("DCGM_FI_DEV_SM_CLOCK", at_s)
                awake = {each.labels["Hostname"] for each in clocks if each.value > 0}
                return [each for each in self._answer("xid") if each.labels["Hostname"] in awake]
            case _:
                return ()

    def tracks(self, key: str, selector: str) -> Sequence[Track]:
        """The scrapes of failing targets in the last hour."""
        return [
            Track(row.labels, points)
            for row in self._scraped.named("up")
            if row.at(self.at_s) == 0 and (points := row.over(self.at_s, 3600.0))
        ]


class SimulatedEngines(FleetEngines):
    """Reads the pages from memory."""

    def __init__(self, profile: Profile, scraped: Scraped) -> None:
        super().__init__(profile)
        self._scraped = scraped

    def _read(
        self,
        source: PrometheusSource,
        log: AnswerLog,
        scope: QueryScope,
        by_target: Mapping[Target, Sequence[Member]],
        at_s: float,
        interval_s: float,
    ) -> Iterator[Sequence[Target]]:
        for target in by_target:
            after_s = max(self._pages.read_until_s(target), at_s - 1800.0)
            answer: list[RawSeries] = []
            for row in self._scraped.by_target.get(target, ()):
                values = [(t, f"{value:g}" if not value else repr(value))
                          for t, value in row.over(at_s, at_s - after_s)]  # fmt: skip
                if values:
                    answer.append(RawSeries(row.metric, Raw(msgspec.json.encode(values))))
            self._pages.add(answer)
            yield [target]


class SimulatedSource:
    """Stands for the connection."""

    url, asked, retried = "memory", 0, 0

    def __init__(self, scraped: Scraped) -> None:
        self._scraped = scraped

    def __enter__(self) -> SimulatedSource:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def now(self, _query: str) -> tuple[Clock, Answer]:
        """The clock, which agrees."""
        return Clock(0.0, 0.0, 0.0), Answer(())

    def instant(self, _query: str, at_s: float) -> Answer:
        """The engines that are there."""
        return Answer(self._scraped.now(RUNNING, at_s))


USUAL = Usual(hit_ratio=0.7, query_per_s=24_000.0, ttft_p50_s=0.05)


def _past(_source: object, _scope: object, shape: Shape, _names: object, **_: float) -> Past:
    return Past(usual={member.group: USUAL for member in shape.members})


def played(
    fleet: LivingFleet,
    folder: Path,
    spans: Sequence[tuple[float, float]],
    *,
    cycle_s: float,
    profile: Profile = living_player.PROFILE,
    follow: Follow = unfollowed,
) -> tuple[Player, list[Told]]:
    """What the daemon says and tells in these spans of a fleet's life. `follow` gets each cycle."""
    scraped = Scraped(fleet, from_s=0, to_s=spans[-1][1])

    def source(*_: object) -> SimulatedSource:
        return SimulatedSource(scraped)

    def engines(profile: Profile) -> SimulatedEngines:
        return SimulatedEngines(profile, scraped)

    def moment(_source: object, _log: object, at_s: float) -> SimulatedMoment:
        return SimulatedMoment(scraped, at_s)

    simulated: tuple[tuple[ModuleType, str, Callable[..., object]], ...] = (
        (living_player, "PrometheusSource", source),
        (living_player, "FleetEngines", engines),
        (snapshot, "QueryMoment", moment),
        (snapshot, "past_of", _past),
    )
    with ExitStack() as stack:
        for where, name, by in simulated:
            stack.enter_context(patch.object(where, name, by))
        server = SimpleNamespace(port=0)
        player = Player(fleet, server, folder, cycle_s=cycle_s, profile=profile, follow=follow)  # type: ignore[arg-type]
        return player, [each for span in spans for each in player.play(*span)]
