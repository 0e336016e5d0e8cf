"""Threads on demand: what hangs delays no other, and what is idle ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from kneewatch.agent.daemon import periodic_jobs as module
from kneewatch.agent.daemon.periodic_jobs import DaemonPool
from tests.waiting import PATIENCE_S, until


def workers() -> list[threading.Thread]:
    """The pool's threads."""
    return [thread for thread in threading.enumerate() if thread.name == "kneewatch-work"]


def test_what_hangs_delays_no_other() -> None:
    pool, hang, done = DaemonPool(), threading.Event(), threading.Event()
    for _ in range(50):
        pool.run(hang.wait)  # type: ignore[arg-type]
    pool.run(done.set)
    assert done.wait(PATIENCE_S)
    until(lambda: pool.busy == 50)
    hang.set()
    until(lambda: pool.busy == 0)


def test_a_thread_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 5.0)
    pool, names = DaemonPool(), set[int]()

    def note() -> None:
        names.add(threading.get_ident())

    for _ in range(20):
        pool.run(note)
        until(lambda: pool.busy == 0)
        time.sleep(0.002)
    assert len(names) < 10, "a thread that is slow to rest is replaced by another"
    assert all(thread.daemon for thread in workers())


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.02)
    before = set(workers())
    pool, hang = DaemonPool(), threading.Event()
    for _ in range(5):
        pool.run(hang.wait)  # type: ignore[arg-type]
    until(lambda: len(set(workers()) - before) == 5)
    hang.set()
    until(lambda: not set(workers()) - before)
    pool.run(hang.set)  # and another one is made
    until(lambda: pool.busy == 0)


def test_work_given_while_a_thread_ends_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.001)
    pool, done = DaemonPool(), list[int]()
    for number in range(300):
        pool.run(lambda number=number: done.append(number))  # type: ignore[misc]
        time.sleep(0.001)
    until(lambda: len(done) == 300)
    assert sorted(done) == list(range(300))


def test_the_interpreter_does_not_wait_for_what_hangs() -> None:
    code = (
        "import time; from kneewatch.agent.daemon.periodic_jobs import DaemonPool;"
        "p = DaemonPool(); p.run(lambda: time.sleep(3600)); p.run(lambda: None); print(p.busy > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
