"""Open rows into chunks, inside the transaction of whoever calls. I/O edge."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Mapping, Sequence

from kneewatch.agent.store.arrays import DamagedError, floats_of
from kneewatch.agent.store.chunk import pack_signals
from kneewatch.agent.store.counters import pack_counters
from kneewatch.agent.store.history import OpenRows, insert_chunk, passed_over
from kneewatch.agent.store.model import StoredScrape
from kneewatch.agent.store.rows import columns_of, rows_of
from kneewatch.agent.store.schema import COUNTERS, SCRAPES, SEQUENCE_MASK, SIGNALS
from kneewatch.agent.store.scrapes import pack_scrapes
from kneewatch.collector.history import Column

SEAL_ROWS = 720
"""An hour at one scrape in five seconds."""


def seal_engine(connection: sqlite3.Connection, engine_id: int, *, over: bool = False) -> None:
    """The engine's open rows as chunks. Its newest counters stay, for the next ones may replace
    them, unless it is `over`."""
    _seal_signals(connection, engine_id)
    newest = connection.execute(
        "SELECT max(id) FROM open_counters WHERE id BETWEEN ? AND ?", rows_of(engine_id)
    ).fetchone()[0]
    if newest is not None:
        _seal_counters(connection, engine_id, newest + 1 if over else newest)


def seal_target(connection: sqlite3.Connection, target_id: int) -> None:
    """The target's open scrapes as a chunk."""
    rows = connection.execute(
        "SELECT id, t_s, error FROM open_scrapes WHERE id BETWEEN ? AND ? ORDER BY id",
        rows_of(target_id),
    ).fetchall()
    if rows:
        scrapes = [StoredScrape(t_s, error is None, error or "") for _, t_s, error in rows]
        insert_chunk(
            connection,
            (SCRAPES, target_id, 0.0),
            (rows[0][0] & SEQUENCE_MASK, rows[-1][0] & SEQUENCE_MASK),
            [scrape.t_s for scrape in scrapes],
            pack_scrapes(scrapes),
        )
        _delete(connection, "open_scrapes", target_id, rows[-1][0])


def _seal_signals(connection: sqlite3.Connection, engine_id: int) -> None:
    opened, ids, times = OpenRows(connection), array("q"), array("d")
    read: list[tuple[dict[str, int], array[float]]] = []
    rows = connection.execute(
        "SELECT id, t_s, layout_id, body FROM open_signals WHERE id BETWEEN ? AND ? ORDER BY id",
        rows_of(engine_id),
    )
    last = None
    for last, t_s, layout_id, body in rows:
        row = opened.row(layout_id, body)
        if row is not None:
            ids.append(last)
            times.append(t_s)
            read.append(row)
    if last is None:
        return
    if times:
        insert_chunk(
            connection,
            (SIGNALS, engine_id, 0.0),
            (ids[0] & SEQUENCE_MASK, ids[-1] & SEQUENCE_MASK),
            times,
            pack_signals(times, _by_key(read)),
        )
        connection.execute("UPDATE engines SET last_s = ? WHERE id = ?", (times[-1], engine_id))
    _delete(connection, "open_signals", engine_id, last)


def _by_key(rows: Sequence[tuple[dict[str, int], array[float]]]) -> Mapping[str, Sequence[float]]:
    """Columns of rows; NaN where a row lacks the signal."""
    first = rows[0][0]
    if all(places is first for places, _ in rows):
        return dict(zip(first, zip(*(values for _, values in rows), strict=True), strict=True))
    keys = dict.fromkeys(key for places, _ in rows for key in places)
    return {
        key: [
            math.nan if (at := places.get(key)) is None else values[at] for places, values in rows
        ]
        for key in keys
    }


def _seal_counters(connection: sqlite3.Connection, engine_id: int, before: int) -> None:
    layouts: dict[int, tuple[Column, ...]] = {}
    read: list[tuple[int, array[float]]] = []
    ids, times = array("q"), array("d")
    rows = connection.execute(
        "SELECT c.id, t_s, layout_id, names, body FROM open_counters c"
        " LEFT JOIN layouts l ON l.id = layout_id WHERE c.id >= ? AND c.id < ? ORDER BY c.id",
        (rows_of(engine_id)[0], before),
    )
    for row, t_s, layout_id, names, body in rows:
        try:
            if layout_id not in layouts:
                layouts[layout_id] = columns_of(names or b"")
            values = floats_of("d", body)
        except DamagedError as error:
            passed_over("counters", row, error)
            continue
        if len(values) == len(layouts[layout_id]):
            ids.append(row)
            times.append(t_s)
            read.append((layout_id, values))
    if times:
        insert_chunk(
            connection,
            (COUNTERS, engine_id, 0.0),
            (ids[0] & SEQUENCE_MASK, ids[-1] & SEQUENCE_MASK),
            times,
            pack_counters(times, _by_column(layouts, read)),
        )
    _delete(connection, "open_counters", engine_id, before - 1)


def _by_column(
    layouts: Mapping[int, tuple[Column, ...]], rows: Sequence[tuple[int, array[float]]]
) -> Mapping[Column, Sequence[float]]:
    """Columns of rows; NaN where a row lacks the column."""
    columns = dict.fromkeys(column for layout in layouts.values() for column in layout)
    places: dict[int, list[int]] = {}
    for layout_id, layout in layouts.items():
        known = {column: at for at, column in enumerate(layout)}
        # The last of a row is the NaN that is put behind it.
        places[layout_id] = [known.get(column, -1) for column in columns]
    table: list[list[float]] = []
    for layout_id, values in rows:
        whole = [*values, math.nan]
        table.append([whole[at] for at in places[layout_id]])
    return dict(zip(columns, zip(*table, strict=True), strict=True))


def _delete(connection: sqlite3.Connection, table: str, owner_id: int, last: int) -> None:
    connection.execute(
        f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", (rows_of(owner_id)[0], last)
    )
