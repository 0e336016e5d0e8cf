"""An engine's counters over an hour or so as one blob. Pure.

A chunk carries its own column names. Whole numbers are kept as steps, others by their bits: what
comes out is what went in, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kneewatch.agent.store.arrays import (
    INT_MAX,
    DamagedError,
    Loops,
    bits_of,
    decoding,
    from_bits,
    pack_integers,
    pack_times,
    same_throughout,
)
from kneewatch.agent.store.chunk import Body, Pieces, Read, pack_body
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


class CounterChunk(Body):
    """A chunk, its numbers unpacked.

    `columns` say of each column where its numbers are: "i" among the `integers`, "b" among the
    `floats`, from its place in `starts` on; else it is always that number.
    """

    def __init__(self, read: Read, loops: Loops) -> None:
        """Reads all of it.

        Raises:
            DamagedError: the bytes are not what was written.
        """
        super().__init__(read, loops)
        self.integers = self._integers("whole")
        self.floats = from_bits(self._integers("other"))
        self.starts: list[int] = []
        integers = floats = 0
        with decoding("counters"):
            self.columns: Sequence[tuple[ColumnRow, float | str]] = self.directory["columns"]
            for _, kind in self.columns:
                self.starts.append(integers if kind == "i" else floats)
                if kind == "i":
                    integers += self.rows
                elif kind == "b":
                    floats += self.rows
        if (integers, floats) != (len(self.integers), len(self.floats)):
            raise DamagedError("there are more counters, or fewer, than their columns say")


def _is_whole(value: float) -> bool:
    return -INT_MAX <= value <= INT_MAX and value.is_integer()
