"""A store's chunks as numpy arrays. Pure.

The store's own codecs give one scrape after another; a report reads a million of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kneewatch.agent.store.arrays import DamagedError
from kneewatch.agent.store.chunk import Body, Read
from kneewatch.agent.store.counters import ColumnRow, column_of, decoding, opened
from kneewatch.collector.history import Column

Floats = npt.NDArray[np.float64]
NO_TIMES: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of neighbouring snapshots. Shapes: `times` (snapshots,), `values` (columns,
    snapshots); NaN where a page lacks a column. `columns` is the same object as long as they are
    the same."""

    times: Floats
    columns: tuple[Column, ...]
    values: Floats


class Columns:
    """A chunk's columns of some metrics. Chunks mostly have those of the one before."""

    def __init__(self, metrics: Collection[str]) -> None:
        self.metrics = frozenset(metrics)
        self._rows: list[ColumnRow] = []
        self._wanted: tuple[Column, ...] = ()
        self._at: list[int] = []

    def unpacked(self, read: Read) -> Counted:
        """The counters of a chunk.

        Raises:
            DamagedError: the bytes are not what was written.
        """
        chunk = opened(read)
        with decoding():
            times = _times(chunk.times)
            self._know([row for row, _ in chunk.columns])
            whole = _integers(chunk.whole)
            other = _integers(chunk.other).view(np.float64)
            values = self._values([kind for _, kind in chunk.columns], chunk.rows, whole, other)
        chunk.check(len(times))
        return Counted(times, self._wanted, values)

    def _know(self, rows: list[ColumnRow]) -> None:
        if rows == self._rows:
            return
        self._at = [at for at, row in enumerate(rows) if row[0] in self.metrics]
        wanted = tuple(column_of(rows[at]) for at in self._at)
        self._rows, self._wanted = rows, wanted

    def _values(
        self,
        kinds: Sequence[float | str],
        count: int,
        whole: npt.NDArray[np.int64],
        other: Floats,
    ) -> Floats:
        made = np.empty((len(self._at), count))
        at = iter([*self._at, -1])
        wanted, row = next(at), 0
        whole_at = other_at = 0
        for place, kind in enumerate(kinds):
            if place == wanted:
                if kind == "i":
                    made[row] = whole[whole_at : whole_at + count]
                elif kind == "b":
                    made[row] = other[other_at : other_at + count]
                else:
                    made[row] = float(kind)
                wanted, row = next(at), row + 1
            whole_at += count if kind == "i" else 0
            other_at += count if kind == "b" else 0
        return made


def add_signals(read: Read, times: list[Floats], values: dict[str, list[Floats]]) -> None:
    """Add a chunk's times and some of its signals.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read)
    try:
        count = int(body.directory["rows"])
        found = _times(body.piece(body.directory["times"]))
        places: dict[str, Any] = body.directory["columns"]
        columns = {key: _column(body, places.get(key), count) for key in values}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the signals cannot be read: {error}") from error
    if len(found) != count:
        raise DamagedError(f"{len(found)} times for {count} scrapes")
    times.append(found)
    for key, column in columns.items():
        values[key].append(column)


def add_scrapes(read: Read, times: list[Floats], failed: list[tuple[float, str]]) -> None:
    """Add a chunk's times, and those of scrapes that failed.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read)
    try:
        found = _times(body.piece(body.directory["times"]))
        failed += [(float(found[at]), str(why)) for at, why in body.directory["failed"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedError(f"the scrapes cannot be read: {error}") from error
    times.append(found)


def _column(body: Body, place: list[int] | float | None, count: int) -> Floats:
    if not isinstance(place, list):
        return np.full(count, np.nan if place is None else float(place))
    column = _planes(body.piece(place), 4).view("<f4").astype(np.float64)
    if len(column) != count:
        raise DamagedError(f"{len(column)} values for {count} scrapes")
    return column


def _planes(data: bytes, width: int) -> npt.NDArray[np.uint8]:
    """The bytes of numbers that lie plane by plane, the highest first, compressed."""
    try:
        plain = np.frombuffer(zlib.decompress(data), dtype=np.uint8)
    except zlib.error as error:
        raise DamagedError(str(error)) from error
    if len(plain) % width:
        raise DamagedError(f"{len(plain)} bytes are not planes of {width}")
    return np.ascontiguousarray(plain.reshape(width, -1)[::-1].T).reshape(-1)


def _integers(data: bytes) -> npt.NDArray[np.int64]:
    """Integers kept as folded steps; sums wrap around as they did when the steps were made."""
    folded = _planes(data, 8).view("<u8")
    steps = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    return np.cumsum(steps)


def _times(data: bytes) -> Floats:
    """Times, kept as steps of steps of their bits."""
    return np.cumsum(_integers(data)).view(np.float64)


def in_order(times: Floats) -> npt.NDArray[np.bool_]:
    """The scrapes that are newer than all before them: a clock may have been set back."""
    if len(times) == 0:
        return np.empty(0, dtype=np.bool_)
    newest = np.maximum.accumulate(times)
    return np.concatenate(([True], times[1:] > newest[:-1]))
