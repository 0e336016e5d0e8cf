"""Runs periodic jobs, such as targets' cycles, on as few threads as can keep up. I/O edge.

Switching threads costs time, so one thread runs all due cycles one after the other. Phases have few
different values (`phase_count`), so many cycles are due together.

A cycle that waits for a slow server must not delay the others. Another thread is therefore added
when a due cycle has waited longer than the grace time. While a cycle runs longer than the grace
time, a spare thread waits for the next due one.

A cycle within `computing` waits for the CPU, not for its server. It gets no extra thread: the
interpreter runs one thread at a time.

Steps that only need the CPU run for many cycles together: each step of all of them before the next
step. So the step's code stays in the CPU's caches, which saves a sixth of the CPU time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Condition, Lock, Thread, local
from typing import Protocol

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


# --- The queue of due jobs ------------------------------------------------------------------------


GRACE_RATIO, GRACE_S = 1 / 20, (0.05, 0.5)
"""How long a due cycle waits for a busy thread before another thread is added (the grace time): a
share of the shortest interval, and its minimum and maximum in seconds."""

QUICK_MAX = 8
"""Maximum number of threads whose job is computing or started less than the grace time ago. More
threads would only compete for the CPU."""

BATCH_MAX = 32
"""Maximum number of cycles that compute together."""

HEAVY_S = 0.1
"""CPU seconds of a step from which its job is computed alone, and no two such jobs at once."""

IDLE_S = 30.0
"""Seconds without work after which a spare thread ends."""


APART_RATIO = 1 / 4
"""The least time between the starts of two runs, as a share of the interval: a wall clock that
stands still, or is set back again and again, is always at the same point of the grid."""


class QueuedJob(Struct, eq=False):
    """A job in the queue. All its times are monotonic.

    `due_s` is the time of its next run. It is None while the job runs, and after the job was
    dropped; within a run, it is the time from which its next step may wait for a server. `began_s`
    is the start of the newest run. `steps` are the steps that are left of the present run; None
    between runs. If the job is replaced while it runs, `first_s` is the first run of the new job.
    `computes`: the job is doing work that only needs the CPU. `cpu_s` and `last_cpu_s` are the CPU
    seconds of the longest step of the present run, and of the run before.
    """

    name: str
    job: Job
    grid: RunTimes
    due_s: float | None = None
    began_s: float = 0.0
    first_s: float | None = None
    steps: Steps | None = None
    is_dropped: bool = False
    computes: bool = False
    cpu_s: float = 0.0
    last_cpu_s: float = 0.0

    @property
    def is_heavy(self) -> bool:
        """Whether a step takes so much CPU time that it would delay those of others."""
        return max(self.cpu_s, self.last_cpu_s) > HEAVY_S


class DueQueue:
    """Runs jobs at their intervals, never two of the same name at once.

    The wall clock only places runs on the grid. The next run is waited for on the monotonic clock,
    so a wall clock that is set or stands still delays no run.
    """

    def __init__(
        self, *, wall: Callable[[], float] = OWN_CLOCK, on_idle: Callable[[], None] = lambda: None
    ) -> None:
        """`on_idle` is called when no job is due: it must not block."""
        self._wall, self._on_idle = wall, on_idle
        self._lock = Lock()
        self._due, self._spare = Condition(self._lock), Condition(self._lock)
        self._watch = Condition(self._lock)
        self._grace_s = GRACE_S[1]
        self._entries: dict[str, QueuedJob] = {}
        self._heap: list[tuple[float, int, QueuedJob]] = []
        self._number = itertools.count()
        self._running: dict[QueuedJob, float] = {}
        """The entries whose step may wait, with the monotonic time at which each step started."""
        self._ready: list[QueuedJob] = []
        """The entries whose next step only needs the CPU, without the heavy ones."""
        self._heavy: list[QueuedJob] = []
        """The heavy entries whose next step only needs the CPU."""
        self._ready_s = 0.0
        """The monotonic time from which the first of them has waited."""
        self._computing = 0
        """Number of threads that compute."""
        self._is_heavy = False
        """Whether one of them computes a heavy job."""
        self.busy = 0
        """Number of jobs that are running."""
        self._is_waited_for = False
        """Whether a thread is waiting for the next due job."""
        self._own = local()
        """Its attribute `entry` is the entry whose job the current thread runs."""
        self._spares = self._wanted = 0
        """Number of spare threads, which wait for work, and how many of these have been woken."""
        self._stopped = False

    def start(self) -> None:
        """Start running jobs."""
        Thread(target=self._watch_threads, name="kneewatch-due", daemon=True).start()

    def put(
        self,
        name: str,
        job: Job,
        *,
        interval_s: float,
        phases: int = 1,
        first_in_s: float | None = None,
    ) -> None:
        """Add a job at an interval; it replaces a job with the same name.

        The job gets one of `phases` different phases. `first_run_s` computes the time of its first
        run.
        """
        grid = RunTimes(interval_s=interval_s, phase_s=phase_ratio(name, phases) * interval_s)
        wall_s = self._wall()
        first_s = time.monotonic() + first_run_s(grid, wall_s, first_in_s) - wall_s
        with self._lock:
            self._grace_s = min(self._grace_s, max(GRACE_S[0], GRACE_RATIO * interval_s))
            entry = self._entries.setdefault(name, QueuedJob(name, job, grid))
            entry.job, entry.grid = job, grid
            if entry.steps is not None:
                entry.first_s = first_s
            else:
                self._push(entry, first_s)

    def drop(self, name: str) -> None:
        """Remove a job; a running one finishes."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                entry.is_dropped = True
                if entry.steps is None:
                    entry.due_s = None

    @contextmanager
    def computing(self) -> Generator[None]:
        """A context that jobs enter around work that only needs the CPU."""
        entry: QueuedJob | None = getattr(self._own, "entry", None)
        if entry is None:
            yield
            return
        entry.computes = True
        try:
            yield
        finally:
            entry.computes = False

    @property
    def late_s(self) -> float:
        """Seconds by which the next job is late; 0 if no job is due."""
        with self._lock:
            next_s = self._waiting_s()
            return 0.0 if next_s is None else max(0.0, time.monotonic() - next_s)

    def stop(self) -> None:
        """Start no more jobs. Does not wait for running ones."""
        with self._lock:
            self._stopped = True
            for condition in (self._due, self._spare, self._watch):
                condition.notify_all()

    # ---- under the lock

    def _push(self, entry: QueuedJob, due_s: float) -> None:
        before_s = self._next_s()
        entry.due_s = due_s
        heapq.heappush(self._heap, (due_s, next(self._number), entry))
        if before_s is None or due_s < before_s:
            self._due.notify()
            self._watch.notify()

    def _next_s(self) -> float | None:
        """Time at which the next job is due. None if the queue is empty."""
        while self._heap and self._heap[0][2].due_s != self._heap[0][0]:
            heapq.heappop(self._heap)  # it was dropped or rescheduled
        return self._heap[0][0] if self._heap else None

    def _waiting_s(self) -> float | None:
        """Time from which a step has waited, or will wait, for a thread; None if none does."""
        next_s = self._next_s()
        if not self._ready:
            return next_s
        return self._ready_s if next_s is None else min(self._ready_s, next_s)

    def _hangs(self, entry: QueuedJob) -> bool:
        """Whether the step of a running entry waits for a slow server."""
        return not entry.computes and self._running[entry] < time.monotonic() - self._grace_s

    def _quick(self) -> int:
        """Number of threads that do not wait for a slow server."""
        return self._computing + sum(not self._hangs(entry) for entry in self._running)

    def _add_thread(self) -> None:
        """Wake a spare thread, or start one."""
        if self._spares > self._wanted:
            self._wanted += 1
            self._spare.notify()
            return
        try:
            # The interpreter does not wait for daemon threads: a hanging cycle delays no stop.
            Thread(target=self._run_due, name="kneewatch-work", daemon=True).start()
        except RuntimeError as error:
            log.warning("cannot start a thread for a due cycle error=%s", error)

    # ---- threads

    def _watch_threads(self) -> None:
        """Add threads while due jobs have waited longer than the grace time. Runs until the queue
        is stopped."""
        with self._lock:
            while not self._stopped:
                next_s = self._waiting_s()
                wait_s = None if next_s is None else next_s + self._grace_s - time.monotonic()
                if wait_s is None or wait_s > 0:
                    self._watch.wait(wait_s)
                    continue
                if not self._is_waited_for and self._quick() < QUICK_MAX:
                    self._add_thread()
                self._watch.wait(GRACE_S[0])

    def _run_due(self) -> None:
        """Run due jobs one after the other until this thread is no longer needed."""
        while batch := self._take():
            together = batch[0] not in self._running
            is_heavy = together and batch[0].is_heavy
            while batch:
                batch = [entry for entry in batch if self._goes_on(entry, together=together)]
            if together:
                with self._lock:
                    self._computing -= 1
                    self._is_heavy = self._is_heavy and not is_heavy

    def _take(self) -> list[QueuedJob]:
        """Wait for the next due job, or the jobs to compute, and return them. Returns none when
        this thread is no longer needed."""
        with self._lock:
            while self._ready or (self._heavy and not self._is_heavy) or not self._stopped:
                next_s = None if self._stopped else self._next_s()
                left_s = None if next_s is None else next_s - time.monotonic()
                is_due = left_s is not None and left_s <= 0
                if self._ready and (not is_due or len(self._ready) >= BATCH_MAX):
                    batch, self._ready = self._ready, []
                    self._computing += 1
                    return batch
                if self._heavy and not is_due and not self._is_heavy:
                    self._computing, self._is_heavy = self._computing + 1, True
                    return [self._heavy.pop(0)]
                if is_due:
                    return [self._started(heapq.heappop(self._heap)[2])]
                if self._is_waited_for:
                    if not self._rest():
                        break
                    continue
                self._is_waited_for = True
                self._on_idle()
                self._due.wait(left_s)
                self._is_waited_for = False
        return []

    def _started(self, entry: QueuedJob) -> QueuedJob:
        entry.due_s = None
        if not self._is_waited_for and any(map(self._hangs, self._running)):
            self._add_thread()
        self._running[entry] = now_s = time.monotonic()
        if entry.steps is None:
            entry.steps, entry.began_s = self._steps(entry), now_s
            self.busy += 1
        return entry

    def _rest(self) -> bool:
        """Wait as a spare thread for at most `IDLE_S`. Returns whether another thread woke this
        one. If not, this thread must end."""
        self._spares += 1
        self._spare.wait_for(lambda: self._wanted or self._stopped, IDLE_S)
        self._spares -= 1
        if not self._wanted:
            return False
        self._wanted -= 1
        return True

    def _goes_on(self, entry: QueuedJob, *, together: bool) -> bool:
        """Run the next step of an entry. Returns whether one follows that is computed `together`
        with those of other entries."""
        assert entry.steps is not None
        self._own.entry = entry
        after_s, ended, computes = None, False, False
        began_s = time.thread_time()
        try:
            computes = next(entry.steps)
        except StopIteration as end:
            after_s, ended = end.value, True
        entry.cpu_s = max(entry.cpu_s, time.thread_time() - began_s)
        if together and computes:
            return True
        with self._lock:
            self._running.pop(entry, None)
            if ended:
                entry.steps = None
                entry.last_cpu_s, entry.cpu_s = entry.cpu_s, 0.0
                self.busy -= 1
                if not entry.is_dropped:
                    self._push(entry, self._after_s(entry, after_s))
            elif computes:
                if entry.is_heavy:
                    self._heavy.append(entry)
                    return False
                if not self._ready:
                    self._ready_s = time.monotonic()
                    self._watch.notify()
                self._ready.append(entry)
            else:
                self._push(entry, time.monotonic())
        return False

    def _after_s(self, entry: QueuedJob, after_s: float | None) -> float:
        """Time of an entry's next run, after its job has run. `after_s` is what the job
        returned."""
        first_s, entry.first_s = entry.first_s, None
        if first_s is not None:
            return first_s
        now_s = time.monotonic()
        if after_s is not None:
            return now_s + after_s
        wall_s, interval_s = self._wall(), entry.grid.interval_s
        due_s = now_s + entry.grid.after_s(wall_s) - wall_s
        return due_s if due_s - entry.began_s > APART_RATIO * interval_s else due_s + interval_s

    def _steps(self, entry: QueuedJob) -> Steps:
        """One run of an entry's job; a job that crashes says when it runs again."""
        job = entry.job
        try:
            return (yield from job.steps())
        except Exception as error:
            log.exception("job crashed name=%s", entry.name)
            try:
                return job.crashed(error)
            except Exception:
                log.exception("job crashed again name=%s", entry.name)
                return None
