"""Downsampling: merges old chunks into one with one value per minute, within the caller's
transaction. I/O edge.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence

from kneewatch.agent.store.chunks import (
    SignalChunk,
    bytes_reader,
    concat_scrapes,
    downsample_scrapes,
    pack_scrapes,
    pack_signals,
    unpack_scrapes,
)
from kneewatch.agent.store.columns import DamagedError
from kneewatch.agent.store.records import Scrapes
from kneewatch.agent.store.schema import SIGNALS
from kneewatch.agent.store.stored_series import ChunkRow, insert_chunk, log_damage

COARSE_S = 60.0
Fold = Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def fold_of(key: str) -> Fold:
    """How a minute of a signal becomes one value: maxima and upper quantiles keep their maximum."""
    if any(part in key for part in ("_max", "_p95", "_p99")) or key == "cascade_stage":
        return max
    return min if key.endswith("_min") else mean


def downsample(
    connection: sqlite3.Connection, kind: int, owner_id: int, chunks: Sequence[ChunkRow]
) -> None:
    """Replace an owner's chunks of signals or scrapes by one with one value per minute."""
    marks = ", ".join("?" * len(chunks))
    ids = [chunk.id for chunk in chunks]
    bodies = connection.execute(
        f"SELECT id, body FROM chunks WHERE id IN ({marks}) ORDER BY first_seq", ids
    ).fetchall()
    merged = _signals(bodies) if kind == SIGNALS else _scrapes(bodies)
    if merged is not None:
        sequence = chunks[0].first_seq, chunks[-1].last_seq
        insert_chunk(connection, (kind, owner_id, COARSE_S), sequence, *merged)
    connection.execute(f"DELETE FROM chunks WHERE id IN ({marks})", ids)


def _signals(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    chunks: list[SignalChunk] = []
    times: array[float] = array("d")
    keys: dict[str, None] = {}
    for row, body in bodies:
        try:
            chunk = SignalChunk(bytes_reader(body))
            times.extend(chunk.times())
        except DamagedError as error:
            log_damage("chunk", row, error)
            continue
        chunks.append(chunk)
        keys.update(dict.fromkeys(chunk.keys))
    if not times:
        return None
    parts = list(minutes(times))
    kept: list[float] = [times[part.stop - 1] for part in parts]
    # One column at a time: all of them decoded would take tens of megabytes.
    return kept, pack_signals(kept, {key: _folded(chunks, key, parts) for key in keys})


def _folded(chunks: Sequence[SignalChunk], key: str, parts: Sequence[slice]) -> array[float]:
    fold, column = fold_of(key), array("d")
    for chunk in chunks:
        try:
            column.extend(chunk.column(key))
        except DamagedError as error:
            log_damage("column", key, error)
            column.extend([math.nan] * chunk.rows)
    folded = array("d")
    for part in parts:
        values = [value for value in column[part] if value == value]
        folded.append(fold(values) if values else math.nan)
    return folded


def _scrapes(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    parts: list[Scrapes] = []
    for row, body in bodies:
        try:
            parts.append(unpack_scrapes(bytes_reader(body)))
        except DamagedError as error:
            log_damage("scrapes", row, error)
    kept = downsample_scrapes(concat_scrapes(parts), step_s=COARSE_S)
    return (kept.times, pack_scrapes(kept)) if kept.times else None


def minutes(times: Sequence[float]) -> Iterator[slice]:
    """Slices of neighbouring scrapes in the same minute."""
    first = 0
    for at in range(1, len(times) + 1):
        if at == len(times) or times[at] // COARSE_S != times[first] // COARSE_S:
            yield slice(first, at)
            first = at
