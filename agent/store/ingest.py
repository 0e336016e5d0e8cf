"""Packed cycles into rows, inside the transaction of whoever calls. I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable

from kneewatch.agent.store.chunk_flush import SEAL_ROWS
from kneewatch.agent.store.encoding import CHAIN, SHIFTED, PackedCycle, PackedEngine, squeeze
from kneewatch.agent.store.engine_cache import Chain, EngineCache, KnownEngine, KnownTarget
from kneewatch.agent.store.outcomes import Tracking
from kneewatch.agent.store.records import DAY_S
from kneewatch.agent.store.schema import row_id
from kneewatch.diagnose.intervals import Change

COUNTERS_EVERY_S = 60.0
"""Counters of two rows that stay are at most so far apart, where scrapes are not rarer."""


class Writing:
    """Writes cycles as rows of the open tables, and what changes with them."""

    def __init__(
        self, connection: sqlite3.Connection, ledger: EngineCache, monotonic: Callable[[], float]
    ) -> None:
        self._execute = connection.execute
        self._ledger, self._monotonic = ledger, monotonic
        self._following = Tracking(connection)

    def cycle(self, cycle: PackedCycle) -> None:
        """One cycle of one target."""
        sequence = self._ledger.next_sequence()
        target = self._ledger.target(cycle.target)
        self._execute(
            "INSERT INTO open_scrapes (id, t_s, error) VALUES (?, ?, ?)",
            (row_id(target.id, sequence), cycle.t_s, cycle.error),
        )
        target.rows += 1
        if target.rows >= SEAL_ROWS:
            self._ledger.due_targets[target.id] = target
        written = 0
        for engine in cycle.engines:
            known = self._ledger.engine(target, engine.name, engine.t_s, cycle.labels)
            if known is not None:
                self._engine(known, row_id(known.id, sequence), engine)
                written += 1
        # A cycle without engines and without an error was not newer than the last one.
        if cycle.error is None and cycle.engines and written < len(target.engines):
            self._gone(target, cycle)

    def close(self, known: KnownEngine) -> None:
        """Nobody sees the engine any more: what was open of it ended when it was last seen."""
        self._changes(known, known.book.close())
        self._following.told(known, (), known.last_s)

    def _engine(self, known: KnownEngine, row: int, engine: PackedEngine) -> None:
        if not known.session:
            self._changes(known, known.book.pause())
            self._following.told(known, (), known.last_s)
            known.session = True
            self._ledger.fresh.add(known.id)
        self._execute(
            "INSERT OR REPLACE INTO open_signals (id, t_s, layout_id, body) VALUES (?, ?, ?, ?)",
            (row, engine.t_s, self._ledger.keys_layout(engine.keys), engine.signals),
        )
        known.rows += 1
        if known.rows >= SEAL_ROWS:
            self._ledger.due_engines[known.id] = known
        if engine.columns:
            self._counters(known, row, engine)
        if engine.document is not None:
            self._document(known, row, engine.t_s, engine.document)
        self._changes(known, known.book.take(engine.verdict))
        self._following.take(known, row, engine)
        known.last_s, known.seen_s = engine.t_s, self._monotonic()

    def _counters(self, known: KnownEngine, row: int, engine: PackedEngine) -> None:
        """Write the newest counters. Those before them go unless they are due, or the last ones
        of a process or of a layout."""
        layout, t_s = self._ledger.columns_layout(known, engine.columns), engine.t_s
        another = engine.restart is not None or layout != known.counters_layout
        if another or not known.counters_id:
            known.counters_kept_s = t_s
        elif known.counters_s != known.counters_kept_s:
            if 0 <= t_s - known.counters_kept_s <= COUNTERS_EVERY_S:
                self._execute("DELETE FROM open_counters WHERE id = ?", (known.counters_id,))
            else:
                known.counters_kept_s = known.counters_s
        self._execute(
            "INSERT OR REPLACE INTO open_counters (id, t_s, layout_id, body) VALUES (?, ?, ?, ?)",
            (row, t_s, layout, engine.counters),
        )
        known.counters_id, known.counters_s, known.counters_layout = row, t_s, layout

    def _document(self, known: KnownEngine, row: int, t_s: float, document: bytes) -> None:
        chain, body, base_id = known.documents, b"", None
        if chain is not None and 0 <= t_s - chain.whole_s <= DAY_S:
            anew = chain.links + 1 >= CHAIN
            base_id, base = (chain.whole_id, chain.whole) if anew else (chain.last_id, chain.last)
            body = squeeze(document, base)
            chain.last_id, chain.last = row, document
            chain.links = 0 if anew else chain.links + 1
        if chain is None or base_id is None or len(body) > SHIFTED * chain.whole_bytes:
            body, base_id = squeeze(document, None), None
            known.documents = Chain(row, document, len(body), t_s, row, document)
        self._execute(
            "INSERT OR REPLACE INTO documents (id, engine_id, t_s, base_id, body, exact)"
            " VALUES (?, ?, ?, ?, ?, 1)",
            (row, known.id, t_s, base_id, body),
        )

    def _changes(self, known: KnownEngine, changes: Iterable[Change]) -> None:
        for change in changes:
            one = change.interval
            if change.began:
                self._execute(
                    "INSERT INTO intervals (engine_id, kind, name, severity, start_s)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (known.id, one.kind, one.id, int(one.severity), one.start_s),
                )
                continue
            end_s = change.end_s if change.ended else None
            last_s = one.last_s if one.paused or change.ended else None
            self._execute(
                "UPDATE intervals SET severity = ?, end_s = ?, last_s = ?, ended = ?"
                " WHERE engine_id = ? AND kind = ? AND name = ? AND end_s IS NULL",
                (int(one.severity), end_s, last_s, change.ended, known.id, one.kind, one.id),
            )

    def _gone(self, target: KnownTarget, cycle: PackedCycle) -> None:
        present = {engine.name for engine in cycle.engines}
        for name in [name for name in target.engines if name not in present]:
            known = target.engines.pop(name)
            self.close(known)
            self._ledger.left.add(known.id)
