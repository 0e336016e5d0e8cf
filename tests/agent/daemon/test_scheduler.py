"""Jobs at their intervals: phases, hanging, crashes, backoff, a clock that is set."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.daemon.periodic_jobs import (
    APART_RATIO,
    GRACE_RATIO,
    GRACE_S,
    HEAVY_S,
    PHASES_MAX,
    QUICK_MAX,
    DueQueue,
    Job,
    OwnClock,
    RunTimes,
    Steps,
    phase_count,
    phase_ratio,
)
from tests.waiting import PATIENCE_S, until


class Counted(Job):
    """A job that notes when it ran."""

    def __init__(self, after: Callable[[], float | None] = lambda: None) -> None:
        self.times: list[float] = []
        self.crashes: list[Exception] = []
        self._after = after

    def cycle(self) -> float | None:
        self.times.append(time.monotonic())
        return self._after()

    def crashed(self, error: Exception) -> float | None:
        self.crashes.append(error)
        return None


@pytest.fixture
def queue() -> Iterator[DueQueue]:
    """What runs jobs at their intervals."""
    due_queue = DueQueue()
    due_queue.start()
    yield due_queue
    due_queue.stop()


@given(
    st.floats(0.1, 3600),
    st.floats(0, 1),
    st.floats(1.6e9, 2.0e9),
)
def test_the_grid(interval_s: float, ratio: float, now_s: float) -> None:
    phase_s = ratio * interval_s
    grid = RunTimes(interval_s=interval_s, phase_s=phase_s)
    next_s = grid.after_s(now_s)
    assert 0 < next_s - now_s <= interval_s + 0.002
    steps = (next_s - phase_s) / interval_s
    assert abs(steps - round(steps)) * interval_s < 1e-3, "it is on the grid"


def test_a_time_on_the_grid_is_not_its_own_next_one() -> None:
    grid = RunTimes(interval_s=0.1, phase_s=0.0)
    for step in range(2000):
        now_s = 1.7e9 + step * 0.1
        assert 0.05 < grid.after_s(now_s) - now_s < 0.15


def test_phases_are_spread_evenly() -> None:
    phases = phase_count(1000, 15.0)
    ratios = [phase_ratio(f"http://10.0.{n // 250}.{n % 250}:8000", phases) for n in range(1000)]
    cycles = Counter(ratios)
    assert phases == PHASES_MAX
    assert sorted(cycles) == [phase / phases for phase in range(phases)]
    assert min(cycles.values()) > 0.6 * len(ratios) / phases
    assert phase_ratio("a", phases) == phase_ratio("a", phases)


def test_few_jobs_run_one_after_the_other() -> None:
    assert phase_count(0, 5.0) == phase_count(8, 5.0) == 1
    assert {phase_ratio(f"http://10.0.0.{n}:8000", phase_count(8, 5.0)) for n in range(8)} == {0.0}
    assert phase_count(8, 0.2) == PHASES_MAX, "a run of 8 would take a tenth of this interval"


def test_jobs_keep_their_interval(queue: DueQueue) -> None:
    job = Counted()
    queue.put("a", job, interval_s=0.1)
    until(lambda: len(job.times) >= 12)
    gaps = [after - before for before, after in zip(job.times[1:], job.times[2:], strict=False)]
    assert sum(gaps) / len(gaps) > 0.08


def test_the_first_run_comes_soon(queue: DueQueue) -> None:
    soon, on_the_grid = Counted(), Counted()
    since_s = time.monotonic()
    queue.put("a", soon, interval_s=1e6, first_in_s=0.05)
    queue.put("b", on_the_grid, interval_s=1e6)
    until(lambda: soon.times)
    assert soon.times[0] - since_s > 0.03
    assert not on_the_grid.times


def test_never_two_at_once_and_nobody_is_delayed(queue: DueQueue) -> None:
    hang = threading.Event()

    def hangs() -> None:
        hang.wait(2 * PATIENCE_S)

    slow, quick = Counted(hangs), Counted()
    queue.put("slow", slow, interval_s=0.1)
    queue.put("quick", quick, interval_s=0.1)
    until(lambda: len(quick.times) >= 10 and slow.times)
    assert len(slow.times) == 1
    hang.set()
    until(lambda: len(slow.times) >= 3)


def test_a_job_says_when_it_is_next(queue: DueQueue) -> None:
    waits = iter([0.3, 0.3, 0.3])
    job = Counted(lambda: next(waits, 1e6))
    queue.put("a", job, interval_s=0.1)
    until(lambda: len(job.times) == 4)
    gaps = [after - before for before, after in zip(job.times, job.times[1:], strict=False)]
    assert all(gap > 0.28 for gap in gaps)
    time.sleep(0.3)
    assert len(job.times) == 4


def test_a_crash_is_logged_and_the_next_run_comes(
    queue: DueQueue, caplog: pytest.LogCaptureFixture
) -> None:
    job = Counted(lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        queue.put("a", job, interval_s=0.1)
        until(lambda: len(job.crashes) >= 3)
    assert isinstance(job.crashes[0], ZeroDivisionError)
    record = caplog.records[0]
    assert (record.msg, record.args) == ("job crashed name=%s", ("a",))
    assert record.exc_info is not None


def test_a_dropped_job_runs_no_more(queue: DueQueue) -> None:
    job = Counted(lambda: 0.05)
    queue.put("a", job, interval_s=0.1)
    until(lambda: job.times)
    queue.drop("a")
    queue.drop("a")
    time.sleep(0.1)
    until(lambda: not queue.busy)
    ran = len(job.times)
    time.sleep(0.3)
    assert len(job.times) == ran


# Threads of the queue


PATIENT_S = GRACE_S[1] / GRACE_RATIO
"""An interval at which a thread that the machine stalls for a moment is not taken for one that
hangs."""


class Threads(Counted):
    """A job that notes the threads it ran in."""

    def __init__(self, after: Callable[[], float | None]) -> None:
        super().__init__(after)
        self.threads: set[int] = set()

    def cycle(self) -> float | None:
        self.threads.add(threading.get_ident())
        return super().cycle()


def share_threads(count: int) -> bool:
    """Whether quick jobs run on fewer threads than there are jobs."""
    queue, jobs = DueQueue(), [Threads(lambda: 0.2) for _ in range(count)]
    queue.start()
    try:
        for number, job in enumerate(jobs):
            queue.put(f"{number}", job, interval_s=PATIENT_S, first_in_s=0.2)
        until(lambda: all(len(job.times) >= 3 for job in jobs))
    finally:
        queue.stop()
    return len(set[int]().union(*(job.threads for job in jobs))) < count


def test_quick_jobs_share_a_few_threads() -> None:
    # Jobs that the machine stalls get more threads: then once more.
    assert any(share_threads(40) for _ in range(5))


def test_many_that_hang_delay_no_other(queue: DueQueue) -> None:
    hang, quick = threading.Event(), Counted()
    slow = [Counted(lambda: hang.wait(2 * PATIENCE_S) and None) for _ in range(30)]
    for number, job in enumerate(slow):
        queue.put(f"slow {number}", job, interval_s=0.1)
    until(lambda: all(job.times for job in slow))
    assert queue.busy == 30
    queue.put("quick", quick, interval_s=0.1)
    until(lambda: len(quick.times) >= 10)
    hang.set()
    until(lambda: all(len(job.times) >= 2 for job in slow))


def test_many_that_compute_get_a_few_threads(queue: DueQueue) -> None:
    go_on = threading.Event()

    def computes() -> float:
        with queue.computing():
            go_on.wait(2 * PATIENCE_S)
        return 0.1

    jobs = [Counted(computes) for _ in range(5 * QUICK_MAX)]
    for number, job in enumerate(jobs):
        queue.put(f"{number}", job, interval_s=PATIENT_S, first_in_s=0.1)
    until(lambda: queue.late_s > 5 * GRACE_S[1])  # time for a thread for each of them
    # A thread that stalls before it says that it computes is taken for one that hangs.
    assert 0 < queue.busy <= 2 * QUICK_MAX
    go_on.set()
    until(lambda: all(len(job.times) >= 2 for job in jobs))


class Stepping(Counted):
    """A job that fetches, computes twice and fetches again, and notes each step in `noted`."""

    def __init__(self, noted: list[str], fetch: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._noted, self._fetch = noted, fetch

    def steps(self) -> Steps:
        self.times.append(time.monotonic())
        self._fetch()
        for step, computes in (("read", True), ("judge", True), ("ask", False)):
            yield computes
            self._noted.append(step)
        return 1e6


def test_each_step_of_all_due_jobs_comes_before_the_next_step(queue: DueQueue) -> None:
    noted, jobs = list[str](), 10
    for number in range(jobs):
        queue.put(f"{number}", Stepping(noted), interval_s=PATIENT_S, first_in_s=0.5)
    until(lambda: len(noted) == 3 * jobs and not queue.busy)
    assert sorted(noted[: 2 * jobs]) == ["judge"] * jobs + ["read"] * jobs
    assert noted[:2] == ["read", "read"], "together"


def test_heavy_jobs_are_computed_one_at_a_time_and_light_ones_between(queue: DueQueue) -> None:
    noted, go_on = list[str](), threading.Event()

    class Heavy(Counted):
        def steps(self) -> Steps:
            began_s = time.thread_time()
            while time.thread_time() - began_s < 1.5 * HEAVY_S:
                pass
            self.times.append(time.monotonic())
            yield True
            noted.append("heavy")
            go_on.wait(2 * PATIENCE_S)
            return 1e6

    jobs = [Heavy() for _ in range(3)]
    for number, job in enumerate(jobs):
        queue.put(f"heavy {number}", job, interval_s=PATIENT_S, first_in_s=0.1)
    until(lambda: all(job.times for job in jobs) and noted == ["heavy"])
    light = Stepping(list[str]())
    queue.put("light", light, interval_s=0.1)
    until(lambda: light.times and queue.busy == len(jobs))
    assert noted == ["heavy"], "the others wait for their turn"
    go_on.set()
    until(lambda: noted == ["heavy"] * len(jobs) and not queue.busy)


def test_a_fetch_that_hangs_delays_no_job_that_has_its_page(queue: DueQueue) -> None:
    hang, noted = threading.Event(), list[str]()
    for number in range(4):
        queue.put(f"{number}", Stepping(noted), interval_s=PATIENT_S, first_in_s=0.2)
    hanging = Stepping(noted, lambda: hang.wait(2 * PATIENCE_S))
    queue.put("hangs", hanging, interval_s=PATIENT_S, first_in_s=0.2)
    until(lambda: len(noted) == 12 and queue.busy == 1)
    queue.drop("hangs")
    hang.set()
    until(lambda: len(noted) == 15 and not queue.busy)  # a run that has begun ends
    assert len(hanging.times) == 1


def test_a_step_that_crashes_ends_its_job_only(queue: DueQueue) -> None:
    class Crashes(Stepping):
        def steps(self) -> Steps:
            yield True
            raise ZeroDivisionError

    noted = list[str]()
    crashes, well = Crashes(noted), Stepping(noted)
    queue.put("crashes", crashes, interval_s=0.1)
    queue.put("well", well, interval_s=0.1)
    until(lambda: len(crashes.crashes) >= 2 and len(noted) == 3)


def test_a_job_that_is_replaced_while_it_runs_never_runs_twice_at_once(queue: DueQueue) -> None:
    hang, after = threading.Event(), Counted()
    queue.put("a", Counted(lambda: hang.wait(2 * PATIENCE_S) and None), interval_s=0.1)
    until(lambda: queue.busy == 1)
    queue.put("a", after, interval_s=0.1)
    time.sleep(0.3)
    assert not after.times
    hang.set()
    until(lambda: len(after.times) >= 2)


def test_a_due_job_without_a_thread_is_seen() -> None:
    queue = DueQueue()  # not started: nobody runs anything
    assert queue.late_s == 0.0
    queue.put("a", Counted(), interval_s=0.1)
    until(lambda: queue.late_s > 0.2)


class Clock:
    """The wall clock, which can be set."""

    set_by_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.set_by_s


INTERVAL_S = 0.1


CLOCKS: dict[str, Callable[[float], float]] = {
    "set back": lambda s: s - (3600.0 if s > 1.0 else 0.0),
    "set forward": lambda s: s + (3600.0 if s > 1.0 else 0.0),
    "stands still": lambda s: min(s, 1.0),
    "runs backwards": lambda s: -s,
    "set back again and again": lambda s: s % INTERVAL_S,
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_no_wall_clock_delays_a_cycle(clock: str) -> None:
    began_s = time.monotonic()
    clockwork = DueQueue(wall=lambda: 1e9 + CLOCKS[clock](time.monotonic() - began_s))
    clockwork.start()
    try:
        job = Counted()
        clockwork.put("a", job, interval_s=INTERVAL_S)
        until(lambda: time.monotonic() - began_s > 1.2)
        ran, from_s = len(job.times), time.monotonic()
        until(lambda: len(job.times) >= ran + 10)
        per_interval = 10 * INTERVAL_S / (time.monotonic() - from_s)
        assert per_interval < 1.1 / APART_RATIO, "and none comes much too early"
    finally:
        clockwork.stop()


def test_a_clock_that_stands_still_goes_on_until_it_runs_again() -> None:
    wall = {"s": 1e9}
    clock = OwnClock(lambda: wall["s"])
    began_s = time.monotonic()
    until(lambda: clock() > 1e9 + 0.05)
    assert clock() <= 1e9 + 0.001 + time.monotonic() - began_s
    for set_to_s in (2e9, 1e9):  # where it is set, it is followed
        wall["s"] = set_to_s
        assert clock() == pytest.approx(set_to_s, abs=PATIENCE_S)
    running = OwnClock()
    until(lambda: time.monotonic() - began_s > 0.2)
    assert abs(running() - time.time()) < 0.1
