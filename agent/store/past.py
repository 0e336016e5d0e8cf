"""A diagnosis of the past: the document in force, with the numbers of the moment. I/O edge."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kneewatch.agent.store.arrays import DamagedError
from kneewatch.agent.store.chunk import SignalChunk
from kneewatch.agent.store.documents import at_scrape, expand
from kneewatch.agent.store.history import ChunkRow, OpenRows, chunk_rows, passed_over, reading
from kneewatch.agent.store.rows import rows_of
from kneewatch.agent.store.schema import SIGNALS

INTERVALS_AWAY = 5
"""A moment so many intervals after the last scrape was not watched."""

LEAST_S = 2.0
GAPS = 4


@dataclass(frozen=True, slots=True)
class Scrape:
    """The newest scrape at or before a moment. `interval_s` is the distance of scrapes there,
    `values` gives its signals."""

    t_s: float
    interval_s: float
    exact: bool
    values: Callable[[], Mapping[str, float]]


def document_at(
    connection: sqlite3.Connection, engine_id: int, at_s: float
) -> dict[str, Any] | None:
    """The diagnosis in force at a moment; None where the engine was not watched then. The caller
    has begun a transaction."""
    scrape = _scrape(connection, engine_id, at_s)
    if scrape is None or at_s - scrape.t_s > INTERVALS_AWAY * max(scrape.interval_s, LEAST_S):
        return None
    row = connection.execute(
        "SELECT d.id, d.body, base.body, d.base_id FROM documents d"
        " LEFT JOIN documents base ON base.id = d.base_id"
        " WHERE d.engine_id = ? AND d.t_s <= ? ORDER BY d.t_s DESC, d.id DESC LIMIT 1",
        (engine_id, scrape.t_s),
    ).fetchone()
    if row is None:
        return None
    row_id, body, base, base_id = row
    try:
        stored = expand(body, None if base_id is None else expand(base or b"", None))
        return at_scrape(stored, scrape.t_s, scrape.values(), exact=scrape.exact)
    except DamagedError as error:
        passed_over("document", row_id, error)
        return None


def _scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    found = [_open_scrape(connection, engine_id, at_s)]
    # Chunks overlap only where the clock was set back.
    rows = chunk_rows(connection, SIGNALS, engine_id, from_s=-math.inf, to_s=at_s)
    newest = max((row.max_s for row in rows if row.max_s <= at_s), default=-math.inf)
    for row in rows:
        if row.max_s >= newest:
            found.append(_sealed_scrape(connection, row, at_s))
    known = [one for one in found if one is not None]
    return max(known, key=lambda one: one.t_s, default=None)


def _open_scrape(connection: sqlite3.Connection, engine_id: int, at_s: float) -> Scrape | None:
    rows = connection.execute(
        "SELECT t_s, layout_id, body FROM open_signals WHERE id BETWEEN ? AND ? AND t_s <= ?"
        " ORDER BY t_s DESC, id DESC LIMIT ?",
        (*rows_of(engine_id), at_s, GAPS),
    ).fetchall()
    if not rows:
        return None

    def values() -> Mapping[str, float]:
        _, layout_id, body = rows[0]
        found = OpenRows(connection).row(layout_id, body)
        return {} if found is None else {key: found[1][at] for key, at in found[0].items()}

    times = [row[0] for row in reversed(rows)]
    return Scrape(times[-1], _interval_s(times), exact=True, values=values)


def _sealed_scrape(connection: sqlite3.Connection, row: ChunkRow, at_s: float) -> Scrape | None:
    try:
        with reading(connection, row.id) as read:
            times = SignalChunk(read).times()
    except DamagedError as error:
        passed_over("chunk", row.id, error)
        return None
    before = [(t_s, index) for index, t_s in enumerate(times) if t_s <= at_s]
    if not before:
        return None
    t_s, at = max(before)

    def values() -> Mapping[str, float]:
        with reading(connection, row.id) as read:
            return SignalChunk(read).values(at)

    interval_s = max(_interval_s(times[max(0, at + 1 - GAPS) : at + 1]), row.step_s)
    return Scrape(t_s, interval_s, exact=row.step_s == 0, values=values)


def _interval_s(times: Sequence[float]) -> float:
    """The longest of the last distances: a target in trouble is asked less often."""
    return max((b - a for a, b in pairwise(times)), default=0.0)
