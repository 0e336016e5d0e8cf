"""A diagnosis of the past: the document in force, with the numbers of the moment. I/O edge."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kneewatch.agent.store.arrays import DamagedError, floats_of
from kneewatch.agent.store.chunk import SignalChunk
from kneewatch.agent.store.documents import CHAIN, at_scrape, expand
from kneewatch.agent.store.history import ChunkRow, OpenRows, chunk_rows, passed_over, reading
from kneewatch.agent.store.intervals import AWAY_STEPS, TIMES_KEPT, away_s
from kneewatch.agent.store.packing import EngineName, PackedCycle, PackedEngine
from kneewatch.agent.store.rows import rows_of
from kneewatch.agent.store.schema import SIGNALS


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
