"""How hard a metrics system may be asked: so many queries at once, so many a second. I/O edge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Pace:
    """Turns to ask. A second's worth of turns may be taken at once; all are counted."""

    def __init__(
        self,
        *,
        at_once: int,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.at_once = at_once
        self._per_s, self._clock, self._sleep = per_s, clock, sleep
        self._seats = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._due_s = float("-inf")
        self.asked = 0
        self.busy_s = 0.0

    @contextmanager
    def turn(self) -> Generator[None]:
        """One query's turn; waits for it."""
        with self._seats:
            wait_s = self._reserve()
            if wait_s > 0:
                self._sleep(wait_s)
            started_s = self._clock()
            try:
                yield
            finally:
                with self._lock:
                    self.busy_s += self._clock() - started_s

    def _reserve(self) -> float:
        """Seconds until the next turn, which is taken."""
        with self._lock:
            now_s = self._clock()
            self.asked += 1
            # A turn costs 1/per_s; up to a second of them may be owed.
            self._due_s = max(self._due_s, now_s - 1.0) + 1 / self._per_s
            return max(0.0, self._due_s - now_s)
