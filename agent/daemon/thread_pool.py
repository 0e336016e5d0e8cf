"""Threads on demand, for work that may hang. I/O edge."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread

IDLE_S = 30.0
"""A thread that has had nothing to do for so long ends."""

Work = Callable[[], None]


class Worker:
    """A thread that waits for work and does it."""

    def __init__(self, pool: DaemonPool) -> None:
        self.given: SimpleQueue[Work] = SimpleQueue()
        self._pool = pool

    def start(self, work: Work) -> None:
        """Begin a thread with some work."""
        self.given.put(work)
        # The interpreter does not wait for daemons at its end: a scrape that hangs delays no stop.
        Thread(target=self._loop, name="kneewatch-work", daemon=True).start()

    def _loop(self) -> None:
        while True:
            try:
                work = self.given.get(timeout=IDLE_S)
            except Empty:
                if self._pool.leave(self):
                    return
                work = self.given.get()  # it was being handed work just then
            try:
                work()
            finally:
                self._pool.done()
            del work
            self._pool.rest(self)


class DaemonPool:
    """Runs each piece of work on an idle thread, or else on a new one: what hangs delays no other.

    The thread that became idle last is taken first, so that those a busy moment left over end.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[Worker] = []
        self.busy = 0

    def run(self, work: Work) -> None:
        """Have some work done soon.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            self.busy += 1
        if worker is not None:
            worker.given.put(work)
            return
        try:
            Worker(self).start(work)
        except RuntimeError:
            self.done()
            raise

    def done(self) -> None:
        """A piece of work has ended."""
        with self._lock:
            self.busy -= 1

    def rest(self, worker: Worker) -> None:
        """A worker waits for more."""
        with self._lock:
            self._idle.append(worker)

    def leave(self, worker: Worker) -> bool:
        """Whether an idle worker may end: not while it is being handed work."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True
