"""Reads the history and past diagnoses, even while the daemon writes. Thread-safe. I/O edge."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import astuple

from kneewatch.agent.store.chunks import (
    PURE_PYTHON,
    DamagedError,
    Decoders,
    SignalChunk,
)
from kneewatch.agent.store.database import SIGNALS, connect_to_read, identity, is_damage, rows_of
from kneewatch.agent.store.encoding import (
    CHAIN_MAX_LINKS,
    decompress_document,
    verdict_at_scrape,
)
from kneewatch.agent.store.records import KINDS, Scrapes, Series, StoredEngine
from kneewatch.agent.store.stored_series import (
    OPEN_SIGNALS,
    ChunkRow,
    chunk_reader,
    chunk_rows,
    log_damage,
    open_rows,
    read_scrapes,
    read_signals,
)
from kneewatch.collector.errors import StoreError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.packaged import decoder
from kneewatch.diagnose.change import AWAY_STEPS, TIMES_KEPT, Interval, away_s
from kneewatch.diagnose.engine_history import ConfigChange, PastAdvice
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import SEVERITIES

RECOMMENDATION = decoder(Advice)


class Scrape(Struct, frozen=True):
    """The newest scrape at or before a time. It is valid for `lasts_s` seconds. `values` reads its
    signals."""

    t_s: float
    lasts_s: float
    exact: bool
    values: Callable[[], Mapping[str, float]]

    def covers(self, at_s: float) -> bool:
        """Whether the scrape is still valid at a time, because the next scrape was not long overdue
        then."""
        return at_s - self.t_s <= self.lasts_s


def _stored_document(
    connection: sqlite3.Connection, engine_id: int, t_s: float
) -> tuple[bytes, bool] | None:
    """The newest document at or before a scrape, and whether it is valid until the next document.
    None if there is none."""
    rows = connection.execute(
        "WITH RECURSIVE chain (id, base_id, body, exact, links) AS ("
        " SELECT * FROM (SELECT id, base_id, body, exact, 0 FROM documents"
        " WHERE engine_id = ? AND t_s <= ? ORDER BY t_s DESC, id DESC LIMIT 1)"
        " UNION ALL SELECT d.id, d.base_id, d.body, d.exact, links + 1 FROM documents d"
        " JOIN chain ON d.id = chain.base_id WHERE links <= ?)"
        " SELECT body, exact FROM chain ORDER BY links DESC",
        (engine_id, t_s, CHAIN_MAX_LINKS),
    ).fetchall()
    if not rows:
        return None
    document: bytes | None = None
    for body, _ in rows:
        document = decompress_document(body, document)
    return document or b"", bool(rows[-1][1])


def _newest_scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    """The newest scrape at or before a time. None if there is none. Damaged chunks are skipped."""
    candidates = [_open_scrape(connection, engine_id, at_s)]
    # Chunks overlap only where the clock was set back.
    rows = chunk_rows(connection, SIGNALS, engine_id, from_s=-math.inf, to_s=at_s)
    newest = max((row.max_s for row in rows if row.max_s <= at_s), default=-math.inf)
    for row in rows:
        if row.max_s >= newest:
            try:
                candidates.append(_chunk_scrape(connection, row, at_s))
            except DamagedError as error:
                log_damage("chunk", row.id, error)
    scrapes = [scrape for scrape in candidates if scrape is not None]
    return max(scrapes, key=lambda scrape: scrape.t_s, default=None)


def _open_scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    rows = connection.execute(
        "SELECT t_s, id FROM open_signals WHERE id BETWEEN ? AND ? AND t_s <= ?"
        " ORDER BY t_s DESC, id DESC LIMIT ?",
        (*rows_of(engine_id), at_s, TIMES_KEPT),
    ).fetchall()
    if not rows:
        return None

    def values() -> Mapping[str, float]:
        ids = rows[0][1], rows[0][1]
        row = next(open_rows(connection, OPEN_SIGNALS, ids), None)
        if row is None:
            raise DamagedError("a scrape's signals cannot be read")
        places, numbers = row[2]
        return {key: numbers[at] for key, at in places.items()}

    times = [t_s for t_s, _ in reversed(rows)]
    return Scrape(times[-1], away_s(times), exact=True, values=values)


def _chunk_scrape(connection: sqlite3.Connection, row: ChunkRow, at_s: float) -> Scrape | None:
    with chunk_reader(connection, row.id) as read:
        times = SignalChunk(read).times()
    before = [(t_s, index) for index, t_s in enumerate(times) if t_s <= at_s]
    if not before:
        return None
    t_s, at = max(before)

    def values() -> Mapping[str, float]:
        with chunk_reader(connection, row.id) as read:
            return SignalChunk(read).values(at)

    newest = times[max(0, at + 1 - TIMES_KEPT) : at + 1]
    lasts_s = max(away_s(newest), AWAY_STEPS * row.step_s)
    return Scrape(t_s, lasts_s, exact=row.step_s == 0, values=values)


# --- The reader -----------------------------------------------------------------------------------


LAST_S = (
    "coalesce((SELECT t_s FROM open_signals o WHERE o.id BETWEEN e.id << 40"
    " AND ((e.id + 1) << 40) - 1 ORDER BY o.id DESC LIMIT 1), e.last_s)"
)
"""SQL expression for the time of an engine's last scrape."""


class Reader:
    """Reads a store. Each query sees a consistent snapshot, even while the daemon writes."""

    def __init__(
        self,
        path: Path,
        loops: Decoders = PURE_PYTHON,
        on_damage: Callable[[], None] = lambda: None,
        *,
        may_be_late: bool = False,
    ) -> None:
        """Open the store. `on_damage` is called when the file turns out to be damaged.
        `may_be_late`: the store may be missing or unreadable until the first query.

        Raises:
            StoreError: the store is missing or unreadable; the message says what to do.
        """
        self.path, self._loops, self._on_damage = path, loops, on_damage
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        with contextlib.suppress(StoreError) if may_be_late else contextlib.nullcontext():
            self._open()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _open(self) -> sqlite3.Connection:
        self._connection = connect_to_read(self.path)
        self._file = identity(self.path)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The engines of a target, or all engines."""
        with self._snapshot() as connection:
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
        """The scrapes of a target. Of downsampled scrapes, all failures are left, and one success
        per minute."""
        span = {"from_s": from_s, "to_s": to_s}
        with self._snapshot() as connection:
            row = connection.execute("SELECT id FROM targets WHERE name = ?", (target,)).fetchone()
            if row is None:
                return Scrapes(array("d"), {})
            return read_scrapes(connection, row[0], self._loops, **span)

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """The signals of an engine at every scrape. Where they were downsampled, there is one value
        per minute."""
        with self._snapshot() as connection:
            return read_signals(connection, engine_id, keys, from_s=from_s, to_s=to_s)

    def intervals(
        self,
        *,
        from_s: float,
        to_s: float,
        engine_id: int | None = None,
        kinds: Sequence[str] = KINDS,
    ) -> list[Interval]:
        """The intervals that overlap a time range, sorted by start. Open intervals have no end."""
        marks = ", ".join("?" * len(kinds))
        with self._snapshot() as connection:
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
            Interval(kind, name, SEVERITIES[int(worst)], start_s, last_s, end_s, ended, engine)
            for engine, kind, name, worst, start_s, end_s, last_s, ended in rows
        ]

    def verdict(self, engine_id: int, at_s: float) -> Verdict | None:
        """The verdict that was valid at a time. None if there is none, or if it is damaged."""
        with self._snapshot() as connection:
            try:
                scrape = _newest_scrape(connection, engine_id, at_s)
                if scrape is None or not scrape.covers(at_s):
                    return None
                stored = _stored_document(connection, engine_id, scrape.t_s)
                if stored is None:
                    return None
                document, exact = stored
                values, averaged = scrape.values(), not scrape.exact
                return verdict_at_scrape(
                    document, scrape.t_s, values, averaged=averaged, exact=exact
                )
            except DamagedError as error:
                log_damage("document", engine_id, error)
                return None

    def watched(self, engine_id: int, at_s: float) -> bool:
        """Whether the engine was being watched at a time."""
        with self._snapshot() as connection:
            scrape = _newest_scrape(connection, engine_id, at_s)
        return scrape is not None and scrape.covers(at_s)

    def recommendations(
        self, *, from_s: float, to_s: float, engine_id: int | None = None
    ) -> list[PastAdvice]:
        """The recommendations that were active or applied in a time range, sorted by start."""
        with self._snapshot() as connection:
            rows = connection.execute(
                f"SELECT r.engine_id, document, r.first_s, coalesce(r.last_s, {LAST_S}) AS until_s,"
                " fate, applied_s, measured FROM recommendations r"
                " JOIN engines e ON e.id = r.engine_id"
                " WHERE (r.first_s <= ? AND until_s >= ? OR applied_s BETWEEN ? AND ?)"
                " AND (? IS NULL OR r.engine_id = ?) ORDER BY r.first_s, r.id",
                (to_s, from_s, from_s, to_s, engine_id, engine_id),
            ).fetchall()
        return [_recommendation(row) for row in rows]

    def configs(self, engine_id: int, *, from_s: float, to_s: float) -> list[ConfigChange]:
        """The starts of an engine and the changes of its configuration in a time range."""
        with self._snapshot() as connection:
            rows = connection.execute(
                "SELECT t_s, lag(labels, 1, '{}') OVER (ORDER BY id), labels, restart"
                " FROM configs WHERE engine_id = ? ORDER BY id",
                (engine_id,),
            ).fetchall()
        return [
            ConfigChange(row[0], orjson.loads(row[1]), orjson.loads(row[2]), row[3])
            for row in rows
            if from_s <= row[0] <= to_s
        ]

    def learned(self, target: str, key: EngineKey) -> bytes | None:
        """What was learned about an engine of a target; None if nothing was stored."""
        place = "target = ? AND model = ? AND engine = ? AND replica = ?"
        with self._snapshot() as connection:
            row = connection.execute(
                f"SELECT body FROM learned WHERE {place}", (target, *astuple(key))
            ).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _snapshot(self) -> Generator[sqlite3.Connection]:
        """A read transaction. If one of the files was replaced, they are opened again first."""
        with self._lock:
            connection = self._connection
            if connection is None or identity(self.path) != self._file:
                self._close()
                connection = self._open()
            try:
                connection.execute("BEGIN")
                yield connection
            except sqlite3.Error as error:
                if is_damage(error):
                    self._on_damage()
                    raise StoreError(
                        f"{self.path} is damaged: {error}; at its start `kneewatch run` moves a "
                        "damaged store aside and begins a new one"
                    ) from error
                raise StoreError(f"cannot read {self.path}: {error}") from error
            finally:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")


def _recommendation(row: Sequence[Any]) -> PastAdvice:
    engine_id, body, first_s, last_s, outcome, applied_s, measured = row
    return PastAdvice(
        engine_id=engine_id,
        recommendation=RECOMMENDATION.decode(body),
        first_s=first_s,
        last_s=last_s,
        outcome=outcome,
        applied_s=applied_s,
        measured=orjson.loads(measured),
    )
