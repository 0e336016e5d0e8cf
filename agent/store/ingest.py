"""Writes packed cycles as rows, within the caller's transaction. I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable

from kneewatch.agent.store.chunk_flush import FLUSH_ROWS
from kneewatch.agent.store.encoding import (
    CHAIN_MAX_LINKS,
    DELTA_MAX_RATIO,
    PackedCycle,
    PackedEngine,
    compress_document,
)
from kneewatch.agent.store.engine_cache import (
    CachedEngine,
    CachedTarget,
    DocumentChain,
    EngineCache,
)
from kneewatch.agent.store.outcomes import Tracking
from kneewatch.agent.store.records import DAY_S
from kneewatch.agent.store.schema import row_id
from kneewatch.diagnose.intervals import Change

COUNTERS_INTERVAL_S = 60.0
"""Counters are kept about once a minute, or at every scrape where scrapes are rarer."""


class CycleWriter:
    """Inserts cycles into the open tables and updates intervals, documents and configurations."""

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
        """End an engine's open intervals and recommendations at its last scrape."""
        self._write_changes(engine, engine.book.close())
        self._tracking.set_active(engine, (), engine.last_s)

    def _write_engine(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        if not engine.session:
            self._write_changes(engine, engine.book.pause())
            self._tracking.set_active(engine, (), engine.last_s)
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
        self._write_changes(engine, engine.book.take(packed.verdict))
        self._tracking.update(engine, row, packed)
        engine.last_s, engine.seen_s = packed.t_s, self._monotonic()

    def _write_counters(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        """Write the newest counters and delete the previous ones unless they are due to be kept,
        or are the last of a process or of a layout."""
        layout, t_s = self._cache.columns_layout(engine, packed.columns), packed.t_s
        new_series = packed.restart is not None or layout != engine.counters_layout
        if new_series or not engine.counters_id:
            engine.counters_kept_s = t_s
        elif engine.counters_s != engine.counters_kept_s:
            if 0 <= t_s - engine.counters_kept_s <= COUNTERS_INTERVAL_S:
                self._execute("DELETE FROM open_counters WHERE id = ?", (engine.counters_id,))
            else:
                engine.counters_kept_s = engine.counters_s
        self._execute(
            "INSERT OR REPLACE INTO open_counters (id, t_s, layout_id, body) VALUES (?, ?, ?, ?)",
            (row, t_s, layout, packed.counters),
        )
        engine.counters_id, engine.counters_s, engine.counters_layout = row, t_s, layout

    def _write_document(self, engine: CachedEngine, row: int, t_s: float, document: bytes) -> None:
        """Write a document as a delta to the previous one, or whole where a delta saves little."""
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
        for change in changes:
            interval = change.interval
            if change.began:
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
            end_s = change.end_s if change.ended else None
            last_s = interval.last_s if interval.paused or change.ended else None
            self._execute(
                "UPDATE intervals SET severity = ?, end_s = ?, last_s = ?, ended = ?"
                " WHERE engine_id = ? AND kind = ? AND name = ? AND end_s IS NULL",
                (
                    int(interval.severity),
                    end_s,
                    last_s,
                    change.ended,
                    engine.id,
                    interval.kind,
                    interval.id,
                ),
            )

    def _close_missing(self, target: CachedTarget, cycle: PackedCycle) -> None:
        """Close engines that the page no longer has."""
        present = {packed.name for packed in cycle.engines}
        for name in [name for name in target.engines if name not in present]:
            engine = target.engines.pop(name)
            self.close(engine)
            self._cache.left.add(engine.id)
