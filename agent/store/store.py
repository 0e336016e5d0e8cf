"""The one writer of the history: a queue, a thread, and what it does in trouble. I/O edge.

Cycles are packed as they come and written at once, one transaction a batch. Where the disk is
full, read-only or broken, packed cycles wait in a bounded queue and are tried again; a file whose
content is damaged is moved aside and a new one begun.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kneewatch.agent.store.backlog import Backlog
from kneewatch.agent.store.cycle import Cycle
from kneewatch.agent.store.database import Lock, is_damage, opened, size_bytes
from kneewatch.agent.store.disk import Disk
from kneewatch.agent.store.model import Retention, StoreStats
from kneewatch.agent.store.packing import PackedCycle
from kneewatch.agent.store.upkeep import Upkeep
from kneewatch.collector.base import StoreError

log = logging.getLogger(__name__)

INBOX_CYCLES = 1024
"""Cycles as they come, which are large: they wait only while one write takes its time."""

BATCH_CYCLES = 256
BACKOFF_S = (1.0, 30.0)
IDLE_S = 20.0


def of_disk(error: Exception) -> bool:
    """Whether an error is the disk's or the file's, which another try may cure, and not that of
    what is written."""
    return isinstance(error, sqlite3.OperationalError | OSError | StoreError) or is_damage(error)


class Store:
    """The history of all targets in one SQLite file, and the thread that writes it."""

    def __init__(self, path: Path, disk: Disk, lock: Lock) -> None:
        self.path = path
        self._disk, self._lock, self._files = disk, lock, disk.files
        self._backlog = Backlog()
        self._inbox: deque[Cycle] = deque()
        self._packing = 0
        self._woken = threading.Condition()
        self._close_by_s: float | None = None
        self._backoff_s = self._retry_s = 0.0
        self._busy = False
        self._written = self._overrun = 0
        self._error = ""
        self._unwritten_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        retention: Retention,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Store:
        """The store at `path`, made where there is none; one that is damaged is moved aside.

        Raises:
            StoreError: it cannot be opened; the message says what to do.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = Lock(path)
        except OSError as error:
            raise StoreError(
                f"cannot write {path}: {error.strerror}; name another file (--store FILE)"
            ) from error
        try:
            upkeep = Upkeep(retention, clock=clock, monotonic=monotonic)
            disk = Disk(path, opened(path), upkeep, monotonic)
        except BaseException:
            lock.release(unused=True)
            raise
        return cls(path, disk, lock)

    def put(self, cycle: Cycle) -> None:
        """Take a cycle, from any thread: it never waits for the disk and never raises."""
        with self._woken:
            self._inbox.append(cycle)
            if len(self._inbox) > INBOX_CYCLES:
                self._inbox.popleft()
                self._overrun += 1
            self._woken.notify()

    def stats(self) -> StoreStats:
        """How the store does."""
        with self._woken:
            queued = len(self._inbox) + self._packing + len(self._backlog)
            dropped = self._overrun + self._backlog.dropped
        taken_bytes = size_bytes(self.path)
        return StoreStats(
            queued,
            self._written,
            dropped,
            self._error,
            taken_bytes,
            self._disk.oldest_s,
            self._unwritten_s,
        )

    def waiting(self) -> list[PackedCycle]:
        """The cycles that the disk has not taken yet, oldest first."""
        return self._backlog.waiting()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for `timeout_s` at most, and close the file."""
        with self._woken:
            self._close_by_s = time.monotonic() + timeout_s
            self._woken.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("store not closed in time path=%s timeout_s=%s", self.path, timeout_s)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._disk.close()
            self._lock.release()

    def _turn(self) -> bool:
        """Pack what has come, write what is packed, tidy a little; whether to go on."""
        with self._woken:
            if not self._inbox and self._close_by_s is None:
                self._woken.wait(self._idle_s())
            close_by_s, taken = self._close_by_s, list(self._inbox)
            self._packing = len(taken)
            self._inbox.clear()
        for cycle in taken:
            self._backlog.take(cycle)
            self._packing -= 1
        if close_by_s is None:
            if time.monotonic() >= self._retry_s:
                self._work(tidy=True)
            return True
        self._work(tidy=False)
        left = len(self._backlog) + len(self._inbox)
        if left and (self._error or time.monotonic() > close_by_s):
            log.warning("store closed, not all written cycles=%s error=%s", left, self._error)
            return False
        return left > 0

    def _idle_s(self) -> float:
        if self._retry_s:
            return max(0.0, self._retry_s - time.monotonic())
        return 0.0 if self._busy or len(self._backlog) else IDLE_S

    def _work(self, *, tidy: bool) -> None:
        batch = self._backlog.next(BATCH_CYCLES)
        try:
            if batch:
                self._write(batch)
            self._busy = tidy and self._disk.tidy()
        except Exception as error:
            if not of_disk(error):
                # Tidying is tried again with the next round; cycles come first.
                log.exception("store not tidied path=%s", self.path)
                self._disk.close()
                return
            self._trouble(error)
        else:
            self._well()

    def _write(self, batch: Sequence[PackedCycle]) -> None:
        try:
            refused = self._disk.write(batch)
        except Exception as error:
            if of_disk(error):
                raise
            self._disk.close()
            if len(batch) > 1:
                for cycle in batch:
                    self._write([cycle])
                return
            log.exception("cycle cannot be written target=%s", batch[0].target)
            self._backlog.drop(batch[0])
        else:
            self._backlog.written(len(batch))
            self._written += len(batch)
            self._backlog.unwritten(refused)

    def _trouble(self, error: Exception) -> None:
        """Wait longer each time; a damaged file is moved aside first."""
        try:
            self._disk.recover(error)
        except OSError as worse:
            error = worse
        if str(error) != self._error:
            log.warning("store cannot write path=%s error=%s", self.path, error)
        if self._unwritten_s is None:
            self._unwritten_s = self._backlog.since_s
        self._error, self._busy = str(error), False
        least_s, most_s = BACKOFF_S
        self._backoff_s = min(most_s, max(least_s, 2 * self._backoff_s))
        self._retry_s = time.monotonic() + self._backoff_s

    def _well(self) -> None:
        if self._error:
            log.info("store writes again path=%s waiting=%s", self.path, len(self._backlog))
        self._error, self._backoff_s, self._retry_s = "", 0.0, 0.0
        self._unwritten_s = None
        if self._disk.files != self._files:
            self._files = self._disk.files
            self._backlog.begin_anew()
