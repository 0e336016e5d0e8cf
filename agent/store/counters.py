"""An engine's counters over an hour or so as one blob. Pure.

A chunk carries its own column names. Whole numbers are kept as steps, others by their bits: what
comes out is what went in, to the last bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from kneewatch.agent.store.arrays import (
    INT_MAX,
    DamagedError,
    bits_of,
    from_bits,
    pack_integers,
    pack_times,
    same_throughout,
    unpack_integers,
    unpack_times,
)
from kneewatch.agent.store.chunk import Body, Pieces, Read, pack_body
from kneewatch.agent.store.model import Counters, RawSnapshot
from kneewatch.collector.history import Column

ColumnRow = tuple[str, Sequence[Sequence[str]], str]


def column_row(column: Column) -> ColumnRow:
    """A column as JSON has it."""
    return column.metric, column.labels, column.part


def column_of(row: ColumnRow) -> Column:
    """The inverse of `column_row`."""
    metric, labels, part = row
    return Column(metric, tuple((name, value) for name, value in labels), part)


def pack_counters(times: Sequence[float], columns: Mapping[Column, Sequence[float]]) -> bytes:
    """A chunk. Shapes: `times` and each column (snapshots,); NaN where a page lacks a column."""
    whole: list[int] = []
    other: list[int] = []
    rows: list[tuple[ColumnRow, float | str]] = []
    for column, values in columns.items():
        kind: float | str
        if all(map(_is_whole, values)):
            kind = "i"
            if same_throughout(values):
                kind = values[0]
            else:
                whole.extend(map(int, values))
        else:
            kind = "b"
            other.extend(bits_of(values))
        rows.append((column_row(column), kind))
    pieces = Pieces()
    directory: dict[str, Any] = {
        "rows": len(times),
        "times": pieces.lay(pack_times(times)),
        "whole": pieces.lay(pack_integers(whole)),
        "other": pieces.lay(pack_integers(other)),
        "columns": rows,
    }
    return pack_body(directory, pieces.laid)


@dataclass(frozen=True, slots=True)
class Opened:
    """A chunk's pieces, the numbers still packed; `columns` say of each column where its numbers
    are: "i" among the whole ones, "b" among the others, else the number that it always is."""

    rows: int
    times: bytes
    whole: bytes
    other: bytes
    columns: Sequence[tuple[ColumnRow, float | str]]

    def check(self, times: int) -> None:
        """That there are as many times as snapshots.

        Raises:
            DamagedError: there are not.
        """
        if times != self.rows:
            raise DamagedError(f"{times} times for {self.rows} snapshots")


@contextmanager
def decoding() -> Generator[None]:
    """Of bytes that are not what was written: whatever goes wrong is a DamagedError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedError(f"the counters cannot be read: {error}") from error


def opened(read: Read) -> Opened:
    """A chunk's pieces.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read)
    with decoding():
        directory = body.directory
        return Opened(
            int(directory["rows"]),
            body.piece(directory["times"]),
            body.piece(directory["whole"]),
            body.piece(directory["other"]),
            directory["columns"],
        )


def unpack_counters(read: Read) -> Iterator[RawSnapshot]:
    """The snapshots of a chunk.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    chunk = opened(read)
    with decoding():
        times = unpack_times(chunk.times)
        whole = unpack_integers(chunk.whole)
        bits = unpack_integers(chunk.other)
        columns = _columns(chunk.columns, chunk.rows, whole, from_bits(bits))
    chunk.check(len(times))
    places = {column: at for at, (column, _) in enumerate(columns)}
    table = zip(*(values for _, values in columns), strict=True) if columns else repeat(())
    for t_s, row in zip(times, table, strict=False):
        yield RawSnapshot(t_s, Counters(places, row))


def _columns(
    described: Sequence[tuple[ColumnRow, float | str]],
    rows: int,
    whole: Sequence[int],
    other: Sequence[float],
) -> list[tuple[Column, Sequence[float]]]:
    found: list[tuple[Column, Sequence[float]]] = []
    whole_at = other_at = 0
    for row, kind in described:
        values: Sequence[float]
        if kind == "i":
            values = array("d", whole[whole_at : whole_at + rows])
            whole_at += rows
        elif kind == "b":
            values = other[other_at : other_at + rows]
            other_at += rows
        else:
            values = array("d", [float(kind)]) * rows
        if len(values) != rows:
            raise DamagedError("the counters end too early")
        found.append((column_of(row), values))
    return found


def _is_whole(value: float) -> bool:
    return -INT_MAX <= value <= INT_MAX and value.is_integer()
