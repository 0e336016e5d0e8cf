"""What the history says about each engine: weekly peaks, seasonal baseline, knee. I/O edge."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kneewatch.agent.store.records import DAY_S, ConfigChange, Series, StoredEngine
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_series import EngineKey
from kneewatch.diagnose.engine.engine_monitor import EngineMonitor
from kneewatch.diagnose.learned.knee import (
    FORGOTTEN_S,
    IN_FLIGHT_MIN,
    LIVE_POINTS_KEPT,
    LOAD_SIGNALS,
    POINT_SIGNALS,
    LiveKnee,
    Point,
    point_of,
    same_launch,
    step_of,
)
from kneewatch.rules.baseline import (
    HOUR_S,
    TRACKED_SIGNALS,
    earlier_hours,
    hour_start_s,
    hourly,
    usual,
)

log = logging.getLogger(__name__)

PEAKS_JOB = "\0weekly peaks"
"""No target's name: these are printable."""

PEAKS_EVERY_S = 3600.0
WEEK_S = 7 * 86_400.0
MIN_COVERAGE_RATIO = 0.9
"""Of the week's hours so many must have been seen: a peak may lie in those that were not."""

SEEN_S = 86_400.0
"""Of an engine that nobody has seen for longer nothing is read: of those that left may be many."""

KEYS = ("running", "waiting")


class HistoryReader(Protocol):
    """The history, as far as it is read here."""

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The engines of a target."""
        ...

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """Signals of an engine."""
        ...


def engines_seen(
    history: HistoryReader, targets: Sequence[TargetSpec], now_s: float
) -> Iterator[tuple[tuple[str, EngineKey], StoredEngine]]:
    """The engines of some targets that were seen lately, with what the daemon calls them."""
    for spec in targets:
        for item in history.engines(spec.name):
            if now_s - item.last_s < SEEN_S:
                yield (spec.name, item.key), item


class WeeklyPeaks:
    """Reads the peaks again and again; only of targets with several replicas, for the others have
    none to spare."""

    def __init__(
        self,
        history: HistoryReader,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._peaks: dict[tuple[str, EngineKey], float | None] = {}

    def peak_requests(self, target: str, key: EngineKey) -> float | None:
        """Requests; None where less than a week is known."""
        return self._peaks.get((target, key))

    def cycle(self) -> float | None:
        """Read them once."""
        now_s = self._wall()
        spare = [spec for spec in self._targets() if (spec.settings["replicas"] or 1) > 1]
        try:
            self._peaks = {
                key: self._peak(item, now_s)
                for key, item in engines_seen(self._history, spare, now_s)
            }
        except StoreError as error:
            log.warning("weekly peaks stay as they were error=%s", error)
        return None

    def crashed(self, error: Exception) -> float | None:
        """What was read last holds on."""
        del error
        return None

    def _peak(self, engine: StoredEngine, now_s: float) -> float | None:
        from_s = now_s - WEEK_S
        if engine.first_s > from_s + (1 - MIN_COVERAGE_RATIO) * WEEK_S:
            return None
        return peak_of(self._history.signals(engine.id, KEYS, from_s=from_s, to_s=now_s))


def peak_of(week: Series) -> float | None:
    """The most requests that ran or waited at a scrape; None where too few hours of the week have
    a scrape that tells both."""
    running, waiting = (week.values[key] for key in KEYS)
    hours: set[int] = set()
    peak = 0.0
    for t_s, ran, waited in zip(week.times, running, waiting, strict=True):
        requests = ran + waited
        if requests == requests:  # NaN is a scrape that tells nothing
            hours.add(int(t_s // 3600))
            peak = max(peak, requests)
    return peak if len(hours) >= MIN_COVERAGE_RATIO * WEEK_S / 3600 else None


# --- What each engine usually looks like at this hour of the week, from the history. I/O edge -----


SEASONS_JOB = "\0seasons"
"""No target's name: these are printable."""

SEASONS_EVERY_S = 900.0
"""Four times an hour: the next hour is known before it begins."""


Habits = Mapping[tuple[str, EngineKey], Mapping[str, float]]


class SeasonalBaselines:
    """Reads this hour's and the next one's habits from the weeks before, each hour once."""

    def __init__(
        self,
        history: HistoryReader,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._hours: dict[float, Habits] = {}

    def usual(self, target: str, key: EngineKey, t_s: float) -> Mapping[str, float]:
        """The tracked signals of an engine as they usually are at a moment; none where too few
        weeks are known."""
        return self._hours.get(hour_start_s(t_s), {}).get((target, key), {})

    def cycle(self) -> float | None:
        """Read what is not known yet."""
        now_s = self._wall()
        wanted = (hour_start_s(now_s), hour_start_s(now_s + HOUR_S))
        hours = {hour: habits for hour, habits in self._hours.items() if hour in wanted}
        try:
            for hour in wanted:
                hours.setdefault(hour, {})
                hours[hour] = {**self._missing(hour, now_s, hours[hour]), **hours[hour]}
        except StoreError as error:
            log.warning("habits of the week stay as they were error=%s", error)
            return None
        self._hours = hours
        return None

    def crashed(self, error: Exception) -> float | None:
        """What was read last holds on."""
        del error
        return None

    def _missing(self, hour_s: float, now_s: float, known: Habits) -> Habits:
        return {
            key: self._read(item, hour_s)
            for key, item in engines_seen(self._history, self._targets(), now_s)
            if key not in known
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


# --- What each engine carried before this daemon began to watch it, from the history. I/O edge ----
#
# A knee is learned from days of loads. The windows of the last two weeks are read again where the
# engine is still the same model, launched as it was.


KNEES_JOB = "\0knees"
"""No target's name: these are printable."""

KNEES_EVERY_S = 1.0
RETRY_S = 900.0
"""A history that cannot be read is left alone for so long."""

REST_FACTOR = 3.0
"""Reading one of many engines' two weeks rests so much longer than it works: scrapes come first."""

READ_S = 1.0
"""CPU time that one engine's history is worth; days that take longer stay unread, oldest first."""


class LaunchHistoryReader(HistoryReader, Protocol):
    """The history, as far as it is read here."""

    def configs(self, engine_id: int, *, from_s: float, to_s: float) -> list[ConfigChange]:
        """Starts and changes of configuration of an engine."""
        ...


@dataclass(frozen=True, slots=True)
class KneeRequest:
    """Whose windows are wanted, and how it was launched."""

    target: str
    key: EngineKey
    knee: LiveKnee
    window_s: float
    before_s: float
    config: Mapping[str, str]


class KneeLoader:
    """Reads what engines carried before they were watched, a day at a time, each engine once."""

    def __init__(
        self, history: LaunchHistoryReader, clock_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._history, self._clock_s = history, clock_s
        self._requests: deque[KneeRequest] = deque()
        self._reading: Iterator[None] = iter(())

    def request(self, target: str, engine: EngineMonitor) -> None:
        """Have an engine's knee told what was seen of it before. Safe between threads."""
        first_s = engine.learned.knee.first_s
        if first_s is None:
            return
        engine.learned.knee.asked = True
        window_s = engine.profile.window_s
        self._requests.append(
            KneeRequest(target, engine.key, engine.learned.knee, window_s, first_s, engine.config)
        )

    def cycle(self) -> float | None:
        """Read one day of one engine. Gives the time until the next; None: nobody waits."""
        began_s = self._clock_s()
        try:
            if next(self._reading, self) is self:
                if not self._requests:
                    return None
                self._reading = self._read(self._requests.popleft())
        except StoreError as error:
            log.warning("knees are learned anew for now error=%s", error)
            return RETRY_S
        return REST_FACTOR * (self._clock_s() - began_s)

    def crashed(self, error: Exception) -> float | None:
        """This engine's knee is learned anew; the next one's is read."""
        del error
        return None

    def _read(self, item: KneeRequest) -> Iterator[None]:
        """Reads an engine's days, newest first, until its knee is told.

        Raises:
            StoreError: the history cannot be read; the engine waits again.
        """
        try:
            yield from self._days(item)
        except StoreError:
            self._requests.append(item)
            raise

    def _days(self, item: KneeRequest) -> Iterator[None]:
        known = self._history.engines(item.target)
        engine = next((engine for engine in known if engine.key == item.key), None)
        if engine is None:
            return
        launches = self._history.configs(engine.id, from_s=-math.inf, to_s=math.inf)
        since_s = max(
            item.before_s - FORGOTTEN_S, launched_s(launches, item.config), engine.first_s
        )
        windows, spent_s = Windows(item.window_s), 0.0
        until_s = math.nextafter(item.before_s, -math.inf)
        while since_s <= until_s and spent_s < READ_S:
            began_s = self._clock_s()
            from_s = max(since_s, until_s - DAY_S)
            read = partial(self._history.signals, engine.id, from_s=from_s, to_s=until_s)
            if windows.empty or windows.lacks(read(LOAD_SIGNALS)):
                windows.add_older(read(POINT_SIGNALS))
            until_s = math.nextafter(from_s, -math.inf)
            spent_s += self._clock_s() - began_s
            yield
        points = windows.points()
        item.knee.recall(points)
        if points:
            log.debug("knee recalled target=%s points=%s", item.target, len(points))


class Windows:
    """Windows of one engine, gathered from the newest to the oldest: of each concurrency as many
    as a knee keeps."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._steps: dict[int, list[Point]] = {}
        self._oldest_s = math.inf

    @property
    def empty(self) -> bool:
        """Whether none is taken yet."""
        return not self._steps

    def lacks(self, series: Series) -> bool:
        """Whether there were loads of which too few windows are taken: most days are like the
        newest ones, and to read all of a day takes twice as long."""
        return any(
            len(self._steps.get(step_of(load), ())) < LIVE_POINTS_KEPT
            for load in loads_of(series, self._window_s)
        )

    def add_older(self, series: Series) -> None:
        """Take what was seen before all that was taken so far; no window reaches into another."""
        fresh: dict[int, list[Point]] = {}
        oldest_s = self._oldest_s
        for point in windows_of(series, self._window_s):
            if point.t_s > oldest_s - self._window_s:
                break
            self._oldest_s = min(self._oldest_s, point.t_s)
            fresh.setdefault(step_of(point.in_flight), []).append(point)
        for step, points in fresh.items():
            known = self._steps.setdefault(step, [])
            room = LIVE_POINTS_KEPT - len(known)
            self._steps[step] = [*(points[-room:] if room else ()), *known]

    def points(self) -> list[Point]:
        """Those that are kept, oldest first."""
        every = (point for points in self._steps.values() for point in points)
        return sorted(every, key=lambda point: point.t_s)


def loads_of(series: Series, window_s: float) -> Iterator[float]:
    """Requests in flight, once a window, where there were any."""
    times = series.times
    running, waiting = (series.values[key] for key in LOAD_SIGNALS)
    at = 0
    while at < len(times):
        load = running[at] + waiting[at]
        if load >= IN_FLIGHT_MIN:
            yield load
        at = bisect_left(times, times[at] + window_s, at + 1)


def windows_of(series: Series, window_s: float) -> Iterator[Point]:
    """The windows that say something about latency under load, none reaching into another."""
    times, columns = series.times, series.values
    running, waiting = (columns[key] for key in LOAD_SIGNALS)
    at = 0
    while at < len(times):
        if running[at] + waiting[at] < IN_FLIGHT_MIN:  # most of a quiet day; NaN is not less
            at += 1
            continue
        values = {key: _known(column[at]) for key, column in columns.items()}
        point = point_of(times[at], values, window_s)
        if point is None:
            at += 1
            continue
        yield point
        at = bisect_left(times, point.t_s + window_s, at + 1)


def launched_s(changes: Sequence[ConfigChange], config: Mapping[str, str]) -> float:
    """Since when the engine has been launched as it is now; infinite where it never was."""
    since_s = math.inf
    for change in reversed(changes):
        if not same_launch(change.after, config):
            break
        since_s = change.t_s
    return since_s


def _known(value: float) -> float | None:
    return value if value == value else None
