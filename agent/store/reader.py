"""Reads the history and past diagnoses while the daemon writes. Thread-safe. I/O edge."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kneewatch.agent.store.chunks import SignalChunk
from kneewatch.agent.store.columns import PLAIN, DamagedError, Loops, floats_of
from kneewatch.agent.store.database import connect_to_read, identity
from kneewatch.agent.store.encoding import (
    CHAIN,
    EngineName,
    PackedCycle,
    PackedEngine,
    at_scrape,
    expand,
)
from kneewatch.agent.store.history import (
    ChunkRow,
    OpenRows,
    chunk_rows,
    passed_over,
    read_scrapes,
    read_signals,
    reading,
)
from kneewatch.agent.store.records import (
    KINDS,
    ConfigChange,
    Interval,
    Look,
    Scrapes,
    Series,
    StoredEngine,
    StoredRecommendation,
)
from kneewatch.agent.store.schema import SIGNALS, rows_of
from kneewatch.collector.errors import StoreError
from kneewatch.diagnose.intervals import AWAY_STEPS, TIMES_KEPT, away_s
from kneewatch.rules.rule import Severity


@dataclass(frozen=True, slots=True)
class Scrape:
    """The newest scrape at or before a moment. It tells of `lasts_s` after it, `values` gives its
    signals."""

    t_s: float
    lasts_s: float
    exact: bool
    values: Callable[[], Mapping[str, float]]

    def told(self, at_s: float) -> bool:
        """Whether it tells of a moment: the next one was not due long before."""
        return at_s - self.t_s <= self.lasts_s


def document_at(
    connection: sqlite3.Connection, engine_id: int, at_s: float
) -> dict[str, Any] | None:
    """The diagnosis in force at a moment; None where the engine was not watched then. The caller
    has begun a transaction.

    Raises:
        DamagedError: what is stored of that moment is not what was written.
    """
    scrape = _scrape(connection, engine_id, at_s)
    if scrape is None or not scrape.told(at_s):
        return None
    stored = _stored(connection, engine_id, scrape.t_s)
    if stored is None:
        return None
    told, exact = stored
    return at_scrape(told, scrape.t_s, scrape.values(), averaged=not scrape.exact, exact=exact)


def watched(connection: sqlite3.Connection, engine_id: int, at_s: float) -> bool:
    """Whether the engine was watched at a moment. The caller has begun a transaction."""
    try:
        scrape = _scrape(connection, engine_id, at_s)
    except DamagedError:
        return False
    return scrape is not None and scrape.told(at_s)


def document_waiting(
    connection: sqlite3.Connection,
    engine_id: int,
    name: EngineName,
    waiting: Sequence[PackedCycle],
    at_s: float,
) -> dict[str, Any] | None:
    """The same from cycles that wait to be written, in order; None where none of them tells."""
    own = [
        engine
        for cycle in waiting
        if cycle.target == name.target
        for engine in cycle.engines
        if engine.name == name and engine.t_s <= at_s
    ]
    if not own:
        return None
    last = own[-1]
    times = [one.t_s for one in own[-TIMES_KEPT:]]
    scrape = Scrape(last.t_s, away_s(times), exact=True, values=lambda: _values(last))
    if not scrape.told(at_s):
        return None
    told = next((one.document for one in reversed(own) if one.document is not None), None)
    if told is None:
        stored = _stored(connection, engine_id, last.t_s)
        told = None if stored is None else stored[0]
    if told is None:
        return None
    return at_scrape(told, last.t_s, scrape.values(), averaged=False, exact=True)


def _values(engine: PackedEngine) -> Mapping[str, float]:
    return dict(zip(engine.keys, floats_of("f", engine.signals), strict=True))


def _stored(
    connection: sqlite3.Connection, engine_id: int, t_s: float
) -> tuple[bytes, bool] | None:
    """The newest document at or before a scrape, and whether it holds until the next one."""
    rows = connection.execute(
        "WITH RECURSIVE told (id, base_id, body, exact, links) AS ("
        " SELECT * FROM (SELECT id, base_id, body, exact, 0 FROM documents"
        " WHERE engine_id = ? AND t_s <= ? ORDER BY t_s DESC, id DESC LIMIT 1)"
        " UNION ALL SELECT d.id, d.base_id, d.body, d.exact, links + 1 FROM documents d"
        " JOIN told ON d.id = told.base_id WHERE links <= ?)"
        " SELECT body, exact FROM told ORDER BY links DESC",
        (engine_id, t_s, CHAIN),
    ).fetchall()
    if not rows:
        return None
    made: bytes | None = None
    for body, _ in rows:
        made = expand(body, made)
    return made or b"", bool(rows[-1][1])


def _scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    """The newest scrape at or before a moment.

    Raises:
        DamagedError: it is in a chunk that cannot be read.
    """
    found = [_open_scrape(connection, engine_id, at_s)]
    damage: DamagedError | None = None
    # Chunks overlap only where the clock was set back.
    rows = chunk_rows(connection, SIGNALS, engine_id, from_s=-math.inf, to_s=at_s)
    newest = max((row.max_s for row in rows if row.max_s <= at_s), default=-math.inf)
    for row in rows:
        if row.max_s >= newest:
            try:
                found.append(_sealed_scrape(connection, row, at_s))
            except DamagedError as error:
                passed_over("chunk", row.id, error)
                damage = error if at_s <= row.max_s + away_s(()) else damage
    known = [one for one in found if one is not None]
    newest_known = max(known, key=lambda one: one.t_s, default=None)
    if damage is not None and (newest_known is None or not newest_known.told(at_s)):
        raise damage
    return newest_known


def _open_scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    rows = connection.execute(
        "SELECT t_s, layout_id, body FROM open_signals WHERE id BETWEEN ? AND ? AND t_s <= ?"
        " ORDER BY t_s DESC, id DESC LIMIT ?",
        (*rows_of(engine_id), at_s, TIMES_KEPT),
    ).fetchall()
    if not rows:
        return None

    def values() -> Mapping[str, float]:
        _, layout_id, body = rows[0]
        found = OpenRows(connection).row(layout_id, body)
        if found is None:
            raise DamagedError("a scrape's signals cannot be read")
        return {key: found[1][at] for key, at in found[0].items()}

    times = [row[0] for row in reversed(rows)]
    return Scrape(times[-1], away_s(times), exact=True, values=values)


def _sealed_scrape(connection: sqlite3.Connection, row: ChunkRow, at_s: float) -> Scrape | None:
    with reading(connection, row.id) as read:
        times = SignalChunk(read).times()
    before = [(t_s, index) for index, t_s in enumerate(times) if t_s <= at_s]
    if not before:
        return None
    t_s, at = max(before)

    def values() -> Mapping[str, float]:
        with reading(connection, row.id) as read:
            return SignalChunk(read).values(at)

    newest = times[max(0, at + 1 - TIMES_KEPT) : at + 1]
    lasts_s = max(away_s(newest), AWAY_STEPS * row.step_s)
    return Scrape(t_s, lasts_s, exact=row.step_s == 0, values=values)


# --- The history, read: beside a writing daemon, many at once, safe between threads. I/O edge -----


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
