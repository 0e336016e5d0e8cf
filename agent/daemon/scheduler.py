"""When each target's cycle runs: APScheduler's jobs, each with its own phase. I/O edge."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from apscheduler.executors import base  # type: ignore[import-untyped]
from apscheduler.jobstores.base import JobLookupError  # type: ignore[import-untyped]
from apscheduler.schedulers.background import (  # type: ignore[import-untyped]
    BackgroundScheduler,
)
from apscheduler.triggers.base import BaseTrigger  # type: ignore[import-untyped]

from kneewatch.agent.daemon.thread_pool import DaemonPool

log = logging.getLogger(__name__)

HEARTBEAT, HEARTBEAT_S = "heartbeat", 1.0
JOB = "job "
NEAR_S = 0.001
"""A time so near is now: times lose less than this on their way through APScheduler."""

STEP_S = 1.0
"""A clock that moved by more than this against the monotonic one was set."""


class Job(Protocol):
    """What is done again and again. Both give the seconds until the next time; None: on the
    grid."""

    def cycle(self) -> float | None:
        """Do it once."""
        ...

    def crashed(self, error: Exception) -> float | None:
        """It was not done: there is a bug."""
        ...


def phase_ratio(name: str) -> float:
    """Where in its interval a job stands, from 0 to 1: even over many, and the same every time."""
    return zlib.crc32(name.encode()) / 2**32


class Grid(BaseTrigger):  # type: ignore[misc]
    """Every interval, at a phase of its own; what was missed is not made up for."""

    def __init__(self, *, interval_s: float, phase_s: float) -> None:
        self.interval_s, self.phase_s = interval_s, phase_s

    def after_s(self, now_s: float) -> float:
        """The first time on the grid after a time."""
        steps = math.floor((now_s - self.phase_s) / self.interval_s) + 1
        next_s = self.phase_s + steps * self.interval_s
        return next_s if next_s - now_s > NEAR_S else next_s + self.interval_s

    def get_next_fire_time(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, previous_fire_time: datetime | None, now: datetime
    ) -> datetime:
        """The same, as APScheduler asks for it."""
        del previous_fire_time
        return moment(self.after_s(now.timestamp()))


class OnDemand(base.BaseExecutor):  # type: ignore[misc]
    """APScheduler's executor over a pool whose threads nobody waits for."""

    def __init__(self, pool: DaemonPool) -> None:
        super().__init__()
        self._pool = pool

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:  # noqa: ANN401
        untyped = cast("Any", base), cast("Any", self)

        def work() -> None:
            events = untyped[0].run_job(job, job._jobstore_alias, run_times, self._logger.name)
            untyped[1]._run_job_success(job.id, events)

        self._pool.run(work)


class Scheduler:
    """Runs cycles at their intervals, never two of the same name at once.

    APScheduler plans on the wall clock. One that is set back would stop every job until the old
    time comes again: `check` sees that and plans anew.
    """

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self.pool = DaemonPool()
        self._wall = wall
        self._ahead_s = self._wall_ahead_s()
        self._scheduler = cast(
            "Any",
            BackgroundScheduler(
                timezone=UTC,
                executors={"default": OnDemand(self.pool)},
                # A run that comes late is still wanted: only the newest of several.
                job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            ),
        )
        self._beaten_s = time.monotonic()

    def start(self) -> None:
        """Begin to run what was put in."""
        self._scheduler.start()
        self._scheduler.add_job(self._beat, Grid(interval_s=HEARTBEAT_S, phase_s=0.0), id=HEARTBEAT)

    def put(
        self, name: str, job: Job, *, interval_s: float, first_in_s: float | None = None
    ) -> None:
        """Do a job at an interval, in place of what has that name.

        The first run is at its place on the grid, or `first_in_s` from now where that is sooner by
        a second: two scrapes too close to each other tell no rate.
        """
        grid = Grid(interval_s=interval_s, phase_s=phase_ratio(name) * interval_s)
        now_s = self._wall()
        first_s = grid.after_s(now_s)
        if first_in_s is not None and now_s + first_in_s < first_s - min(1.0, interval_s / 2):
            first_s = now_s + first_in_s
        self._scheduler.add_job(
            self._run,
            grid,
            args=(name, job),
            id=JOB + name,
            next_run_time=moment(first_s),
            replace_existing=True,
        )

    def drop(self, name: str) -> None:
        """Run it no more; a run under way ends by itself."""
        with contextlib.suppress(JobLookupError):
            self._scheduler.remove_job(JOB + name)

    def check(self) -> float:
        """Plan every job anew where the clock was set. Gives by how much it was, else 0."""
        ahead_s = self._wall_ahead_s()
        step_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        if abs(step_s) <= STEP_S:
            return 0.0
        now_s = self._wall()
        for job in self._scheduler.get_jobs():
            with contextlib.suppress(JobLookupError):
                job.modify(next_run_time=moment(job.trigger.after_s(now_s)))
        return step_s

    @property
    def scheduler(self) -> Any:  # noqa: ANN401 - APScheduler has no types
        """The scheduler, for a job with a trigger of its own that has `after_s`."""
        return self._scheduler

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler last ran anything."""
        return time.monotonic() - self._beaten_s

    def stop(self) -> None:
        """Start no more cycles; those under way are left to themselves."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _run(self, name: str, job: Job) -> None:
        try:
            after_s = job.cycle()
        except Exception as error:
            log.exception("a cycle crashed; going on name=%s", name)
            after_s = job.crashed(error)
        if after_s is not None:
            with contextlib.suppress(JobLookupError):
                self._scheduler.modify_job(JOB + name, next_run_time=moment(self._wall() + after_s))

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()

    def _wall_ahead_s(self) -> float:
        return self._wall() - time.monotonic()


def moment(t_s: float) -> datetime:
    """A unix time as APScheduler takes it."""
    return datetime.fromtimestamp(t_s, UTC)
