"""Old chunks of every scrape into one of a value a minute, inside the caller's transaction.
I/O edge."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence

from kneewatch.agent.store.chunks import (
    SignalChunk,
    joined,
    pack_scrapes,
    pack_signals,
    reading_from,
    thinned,
    unpack_scrapes,
)
from kneewatch.agent.store.columns import DamagedError
from kneewatch.agent.store.history import ChunkRow, insert_chunk, passed_over
from kneewatch.agent.store.records import Scrapes
from kneewatch.agent.store.schema import SIGNALS

COARSE_S = 60.0
Fold = Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers."""
    return math.fsum(values) / len(values)


def folding(key: str) -> Fold:
    """How a minute of a signal becomes one value: a peak stays a peak."""
    if any(part in key for part in ("_max", "_p95", "_p99")) or key == "cascade_stage":
        return max
    return min if key.endswith("_min") else mean


def downsample(
    connection: sqlite3.Connection, kind: int, owner_id: int, chunks: Sequence[ChunkRow]
) -> None:
    """Put chunks of every scrape, of signals or of scrapes, together as one of a value a minute."""
    marks = ", ".join("?" * len(chunks))
    ids = [chunk.id for chunk in chunks]
    bodies = connection.execute(
        f"SELECT id, body FROM chunks WHERE id IN ({marks}) ORDER BY first_seq", ids
    ).fetchall()
    made = _signals(bodies) if kind == SIGNALS else _scrapes(bodies)
    if made is not None:
        sequence = chunks[0].first_seq, chunks[-1].last_seq
        insert_chunk(connection, (kind, owner_id, COARSE_S), sequence, *made)
    connection.execute(f"DELETE FROM chunks WHERE id IN ({marks})", ids)


def _signals(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    chunks: list[SignalChunk] = []
    times: array[float] = array("d")
    keys: dict[str, None] = {}
    for row, body in bodies:
        try:
            chunk = SignalChunk(reading_from(body))
            times.extend(chunk.times())
        except DamagedError as error:
            passed_over("chunk", row, error)
            continue
        chunks.append(chunk)
        keys.update(dict.fromkeys(chunk.keys))
    if not times:
        return None
    parts = list(minutes(times))
    kept: list[float] = [times[part.stop - 1] for part in parts]
    # A column at a time: all of them in full would take tens of megabytes.
    return kept, pack_signals(kept, {key: _folded(chunks, key, parts) for key in keys})


def _folded(chunks: Sequence[SignalChunk], key: str, parts: Sequence[slice]) -> array[float]:
    fold, column = folding(key), array("d")
    for chunk in chunks:
        try:
            column.extend(chunk.column(key))
        except DamagedError as error:
            passed_over("column", key, error)
            column.extend([math.nan] * chunk.rows)
    made = array("d")
    for part in parts:
        known = [value for value in column[part] if value == value]
        made.append(fold(known) if known else math.nan)
    return made


def _scrapes(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    found: list[Scrapes] = []
    for row, body in bodies:
        try:
            found.append(unpack_scrapes(reading_from(body)))
        except DamagedError as error:
            passed_over("scrapes", row, error)
    kept = thinned(joined(found), step_s=COARSE_S)
    return (kept.times, pack_scrapes(kept)) if kept.times else None


def minutes(times: Sequence[float]) -> Iterator[slice]:
    """Runs of neighbouring scrapes that lie in the same minute."""
    first = 0
    for at in range(1, len(times) + 1):
        if at == len(times) or times[at] // COARSE_S != times[first] // COARSE_S:
            yield slice(first, at)
            first = at
