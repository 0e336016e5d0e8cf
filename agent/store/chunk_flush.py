"""Chunk flush: encodes open rows as chunks, within the caller's transaction. I/O edge."""

from __future__ import annotations

import sqlite3
from array import array

from kneewatch.agent.store.chunks import pack_counters, pack_scrapes, pack_signals
from kneewatch.agent.store.schema import COUNTERS, SCRAPES, SEQUENCE_MASK, SIGNALS, rows_of
from kneewatch.agent.store.stored_series import (
    OpenRows,
    columns_by_name,
    insert_chunk,
    open_counters,
    scrapes_from_rows,
)

FLUSH_ROWS = 720
"""Open rows per chunk: an hour at a 5 s interval."""


def flush_engine(connection: sqlite3.Connection, engine_id: int, *, over: bool = False) -> None:
    """Flush an engine's open rows. The newest counters stay open, because the next ones may replace
    them, unless the engine is `over`."""
    _flush_signals(connection, engine_id)
    newest = connection.execute(
        "SELECT max(id) FROM open_counters WHERE id BETWEEN ? AND ?", rows_of(engine_id)
    ).fetchone()[0]
    if newest is not None:
        _flush_counters(connection, engine_id, newest + 1 if over else newest)


def flush_target(connection: sqlite3.Connection, target_id: int) -> None:
    """Flush a target's open scrapes."""
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


def _flush_signals(connection: sqlite3.Connection, engine_id: int) -> None:
    open_rows, ids, times = OpenRows(connection), array("q"), array("d")
    decoded: list[tuple[dict[str, int], array[float]]] = []
    rows = connection.execute(
        "SELECT id, t_s, layout_id, body FROM open_signals WHERE id BETWEEN ? AND ? ORDER BY id",
        rows_of(engine_id),
    )
    last = None
    for last, t_s, layout_id, body in rows:
        row = open_rows.row(layout_id, body)
        if row is not None:
            ids.append(last)
            times.append(t_s)
            decoded.append(row)
    if last is None:
        return
    if times:
        insert_chunk(
            connection,
            (SIGNALS, engine_id, 0.0),
            (ids[0] & SEQUENCE_MASK, ids[-1] & SEQUENCE_MASK),
            times,
            pack_signals(times, columns_by_name(decoded)),
        )
        connection.execute("UPDATE engines SET last_s = ? WHERE id = ?", (times[-1], engine_id))
    _delete(connection, "open_signals", engine_id, last)


def _flush_counters(connection: sqlite3.Connection, engine_id: int, before: int) -> None:
    decoded = list(open_counters(connection, engine_id, before=before))
    if decoded:
        ids, times, rows = zip(*decoded, strict=True)
        insert_chunk(
            connection,
            (COUNTERS, engine_id, 0.0),
            (ids[0] & SEQUENCE_MASK, ids[-1] & SEQUENCE_MASK),
            times,
            pack_counters(times, columns_by_name(rows)),
        )
    _delete(connection, "open_counters", engine_id, before - 1)


def _delete(connection: sqlite3.Connection, table: str, owner_id: int, last: int) -> None:
    connection.execute(
        f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", (rows_of(owner_id)[0], last)
    )
