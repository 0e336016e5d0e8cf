"""The only writer of the history: a bounded queue, a thread, its connection. I/O edge."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kneewatch.agent.store.database import (
    Lock,
    connect,
    identity,
    is_damage,
    is_ours,
    move_aside,
    opened,
    size_bytes,
)
from kneewatch.agent.store.encoding import EngineName, PackedCycle, Packer
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.ingest import Writing
from kneewatch.agent.store.maintenance import Upkeep, transaction
from kneewatch.agent.store.records import Cycle, Retention, StoreStats
from kneewatch.collector.errors import StoreError

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 1024 * 1024


class Backlog:
    """Cycles in the order in which they came. `dropped` counts those that nobody will write."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._packer = Packer()
        self._waiting: deque[PackedCycle] = deque()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, cycle: Cycle) -> None:
        """Add a cycle; the oldest goes where there is no room."""
        try:
            packed = self._packer.pack(cycle)
        except Exception:
            # Whatever is wrong with one cycle, the others are kept.
            log.exception("cycle cannot be packed target=%s", cycle.target)
            self.dropped += 1
            return
        self._waiting.append(packed)
        self._bytes += packed.bytes
        while self._bytes > self._most_bytes:
            self.drop(self.next(1)[0])

    @property
    def since_s(self) -> float | None:
        """The time of the first cycle that waits; None where none does."""
        return self._waiting[0].t_s if self._waiting else None

    def waiting(self) -> list[PackedCycle]:
        """All that wait, from any thread: a deque is copied in one step."""
        return list(self._waiting)

    def next(self, most: int) -> list[PackedCycle]:
        """The cycles to be written next."""
        return list(itertools.islice(self._waiting, most))

    def written(self, cycles: int) -> None:
        """The first so many are written."""
        for _ in range(cycles):
            self._bytes -= self._waiting.popleft().bytes

    def drop(self, cycle: PackedCycle) -> None:
        """Give the first cycle up. What its documents said, the next ones say."""
        self.written(1)
        self.dropped += 1
        for engine in cycle.engines:
            if engine.document is not None:
                self._pass_on(engine.name, engine.document)

    def _pass_on(self, name: EngineName, document: bytes) -> None:
        for at, cycle in enumerate(self._waiting):
            for engine in cycle.engines:
                if engine.name != name:
                    continue
                if engine.document is None:
                    engines = tuple(
                        replace(one, document=document) if one is engine else one
                        for one in cycle.engines
                    )
                    self._waiting[at] = replace(cycle, engines=engines)
                return
        self._packer.forget(name)

    def unwritten(self, names: Iterable[EngineName]) -> None:
        """These engines of cycles that are written were left out: their next documents are told."""
        for name in names:
            self._packer.forget(name)

    def begin_anew(self) -> None:
        """A new file has been begun: it has no document yet."""
        self._packer.forget()


# --- The writer's connection: batches, upkeep, and a new start after trouble. I/O edge ------------


ASIDE_EVERY_S = 600.0
"""A disk that damages every new file is not filled with them."""

OLDEST_EVERY_S = 30.0


class Disk:
    """Writes to the file at a path, whichever it is by now. Used by one thread."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        upkeep: Upkeep,
        monotonic: Callable[[], float],
    ) -> None:
        self._path, self._upkeep, self._monotonic = path, upkeep, monotonic
        self._session: set[int] = set()
        self._aside_s = float("-inf")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self.files = 0
        """How many files have been begun or found at the path."""
        self.oldest_s: float | None = None
        self._oldest_looked_s = float("-inf")
        self._take(connection)

    def write(self, cycles: Sequence[PackedCycle]) -> set[EngineName]:
        """Write cycles, all or none. Gives the engines for which there was no room.

        Raises:
            sqlite3.Error, OSError: the disk does not take them; they can be tried again.
        """
        connection = self._current()
        with transaction(connection):
            for cycle in cycles:
                self._writing.cycle(cycle)
        self._ledger.committed()
        self._look_for_oldest(connection)
        refused, self._ledger.refused = self._ledger.refused, set()
        return refused

    def tidy(self) -> bool:
        """Do one thing of the upkeep; whether there was anything to do.

        Raises:
            sqlite3.Error, OSError: the disk does not allow it.
        """
        return self._upkeep.step(self._current(), self._ledger)

    def recover(self, error: Exception) -> None:
        """Forget the connection after an error: the next use opens the file again. A damaged file
        is moved aside.

        Raises:
            OSError: it cannot be moved.
        """
        self.close()
        now_s = time.monotonic()
        if is_damage(error) and now_s - self._aside_s > ASIDE_EVERY_S and is_ours(self._path):
            self._aside_s = now_s
            move_aside(self._path, str(error))

    def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _current(self) -> sqlite3.Connection:
        if self._connection is not None and identity(self._path) != self._file:
            # Somebody moved or removed the file: what is written to it now, nobody would find.
            self.close()
        return self._connection or self._take(connect(self._path))

    def _take(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        file = identity(self._path)
        if self.files == 0 or file != self._file:
            self._file = file
            self._session.clear()
            self.files += 1
        self._connection = connection
        self._ledger = EngineCache(connection, self._session)
        self._writing = Writing(connection, self._ledger, self._monotonic)
        return connection

    def _look_for_oldest(self, connection: sqlite3.Connection) -> None:
        if time.monotonic() - self._oldest_looked_s < OLDEST_EVERY_S:
            return
        self._oldest_looked_s = time.monotonic()
        row = connection.execute("SELECT min_s FROM chunks ORDER BY max_s LIMIT 1").fetchone()
        if row is None:
            row = connection.execute("SELECT min(t_s) FROM open_scrapes").fetchone()
        self.oldest_s = row[0]


# --- The one writer of the history: a queue, a thread, and what it does in trouble. I/O edge ------
#
# Cycles are packed as they come and written at once, one transaction a batch. Where the disk is
# full, read-only or broken, packed cycles wait in a bounded queue and are tried again; a file
# whose content is damaged is moved aside and a new one begun.


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
