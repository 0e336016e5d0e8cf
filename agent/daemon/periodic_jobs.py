"""Periodic jobs, their phases, and APScheduler for the reports. I/O edge."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import zlib
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from apscheduler.jobstores.base import JobLookupError  # type: ignore[import-untyped]
from apscheduler.schedulers.background import (  # type: ignore[import-untyped]
    BackgroundScheduler,
)
from msgspec import Struct

log = logging.getLogger(__name__)

TOLERANCE_S = 0.001
"""Tolerance for comparing times, in seconds."""

STEP_S = 1.0
"""If the wall clock drifts from the monotonic clock by more than this many seconds, somebody has
set it."""


Steps = Generator[bool, None, float | None]
"""One run of a job in steps. It yields before each step but the first: true if the step only needs
the CPU, false if it may wait. It returns what `Job.cycle` returns."""


class Job(Protocol):
    """A periodic job. `cycle` and `crashed` return the seconds until the next run; None means the
    usual interval."""

    def cycle(self) -> float | None:
        """Run once."""
        ...

    def steps(self) -> Steps:
        """Run once, in steps; by default in one."""
        yield from ()
        return self.cycle()

    def crashed(self, error: Exception) -> float | None:
        """Handle a run that raised an exception, which is a bug. By default the job keeps its state
        and runs again at its interval."""
        del error
        return None


PHASES_MAX = 4
CYCLE_S, RUN_RATIO = 0.002, 1 / 50
"""CPU seconds of one cycle, and the longest run of cycles as a share of the interval.

Cycles with the same phase run one after the other. That takes less CPU time than running them at
different times, because shared code and data stay in the CPU's caches. Even on a machine five times
slower, no cycle is then late by more than a tenth of the interval, unless there are too many
targets.
"""


def phase_count(jobs: int, interval_s: float) -> int:
    """Number of different phases over which `jobs` jobs with this interval are spread."""
    runs = math.ceil(jobs * CYCLE_S / (RUN_RATIO * interval_s))
    return min(max(1, runs), PHASES_MAX)


def phase_ratio(name: str, phases: int) -> float:
    """A job's phase as a share of its interval (0-1). A name always has the same phase; many names
    are spread evenly."""
    return zlib.crc32(name.encode()) % phases / phases


class RunTimes(Struct, frozen=True):
    """The times every interval at a fixed phase; missed ones are skipped."""

    interval_s: float
    phase_s: float

    def after_s(self, now_s: float) -> float:
        """Time of the first run after `now_s`, in Unix seconds."""
        steps = math.floor((now_s - self.phase_s) / self.interval_s) + 1
        next_s = self.phase_s + steps * self.interval_s
        return next_s if next_s - now_s > TOLERANCE_S else next_s + self.interval_s


def first_run_s(grid: RunTimes, now_s: float, first_in_s: float | None) -> float:
    """The time of a job's first run, in Unix seconds. It is the next time at the job's phase, or
    `first_in_s` seconds from now if that is at least a second sooner.

    Two scrapes closer together would give no rate.
    """
    first_s = grid.after_s(now_s)
    soon = min(1.0, grid.interval_s / 2)
    if first_in_s is not None and now_s + first_in_s < first_s - soon:
        return now_s + first_in_s
    return first_s


class OwnClock:
    """The wall clock in Unix seconds. While that stands still, it goes on by the monotonic clock:
    pages have a time after the one before, and are judged. Thread-safe."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._newest = wall(), time.monotonic()

    def __call__(self) -> float:
        now_s, steady_s = self._wall(), time.monotonic()
        wall_s, since_s = self._newest
        if now_s != wall_s:
            self._newest = now_s, steady_s
            return now_s
        return wall_s + steady_s - since_s


OWN_CLOCK = OwnClock()
"""The clock of the daemon's jobs and answers."""


class Scheduler:
    """APScheduler, for the reports, whose triggers are cron expressions.

    It uses the wall clock. A clock set back would stop every job until the old time returns:
    `check` detects this and reschedules.
    """

    def __init__(self, *, wall: Callable[[], float] = OWN_CLOCK) -> None:
        self._wall = wall
        self._offset_s = self._clock_offset_s()
        self._scheduler = cast(
            "Any",
            BackgroundScheduler(
                timezone=UTC,
                # Late runs still run; several missed runs become one.
                job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            ),
        )

    def start(self) -> None:
        self._scheduler.start()

    def check(self) -> float:
        """Reschedule all jobs if the wall clock was set. Returns the change of the clock in
        seconds; 0 if it was not set."""
        offset_s = self._clock_offset_s()
        step_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(step_s) <= STEP_S:
            return 0.0
        now_s = self._wall()
        for job in self._scheduler.get_jobs():
            with contextlib.suppress(JobLookupError):
                after_s = job.trigger.after_s(now_s)
                job.modify(next_run_time=datetime.fromtimestamp(after_s, UTC))
        return step_s

    @property
    def scheduler(self) -> Any:  # noqa: ANN401 - APScheduler has no types
        """The APScheduler itself. The trigger of a job must have `after_s`."""
        return self._scheduler

    def stop(self) -> None:
        """Start no more jobs. Does not wait for running ones."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _clock_offset_s(self) -> float:
        return self._wall() - time.monotonic()
