"""Writes the history: a bounded queue of cycles, and a thread with its own connection. I/O edge."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from msgspec.structs import astuple, replace

from kneewatch.agent.store.database import (
    SIDE_FILES,
    WAL,
    Lock,
    connect,
    identity,
    is_damage,
    is_kneewatch_file,
    move_aside,
    open_checked,
    size_bytes,
)
from kneewatch.agent.store.downsampling_and_retention import Maintenance, transaction
from kneewatch.agent.store.encoding import EngineName, PackedCycle, Packer
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.ingest import BATCH_BYTES, CycleWriter
from kneewatch.agent.store.records import Cycle, Retention, StoreStats
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey

log = logging.getLogger(__name__)

BACKLOG_MAX_BYTES = 16 * 1024 * 1024


class Backlog:
    """Encoded cycles that wait to be written, oldest first. `dropped` is the number of cycles that
    were lost."""

    def __init__(self, *, max_bytes: int = BACKLOG_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.packer = Packer()
        self._waiting: deque[PackedCycle] = deque()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, cycle: Cycle) -> None:
        """Encode a cycle and add it. If the queue then exceeds its limit in bytes, the oldest
        cycles are dropped."""
        try:
            packed = self.packer.pack(cycle)
        except Exception:
            # A bug in packing one cycle must not lose the others.
            log.exception("cannot encode cycle target=%s", cycle.target)
            self.dropped += 1
            return
        self._waiting.append(packed)
        self._bytes += packed.bytes
        while self._bytes > self._max_bytes:
            self.drop(self.next(1)[0])

    @property
    def oldest_s(self) -> float | None:
        """Time of the oldest queued cycle; None when the queue is empty."""
        return self._waiting[0].t_s if self._waiting else None

    def next(self, limit: int) -> list[PackedCycle]:
        """The oldest cycles to be written next: at most `limit`, and about `BATCH_BYTES`."""
        sizes = itertools.accumulate(cycle.bytes for cycle in self._waiting)
        count = sum(1 for size in itertools.islice(sizes, limit) if size < BATCH_BYTES)
        return list(itertools.islice(self._waiting, min(limit, count + 1)))

    def mark_written(self, count: int) -> None:
        """Remove the first `count` cycles, because they are now in the file."""
        for _ in range(count):
            self._bytes -= self._waiting.popleft().bytes

    def drop(self, cycle: PackedCycle) -> None:
        """Drop the first cycle. Its documents are moved to the next cycles of the same engines."""
        self.mark_written(1)
        self.dropped += 1
        for engine in cycle.engines:
            if engine.document is not None:
                self._carry_document(engine.name, engine.document)

    def _carry_document(self, name: EngineName, document: bytes) -> None:
        for at, cycle in enumerate(self._waiting):
            for engine in cycle.engines:
                if engine.name != name:
                    continue
                if engine.document is None:
                    engines = tuple(
                        replace(other, document=document) if other is engine else other
                        for other in cycle.engines
                    )
                    self._waiting[at] = replace(cycle, engines=engines)
                return
        self.packer.forget(name)


# --- The connection of the writer -----------------------------------------------------------------


Learned = Mapping[tuple[str, EngineKey], tuple[float, bytes]]
"""What was learned about engines, encoded, each with its time, by target and engine."""

LEARNED_KEPT_S = 30 * 86_400.0
"""What was learned about an engine is forgotten after this many seconds without the engine."""

MOVE_ASIDE_INTERVAL_S = 600.0
"""Minimum seconds between two damaged files being moved aside. A bad disk must not be filled with
such files."""

OLDEST_INTERVAL_S = 30.0


class StoreFile:
    """Writes to the file that is currently at a path. It is opened again after errors. Used by one
    thread only."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection | None,
        maintenance: Maintenance,
        monotonic: Callable[[], float],
    ) -> None:
        """`connection` is None if the file cannot be opened yet."""
        self._path, self.maintenance, self._monotonic = path, maintenance, monotonic
        self._session: set[int] = set()
        self._moved_aside_s = float("-inf")
        self._connection: sqlite3.Connection | None = None
        self._file = identity(path)
        self.files = 0
        """Number of different files that were opened at the path so far."""
        self.oldest_s: float | None = None
        self._oldest_read_s = float("-inf")
        if connection is not None:
            self._open(connection)

    def write(self, cycles: Sequence[PackedCycle], learned: Learned) -> set[EngineName]:
        """Write cycles and what was learned in one transaction. Returns the engines that were
        skipped because of the limit on new engines.

        Raises:
            sqlite3.Error, OSError: the write failed; it can be retried.
        """
        connection = self._current()
        most_bytes = self.maintenance.wal_max_bytes
        if size_bytes(self._path, (WAL,)) > most_bytes:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if size_bytes(self._path, (WAL,)) > most_bytes:
                raise StoreError(f"{self._path}-wal is full: another program reads for too long")
        with transaction(connection):
            for cycle in cycles:
                self._writer.write(cycle)
            if learned:
                rows = [(target, *astuple(key), *new) for (target, key), new in learned.items()]
                connection.executemany(
                    "INSERT OR REPLACE INTO learned VALUES (?, ?, ?, ?, ?, ?)", rows
                )
                before_s = max(t_s for t_s, _ in learned.values()) - LEARNED_KEPT_S
                connection.execute("DELETE FROM learned WHERE t_s < ?", (before_s,))
        self._cache.committed()
        self._refresh_oldest(connection)
        refused, self._cache.refused = self._cache.refused, set()
        return refused

    def maintain(self) -> bool:
        """Run one maintenance job. Returns whether a job was due.

        Raises:
            sqlite3.Error, OSError: the job failed; it can be retried.
        """
        return self.maintenance.step(self._current(), self._cache)

    def recover(self, error: Exception) -> None:
        """Close the connection after an error; the next call opens the file again. A damaged file
        is moved aside.

        Raises:
            OSError: the file cannot be moved.
        """
        self.close()
        now_s = time.monotonic()
        if (
            is_damage(error)
            and now_s - self._moved_aside_s > MOVE_ASIDE_INTERVAL_S
            and (identity(self._path)[0] == self._file[0] or is_kneewatch_file(self._path))
        ):
            self._moved_aside_s = now_s
            move_aside(self._path, str(error))

    def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _current(self) -> sqlite3.Connection:
        before, now = self._file, identity(self._path)
        if self._connection is not None and now != before:
            # Writes to an open file that was moved or deleted would be lost.
            if now[0] == before[0]:  # what is only in a deleted -wal is copied to the file
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self.close()
        for file, left, suffix in zip(now[1:], before[1:], SIDE_FILES, strict=True):
            if now[0] != before[0] and file == left:
                # It belongs to the file before; SQLite would apply it to the new one.
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        return self._connection or self._open(connect(self._path))

    def _open(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        before, self._file = self._file, identity(self._path)
        if self.files == 0 or before[0] != self._file[0]:
            if self.files:
                log.warning("store was moved or replaced, opening its path path=%s", self._path)
            self._session.clear()
            self.files += 1
        self._connection = connection
        self._cache = EngineCache(connection, self._session)
        self._writer = CycleWriter(connection, self._cache, self._monotonic)
        return connection

    def _refresh_oldest(self, connection: sqlite3.Connection) -> None:
        if time.monotonic() - self._oldest_read_s < OLDEST_INTERVAL_S:
            return
        self._oldest_read_s = time.monotonic()
        row = connection.execute("SELECT min_s FROM chunks ORDER BY max_s LIMIT 1").fetchone()
        if row is None:
            row = connection.execute("SELECT min(t_s) FROM open_scrapes").fetchone()
        self.oldest_s = row[0]


# --- The store ------------------------------------------------------------------------------------
#
# Cycles are packed on arrival and written in batches, one transaction each. While the disk is
# full, read-only or broken, packed cycles wait in a bounded queue and are retried. A damaged
# file is moved aside and a new one started.


INBOX_CYCLES = 1024
"""Maximum number of cycles that wait to be encoded while a write is running. Such cycles are
large."""

BATCH_CYCLES = 256
GATHER_S = 0.1
"""Seconds that the thread collects cycles, starting with the first: fewer once no cycle is due, and
at most `BATCH_CYCLES`. They are then encoded and written together. Waking the thread for each cycle
would slow down the scrapes."""

BACKOFF_S = (1.0, 30.0)
IDLE_S = 20.0
ERROR_EVERY_S = 300.0
"""How often the same error is logged while it lasts."""


def is_disk_error(error: Exception) -> bool:
    """Whether an error comes from the disk or the file, so that a retry may succeed. Other errors
    come from the data."""
    return isinstance(error, sqlite3.OperationalError | OSError | StoreError) or is_damage(error)


class Store:
    """The history of all targets in one SQLite file, with the thread that writes it."""

    def __init__(
        self, path: Path, store_file: StoreFile, lock: Lock, error: Exception | None
    ) -> None:
        """`error` is why the file cannot be opened yet."""
        self.path = path
        self._store_file, self._lock, self._files = store_file, lock, store_file.files
        self._backlog = Backlog()
        self._inbox: deque[Cycle] = deque()
        self._received = 0
        self._learned: dict[tuple[str, EngineKey], tuple[float, bytes]] = {}
        self._wake = threading.Condition()
        self._close_by_s: float | None = None
        self._hurried = False
        self._backoff_s = self._retry_s = self._log_again_s = 0.0
        self._busy = False
        self._written = self._inbox_dropped = 0
        self._error = ""
        self._unwritten_s: float | None = None
        self._ended = False
        if error is not None:
            self._back_off(error)
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
        """Open the store at `path`. A missing store is created, a damaged one is moved aside. If
        the disk of an earlier store is full or fails, cycles wait as they do later.

        Raises:
            StoreError: the store cannot be opened; the message says what to do.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = Lock(path)
        except OSError as error:
            raise StoreError(
                f"cannot write {path}: {error.strerror}; name another file (--store FILE)"
            ) from error
        try:
            maintenance = Maintenance(retention, clock=clock, monotonic=monotonic)
            connection, failure = None, cast("Exception | None", lock.error)
            if failure is None:
                try:
                    connection = open_checked(path, is_ours=lock.is_renewed)
                except (sqlite3.Error, OSError) as error:
                    failure = error
                    maintenance.check_soon()
            store_file = StoreFile(path, connection, maintenance, monotonic)
        except BaseException:
            lock.release(unused=True)
            raise
        return cls(path, store_file, lock, failure)

    def put(self, cycle: Cycle) -> None:
        """Queue a cycle. Thread-safe; never waits for the disk and never raises. A cycle that
        ends after the store is closed is not kept."""
        with self._wake:
            if self._ended:
                return
            self._inbox.append(cycle)
            if len(self._inbox) in (1, BATCH_CYCLES):
                self._wake.notify()
            if len(self._inbox) > INBOX_CYCLES:
                self._inbox.popleft()
                self._inbox_dropped += 1

    def learn(self, target: str, key: EngineKey, t_s: float, state: bytes) -> None:
        """Write what was learned about an engine with the next cycles. Thread-safe."""
        with self._wake:
            self._learned[target, key] = t_s, state

    def flush(self) -> None:
        """Start to write queued cycles at once, without collecting more. Does not wait until they
        are written."""
        with self._wake:
            self._hurried = bool(self._inbox)
            if self._hurried:
                self._wake.notify()

    @property
    def last_error(self) -> str:
        """Why the newest write failed; empty if it did not. Unlike `stats`, does not wait for the
        disk."""
        return self._error

    def stats(self) -> StoreStats:
        """The store's counts, size and last error, all at the same moment."""
        file_bytes = size_bytes(self.path)
        with self._wake:
            return StoreStats(
                len(self._inbox) + self._received + len(self._backlog),
                self._written,
                self._inbox_dropped + self._backlog.dropped,
                self._error,
                file_bytes,
                self._store_file.oldest_s,
                self._unwritten_s,
            )

    def check(self) -> None:
        """Check the file for damage soon, and not only once a day. Thread-safe."""
        self._store_file.maintenance.check_soon()

    def close(self, timeout_s: float) -> None:
        """Write queued cycles for at most `timeout_s` seconds, then close the file."""
        with self._wake:
            self._close_by_s = time.monotonic() + timeout_s
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("store not closed in time path=%s timeout_s=%s", self.path, timeout_s)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._store_file.close()
            self._lock.release()

    def _step(self) -> bool:
        """Encode received cycles, write a batch, and run one maintenance job. Returns whether to
        continue."""
        with self._wake:
            if not self._inbox and self._close_by_s is None:
                self._wake.wait(self._idle_s())
            if self._inbox:
                self._wake.wait_for(self._is_gathered, GATHER_S)
            close_by_s, received = self._close_by_s, list(self._inbox)
            self._received, self._hurried = len(received), False
            self._inbox.clear()
            if received and self._error and self._unwritten_s is None:
                self._unwritten_s = received[0].t_s  # maintenance failed while none was queued
        for cycle in received:
            self._backlog.add(cycle)
            self._received -= 1
        if close_by_s is None:
            if time.monotonic() >= self._retry_s:
                self._work(maintain=True)
            return True
        self._work(maintain=False)
        with self._wake:
            unwritten = len(self._backlog) + len(self._inbox)
            given_up = bool(self._error) or time.monotonic() > close_by_s
            self._ended = not unwritten or given_up
        if unwritten and given_up:
            log.error(
                "store closed with unwritten cycles cycles=%s error=%s", unwritten, self._error
            )
        return not self._ended

    def _is_gathered(self) -> bool:
        closes = self._close_by_s is not None
        return self._hurried or closes or len(self._inbox) >= BATCH_CYCLES

    def _idle_s(self) -> float:
        if self._retry_s:
            return max(0.0, self._retry_s - time.monotonic())
        return 0.0 if self._busy or len(self._backlog) else IDLE_S

    def _work(self, *, maintain: bool) -> None:
        batch = self._backlog.next(BATCH_CYCLES)
        try:
            self._lock.renew()
            if batch:
                self._write(batch)
            self._busy = maintain and self._store_file.maintain()
        except Exception as error:
            if not is_disk_error(error):
                # Cycles come first; maintenance is retried in the next round.
                log.exception("store maintenance failed path=%s", self.path)
                self._store_file.close()
                return
            self._back_off(error)
        else:
            self._succeeded()

    def _write(self, batch: Sequence[PackedCycle]) -> None:
        with self._wake:
            learned = dict(self._learned)
        try:
            refused = self._store_file.write(batch, learned)
        except Exception as error:
            if is_disk_error(error):
                raise
            self._store_file.close()
            if len(batch) > 1:
                for cycle in batch:
                    self._write([cycle])
                return
            log.exception("cannot write cycle target=%s", batch[0].target)
            self._backlog.drop(batch[0])
        else:
            with self._wake:
                self._backlog.mark_written(len(batch))
                self._written += len(batch)
                for place in [p for p in learned if self._learned[p] is learned[p]]:
                    del self._learned[place]
            for name in refused:  # pack its next document whole
                self._backlog.packer.forget(name)

    def _back_off(self, error: Exception) -> None:
        """Schedule a retry after twice the last delay. A damaged file is moved aside first."""
        try:
            self._store_file.recover(error)
        except OSError as move_error:
            error = move_error
        if str(error) != self._error or time.monotonic() >= self._log_again_s:
            waiting = len(self._backlog)
            log.error("store cannot write path=%s error=%s queued=%s", self.path, error, waiting)
            self._log_again_s = time.monotonic() + ERROR_EVERY_S
        with self._wake:
            if self._unwritten_s is None:
                self._unwritten_s = self._backlog.oldest_s
            self._error, self._busy = str(error), False
        min_s, max_s = BACKOFF_S
        self._backoff_s = min(max_s, max(min_s, 2 * self._backoff_s))
        self._retry_s = time.monotonic() + self._backoff_s

    def _succeeded(self) -> None:
        if self._error:
            log.info("store recovered path=%s queued=%s", self.path, len(self._backlog))
        with self._wake:
            self._error, self._unwritten_s = "", None
        self._backoff_s = self._retry_s = 0.0
        if self._store_file.files != self._files:
            self._files = self._store_file.files
            self._backlog.packer.forget()  # a new file has no documents yet
