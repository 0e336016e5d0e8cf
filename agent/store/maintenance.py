"""Upkeep between batches: flush, downsample, delete, evaluate. I/O edge."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from kneewatch.agent.store.chunk_flush import seal_engine, seal_target
from kneewatch.agent.store.columns import DamagedError
from kneewatch.agent.store.database import file_damage
from kneewatch.agent.store.downsampling import downsample
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.history import ChunkRow
from kneewatch.agent.store.ingest import Writing
from kneewatch.agent.store.outcomes import Evaluation
from kneewatch.agent.store.records import DAY_S, Retention
from kneewatch.agent.store.schema import SCRAPES, SEQUENCE_BITS, SIGNALS, rows_of
from kneewatch.diagnose.intervals import BRIDGED_S, UNWATCHED

COARSENED_AT_ONCE = 6
DELETED_AT_LEAST, DELETED_SHARE = 16, 100
"""The oldest chunks that go at once, for a store that is too large: some, and a hundredth."""

LAYOUTS_MAX = 200


def thin(connection: sqlite3.Connection, *, before_s: float) -> bool:
    """Make one coarse chunk of an owner's chunks from before a time; whether there was one to
    make. Owners wait until a few chunks are due, for a small coarse chunk wastes space."""
    row = connection.execute(
        "SELECT kind, owner_id FROM chunks WHERE kind IN (?, ?) AND step_s = 0 AND max_s < ?"
        " GROUP BY kind, owner_id HAVING count(*) >= ? OR min(max_s) < ? LIMIT 1",
        (SIGNALS, SCRAPES, before_s, COARSENED_AT_ONCE, before_s - DAY_S),
    ).fetchone()
    if row is None:
        return False
    kind, owner_id = row
    chunks = connection.execute(
        "SELECT id, step_s, first_seq, last_seq, min_s, max_s FROM chunks"
        " WHERE kind = ? AND owner_id = ? AND step_s = 0 AND max_s < ?"
        " ORDER BY first_seq LIMIT ?",
        (kind, owner_id, before_s, COARSENED_AT_ONCE),
    ).fetchall()
    downsample(connection, kind, owner_id, [ChunkRow(*chunk) for chunk in chunks])
    return True


def forget(connection: sqlite3.Connection, *, before_s: float) -> bool:
    """Delete what ended before a time; whether an engine went with it. Open rows are sealed
    first."""
    execute = connection.execute
    execute("DELETE FROM chunks WHERE max_s < ?", (before_s,))
    execute("DELETE FROM intervals WHERE end_s < ?", (before_s,))
    execute("DELETE FROM recommendations WHERE last_s < ?", (before_s,))
    for (engine_id,) in execute("SELECT id FROM engines").fetchall():
        _forget_versions(connection, engine_id, before_s)
    gone = execute(
        "SELECT id FROM engines WHERE last_s < ? AND NOT EXISTS (SELECT 1 FROM chunks"
        " WHERE kind != ? AND owner_id = engines.id) AND NOT EXISTS (SELECT 1 FROM open_signals"
        " WHERE open_signals.id BETWEEN engines.id << ? AND ((engines.id + 1) << ?) - 1)",
        (before_s, SCRAPES, SEQUENCE_BITS, SEQUENCE_BITS),
    ).fetchall()
    for (engine_id,) in gone:
        for table in ("documents", "intervals", "recommendations", "configs"):
            execute(f"DELETE FROM {table} WHERE engine_id = ?", (engine_id,))
        execute("DELETE FROM open_counters WHERE id BETWEEN ? AND ?", rows_of(engine_id))
        execute("DELETE FROM engines WHERE id = ?", (engine_id,))
    execute(
        "DELETE FROM targets WHERE id NOT IN (SELECT target_id FROM engines) AND id NOT IN"
        " (SELECT owner_id FROM chunks WHERE kind = ?) AND NOT EXISTS (SELECT 1 FROM open_scrapes"
        " WHERE open_scrapes.id BETWEEN targets.id << ? AND ((targets.id + 1) << ?) - 1)",
        (SCRAPES, SEQUENCE_BITS, SEQUENCE_BITS),
    )
    return bool(gone)


def _forget_versions(connection: sqlite3.Connection, engine_id: int, before_s: float) -> None:
    """Documents and configurations from before a time, but for those still in force then, and
    what a document is told against."""
    execute = connection.execute
    (whole,) = execute(
        "WITH RECURSIVE told (id, base_id) AS ("
        " SELECT * FROM (SELECT id, base_id FROM documents WHERE engine_id = ? AND t_s < ?"
        " ORDER BY t_s DESC, id DESC LIMIT 1)"
        " UNION SELECT d.id, d.base_id FROM documents d JOIN told ON d.id = told.base_id)"
        " SELECT min(id) FROM told",
        (engine_id, before_s),
    ).fetchone()
    if whole is not None:
        # Later documents are told against this one or a later one.
        execute(
            "DELETE FROM documents WHERE engine_id = ? AND t_s < ? AND id < ?",
            (engine_id, before_s, whole),
        )
    execute(
        "DELETE FROM configs WHERE engine_id = ? AND t_s < ? AND id <"
        " (SELECT max(id) FROM configs WHERE engine_id = ? AND t_s < ?)",
        (engine_id, before_s, engine_id, before_s),
    )


def used_bytes(connection: sqlite3.Connection) -> int:
    """What the store's content takes, without pages that are free."""
    pages, free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page_bytes)


def shrink(connection: sqlite3.Connection, *, max_bytes: float) -> bool:
    """Delete the oldest of everything where the content takes more; whether that deleted any."""
    if used_bytes(connection) <= max_bytes:
        return False
    oldest = connection.execute(
        "SELECT max_s FROM chunks ORDER BY max_s LIMIT (SELECT ? + count(*) / ? FROM chunks)",
        (DELETED_AT_LEAST, DELETED_SHARE),
    ).fetchall()
    if not oldest:
        return False
    # The last of them goes too: a moment later is the first that stays.
    (last_s,) = oldest[-1]
    forget(connection, before_s=last_s + 1e-3)
    return True


def drop_layouts(connection: sqlite3.Connection) -> bool:
    """Delete layouts that no open row has, where there are many; whether any was deleted."""
    (layouts,) = connection.execute("SELECT count(*) FROM layouts").fetchone()
    if layouts <= LAYOUTS_MAX:
        return False
    connection.execute(
        "DELETE FROM layouts WHERE id NOT IN (SELECT layout_id FROM open_signals)"
        " AND id NOT IN (SELECT layout_id FROM open_counters)"
    )
    return True


# What the writer does between batches: sealing, thinning, deleting, judging; one small
# transaction at a time. I/O edge.


ROUND_EVERY_S = 60.0
FORGET_EVERY_S = 3600.0
SEAL_AFTER_S = 2 * 3600.0
"""Open rows of an owner that gives no more are sealed after so long."""

FREE_RATIO = 0.1
"""So much of the file may be free pages: the next rows take them."""

VACUUM_PAGES = 500


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """All or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Upkeep:
    """Does one thing at a time, so that cycles are not kept waiting."""

    def __init__(
        self,
        retention: Retention,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retention, self._clock, self._monotonic = retention, clock, monotonic
        self._judging = Evaluation()
        self._since_s = monotonic()
        self._round_s = self._forgot_s = -math.inf
        self._checked_s = clock()
        self._jobs: list[Callable[[sqlite3.Connection, EngineCache], bool]] = []

    def step(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        """Do what is due next; whether there was anything."""
        if ledger.due_engines:
            engine_id, known = ledger.due_engines.popitem()
            with transaction(connection):
                seal_engine(connection, engine_id)
            known.rows = 0
            return True
        if ledger.due_targets:
            target_id, target = ledger.due_targets.popitem()
            with transaction(connection):
                seal_target(connection, target_id)
            target.rows = 0
            return True
        return self._round(connection, ledger)

    def _round(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        now_s = self._clock()
        if not self._jobs:
            if 0 <= now_s - self._round_s < ROUND_EVERY_S:
                return False
            self._round_s = now_s
            self._jobs = [self._vacuum, self._shrink, self._thin, self._judge, self._close]
            if not 0 <= now_s - self._forgot_s < FORGET_EVERY_S:
                self._forgot_s = now_s
                self._jobs += [self._forget, self._seal_idle]
            if not 0 <= now_s - self._checked_s < DAY_S:
                self._checked_s = now_s
                self._jobs.append(self._check)
        job = self._jobs.pop()
        if job(connection, ledger):
            self._jobs.append(job)
        return True

    def _newest_s(self, connection: sqlite3.Connection) -> float:
        """Now, or the newest scrape where that is older: a clock that is ahead deletes nothing."""
        (newest_s,) = connection.execute("SELECT max(max_s) FROM chunks").fetchone()
        return min(self._clock(), math.inf if newest_s is None else newest_s)

    def _close(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        """Close what is open of engines that nobody scrapes any more, and forget them."""
        now_s = self._monotonic()
        writing = Writing(connection, ledger, self._monotonic)
        gone = [
            (target, name, known)
            for target in ledger.targets.values()
            for name, known in target.engines.items()
            if known.session and now_s - known.seen_s > BRIDGED_S
        ]
        with transaction(connection):
            for _, _, known in gone:
                writing.close(known)
            if now_s - self._since_s > BRIDGED_S:
                self._close_unseen(connection, ledger.session)
        for target, name, known in gone:
            del target.engines[name]
            ledger.session.discard(known.id)
        ledger.drop_empty()
        return False

    def _close_unseen(self, connection: sqlite3.Connection, session: set[int]) -> None:
        opened = connection.execute(
            "SELECT DISTINCT engine_id, engines.last_s FROM intervals"
            " JOIN engines ON engines.id = engine_id WHERE end_s IS NULL"
        ).fetchall()
        for engine_id, last_s in opened:
            if engine_id not in session:
                connection.execute(
                    "UPDATE intervals SET end_s = max(start_s, coalesce(last_s, ?)),"
                    " last_s = coalesce(last_s, ?), ended = ?"
                    " WHERE engine_id = ? AND end_s IS NULL",
                    (last_s, last_s, UNWATCHED, engine_id),
                )
                connection.execute(
                    "UPDATE recommendations SET last_s = ? WHERE engine_id = ? AND last_s IS NULL",
                    (last_s, engine_id),
                )

    def _seal_idle(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        """Seal what lies open of owners that give no more."""
        before_s = self._clock() - SEAL_AFTER_S
        for table, owners, seal in (
            ("open_signals", "engines", partial(seal_engine, over=True)),
            ("open_scrapes", "targets", seal_target),
        ):
            for (owner_id,) in connection.execute(f"SELECT id FROM {owners}").fetchall():
                newest = connection.execute(
                    f"SELECT t_s FROM {table} WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1",
                    rows_of(owner_id),
                ).fetchone()
                if newest is not None and newest[0] < before_s:
                    with transaction(connection):
                        seal(connection, owner_id)
        return False

    def _judge(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        with transaction(connection):
            self._judging.look(connection, self._clock())
        return False

    def _thin(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_s
        with transaction(connection):
            return thin(connection, before_s=before_s)

    def _forget(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_coarse_s
        with transaction(connection):
            gone = forget(connection, before_s=before_s) | drop_layouts(connection)
        if gone:
            ledger.reload()
        return False

    def _shrink(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        with transaction(connection):
            shrunk = shrink(connection, max_bytes=self._retention.max_bytes)
        if shrunk:
            ledger.reload()
        return shrunk

    def _check(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        """Look for damage that nobody has come across."""
        why = file_damage(connection)
        if why:
            raise DamagedError(why)
        return False

    def _vacuum(self, connection: sqlite3.Connection, ledger: EngineCache) -> bool:
        """Give free pages back to the disk, some at a time."""
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        if free <= FREE_RATIO * pages + VACUUM_PAGES:
            return False
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return True
