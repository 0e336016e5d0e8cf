"""The history, read: beside a writing daemon, many at once, safe between threads. I/O edge."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from kneewatch.agent.store.arrays import PLAIN, DamagedError, Loops
from kneewatch.agent.store.database import connect_to_read, identity
from kneewatch.agent.store.history import passed_over, read_scrapes, read_signals
from kneewatch.agent.store.model import (
    KINDS,
    ConfigChange,
    Interval,
    Look,
    Scrapes,
    Series,
    StoredEngine,
    StoredRecommendation,
)
from kneewatch.agent.store.packing import EngineName, PackedCycle
from kneewatch.agent.store.past import document_at, document_waiting, watched
from kneewatch.collector.base import StoreError
from kneewatch.rules.model import Severity

LAST_S = (
    "coalesce((SELECT t_s FROM open_signals o WHERE o.id BETWEEN e.id << 40"
    " AND ((e.id + 1) << 40) - 1 ORDER BY o.id DESC LIMIT 1), e.last_s)"
)
"""When an engine was last scraped."""


class Reader:
    """What a store holds. Each answer is of one moment of the file, however the daemon goes on."""

    def __init__(self, path: Path, loops: Loops = PLAIN) -> None:
        """Opens the store.

        Raises:
            StoreError: there is none, or it cannot be read; the message says what to do.
        """
        self.path, self._loops = path, loops
        self._lock = threading.Lock()
        self._file = identity(path)
        self._connection: sqlite3.Connection | None = connect_to_read(path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The engines of a target, or all of them."""
        with self._moment() as connection:
            rows = connection.execute(
                f"SELECT e.id, name, model, engine, replica, labels, first_s, {LAST_S}"
                " FROM engines e JOIN targets t ON t.id = target_id WHERE ? IN (name, '')"
                " ORDER BY name, e.id",
                (target or "",),
            ).fetchall()
        return [
            StoredEngine(id_, name, model, engine, replica, orjson.loads(labels), first_s, last_s)
            for id_, name, model, engine, replica, labels, first_s, last_s in rows
        ]

    def scrapes(self, target: str, *, from_s: float, to_s: float) -> Scrapes:
        """Every scrape of a target; of old ones those that failed and one a minute."""
        span = {"from_s": from_s, "to_s": to_s}
        with self._moment() as connection:
            row = connection.execute("SELECT id FROM targets WHERE name = ?", (target,)).fetchone()
            if row is None:
                return Scrapes(array("d"), {})
            return read_scrapes(connection, row[0], self._loops, **span)

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """Signals of an engine: every scrape, or a value a minute where they are old."""
        with self._moment() as connection:
            return read_signals(connection, engine_id, keys, from_s=from_s, to_s=to_s)

    def intervals(
        self,
        *,
        from_s: float,
        to_s: float,
        engine_id: int | None = None,
        kinds: Sequence[str] = KINDS,
    ) -> list[Interval]:
        """The intervals that reach into a time, by their start. Those that go on reach into any
        that their start does."""
        marks = ", ".join("?" * len(kinds))
        with self._moment() as connection:
            rows = connection.execute(
                "SELECT engine_id, kind, i.name, severity, start_s, end_s,"
                f" coalesce(i.last_s, {LAST_S}), ended"
                " FROM intervals i JOIN engines e ON e.id = engine_id"
                " WHERE start_s <= ? AND (end_s IS NULL OR end_s >= ?)"
                f" AND (? IS NULL OR engine_id = ?) AND kind IN ({marks})"
                " ORDER BY start_s, i.id",
                (to_s, from_s, engine_id, engine_id, *kinds),
            ).fetchall()
        return [
            Interval(engine, kind, name, Severity(worst), start_s, end_s, last_s, ended)
            for engine, kind, name, worst, start_s, end_s, last_s, ended in rows
        ]

    def document(self, engine_id: int, at_s: float) -> dict[str, Any] | None:
        """The diagnosis in force at that moment; None where none is known."""
        return self.look(engine_id, at_s).document

    def look(self, engine_id: int, at_s: float) -> Look:
        """The same, and why there is none."""
        with self._moment() as connection:
            try:
                return Look(document_at(connection, engine_id, at_s))
            except DamagedError as error:
                passed_over("document", engine_id, error)
                return Look(None, damaged=True)

    def waiting(
        self, engine: StoredEngine, cycles: Sequence[PackedCycle], at_s: float
    ) -> dict[str, Any] | None:
        """The same from cycles that are not written yet; None where they do not tell of it."""
        name = EngineName(engine.target, engine.model, engine.engine, engine.replica)
        with self._moment() as connection:
            try:
                return document_waiting(connection, engine.id, name, cycles, at_s)
            except DamagedError as error:
                passed_over("document", engine.id, error)
                return None

    def watched(self, engine_id: int, at_s: float) -> bool:
        """Whether the engine was watched at that moment."""
        with self._moment() as connection:
            return watched(connection, engine_id, at_s)

    def recommendations(
        self, *, from_s: float, to_s: float, engine_id: int | None = None
    ) -> list[StoredRecommendation]:
        """The recommendations told or followed in that time, by when they were first told."""
        with self._moment() as connection:
            rows = connection.execute(
                f"SELECT r.engine_id, document, r.first_s, coalesce(r.last_s, {LAST_S}) AS told_s,"
                " fate, applied_s, measured FROM recommendations r"
                " JOIN engines e ON e.id = r.engine_id"
                " WHERE (r.first_s <= ? AND told_s >= ? OR applied_s BETWEEN ? AND ?)"
                " AND (? IS NULL OR r.engine_id = ?) ORDER BY r.first_s, r.id",
                (to_s, from_s, from_s, to_s, engine_id, engine_id),
            ).fetchall()
        return [_recommendation(row) for row in rows]

    def configs(self, engine_id: int, *, from_s: float, to_s: float) -> list[ConfigChange]:
        """The engine's starts and changes of configuration in that time."""
        with self._moment() as connection:
            rows = connection.execute(
                "SELECT t_s, lag(labels, 1, '{}') OVER (ORDER BY id), labels, started_s, restart"
                " FROM configs WHERE engine_id = ? ORDER BY id",
                (engine_id,),
            ).fetchall()
        return [
            ConfigChange(row[0], orjson.loads(row[1]), orjson.loads(row[2]), row[3], row[4])
            for row in rows
            if from_s <= row[0] <= to_s
        ]

    @contextmanager
    def _moment(self) -> Generator[sqlite3.Connection]:
        """The file as it is at one moment; opened anew where another one lies there by now."""
        with self._lock:
            if self._connection is None or identity(self.path) != self._file:
                if self._connection is not None:
                    self._connection.close()
                self._file, self._connection = identity(self.path), None
                self._connection = connect_to_read(self.path)
            connection = self._connection
            try:
                connection.execute("BEGIN")
                yield connection
            except sqlite3.Error as error:
                raise StoreError(f"cannot read {self.path}: {error}") from error
            finally:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")


def _recommendation(row: Sequence[Any]) -> StoredRecommendation:
    engine_id, document, first_s, last_s, fate, applied_s, measured = row
    told = orjson.loads(document)
    return StoredRecommendation(
        engine_id,
        told,
        first_s,
        last_s,
        fate,
        applied_s,
        told.get("predicted", {}),
        orjson.loads(measured),
    )
