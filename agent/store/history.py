"""An engine's signals as the file has them: sealed chunks, then the open rows. I/O edge.

What is damaged is passed over and logged: the rest can be read.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kneewatch.agent.store.arrays import DamagedError, floats_of
from kneewatch.agent.store.chunk import Read, SignalChunk
from kneewatch.agent.store.model import Series
from kneewatch.agent.store.rows import keys_of, rows_of
from kneewatch.agent.store.schema import SIGNALS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Where a chunk is, and what it spans; `step_s` is 0 where it has every scrape."""

    id: int
    step_s: float
    first_seq: int
    last_seq: int
    min_s: float
    max_s: float


def chunk_rows(
    connection: sqlite3.Connection, kind: int, owner_id: int, *, from_s: float, to_s: float
) -> list[ChunkRow]:
    """The chunks that reach into a time, in order of arrival."""
    rows = connection.execute(
        "SELECT id, step_s, first_seq, last_seq, min_s, max_s FROM chunks"
        " WHERE kind = ? AND owner_id = ? AND max_s >= ? AND min_s <= ? ORDER BY first_seq",
        (kind, owner_id, from_s, to_s),
    )
    return [ChunkRow(*row) for row in rows]


@contextmanager
def reading(connection: sqlite3.Connection, chunk_id: int) -> Generator[Read]:
    """Reads from a chunk's body, a piece at a time: only what is asked for leaves the disk."""
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
    """Add a chunk. `owner`: kind, id and step; `sequence`: of the first and the last scrape."""
    connection.execute(
        "INSERT INTO chunks (kind, owner_id, step_s, first_seq, last_seq, min_s, max_s, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*owner, *sequence, min(times), max(times), body),
    )


def passed_over(what: str, where: object, error: DamagedError) -> None:
    """Say that something cannot be read."""
    log.warning("damaged history passed over what=%s at=%s reason=%s", what, where, error)


class OpenRows:
    """Open rows of signals, as values by key."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._layouts: dict[int, dict[str, int]] = {}

    def places(self, layout_id: int) -> dict[str, int]:
        """Where each signal of a layout stands; empty where the layout is damaged."""
        known = self._layouts.get(layout_id)
        if known is None:
            row = self._connection.execute(
                "SELECT names FROM layouts WHERE id = ?", (layout_id,)
            ).fetchone()
            known = {}
            try:
                known = {key: at for at, key in enumerate(keys_of(row[0] if row else b""))}
            except DamagedError as error:
                passed_over("layout", layout_id, error)
            self._layouts[layout_id] = known
        return known

    def rows(
        self, engine_id: int, *, from_s: float, to_s: float
    ) -> Iterator[tuple[float, dict[str, int], array[float]]]:
        """Time, places and values of each open scrape, in order of arrival."""
        rows = self._connection.execute(
            "SELECT t_s, layout_id, body FROM open_signals"
            " WHERE id BETWEEN ? AND ? AND t_s BETWEEN ? AND ? ORDER BY id",
            (*rows_of(engine_id), from_s, to_s),
        )
        for t_s, layout_id, body in rows:
            row = self.row(layout_id, body)
            if row is not None:
                yield t_s, *row

    def row(self, layout_id: int, body: bytes) -> tuple[dict[str, int], array[float]] | None:
        """Places and values of one open scrape; None where it is damaged."""
        places = self.places(layout_id)
        try:
            values = floats_of("f", body)
        except DamagedError as error:
            passed_over("scrape", layout_id, error)
            return None
        return (places, values) if len(values) == len(places) else None


def read_signals(
    connection: sqlite3.Connection,
    engine_id: int,
    keys: Sequence[str],
    *,
    from_s: float,
    to_s: float,
) -> Series:
    """Signals over a time, in order of arrival. The caller has begun a transaction."""
    times: array[float] = array("d")
    values: dict[str, array[float]] = {key: array("d") for key in keys}
    for row in chunk_rows(connection, SIGNALS, engine_id, from_s=from_s, to_s=to_s):
        try:
            with reading(connection, row.id) as read:
                _add(SignalChunk(read), row, times, values, from_s=from_s, to_s=to_s)
        except DamagedError as error:
            passed_over("chunk", row.id, error)
    for t_s, places, found in OpenRows(connection).rows(engine_id, from_s=from_s, to_s=to_s):
        times.append(t_s)
        for key, column in values.items():
            at = places.get(key)
            column.append(math.nan if at is None else found[at])
    return Series(times, values)


def _add(
    chunk: SignalChunk,
    row: ChunkRow,
    times: array[float],
    values: dict[str, array[float]],
    *,
    from_s: float,
    to_s: float,
) -> None:
    chunk_times = chunk.times()
    whole = from_s <= row.min_s and row.max_s <= to_s
    inside = [] if whole else [from_s <= t_s <= to_s for t_s in chunk_times]
    times.extend(_cut(chunk_times, inside))
    for key, column in values.items():
        column.extend(_cut(_column(chunk, key, row.id), inside))


def _column(chunk: SignalChunk, key: str, chunk_id: int) -> array[float]:
    try:
        return chunk.column(key)
    except DamagedError as error:
        passed_over(key, chunk_id, error)
        return array("d", [math.nan]) * chunk.rows


def _cut(values: array[float], inside: Sequence[bool]) -> array[float]:
    if not inside:
        return values
    return array("d", [value for value, keep in zip(values, inside, strict=True) if keep])
