"""Judges the engines of a fleet, scrape by scrape, by the samples of a metrics system. I/O edge.

The samples are rebuilt to the pages that were scraped, and judged as the sidecar judges pages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import zip_longest
from typing import TypeVar

import msgspec

from kneewatch.agent.fleet.queries import AnswerLog, KeptAnswers, QueryScope
from kneewatch.agent.stream import AcceptRequest, EngineAcceptance, accept, target_monitor
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.scraped_pages import (
    TARGET_LABELS,
    ScrapedPages,
    Target,
    page_names,
    target_of,
)
from kneewatch.collector.signals.promql import any_of, duration, quoted
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.reader import decides
from kneewatch.diagnose.engine.target_monitor import EngineMonitor, TargetMonitor
from kneewatch.diagnose.fleet.inventory import Group, Key, Member, RestartedReplica
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import HOUR_S, LONG_WINDOWS

HISTORY_S = 1800.0
"""Seconds of the past that are judged first when an engine is new to us: its usual values are
learned from them, and conditions that have held since then are known."""

THINNED_S = 60.0
"""Before the last LONG_WINDOWS windows of that history, one page in so many seconds is enough."""

SAMPLES_AT_ONCE = 50_000
"""Most samples in one answer: about 10 MB of JSON. More targets in a query save the server nothing:
its time per target is the same from 10 targets on."""

SERIES_EXPECTED = 300
"""Series of one engine that are read."""

MARGIN_S = 0.5
"""Seconds by which the first range is longer: Prometheus 3 leaves out a range's first moment."""

MS_S = 0.001
"""The unit of the times of samples, in seconds."""

EARLY_RATIO = 0.25
"""A scrape may come early by this share of its interval."""

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
Judge = Callable[[], list[Verdict]]
"""Judges a page that was read."""


class FleetEngines:
    """The engines of a fleet over time. `cycle` is called by one thread at a time."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._profiles: dict[bool, Profile] = {}
        self._pages = ScrapedPages()
        self._monitors: dict[Target, TargetMonitor] = {}
        self._adding = threading.Lock()
        self._spans_s: dict[Target, float] = {}
        """The seconds that were last read of each target."""
        self.kept = KeptAnswers()
        """The answers that change slowly."""

    def adopt(self, profile: Profile) -> None:
        """Judge by this profile from now on. A profile that differs begins with the history."""
        if profile != self._profile:
            self._profile, self._profiles = profile, {}
            self._pages = ScrapedPages()
            self._monitors = {}

    def cycle(
        self,
        source: PrometheusSource,
        log: AnswerLog,
        scope: QueryScope,
        members: Sequence[Member],
        gpus: Mapping[Key, GpuReading],
        usual: Mapping[Group, Mapping[str, float]],
        *,
        at_s: float,
        interval_s: float,
        stopped: Sequence[Member] = (),
    ) -> dict[Key, EngineMonitor]:
        """Judge the pages since the last cycle. Returns the monitor of each of `members` that has
        one. `stopped` are members that do not serve now: if they answer again, their past counts.

        `usual` are usual values of signals by group, from past hours. `interval_s` is the time
        between scrapes. Errors of queries are added to `log`.
        """
        by_target: dict[Target, list[Member]] = {}
        for member in (*members, *stopped):
            by_target.setdefault(target_of(member.labels), []).append(member)
        self._pages.keep(by_target)
        self._spans_s = {target: self._spans_s.get(target, 0.0) for target in by_target}
        self._monitors = {
            target: self._monitors.get(target) or self._monitor(of)
            for target, of in by_target.items()
        }
        for targets in self._read(source, log, scope, by_target, at_s, interval_s):
            followed: list[Iterator[Judge]] = []
            for target in targets:
                member = by_target[target][0]
                self._monitors[target].set_usual(usual.get(member.group, {}))
                followed.append(self._pages_read(target, gpus.get(member.key, NO_GPUS), at_s))
            # Each target's next page is read, then all of these are judged.
            for judges in zip_longest(*followed):
                for judge in judges:
                    if judge is not None:
                        judge()
        return {member.key: engine for member, engine in self._found(members)}

    def restarted(self, members: Sequence[Member], at_s: float) -> list[RestartedReplica]:
        """Those of the members whose process was replaced within an hour."""
        by_name: dict[tuple[str, str], RestartedReplica] = {}
        for member, engine in self._found(members):
            recent = [each for each in engine.judge.restarts if at_s - each.t_s <= HOUR_S]
            if recent:
                name = member.replica, member.pool
                by_name[name] = RestartedReplica(*name, recent)
        return list(by_name.values())

    def _found(self, members: Sequence[Member]) -> Iterator[tuple[Member, EngineMonitor]]:
        for member in members:
            monitor = self._monitors.get(target_of(member.labels))
            engine = None if monitor is None else engine_of(monitor, member)
            if engine is not None:
                yield member, engine

    def monitored(self) -> Iterator[tuple[str, EngineMonitor]]:
        """Yields all engines, each with the name of its replica."""
        for monitor in self._monitors.values():
            for engine in monitor.engines:
                yield f"fleet/{monitor.name}", engine

    def accept(self, t_s: float, request: AcceptRequest) -> list[EngineAcceptance]:
        """Make the present values of a replica's engines the usual ones."""
        return [
            accepted
            for monitor in self._monitors.values()
            if monitor.name == request.target
            for accepted in accept(monitor, t_s, request)
        ]

    def _monitor(self, members: Sequence[Member]) -> TargetMonitor:
        goal = members[0].throughput_only
        if goal not in self._profiles:
            self._profiles[goal] = self._profile.for_throughput() if goal else self._profile
        return target_monitor(members[0].replica, self._profiles[goal])

    def _pages_read(self, target: Target, gpus: GpuReading, at_s: float) -> Iterator[Judge]:
        """Reads the target's new pages, and yields the function that judges each."""
        monitor = self._monitors[target]
        is_new, due_s = not monitor.engines, float("-inf")
        dense_from_s = at_s - LONG_WINDOWS * self._profile.window_s
        for t_s, page in self._pages.pages(target):
            if page is None:
                if not is_new:
                    monitor.failed(t_s, CollectError("the scrape failed (up is 0)", kind="refused"))
                continue
            if is_new and t_s < dense_from_s:
                if t_s < due_s:
                    continue
                due_s = t_s + THINNED_S
            # The GPUs were read now: of pages of the past, they would date a fault too early.
            is_now = at_s - t_s <= self._profile.window_s
            yield monitor.read(t_s, page, gpus if is_now else NO_GPUS)

    def _read(
        self,
        source: PrometheusSource,
        log: AnswerLog,
        scope: QueryScope,
        by_target: Mapping[Target, Sequence[Member]],
        at_s: float,
        interval_s: float,
    ) -> Iterator[Sequence[Target]]:
        """Yields groups of targets whose samples were read."""
        names = page_names(decides, scope.prefixes)
        queries = [
            (targets, _query(scope, names, targets, span_s))
            for targets, span_s in self._groups(by_target, at_s, interval_s)
        ]

        def answer(asked: tuple[Sequence[Target], str]) -> Sequence[Target]:
            """Reads the samples of some targets. Returns these targets; none if it failed."""
            targets, query = asked
            try:
                series, warnings = source.series(query, at_s)
                with self._adding:
                    self._pages.add(series)
            except CollectError as exc:
                log.fail("samples", exc)
                return ()
            except (msgspec.DecodeError, ValueError) as exc:
                error = f"{source.url}: the answer is no matrix of samples: {exc}"
                log.fail("samples", CollectError(error, kind="query"))
                return ()
            log.warn(warnings)
            return targets

        yield from read_ahead(source.pool, answer, queries, most=source.pace.at_once)

    def _groups(
        self, by_target: Mapping[Target, Sequence[Member]], at_s: float, interval_s: float
    ) -> Iterator[tuple[Sequence[Target], float]]:
        """Yields groups of targets to read in one query, and the seconds to read."""
        groups: dict[float, list[Target]] = {}
        for target in by_target:
            passed_s = at_s - self._pages.read_until_s(target)
            gap_s, before_s = self._pages.interval_s(target), self._spans_s.get(target, 0.0)
            span_s = unread_s(passed_s, gap_s, interval_s, before_s)
            if span_s:
                self._spans_s[target] = span_s
                groups.setdefault(span_s, []).append(target)
        for span_s, targets in groups.items():
            samples_each = SERIES_EXPECTED * max(1.0, span_s / interval_s)
            most = max(1, int(SAMPLES_AT_ONCE / samples_each))
            for first in range(0, len(targets), most):
                yield targets[first : first + most], span_s


def read_ahead(
    pool: Executor, read: Callable[[Asked], Answered], asked: Iterable[Asked], *, most: int
) -> Iterator[Answered]:
    """Yields what `read` returns for each that is asked for. At most `most` results are in
    memory."""
    waiting: deque[Future[Answered]] = deque()
    for each in asked:
        if len(waiting) == most:
            yield waiting.popleft().result()
        waiting.append(pool.submit(read, each))
    while waiting:
        yield waiting.popleft().result()


def unread_s(passed_s: float, gap_s: float, interval_s: float, before_s: float) -> float:
    """The seconds to read of a target, in half scrape intervals; 0 before its next scrape may come.

    The range begins after the last page, so no sample is read twice, and has the next scrape even
    if that came a quarter of an interval early. `passed_s`: seconds since the last page. `gap_s`:
    seconds between the last two. `interval_s`: the fleet's scrape interval. `before_s`: the range
    read before, which is kept if it can be: an answer is read as a whole while it has the same
    targets.
    """
    if passed_s >= HISTORY_S:
        return HISTORY_S + MARGIN_S
    passed_s -= MS_S  # a sum of floats may reach back to the last page
    own_s = interval_s / max(1, round(interval_s / gap_s))
    if passed_s < own_s * (1 - EARLY_RATIO):
        return 0.0
    if passed_s - own_s * (1 - EARLY_RATIO) <= before_s < passed_s:
        return before_s
    return passed_s // (own_s / 2) * (own_s / 2)


def _query(scope: QueryScope, names: str, targets: Sequence[Target], span_s: float) -> str:
    """A query for the samples of targets. Their instances, and the labels on which all of them
    agree, select them: a matcher for each pod as well would make it too long for some servers."""
    matchers = [f'__name__=~"{quoted(names)}"']
    for label, *values in zip(TARGET_LABELS, *targets, strict=True):
        if label == "instance":
            matchers.append(any_of(label, sorted(set(values))))
        elif values[0] and len(set(values)) == 1:
            matchers.append(f'{label}="{quoted(values[0])}"')
    return f"{scope.series('', ','.join(matchers))}[{duration(span_s)}]"


def engine_of(monitor: TargetMonitor, member: Member) -> EngineMonitor | None:
    """The engine of a page that a member is; None if the page did not have it.

    A page with several replicas (Ray) names the replica in a label that only its series have.
    """
    labels = member.labels
    for engine in monitor.engines:
        key = engine.key
        if (
            key.model == labels.get("model_name", key.model)
            and key.engine == labels.get("engine", key.engine)
            and (not key.replica or key.replica in labels.values())
        ):
            return engine
    return None


def verdicts_of(engines: Mapping[Key, EngineMonitor]) -> dict[Key, Verdict]:
    return {key: engine.newest for key, engine in engines.items() if engine.newest is not None}
