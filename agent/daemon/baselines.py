"""Baselines from the history: weekly peaks, seasonal baselines and knees. I/O edge."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakSet

from msgspec import Struct

from kneewatch.agent.daemon.periodic_jobs import Job
from kneewatch.agent.store.learned import read_learned, write_learned
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import DAY_S, Series, StoredEngine
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.engine.engine_monitor import EngineMonitor
from kneewatch.diagnose.engine_history import ConfigChange
from kneewatch.diagnose.learned.knee import (
    FORGOTTEN_S,
    IN_FLIGHT_MIN,
    LIVE_POINTS_KEPT,
    LOAD_SIGNALS,
    WINDOW_SIGNALS,
    LiveKnee,
    Point,
    point_of,
    same_launch,
    step_of,
)
from kneewatch.rules.baseline import HOUR_S, earlier_hours, hour_start_s, hourly, usual
from kneewatch.rules.rule import TRACKED_SIGNALS

log = logging.getLogger(__name__)

WEEK_S = 7 * 86_400.0
MIN_COVERAGE_RATIO = 0.9
"""Minimum share of the week's hours that have data: otherwise the peak may lie in a missing
hour."""

SEEN_S = 86_400.0
"""Engines last seen more than this many seconds ago are skipped: there may be many old ones."""

KEYS = ("running", "waiting")

Exchange = Callable[[str, EngineMonitor, float], None]
"""Gives an engine of a target what the history has for it, and takes what it learned, after a
scrape at a Unix time. Never waits for the disk."""


def recent_engines(
    history: Reader, targets: Sequence[TargetSpec], now_s: float
) -> Iterator[tuple[tuple[str, EngineKey], StoredEngine]]:
    """Yields the recently seen engines of the given targets: (target, engine key) and the stored
    engine."""
    for spec in targets:
        for engine in history.engines(spec.name):
            if now_s - engine.last_s < SEEN_S:
                yield (spec.name, engine.key), engine


class WeeklyPeaks(Job):
    """Reads the weekly peaks of targets with several replicas from time to time. A target with a
    single replica needs no peak: that replica cannot be removed."""

    every_s, first_in_s = 3600.0, 30.0

    def __init__(
        self,
        history: Reader,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._peaks: dict[tuple[str, EngineKey], float | None] = {}

    def exchange(self, target: str, engine: EngineMonitor, _t_s: float) -> None:
        """Give an engine its peak."""
        engine.judge.set_weekly_peak(self.peak_requests(target, engine.key))

    def peak_requests(self, target: str, key: EngineKey) -> float | None:
        """Peak requests of the last week; None if the history has less than a week."""
        return self._peaks.get((target, key))

    def cycle(self) -> float | None:
        """Read the peaks of all targets again."""
        now_s = self._wall()
        replicated = [spec for spec in self._targets() if (spec.settings["replicas"] or 1) > 1]
        try:
            self._peaks = {
                key: self._peak(engine, now_s)
                for key, engine in recent_engines(self._history, replicated, now_s)
            }
        except StoreError as error:
            log.warning("cannot read weekly peaks, keeping the old ones error=%s", error)
        return None

    def _peak(self, engine: StoredEngine, now_s: float) -> float | None:
        from_s = now_s - WEEK_S
        if engine.first_s > from_s + (1 - MIN_COVERAGE_RATIO) * WEEK_S:
            return None
        return peak_of(self._history.signals(engine.id, KEYS, from_s=from_s, to_s=now_s))


def peak_of(week: Series) -> float | None:
    """The largest number of running plus waiting requests at a scrape of the week. None if too few
    hours of the week have data."""
    running, waiting = (week.values[key] for key in KEYS)
    hours: set[int] = set()
    peak = 0.0
    for t_s, ran, waited in zip(week.times, running, waiting, strict=True):
        requests = ran + waited
        if requests == requests:  # False for NaN: unknown
            hours.add(int(t_s // 3600))
            peak = max(peak, requests)
    return peak if len(hours) >= MIN_COVERAGE_RATIO * WEEK_S / 3600 else None


# --- Seasonal baselines ---------------------------------------------------------------------------


Baselines = Mapping[tuple[str, EngineKey], Mapping[str, float]]


class SeasonalBaselines(Job):
    """Reads the usual values of the current and the next hour of the week from earlier weeks. Each
    hour is read once."""

    every_s, first_in_s = 900.0, 10.0
    """Four runs per hour, so that the values of the next hour are read before it begins."""

    def __init__(
        self,
        history: Reader,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._hours: dict[float, Baselines] = {}

    def exchange(self, target: str, engine: EngineMonitor, t_s: float) -> None:
        """Give an engine its usual values."""
        engine.judge.set_usual(self.usual(target, engine.key, t_s))

    def usual(self, target: str, key: EngineKey, t_s: float) -> Mapping[str, float]:
        """Usual values of an engine's tracked signals at a time. Empty if the history has too few
        weeks."""
        return self._hours.get(hour_start_s(t_s), {}).get((target, key), {})

    def cycle(self) -> float | None:
        """Read the hours and engines that were not read yet."""
        now_s = self._wall()
        needed_hours = (hour_start_s(now_s), hour_start_s(now_s + HOUR_S))
        hours = {hour: baselines for hour, baselines in self._hours.items() if hour in needed_hours}
        try:
            for hour in needed_hours:
                hours.setdefault(hour, {})
                hours[hour] = {**self._missing(hour, now_s, hours[hour]), **hours[hour]}
        except StoreError as error:
            log.warning("cannot read seasonal baselines, keeping the old ones error=%s", error)
            return None
        self._hours = hours
        return None

    def _missing(self, hour_s: float, now_s: float, present: Baselines) -> Baselines:
        return {
            key: self._read(engine, hour_s)
            for key, engine in recent_engines(self._history, self._targets(), now_s)
            if key not in present
        }

    def _read(self, engine: StoredEngine, hour_s: float) -> Mapping[str, float]:
        weeks = [
            hourly(
                self._history.signals(engine.id, TRACKED_SIGNALS, from_s=from_s, to_s=to_s).values
            )
            for from_s, to_s in earlier_hours(hour_s)
            if to_s > engine.first_s
        ]
        return usual(weeks)


# --- Knees ----------------------------------------------------------------------------------------
#
# A knee is learned from days of load. After a restart of the daemon, the windows of the last two
# weeks are read again if the engine still has the same model and launch.


RETRY_S = 900.0
"""Seconds until an unreadable history is retried."""

REST_FACTOR = 3.0
"""Pause after each read, as a multiple of the CPU time of the read: scrapes have priority."""

READ_S = 1.0
"""CPU seconds spent on the history of one engine. When they are used up, the oldest days stay
unread."""


class KneeRequest(Struct, frozen=True):
    """A request to load an engine's knee from its past windows. `config` is the engine's launch
    configuration."""

    target: str
    key: EngineKey
    knee: LiveKnee
    window_s: float
    before_s: float
    config: Mapping[str, str]


class KneeLoader(Job):
    """Loads the knees of engines from their history, one day at a time and each engine once.

    If reading an engine's history crashes, the engine is skipped: its knee is learned from scratch.
    """

    every_s, first_in_s = 10.0, None

    def __init__(self, history: Reader, clock_s: Callable[[], float] = time.thread_time) -> None:
        self._history, self._clock_s = history, clock_s
        self._requests: deque[KneeRequest] = deque()
        self._reading: Iterator[None] = iter(())

    def exchange(self, target: str, engine: EngineMonitor, _t_s: float) -> None:
        """Queue an engine to have its knee loaded, once. Thread-safe."""
        knee, window_s = engine.judge.learned.knee, engine.profile.window_s
        if knee.history_requested or (first_s := knee.first_s) is None:
            return
        knee.history_requested = True
        self._requests.append(
            KneeRequest(target, engine.key, knee, window_s, first_s, engine.config)
        )

    def cycle(self) -> float | None:
        """Read one day of one engine. Returns the seconds until the next read; None when the queue
        is empty."""
        began_s = self._clock_s()
        try:
            if next(self._reading, self) is self:
                if not self._requests:
                    return None
                self._reading = self._read(self._requests.popleft())
        except StoreError as error:
            log.warning("cannot read past windows, retrying error=%s", error)
            return RETRY_S
        return REST_FACTOR * (self._clock_s() - began_s)

    def _read(self, request: KneeRequest) -> Iterator[None]:
        """A generator that reads one day of an engine per step, newest first, and then loads its
        knee.

        Raises:
            StoreError: the history cannot be read; the engine is queued again.
        """
        try:
            yield from self._days(request)
        except StoreError:
            self._requests.append(request)
            raise

    def _days(self, request: KneeRequest) -> Iterator[None]:
        engines = self._history.engines(request.target)
        engine = next((engine for engine in engines if engine.key == request.key), None)
        if engine is None:
            return
        launches = self._history.configs(engine.id, from_s=-math.inf, to_s=math.inf)
        since_s = max(
            request.before_s - FORGOTTEN_S, launched_s(launches, request.config), engine.first_s
        )
        windows, spent_s = Windows(request.window_s), 0.0
        until_s = math.nextafter(request.before_s, -math.inf)
        while since_s <= until_s and spent_s < READ_S:
            began_s = self._clock_s()
            from_s = max(since_s, until_s - DAY_S)
            read = partial(self._history.signals, engine.id, from_s=from_s, to_s=until_s)
            if windows.empty or windows.lacks(read(LOAD_SIGNALS)):
                windows.add_older(read(WINDOW_SIGNALS))
            until_s = math.nextafter(from_s, -math.inf)
            spent_s += self._clock_s() - began_s
            yield
        points = windows.points()
        request.knee.recall(points)
        if points:
            log.debug("knee recalled target=%s points=%s", request.target, len(points))


class Windows:
    """Collects windows of one engine, newest first. The number of windows per concurrency is
    limited, as in the knee."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._steps: dict[int, list[Point]] = {}
        self._oldest_s = math.inf

    @property
    def empty(self) -> bool:
        return not self._steps

    def lacks(self, series: Series) -> bool:
        """Whether windows are still needed at one of a day's concurrencies.

        On most days none are needed. This check takes half as long as reading all signals of the
        day.
        """
        return any(
            len(self._steps.get(step_of(load), ())) < LIVE_POINTS_KEPT
            for load in loads_of(series, self._window_s)
        )

    def add_older(self, series: Series) -> None:
        """Add windows from before the oldest collected one. Windows do not overlap."""
        fresh: dict[int, list[Point]] = {}
        oldest_s = self._oldest_s
        for point in windows_of(series, self._window_s):
            if point.t_s > oldest_s - self._window_s:
                break
            self._oldest_s = min(self._oldest_s, point.t_s)
            fresh.setdefault(step_of(point.in_flight), []).append(point)
        for step, points in fresh.items():
            newer = self._steps.setdefault(step, [])
            missing = LIVE_POINTS_KEPT - len(newer)
            self._steps[step] = [*(points[-missing:] if missing else ()), *newer]

    def points(self) -> list[Point]:
        """The collected windows, oldest first."""
        collected = (point for points in self._steps.values() for point in points)
        return sorted(collected, key=lambda point: point.t_s)


def loads_of(series: Series, window_s: float) -> Iterator[float]:
    """Yields the number of requests in flight at the first scrape of each window. Idle windows are
    skipped."""
    times = series.times
    running, waiting = (series.values[key] for key in LOAD_SIGNALS)
    at = 0
    while at < len(times):
        load = running[at] + waiting[at]
        if load >= IN_FLIGHT_MIN:
            yield load
        at = bisect_left(times, times[at] + window_s, at + 1)


def windows_of(series: Series, window_s: float) -> Iterator[Point]:
    """Yields the windows that have a latency under load. The windows do not overlap."""
    times, columns = series.times, series.values
    running, waiting = (columns[key] for key in LOAD_SIGNALS)
    at = 0
    while at < len(times):
        if running[at] + waiting[at] < IN_FLIGHT_MIN:  # idle; False for NaN
            at += 1
            continue
        values = {key: _value(column[at]) for key, column in columns.items()}
        point = point_of(times[at], values, window_s)
        if point is None:
            at += 1
            continue
        yield point
        at = bisect_left(times, point.t_s + window_s, at + 1)


def launched_s(changes: Sequence[ConfigChange], config: Mapping[str, str]) -> float:
    """Time at which the engine was started with its present launch configuration, in Unix seconds.
    Infinity if the history does not contain this configuration."""
    since_s = math.inf
    for change in reversed(changes):
        if not same_launch(change.after, config):
            break
        since_s = change.t_s
    return since_s


def _value(value: float) -> float | None:
    return value if value == value else None


# --- What was learned about engines ---------------------------------------------------------------
#
# It survives a restart of the daemon, so that a fault from before the restart is still one after
# it, and an accepted value stays the usual one.


Place = tuple[str, EngineKey]


class LearnedStates(Job):
    """Stores what was learned about engines, and returns it after a restart of the daemon.

    Engines exchange their states through memory; the job alone reads and writes the file. A file
    that cannot be read yet is read later: its states are not lost.
    """

    every_s, first_in_s = 5.0, 0.0

    def __init__(self, file: Path) -> None:
        self._file, self._error = file, ""
        self._new: dict[Place, tuple[float, bytes]] = {}
        self._known = WeakSet[EngineMonitor]()
        self._stored: dict[Place, bytes] | None = None

    def exchange(self, target: str, engine: EngineMonitor, t_s: float) -> None:
        """Give an engine that is new here its stored state, and keep the newer ones."""
        place, stored = (target, engine.key), self._stored
        if stored is None:
            return
        if engine not in self._known:
            self._known.add(engine)
            engine.judge.stored = stored.pop(place, None)
            return
        state = engine.judge.learned.state(t_s)
        if state is not None:
            self._new[place] = (t_s, state)

    def cycle(self) -> float | None:
        """Read the stored states once, and write those that changed."""
        try:
            if self._stored is None:
                self._stored = read_learned(self._file)
            if self._new:
                new = dict(self._new)
                write_learned(self._file, new)
                for place, state in new.items():
                    if self._new[place] is state:
                        del self._new[place]
            self._error = ""
        except (StoreError, sqlite3.Error, OSError) as error:
            if str(error) != self._error:
                log.warning("cannot store what was learned, retrying error=%s", error)
            self._error = str(error)
        return None
