"""A pool of daemon threads for work that may hang. I/O edge."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread

IDLE_S = 30.0
"""Idle threads end after this many seconds."""

Work = Callable[[], None]


class Worker:
    """A thread that runs queued work."""

    def __init__(self, pool: DaemonPool) -> None:
        self.queue: SimpleQueue[Work] = SimpleQueue()
        self._pool = pool

    def start(self, work: Work) -> None:
        """Start the thread with a first piece of work."""
        self.queue.put(work)
        # The interpreter does not wait for daemon threads, so a hanging scrape delays no stop.
        Thread(target=self._loop, name="kneewatch-work", daemon=True).start()

    def _loop(self) -> None:
        while True:
            try:
                work = self.queue.get(timeout=IDLE_S)
            except Empty:
                if self._pool.leave(self):
                    return
                work = self.queue.get()  # work was queued just before the timeout
            try:
                work()
            finally:
                self._pool.done()
            del work
            self._pool.rest(self)


class DaemonPool:
    """Runs each piece of work on an idle or new thread, so that hanging work delays no other.

    The most recently idle thread is used first, so that surplus threads end.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[Worker] = []
        self.busy = 0

    def run(self, work: Work) -> None:
        """Run work on a thread.

        Raises:
            RuntimeError: no more threads can be started.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            self.busy += 1
        if worker is not None:
            worker.queue.put(work)
            return
        try:
            Worker(self).start(work)
        except RuntimeError:
            self.done()
            raise

    def done(self) -> None:
        """Count finished work."""
        with self._lock:
            self.busy -= 1

    def rest(self, worker: Worker) -> None:
        """Mark a worker as idle."""
        with self._lock:
            self._idle.append(worker)

    def leave(self, worker: Worker) -> bool:
        """Whether an idle worker may end; not if it was just given work."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True
