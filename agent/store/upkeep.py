"""What the writer does between batches: sealing, thinning, deleting, judging; one small
transaction at a time. I/O edge."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from kneewatch.agent.store.arrays import DamagedError
from kneewatch.agent.store.database import file_damage
from kneewatch.agent.store.intervals import BRIDGED_S, UNWATCHED
from kneewatch.agent.store.judging import Judging
from kneewatch.agent.store.ledger import Ledger
from kneewatch.agent.store.model import DAY_S, Retention
from kneewatch.agent.store.retention import drop_layouts, forget, shrink, thin
from kneewatch.agent.store.rows import rows_of
from kneewatch.agent.store.sealing import seal_engine, seal_target
from kneewatch.agent.store.writing import Writing

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
        self._judging = Judging()
        self._since_s = monotonic()
        self._round_s = self._forgot_s = -math.inf
        self._checked_s = clock()
        self._jobs: list[Callable[[sqlite3.Connection, Ledger], bool]] = []

    def step(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
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

    def _round(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
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

    def _close(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
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

    def _seal_idle(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
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

    def _judge(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        with transaction(connection):
            self._judging.look(connection, self._clock())
        return False

    def _thin(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_s
        with transaction(connection):
            return thin(connection, before_s=before_s)

    def _forget(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_coarse_s
        with transaction(connection):
            gone = forget(connection, before_s=before_s) | drop_layouts(connection)
        if gone:
            ledger.reload()
        return False

    def _shrink(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        with transaction(connection):
            shrunk = shrink(connection, max_bytes=self._retention.max_bytes)
        if shrunk:
            ledger.reload()
        return shrunk

    def _check(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        """Look for damage that nobody has come across."""
        why = file_damage(connection)
        if why:
            raise DamagedError(why)
        return False

    def _vacuum(self, connection: sqlite3.Connection, ledger: Ledger) -> bool:
        """Give free pages back to the disk, some at a time."""
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        if free <= FREE_RATIO * pages + VACUUM_PAGES:
            return False
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return True
