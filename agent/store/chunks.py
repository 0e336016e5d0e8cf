"""Encodes and decodes chunks: about an hour of signals, counters or scrapes as one blob. Pure."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import orjson

from kneewatch.agent.store.columns import (
    INT_MAX,
    LEVEL,
    PURE_PYTHON,
    DamagedError,
    Decoders,
    decoding,
    float_bits,
    floats_from_bits,
    is_constant,
    pack_column,
    pack_integers,
    pack_times,
    unpack_column,
    unpack_integers,
    unpack_times,
    value_in_column,
)
from kneewatch.agent.store.records import Scrapes
from kneewatch.collector.scrape_history import Column

ReadBytes = Callable[[int, int], bytes]
"""A function that reads bytes of a blob. Its arguments are length and offset."""

_LENGTH = struct.Struct("<I")
DIRECTORY_MAX_BYTES = 1 << 24


def pack_body(directory: Mapping[str, Any], pieces: Sequence[bytes]) -> bytes:
    """Build a blob: the length of the directory, the compressed directory, then the pieces."""
    head = zlib.compress(orjson.dumps(directory), LEVEL)
    return b"".join((_LENGTH.pack(len(head)), head, *pieces))


class ChunkBody:
    """A blob. Its directory is read at once, its pieces when they are needed. `rows` is the number
    of scrapes."""

    def __init__(self, read: ReadBytes, loops: Decoders = PURE_PYTHON) -> None:
        """Read the directory.

        Raises:
            DamagedError: the bytes are not a valid directory.
        """
        self._read, self._loops = read, loops
        try:
            (length,) = _LENGTH.unpack(read(_LENGTH.size, 0))
            if length > DIRECTORY_MAX_BYTES:
                raise DamagedError(f"a directory of {length} bytes")
            directory = orjson.loads(zlib.decompress(read(length, _LENGTH.size)))
        except (struct.error, zlib.error, ValueError) as error:
            raise DamagedError(f"the directory cannot be read: {error}") from error
        if not isinstance(directory, dict):
            raise DamagedError("the directory is not a table")
        self.directory = cast("dict[str, Any]", directory)
        self._from = _LENGTH.size + length
        with decoding("directory"):
            self.rows = int(self.directory["rows"])

    def piece(self, place: Sequence[int]) -> bytes:
        """A piece of the blob. `place` is its offset after the directory and its length."""
        with decoding("directory"):
            offset, length = place
            return self._read(length, self._from + offset)

    def times(self) -> array[float]:
        """Times of the scrapes. Shape: (scrapes,).

        Raises:
            DamagedError: the times cannot be decoded.
        """
        with decoding("times"):
            place = self.directory["times"]
        return self.checked(unpack_times(self.piece(place), self._loops))

    def _integers(self, key: str) -> array[int]:
        """The integers in the piece at `directory[key]`.

        Raises:
            DamagedError: the piece cannot be decoded.
        """
        with decoding(key):
            place = self.directory[key]
        return unpack_integers(self.piece(place), self._loops)

    def checked(self, values: array[float]) -> array[float]:
        """Check that there is one value per scrape. Returns the values.

        Raises:
            DamagedError: there are more or fewer values.
        """
        if len(values) != self.rows:
            raise DamagedError(f"{len(values)} values for {self.rows} scrapes")
        return values


def bytes_reader(data: bytes) -> ReadBytes:
    """A `ReadBytes` function for bytes in memory."""
    return lambda length, offset: data[offset : offset + length]


class PieceWriter:
    """Appends pieces to a byte string and returns the place of each."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self._end = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Append a piece. Returns its place: offset and length."""
        self.data.append(data)
        self._end += len(data)
        return self._end - len(data), len(data)


def pack_signals(times: Sequence[float], columns: Mapping[str, Sequence[float]]) -> bytes:
    """Encode a chunk of signals. Shapes: `times` and each column (scrapes,), with at least one
    scrape."""
    pieces = PieceWriter()
    directory: dict[str, Any] = {"rows": len(times), "times": pieces.add(pack_times(times))}
    directory["columns"] = {
        key: column[0]  # NaN becomes null
        if is_constant(column) and not math.isinf(column[0])
        else pieces.add(pack_column(column))
        for key, column in columns.items()
    }
    return pack_body(directory, pieces.data)


class SignalChunk(ChunkBody):
    """A chunk of signals. Columns are decoded when they are needed."""

    def __init__(self, read: ReadBytes, loops: Decoders = PURE_PYTHON) -> None:
        """Read the directory.

        Raises:
            DamagedError: the bytes are not a valid directory.
        """
        super().__init__(read, loops)
        with decoding("directory"):
            self._columns: Mapping[str, Any] = self.directory["columns"]

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def column(self, key: str) -> array[float]:
        """Values of a signal. Shape: (scrapes,). All are NaN if the chunk lacks the signal.

        Raises:
            DamagedError: the column cannot be decoded.
        """
        place = self._columns.get(key)
        if isinstance(place, list):
            return self.checked(unpack_column(self.piece(cast("list[int]", place)), self._loops))
        return array("d", [math.nan if place is None else float(place)]) * self.rows

    def values(self, row: int) -> dict[str, float]:
        """The values of all signals at one scrape. Damaged signals are left out."""
        values: dict[str, float] = {}
        for key, place in self._columns.items():
            if not isinstance(place, list):
                values[key] = math.nan if place is None else float(place)
                continue
            with contextlib.suppress(DamagedError):
                values[key] = value_in_column(self.piece(cast("list[int]", place)), row)
        return values


# --- Counters -------------------------------------------------------------------------------------
#
# A chunk carries its own column names. Whole numbers are stored as deltas, others as deltas of
# their bits, so decoding is exact.


ColumnRow = tuple[str, Sequence[Sequence[str]], str]


def column_row(column: Column) -> ColumnRow:
    """A column in the form in which it is stored as JSON."""
    return column.metric, column.labels, column.part


def column_of(row: ColumnRow) -> Column:
    """The inverse of `column_row`."""
    metric, labels, part = row
    return Column(metric, tuple((name, value) for name, value in labels), part)


def pack_counters(times: Sequence[float], columns: Mapping[Column, Sequence[float]]) -> bytes:
    """Encode a chunk of counters. Shapes: `times` and each column (snapshots,); NaN where a page
    lacks a column."""
    whole: list[int] = []
    other: list[int] = []
    rows: list[tuple[ColumnRow, float | str]] = []
    for column, values in columns.items():
        kind: float | str
        if all(-INT_MAX <= value <= INT_MAX and value.is_integer() for value in values):
            kind = "i"
            if is_constant(values):
                kind = values[0]
            else:
                whole.extend(map(int, values))
        else:
            kind = "b"
            other.extend(float_bits(values))
        rows.append((column_row(column), kind))
    pieces = PieceWriter()
    directory: dict[str, Any] = {
        "rows": len(times),
        "times": pieces.add(pack_times(times)),
        "whole": pieces.add(pack_integers(whole)),
        "other": pieces.add(pack_integers(other)),
        "columns": rows,
    }
    return pack_body(directory, pieces.data)


class CounterChunk(ChunkBody):
    """A decoded chunk of counters.

    `columns` has each column with its kind. Kind "i" means that the column's numbers are in
    `integers`, "b" that they are in `floats`; they begin at the column's index in `starts`. A
    column with a number instead of a kind is constant, and the number is its value.
    """

    def __init__(self, read: ReadBytes, loops: Decoders) -> None:
        """Decode the whole chunk.

        Raises:
            DamagedError: the bytes cannot be decoded.
        """
        super().__init__(read, loops)
        self.integers = self._integers("whole")
        self.floats = floats_from_bits(self._integers("other"))
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
            raise DamagedError("the number of counters does not match their columns")


# --- Scrapes --------------------------------------------------------------------------------------


def pack_scrapes(scrapes: Scrapes) -> bytes:
    """Encode a chunk of scrapes: the times of all scrapes, and the errors of failed scrapes."""
    pieces = PieceWriter()
    directory = {
        "rows": len(scrapes.times),
        "times": pieces.add(pack_times(scrapes.times)),
        "failed": list(scrapes.failed.items()),
    }
    return pack_body(directory, pieces.data)


def unpack_scrapes(read: ReadBytes, loops: Decoders = PURE_PYTHON) -> Scrapes:
    """The inverse of `pack_scrapes`.

    Raises:
        DamagedError: the bytes cannot be decoded.
    """
    body = ChunkBody(read, loops)
    with decoding("scrapes"):
        failed = {int(at): str(error) for at, error in body.directory["failed"]}
    return Scrapes(body.times(), failed)


def concat_scrapes(parts: Iterable[Scrapes]) -> Scrapes:
    """Concatenate the scrapes of several chunks."""
    times: array[float] = array("d")
    failed: dict[int, str] = {}
    for part in parts:
        failed |= {len(times) + at: why for at, why in part.failed.items()}
        times.extend(part.times)
    return Scrapes(times, failed)


def select_scrapes(scrapes: Scrapes, places: Sequence[int]) -> Scrapes:
    failed = {new: scrapes.failed[at] for new, at in enumerate(places) if at in scrapes.failed}
    return Scrapes(array("d", [scrapes.times[at] for at in places]), failed)


def downsample_scrapes(scrapes: Scrapes, *, step_s: float) -> Scrapes:
    """All failed scrapes, but only one successful scrape per `step_s` seconds."""
    kept: list[int] = []
    step: float | None = None
    for at, t_s in enumerate(scrapes.times):
        if at not in scrapes.failed:
            if t_s // step_s == step:
                continue
            step = t_s // step_s
        kept.append(at)
    return select_scrapes(scrapes, kept)
