"""Writes encoded cycles as open rows, and turns full sets of open rows into chunks. All in the
caller's transaction. I/O edge."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from kneewatch.agent.store.chunks import pack_counters, pack_scrapes, pack_signals
from kneewatch.agent.store.database import (
    COUNTERS,
    SCRAPES,
    SEQUENCE_MASK,
    SIGNALS,
    connect,
    row_id,
    rows_of,
)
from kneewatch.agent.store.encoding import (
    CHAIN_MAX_LINKS,
    DELTA_MAX_RATIO,
    EngineName,
    PackedCycle,
    PackedEngine,
    Packer,
    compress_document,
)
from kneewatch.agent.store.engine_cache import (
    CachedEngine,
    CachedTarget,
    DocumentChain,
    EngineCache,
)
from kneewatch.agent.store.outcomes import Tracking
from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.agent.store.stored_series import (
    OPEN_COUNTERS,
    OPEN_SIGNALS,
    Name,
    OpenTable,
    columns_by_name,
    insert_chunk,
    open_rows,
    scrapes_from_rows,
)
from kneewatch.collector.errors import StoreError
from kneewatch.diagnose.change import Change
from kneewatch.rules.rule import DAY_S

# --- Chunk flush: open rows as chunks -------------------------------------------------------------


FLUSH_ROWS = 720
"""Number of open rows that form a chunk: an hour at a 5 s interval."""


def flush_engine(connection: sqlite3.Connection, engine_id: int, *, over: bool = False) -> None:
    """Write an engine's open rows as chunks. The newest row of counters stays open, because the
    next row may replace it. With `over`, the engine has ended and that row is written too."""
    times = _flush(connection, engine_id, SIGNALS, OPEN_SIGNALS, pack_signals)
    if times:
        connection.execute("UPDATE engines SET last_s = ? WHERE id = ?", (times[-1], engine_id))
    _flush(connection, engine_id, COUNTERS, OPEN_COUNTERS, pack_counters, left=0 if over else 1)


def flush_target(connection: sqlite3.Connection, target_id: int) -> None:
    """Write a target's open scrapes as a chunk."""
    rows = connection.execute(
        "SELECT id, t_s, error FROM open_scrapes WHERE id BETWEEN ? AND ? ORDER BY id",
        rows_of(target_id),
    ).fetchall()
    if rows:
        scrapes = scrapes_from_rows([(t_s, error) for _, t_s, error in rows])
        insert_chunk(
            connection,
            (SCRAPES, target_id, 0.0),
            (rows[0][0] & SEQUENCE_MASK, rows[-1][0] & SEQUENCE_MASK),
            scrapes.times,
            pack_scrapes(scrapes),
        )
        _delete(connection, "open_scrapes", target_id, rows[-1][0])


def _flush(
    connection: sqlite3.Connection,
    engine_id: int,
    kind: int,
    of: OpenTable[Name],
    pack: Callable[[Sequence[float], Mapping[Name, Sequence[float]]], bytes],
    *,
    left: int = 0,
) -> Sequence[float]:
    """Write open rows as a chunk, except the newest `left`. Returns the times of the chunk."""
    (first, last), times = rows_of(engine_id), tuple[float, ...]()
    (newest,) = connection.execute(
        f"SELECT max(id) FROM {of.table} WHERE id BETWEEN ? AND ?", (first, last)
    ).fetchone()
    if newest is None:
        return times
    decoded = list(open_rows(connection, of, (first, newest - left)))
    if decoded:
        ids, times, rows = zip(*decoded, strict=True)
        insert_chunk(
            connection,
            (kind, engine_id, 0.0),
            (ids[0] & SEQUENCE_MASK, ids[-1] & SEQUENCE_MASK),
            times,
            pack(times, columns_by_name(rows)),
        )
    _delete(connection, of[0], engine_id, newest - left)
    return times


def _delete(connection: sqlite3.Connection, table: str, owner_id: int, last: int) -> None:
    connection.execute(
        f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", (rows_of(owner_id)[0], last)
    )


# --- Packed cycles as rows ------------------------------------------------------------------------


BATCH_BYTES = 2 * 1024 * 1024
"""Bytes of cycles that are written in one transaction; one cycle at least."""

COUNTERS_INTERVAL_S = 60.0
"""Seconds between two rows of counters that are kept. If scrapes are less frequent, all rows are
kept."""


class CycleWriter:
    """Writes cycles as open rows, and updates intervals, documents and configurations."""

    def __init__(
        self, connection: sqlite3.Connection, cache: EngineCache, monotonic: Callable[[], float]
    ) -> None:
        self._execute = connection.execute
        self._cache, self._monotonic = cache, monotonic
        self._tracking = Tracking(connection)

    def write(self, cycle: PackedCycle) -> None:
        """Write one cycle of one target."""
        sequence = self._cache.next_sequence()
        target = self._cache.target(cycle.target)
        self._execute(
            "INSERT INTO open_scrapes (id, t_s, error) VALUES (?, ?, ?)",
            (row_id(target.id, sequence), cycle.t_s, cycle.error),
        )
        target.rows += 1
        if target.rows >= FLUSH_ROWS:
            self._cache.due_targets[target.id] = target
        written = 0
        for packed in cycle.engines:
            engine = self._cache.engine(target, packed.name, packed.t_s, cycle.labels)
            if engine is not None:
                self._write_engine(engine, row_id(engine.id, sequence), packed)
                written += 1
        # A cycle without engines and without an error repeats a page already seen: the engines
        # are still there.
        if cycle.error is None and cycle.engines and written < len(target.engines):
            self._close_missing(target, cycle)

    def close(self, engine: CachedEngine) -> None:
        """End all open intervals and recommendations of an engine at its last scrape."""
        self._write_changes(engine, engine.book.close())
        self._tracking.set_active(engine, {}, engine.last_s)

    def _write_engine(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        if not engine.session:
            self._write_changes(engine, engine.book.pause())
            self._tracking.set_active(engine, {}, engine.last_s)
            engine.session = True
            self._cache.fresh.add(engine.id)
        self._execute(
            "INSERT OR REPLACE INTO open_signals (id, t_s, layout_id, body) VALUES (?, ?, ?, ?)",
            (row, packed.t_s, self._cache.keys_layout(packed.keys), packed.signals),
        )
        engine.rows += 1
        if engine.rows >= FLUSH_ROWS:
            self._cache.due_engines[engine.id] = engine
        if packed.columns:
            self._write_counters(engine, row, packed)
        if packed.document is not None:
            self._write_document(engine, row, packed.t_s, packed.document)
        changes = engine.book.take(
            packed.t_s,
            packed.conditions,
            read=packed.read,
            restarted=packed.restart is not None,
        )
        self._write_changes(engine, changes)
        self._tracking.update(engine, row, packed)
        engine.last_s, engine.seen_s = packed.t_s, self._monotonic()

    def _write_counters(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        """Write the newest counters, in place of the previous ones. The previous row stays, and
        another follows, if it is due to be kept or is the last of a process or of a layout."""
        t_s = packed.t_s
        layout = self._cache.columns_layout(engine, packed.columns, t_s)
        if layout is None:
            return
        new_series = packed.restart is not None or layout != engine.counters_layout
        if new_series or not engine.counters_id:
            engine.counters_kept_s = t_s
        elif engine.counters_s != engine.counters_kept_s:
            if 0 <= t_s - engine.counters_kept_s <= COUNTERS_INTERVAL_S:
                self._execute(
                    "UPDATE open_counters SET t_s = ?, body = ? WHERE id = ?",
                    (t_s, packed.counters, engine.counters_id),
                )
                engine.counters_s = t_s
                return
            engine.counters_kept_s = engine.counters_s
        self._execute(
            "INSERT OR REPLACE INTO open_counters (id, t_s, layout_id, body) VALUES (?, ?, ?, ?)",
            (row, t_s, layout, packed.counters),
        )
        engine.counters_id, engine.counters_s, engine.counters_layout = row, t_s, layout

    def _write_document(self, engine: CachedEngine, row: int, t_s: float, document: bytes) -> None:
        """Write a document as a delta to the previous one. If that saves little, the document is
        written whole."""
        chain, body, base_id = engine.documents, b"", None
        if chain is not None and 0 <= t_s - chain.whole_s <= DAY_S:
            rebase = chain.links + 1 >= CHAIN_MAX_LINKS
            base_id, base = (chain.whole_id, chain.whole) if rebase else (chain.last_id, chain.last)
            body = compress_document(document, base)
            chain.last_id, chain.last = row, document
            chain.links = 0 if rebase else chain.links + 1
        if chain is None or base_id is None or len(body) > DELTA_MAX_RATIO * chain.whole_bytes:
            body, base_id = compress_document(document, None), None
            engine.documents = DocumentChain(row, document, len(body), t_s, row, document)
        self._execute(
            "INSERT OR REPLACE INTO documents (id, engine_id, t_s, base_id, body, exact)"
            " VALUES (?, ?, ?, ?, ?, 1)",
            (row, engine.id, t_s, base_id, body),
        )

    def _write_changes(self, engine: CachedEngine, changes: Iterable[Change]) -> None:
        for interval, what in changes:
            if what == "began":
                self._execute(
                    "INSERT INTO intervals (engine_id, kind, name, severity, start_s)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (
                        engine.id,
                        interval.kind,
                        interval.id,
                        int(interval.severity),
                        interval.start_s,
                    ),
                )
                continue
            last_s = interval.last_s if interval.paused or interval.ended else None
            self._execute(
                "UPDATE intervals SET severity = ?, end_s = ?, last_s = ?, ended = ?"
                " WHERE engine_id = ? AND kind = ? AND name = ? AND end_s IS NULL",
                (
                    int(interval.severity),
                    interval.end_s,
                    last_s,
                    interval.ended,
                    engine.id,
                    interval.kind,
                    interval.id,
                ),
            )

    def _close_missing(self, target: CachedTarget, cycle: PackedCycle) -> None:
        """Close engines that are no longer on the page."""
        present = {packed.name for packed in cycle.engines}
        for name in [name for name in target.engines if name not in present]:
            engine = target.engines.pop(name)
            self.close(engine)
            self._cache.left.add(engine.id)


# --- A store that is filled with the past ---------------------------------------------------------


class StoreFill:
    """Writes verdicts of the past into a new store, each engine in order of time. Used by one
    thread only."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)
        self._connection.execute("BEGIN IMMEDIATE")
        self._cache = EngineCache(self._connection, set())
        self._writer = CycleWriter(self._connection, self._cache, time.monotonic)
        self._packer = Packer()

    def engine(self, name: EngineName, first_s: float) -> int:
        """The id of an engine. It is inserted if it does not exist.

        Raises:
            StoreError: the target has too many engines.
        """
        return self._cached(name, first_s).id

    def write(self, name: EngineName, cycle: EngineCycle, *, any_time: bool = False) -> None:
        """Write a verdict of an engine. `any_time`: the time since its last verdict is no gap."""
        own = replace(cycle.diagnosis, target=name.target, model=name.model, engine=name.engine)
        t_s = own.t_s
        if any_time:
            self._cached(name, t_s).book.forget_steps()
        engines = (replace(cycle, diagnosis=own, replica=name.replica),)
        self._writer.write(self._packer.pack(Cycle(t_s, name.target, {}, engines)))

    def end(self, name: EngineName, t_s: float) -> None:
        """End all open intervals and recommendations of an engine."""
        engine = self._cached(name, t_s)
        self._writer.close(engine)
        engine.book.forget_steps()

    def close(self) -> None:
        self._connection.execute("COMMIT")
        self._connection.close()

    def _cached(self, name: EngineName, t_s: float) -> CachedEngine:
        engine = self._cache.engine(self._cache.target(name.target), name, t_s, {})
        if engine is None:
            raise StoreError(f"{name.target} has too many engines")
        return engine
