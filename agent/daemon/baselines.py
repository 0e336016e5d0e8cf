"""What is usual for engines: weekly peaks and hours of the week from the history, and what was
learned before a restart of the daemon. I/O edge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from weakref import WeakSet

from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, Job
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Series, StoredEngine
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.engine.target_monitor import EngineMonitor
from kneewatch.rules.rule import HOUR_S, TRACKED_SIGNALS, WEEK_S

log = logging.getLogger(__name__)

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
        wall: Callable[[], float] = OWN_CLOCK,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._peaks: dict[tuple[str, EngineKey], float | None] = {}

    def exchange(self, target: str, engine: EngineMonitor, _t_s: float) -> None:
        engine.judge.weekly_peak_requests = self.peak_requests(target, engine.key)

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
#
# Monday's first hour is slower than the quiet night before it, each week: it is compared with the
# same hour of earlier weeks. An hour is UTC's, so that a change to or from summer time puts the
# profile an hour off until enough weeks are of the new time.


WEEKS = 4
"""Number of earlier weeks used. Older weeks had a different load."""

WEEKS_MIN = 2
"""Fewest weeks that must have data for the same hour."""

SCRAPES_MIN = 10
"""Fewest scrapes with a value that an hour must have."""

SPREAD_MAX = 0.3
"""Largest median absolute deviation of the weeks, relative to their median.

If the weeks differ more, one of them may have had an incident.
"""


def hour_start_s(t_s: float) -> float:
    """Start of the hour that contains `t_s`, in unix seconds."""
    return t_s // HOUR_S * HOUR_S


def earlier_hours(t_s: float) -> Iterator[tuple[float, float]]:
    """Start and end of the same hour in earlier weeks, newest first."""
    start_s = hour_start_s(t_s)
    for week in range(1, WEEKS + 1):
        from_s = start_s - week * WEEK_S
        yield from_s, from_s + HOUR_S


def hourly(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each signal's median within an hour. NaN is ignored; signals with too few values are left
    out."""
    finite = {key: [value for value in of if value == value] for key, of in values.items()}
    return {key: median(of) for key, of in finite.items() if len(of) >= SCRAPES_MIN}


def usual(weeks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each signal's usual value at an hour, learned from the same hour in earlier weeks.

    Signals are left out if too few weeks have data or the weeks do not agree.
    """
    keys = dict.fromkeys(key for week in weeks for key in week)
    by_signal = {key: _usual([week[key] for week in weeks if key in week]) for key in keys}
    return {key: value for key, value in by_signal.items() if value is not None}


def _usual(weeks: Sequence[float]) -> float | None:
    """The median of the weeks; None if they are few or differ."""
    middle = median(weeks)
    deviation = median(abs(value - middle) for value in weeks)
    agree = len(weeks) >= WEEKS_MIN and deviation <= SPREAD_MAX * abs(middle)
    return middle if agree else None


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
        wall: Callable[[], float] = OWN_CLOCK,
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


# --- What was learned about engines ---------------------------------------------------------------
#
# It survives a restart of the daemon, so that a fault from before the restart is still one after
# it, and an accepted value stays the usual one.


class LearnedStates(Job):
    """Stores what was learned about engines through `learn`, and returns it to an engine that is
    watched again, also after a restart of the daemon.

    A history that cannot be read yet is read later: its states are not lost.
    """

    every_s, first_in_s = 5.0, 0.0

    def __init__(
        self, history: Reader, learn: Callable[[str, EngineKey, float, bytes], None]
    ) -> None:
        self._history, self._learn, self._error = history, learn, ""
        self._known = WeakSet[EngineMonitor]()
        self._wanted: dict[tuple[str, EngineKey], EngineMonitor] = {}

    def exchange(self, target: str, engine: EngineMonitor, t_s: float) -> None:
        """Ask for the state of an engine that is new here; store those of the others."""
        if engine not in self._known:
            self._wanted[target, engine.key] = engine
        elif (state := engine.judge.learned.state(t_s)) is not None:
            self._learn(target, engine.key, t_s, state)

    def cycle(self) -> float | None:
        """Give the engines that are new their stored states."""
        wanted, self._wanted = self._wanted, {}
        try:
            for place, engine in wanted.items():
                engine.judge.stored = self._history.learned(*place)
                self._known.add(engine)
        except StoreError as error:
            if str(error) != self._error:
                log.warning("cannot read what was learned, retrying error=%s", error)
            self._error = str(error)
        return None
