"""Encodes and decodes columns: float32 values, times and integers as compressed bytes. Pure.

The decoders are a parameter, `Decoders`. The daemon uses PURE_PYTHON, because importing numpy would
add 11 MiB to its 75 MiB. A report reads millions of numbers and therefore uses decoders with numpy.

All bytes are little-endian. Columns are split into byte planes before compression: all highest
bytes, then all second highest bytes, and so on. Neighbouring numbers share their upper bytes, so
these planes compress well. Each compressed piece contains zlib's checksum, so a flipped bit is
detected.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import accumulate

from msgspec import Struct

from kneewatch.collector.errors import KneewatchError

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
