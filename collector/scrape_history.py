"""The recent scrapes of one engine (or of one GPU page). Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import lt
from typing import TypeAlias

from kneewatch.collector.columns import (
    BEHIND,
    NAN,
    NO_COLUMNS,
    Columns,
    Table,
)
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.samples import Page

FRAMES_MAX = 4_000
"""Most scrapes kept, however short the interval (an hour at one per second)."""

FRESH_FRAMES = 2
"""Number of newest scrapes kept unpacked: they are compared value by value."""

CLOCK_STEP_BACK_S = 1.0
"""A clock that jumps back by more than this was set: earlier scrapes cannot be compared."""

Row: TypeAlias = "tuple[float, ...] | array[float]"


@dataclass(slots=True)
class Frame:
    """One scrape. Shapes: `counters` (counter columns,), `gauges` (gauge columns,)."""

    t_s: float
    counters: Row
    gauges: Row


@dataclass(frozen=True, slots=True)
class Restart:
    """The process behind a target was replaced. `how` says how that was detected."""

    t_s: float
    how: str


class History:
    """The scrapes of one engine process, oldest first; a restart starts over."""

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self.frames: list[Frame] = []
        self.times: list[float] = []
        self.columns = NO_COLUMNS
        self.info: Mapping[str, Mapping[str, str]] = {}
        """The labels of the first series of each info metric of the newest page."""
        self.impossible: Mapping[str, float] = {}
        """Metrics of the newest page with a value that they cannot have (NaN, infinite, negative,
        a share above 1), and the first such value. They count as if the page lacked the series."""
        self.restarts = 0
        self.out_of_order = 0
        self.clock_steps = 0
        self._uneven_until: dict[int, float] = {}
        self._uneven_newest_s = -math.inf
        """Counter column -> time of the newest scrape that lacked it or stood before its reset."""
        self._started: frozenset[float] = frozenset()
        self._start_at: tuple[int, ...] = ()
        self._start_is_created = False

    def append(
        self, t_s: float, page: Page, binding: EngineBinding, process_start: int | None
    ) -> Restart | None:
        """Add a scrape; one that is not newer is dropped. Returns the restart that it reveals, if
        any."""
        if self.times and not t_s > self.times[-1]:
            if not math.isfinite(t_s) or t_s > self.times[-1] - CLOCK_STEP_BACK_S:
                self.out_of_order += 1
                return None
            self.clock_steps += 1
            self._forget()
        if binding is not self.columns.binding:
            self._bind(binding, process_start)
        values = [*page.values, *BEHIND]
        odd: dict[str, float] = {}
        counters, bad_counters = _possible(self.counters, values, odd)
        gauges, _ = _possible(self.gauges, values, odd)
        self.impossible = odd
        frame = Frame(t_s, counters, gauges)
        restart = self._restart(frame, values)
        if restart is not None:
            self._forget()
            self.restarts += 1
        self._mark_resets(frame)
        self.frames.append(frame)
        self.times.append(t_s)
        if len(self.frames) > FRESH_FRAMES:
            # Seldom read again, and half as large without an object for each number.
            old = self.frames[-1 - FRESH_FRAMES]
            old.counters, old.gauges = array("d", old.counters), array("d", old.gauges)
        for index in (*self.counters.absent, *bad_counters):
            self._mark_uneven(index, t_s)
        self._trim(t_s)
        return restart

    @property
    def counters(self) -> Table:
        """The counter columns, including histogram parts."""
        return self.columns.counters

    @property
    def gauges(self) -> Table:
        """The gauge columns."""
        return self.columns.gauges

    @property
    def started_s(self) -> float | None:
        """Start time of the process according to the newest page; None if the page lacks it."""
        return min(self._started, default=None)

    @property
    def first_s(self) -> float:
        """Time of the oldest scrape kept; NaN without one."""
        return self.times[0] if self.times else NAN

    def _bind(self, binding: EngineBinding, process_start: int | None) -> None:
        before = self.columns
        columns = Columns.of(binding) if before is NO_COLUMNS else Columns(binding, before)
        fresh = Columns.of(binding)
        kept, needed = (len(each.counters) + len(each.gauges) for each in (before, fresh))
        if kept > 2 * needed + 500:
            # Series come and go without end (a label that carries an id): keep what is alive.
            self._forget()
            columns = fresh
        new_counters = len(columns.counters) - len(before.counters)
        new_gauges = len(columns.gauges) - len(before.gauges)
        if self.frames and (new_counters or new_gauges):
            for frame in self.frames:
                frame.counters = _wider(frame.counters, new_counters)
                frame.gauges = _wider(frame.gauges, new_gauges)
            for index in range(len(before.counters), len(columns.counters)):
                self._mark_uneven(index, self.times[-1])
        self.columns, self.info = columns, columns.info
        start_at = (process_start,) if process_start is not None else binding.created
        if (process_start is None) != self._start_is_created:
            self._started, self._start_is_created = frozenset(), process_start is None
        self._start_at = start_at

    def _restart(self, frame: Frame, values: list[float]) -> Restart | None:
        # Series come and go with their `_created`; a new process leaves none of the old times.
        started = frozenset(value for at in self._start_at if (value := values[at]) == value)
        before, self._started = self._started, started
        if not self.frames:
            return None
        if started and before:
            same = not started.isdisjoint(before)
            return None if same else Restart(frame.t_s, "the process has a new start time")
        last = self.frames[-1].counters
        live = sum(1 for value in last if value > 0)
        fallen = sum(map(lt, frame.counters, last))
        if live >= 3 and fallen >= live / 2:
            return Restart(frame.t_s, f"{fallen} of {live} counters went back")
        return None

    def _mark_resets(self, frame: Frame) -> None:
        last = self.frames[-1] if self.frames else frame
        if any(map(lt, frame.counters, last.counters)):
            for at, (was, now) in enumerate(zip(last.counters, frame.counters, strict=True)):
                if now < was:
                    self._mark_uneven(at, last.t_s)

    def _mark_uneven(self, column: int, t_s: float) -> None:
        self._uneven_until[column] = t_s
        self._uneven_newest_s = max(self._uneven_newest_s, t_s)

    def uneven_since(self, t_s: float) -> frozenset[int]:
        """Counter columns that are missing from a scrape since `t_s`, or were reset after it."""
        if self._uneven_newest_s < t_s:
            return frozenset()
        return frozenset(at for at, until_s in self._uneven_until.items() if until_s >= t_s)

    def _forget(self) -> None:
        self.frames.clear()
        self.times.clear()
        self._uneven_until.clear()
        self._uneven_newest_s = -math.inf

    def _trim(self, t_s: float) -> None:
        # In batches: deleting from a list's front moves everything behind it.
        if t_s - self.times[0] > 1.25 * self.keep_s or len(self.times) > FRAMES_MAX:
            cut = max(bisect_left(self.times, t_s - self.keep_s), len(self.times) - FRAMES_MAX)
            del self.frames[:cut], self.times[:cut]


def _wider(row: Row, count: int) -> Row:
    """The row with `count` more columns, all NaN."""
    more = (NAN,) * count
    return row + array("d", more) if isinstance(row, array) else (*row, *more)


def _possible(
    table: Table, values: list[float], odd: dict[str, float]
) -> tuple[tuple[float, ...], list[int]]:
    """A page's values by column with NaN for impossible ones, and the columns of those. Adds their
    metrics to `odd`."""
    row = table.read(values)
    bad = table.impossible(row)
    if not bad:
        return row, bad
    cleaned = list(row)
    for at in bad:
        odd.setdefault(table.names[at].metric, row[at])
        cleaned[at] = NAN
    return tuple(cleaned), bad
