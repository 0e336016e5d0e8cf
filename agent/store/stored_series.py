"""Reads scrapes, signals and counters from chunks and open rows. I/O edge.

Damaged chunks and rows are logged and skipped, so that the rest stays readable.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from array import array
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from kneewatch.agent.store.chunks import (
    PURE_PYTHON,
    DamagedError,
    Decoders,
    ReadBytes,
    SignalChunk,
    concat_scrapes,
    floats_from_bytes,
    select_scrapes,
    unpack_scrapes,
)
from kneewatch.agent.store.database import SCRAPES, SIGNALS, columns_of, keys_of, rows_of
from kneewatch.agent.store.records import Scrapes, Series

Name = TypeVar("Name", bound=Hashable)

log = logging.getLogger(__name__)


class ChunkRow(Struct, frozen=True):
    """The id of a chunk, and the range that it covers. `step_s` is 0 unless the chunk was
    downsampled."""

    id: int
    step_s: float
    first_seq: int
    last_seq: int
    min_s: float
    max_s: float

    def inside(self, from_s: float, to_s: float) -> bool:
        """Whether the whole chunk lies within a time range."""
        return from_s <= self.min_s and self.max_s <= to_s


def chunk_rows(
    connection: sqlite3.Connection, kind: int, owner_id: int, *, from_s: float, to_s: float
) -> list[ChunkRow]:
    """The chunks that overlap a time range, in order of arrival."""
    rows = connection.execute(
        "SELECT id, step_s, first_seq, last_seq, min_s, max_s FROM chunks"
        " WHERE kind = ? AND owner_id = ? AND max_s >= ? AND min_s <= ? ORDER BY first_seq",
        (kind, owner_id, from_s, to_s),
    )
    return [ChunkRow(*row) for row in rows]


@contextmanager
def chunk_reader(connection: sqlite3.Connection, chunk_id: int) -> Generator[ReadBytes]:
    """A context with a function that reads the body of a chunk. It reads only the requested pieces
    from disk."""
    with connection.blobopen("chunks", "body", chunk_id, readonly=True) as blob:

        def read(length: int, offset: int) -> bytes:
            if offset < 0 or length < 0 or offset + length > len(blob):
                raise DamagedError("a chunk is shorter than its directory says")
            blob.seek(offset)
            return blob.read(length)

        yield read


def insert_chunk(
    connection: sqlite3.Connection,
    owner: tuple[int, int, float],
    sequence: tuple[int, int],
    times: Sequence[float],
    body: bytes,
) -> None:
    """Insert a chunk. `owner` is the kind, the owner's id and the step in seconds. `sequence` are
    the numbers of the first and last scrape."""
    connection.execute(
        "INSERT INTO chunks (kind, owner_id, step_s, first_seq, last_seq, min_s, max_s, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*owner, *sequence, min(times), max(times), body),
    )


def log_damage(what: str, where: object, error: DamagedError) -> None:
    """Log that stored data is damaged and therefore skipped."""
    log.warning("skipping damaged history what=%s at=%s reason=%s", what, where, error)


class OpenTable(NamedTuple, Generic[Name]):
    """A table of open rows: the type code of its values, and how the names in a layout are read."""

    table: str
    typecode: str
    names_of: Callable[[bytes], Iterable[Name]]


OPEN_SIGNALS = OpenTable("open_signals", "f", keys_of)
OPEN_COUNTERS = OpenTable("open_counters", "d", columns_of)

OpenRow = tuple[dict[Name, int], "array[float]"]
"""The index of each name in the values, and the values."""


def open_rows(
    connection: sqlite3.Connection,
    of: OpenTable[Name],
    ids: tuple[int, int],
    *,
    from_s: float = -math.inf,
    to_s: float = math.inf,
) -> Iterator[tuple[int, float, OpenRow[Name]]]:
    """Yields the open rows with these ids, from the first to the last, in order of arrival. Each
    has its id, its time and its values. Damaged rows are left out."""
    table, typecode, names_of = of
    rows = connection.execute(
        f"SELECT id, t_s, layout_id, body FROM {table}"
        " WHERE id BETWEEN ? AND ? AND t_s BETWEEN ? AND ? ORDER BY id",
        (*ids, from_s, to_s),
    )
    layouts: dict[int, dict[Name, int]] = {}
    for row, t_s, layout_id, body in rows:
        places = layouts.get(layout_id)
        if places is None:
            places = layouts[layout_id] = _places(connection, layout_id, names_of)
        try:
            values = floats_from_bytes(typecode, body)
        except DamagedError as error:
            log_damage(table, row, error)
            continue
        if len(values) == len(places):
            yield row, t_s, (places, values)


def _places(
    connection: sqlite3.Connection, layout_id: int, names_of: Callable[[bytes], Iterable[Name]]
) -> dict[Name, int]:
    """The index of each name of a layout in the values. Empty if the layout is damaged."""
    row = connection.execute("SELECT names FROM layouts WHERE id = ?", (layout_id,)).fetchone()
    try:
        return {name: at for at, name in enumerate(names_of(row[0] if row else b""))}
    except DamagedError as error:
        log_damage("layout", layout_id, error)
        return {}


def columns_by_name(rows: Sequence[OpenRow[Name]]) -> Mapping[Name, Sequence[float]]:
    """The values of each column. NaN where a row lacks the column. There must be at least one
    row."""
    first = rows[0][0]
    if all(places is first for places, _ in rows):
        return dict(zip(first, zip(*(values for _, values in rows), strict=True), strict=True))
    names = dict.fromkeys(name for places, _ in rows for name in places)
    return {
        name: [
            math.nan if (at := places.get(name)) is None else values[at] for places, values in rows
        ]
        for name in names
    }


def read_scrapes(
    connection: sqlite3.Connection, target_id: int, loops: Decoders, *, from_s: float, to_s: float
) -> Scrapes:
    """The scrapes in a time range, in order of arrival. Call within a transaction."""
    parts: list[Scrapes] = []
    for row in chunk_rows(connection, SCRAPES, target_id, from_s=from_s, to_s=to_s):
        try:
            with chunk_reader(connection, row.id) as read:
                part = unpack_scrapes(read, loops)
        except DamagedError as error:
            log_damage("scrapes", row.id, error)
            continue
        if not row.inside(from_s, to_s):
            inside = [at for at, t_s in enumerate(part.times) if from_s <= t_s <= to_s]
            part = select_scrapes(part, inside)
        parts.append(part)
    open_rows = connection.execute(
        "SELECT t_s, error FROM open_scrapes WHERE id BETWEEN ? AND ?"
        " AND t_s BETWEEN ? AND ? ORDER BY id",
        (*rows_of(target_id), from_s, to_s),
    )
    return concat_scrapes([*parts, scrapes_from_rows(open_rows.fetchall())])


def scrapes_from_rows(rows: Sequence[tuple[float, str | None]]) -> Scrapes:
    """Convert rows of time and error to scrapes. The error of a successful scrape is None."""
    failed = {at: error for at, (_, error) in enumerate(rows) if error is not None}
    return Scrapes(array("d", [t_s for t_s, _ in rows]), failed)


def read_signals(
    connection: sqlite3.Connection,
    engine_id: int,
    keys: Sequence[str],
    *,
    from_s: float,
    to_s: float,
) -> Series:
    """The signals in a time range, in order of arrival. Call within a transaction."""
    times: array[float] = array("d")
    values: dict[str, array[float]] = {key: array("d") for key in keys}
    for part in signal_parts(connection, engine_id, keys, PURE_PYTHON, from_s=from_s, to_s=to_s):
        times.extend(part.times)
        for key, column in values.items():
            column.extend(part.values[key])
    return Series(times, values)


def signal_parts(
    connection: sqlite3.Connection,
    engine_id: int,
    keys: Sequence[str],
    loops: Decoders,
    *,
    from_s: float,
    to_s: float,
) -> Iterator[Series]:
    """Yields the signals in a time range: one part per chunk, and last the open rows."""
    for row in chunk_rows(connection, SIGNALS, engine_id, from_s=from_s, to_s=to_s):
        try:
            with chunk_reader(connection, row.id) as read:
                chunk = SignalChunk(read, loops)
                times = chunk.times()
                values = {key: _column(chunk, key, row.id) for key in keys}
        except DamagedError as error:
            log_damage("chunk", row.id, error)
            continue
        if not row.inside(from_s, to_s):
            inside = [at for at, t_s in enumerate(times) if from_s <= t_s <= to_s]
            times = array("d", [times[at] for at in inside])
            values = {
                key: array("d", [column[at] for at in inside]) for key, column in values.items()
            }
        yield Series(times, values)
    opened = list(open_rows(connection, OPEN_SIGNALS, rows_of(engine_id), from_s=from_s, to_s=to_s))
    if opened:
        columns = columns_by_name([row for _, _, row in opened])
        unknown = [math.nan] * len(opened)
        yield Series(
            array("d", [t_s for _, t_s, _ in opened]),
            {key: array("d", columns.get(key, unknown)) for key in keys},
        )


def _column(chunk: SignalChunk, key: str, chunk_id: int) -> array[float]:
    try:
        return chunk.column(key)
    except DamagedError as error:
        log_damage(key, chunk_id, error)
        return array("d", [math.nan]) * chunk.rows
