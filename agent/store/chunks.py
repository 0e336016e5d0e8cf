"""Encodes and decodes chunks: about an hour of signals, counters or scrapes as one blob, and the
columns in it: float32 values, times and integers as compressed bytes. Pure.

The decoders are a parameter, `Decoders`. The daemon uses PURE_PYTHON, because importing numpy would
add 11 MiB to its 75 MiB. A report reads millions of numbers and therefore uses decoders with numpy.

All bytes are little-endian. Columns are split into byte planes before compression: all highest
bytes, then all second highest bytes, and so on. Neighbouring numbers share their upper bytes, so
these planes compress well. Each compressed piece contains zlib's checksum, so a flipped bit is
detected.
"""

from __future__ import annotations

import contextlib
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import orjson
from msgspec import Struct

from kneewatch.agent.store.records import Scrapes
from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.scrape_history import Column

LEVEL = 9
INT_MAX = float(1 << 53)
"""Largest number up to which all integers are exact in float64."""

_FLOAT32 = struct.Struct(">f")
_WRAP = 1 << 64
_HALF = 1 << 63


class DamagedError(KneewatchError):
    """Stored bytes cannot be decoded: the file is damaged."""


@contextmanager
def decoding(what: str) -> Generator[None]:
    """A context that turns errors caused by damaged bytes into DamagedError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedError(f"the {what} cannot be read: {error}") from error


def to_bytes(values: array[float] | array[int]) -> bytes:
    """The bytes of an array, little-endian."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def floats_from_bytes(typecode: str, data: bytes) -> array[float]:
    """The inverse of `to_bytes` for floats of type code "f" or "d"."""
    values: array[float] = array(typecode)
    try:
        values.frombytes(data)
    except ValueError as error:
        raise DamagedError(f"{len(data)} bytes are not an array of numbers") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values


def byte_planes(data: bytes, width: int) -> bytes:
    """The byte planes of numbers that have `width` bytes each. The plane with the highest bytes is
    first."""
    return b"".join([data[at::width] for at in range(width - 1, -1, -1)])


def from_byte_planes(data: bytes, width: int) -> bytes:
    """The inverse of `byte_planes`."""
    count, left = divmod(len(data), width)
    if left:
        raise DamagedError(f"{len(data)} bytes are not planes of {width}")
    whole = bytearray(len(data))
    for plane in range(width):
        whole[width - 1 - plane :: width] = data[plane * count : (plane + 1) * count]
    return bytes(whole)


def compress(data: bytes, width: int) -> bytes:
    """The compressed byte planes of numbers that have `width` bytes each."""
    return zlib.compress(byte_planes(data, width), LEVEL)


def decompress(data: bytes, width: int) -> bytes:
    """The inverse of `compress`.

    Raises:
        DamagedError: the bytes cannot be decompressed.
    """
    try:
        return from_byte_planes(zlib.decompress(data), width)
    except zlib.error as error:
        raise DamagedError(str(error)) from error


def float_bits(values: Sequence[float]) -> array[int]:
    """The bit patterns of float64 numbers as signed integers. Floats that are close give integers
    that are close."""
    bits: array[int] = array("q")
    bits.frombytes(array("d", values).tobytes())
    return bits


def floats_from_bits(bits: array[int]) -> array[float]:
    """The inverse of `float_bits`."""
    values: array[float] = array("d")
    values.frombytes(memoryview(bits).cast("B"))
    return values


def wrap_int64(value: int) -> int:
    """An integer wrapped to the range of signed 64-bit integers."""
    return (value + _HALF) % _WRAP - _HALF


def zigzag_deltas(values: Sequence[int]) -> array[int]:
    """The first value, then the differences between neighbours. They are zigzag encoded, so that
    small differences of either sign have upper bytes of zero."""
    zigzag: array[int] = array("Q")
    before = 0
    for value in values:
        step = wrap_int64(value - before)
        zigzag.append(step << 1 if step >= 0 else ((-step - 1) << 1) | 1)
        before = value
    return zigzag


class Decoders(Struct, frozen=True):
    """Functions that decode all numbers of a piece.

    `sums` returns 64-bit integers from zigzag-encoded differences; with order 2, from differences
    of differences. `doubles` returns float64 numbers from float32 bytes.
    """

    sums: Callable[[bytes, int], array[int]]
    doubles: Callable[[bytes], array[float]]


def _prefix_sums(data: bytes, order: int) -> array[int]:
    folded: array[int] = array("Q", data)
    if sys.byteorder == "big":
        folded.byteswap()
    values: Iterable[int] = [~(step >> 1) if step & 1 else step >> 1 for step in folded]
    for _ in range(order):
        values = accumulate(values)
    whole = list(values)
    try:
        return array("q", whole)
    except OverflowError:  # a sum exceeds 64 bits where neighbouring bit patterns are far apart
        return array("q", map(wrap_int64, whole))


def pack_integers(values: Sequence[int]) -> bytes:
    """Compressed 64-bit integers. The result is small if neighbours are close."""
    return compress(to_bytes(zigzag_deltas(values)), 8)


def _float32_to_float64(data: bytes) -> array[float]:
    return array("d", floats_from_bytes("f", data).tolist())


PURE_PYTHON = Decoders(_prefix_sums, _float32_to_float64)


def unpack_integers(data: bytes, loops: Decoders = PURE_PYTHON, *, order: int = 1) -> array[int]:
    """The inverse of `pack_integers`. Use order 2 if the packed values were themselves
    differences."""
    return loops.sums(decompress(data, 8), order)


def pack_times(times: Sequence[float]) -> bytes:
    """Compressed times without loss. The result is small because intervals are nearly equal."""
    return pack_integers(deltas(float_bits(times)))


def unpack_times(data: bytes, loops: Decoders = PURE_PYTHON) -> array[float]:
    """The inverse of `pack_times`."""
    return floats_from_bits(unpack_integers(data, loops, order=2))


def deltas(values: Sequence[int]) -> array[int]:
    """The first value, then the differences between neighbours, as 64-bit integers."""
    differences: array[int] = array("q")
    before = 0
    for value in values:
        differences.append(wrap_int64(value - before))
        before = value
    return differences


def pack_column(column: Sequence[float]) -> bytes:
    """A compressed column of numbers, which are rounded to float32 (seven digits)."""
    return compress(to_bytes(array("f", column)), 4)


def unpack_column(data: bytes, loops: Decoders = PURE_PYTHON) -> array[float]:
    """The inverse of `pack_column`, as float64."""
    return loops.doubles(decompress(data, 4))


def value_in_column(data: bytes, row: int) -> float:
    """One value of a column. The other values are not decoded.

    Raises:
        DamagedError: the bytes cannot be decoded, or have no such row.
    """
    try:
        by_plane = zlib.decompress(data)
        count = len(by_plane) // 4
        (value,) = _FLOAT32.unpack(bytes(by_plane[plane * count + row] for plane in range(4)))
    except (zlib.error, IndexError) as error:
        raise DamagedError(str(error)) from error
    return float(value)


def is_constant(column: Sequence[float]) -> bool:
    """Whether all values of a column are equal, or all are NaN."""
    first = column[0]
    if math.isnan(first):
        return all(map(math.isnan, column))
    return column.count(first) == len(column)


# --- Signals --------------------------------------------------------------------------------------


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
