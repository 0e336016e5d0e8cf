"""Numbers as bytes: float32 columns, times, and counters. Pure.

The loops over all numbers are a parameter, `Loops`. The daemon's are PLAIN: importing numpy would
add 11 MiB to its 75. A report reads millions of numbers and passes loops of numpy.

All bytes are little-endian. Columns are cut into planes (all first bytes, all second bytes, ...)
before they are compressed, for neighbours share their upper bytes. Each compressed piece carries
zlib's checksum: one with a flipped bit is refused, not misread.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from kneewatch.collector.errors import KneewatchError

LEVEL = 6
INT_MAX = float(1 << 53)
"""Integers up to here are the same as float64."""

_FLOAT32 = struct.Struct(">f")
_WRAP = 1 << 64
_HALF = 1 << 63


class DamagedError(KneewatchError):
    """Stored bytes are not what was written."""


@contextmanager
def decoding(what: str) -> Generator[None]:
    """Of bytes that are not what was written: whatever goes wrong is a DamagedError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedError(f"the {what} cannot be read: {error}") from error


def to_bytes(values: array[float] | array[int]) -> bytes:
    """An array's bytes, little-endian."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def floats_of(typecode: str, data: bytes) -> array[float]:
    """The array of floats ("f" or "d") that `to_bytes` made the bytes of."""
    values: array[float] = array(typecode)
    try:
        values.frombytes(data)
    except ValueError as error:
        raise DamagedError(f"{len(data)} bytes are no array of numbers") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values


def planes(data: bytes, width: int) -> bytes:
    """Numbers of `width` bytes, the highest byte of each first, then the next ones."""
    return b"".join([data[at::width] for at in range(width - 1, -1, -1)])


def from_planes(data: bytes, width: int) -> bytes:
    """The inverse of `planes`."""
    count, left = divmod(len(data), width)
    if left:
        raise DamagedError(f"{len(data)} bytes are not planes of {width}")
    whole = bytearray(len(data))
    for plane in range(width):
        whole[width - 1 - plane :: width] = data[plane * count : (plane + 1) * count]
    return bytes(whole)


def squeeze(data: bytes, width: int) -> bytes:
    """Numbers of `width` bytes, compressed."""
    return zlib.compress(planes(data, width), LEVEL)


def expand(data: bytes, width: int) -> bytes:
    """The inverse of `squeeze`.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    try:
        return from_planes(zlib.decompress(data), width)
    except zlib.error as error:
        raise DamagedError(str(error)) from error


def bits_of(values: Sequence[float]) -> array[int]:
    """The bit patterns of float64 numbers, as signed integers: neighbours are near each other."""
    bits: array[int] = array("q")
    bits.frombytes(array("d", values).tobytes())
    return bits


def from_bits(bits: array[int]) -> array[float]:
    """The inverse of `bits_of`."""
    values: array[float] = array("d")
    values.frombytes(memoryview(bits).cast("B"))
    return values


def wrapped(value: int) -> int:
    """An integer brought into 64 bits, as a machine would."""
    return (value + _HALF) % _WRAP - _HALF


def folded_steps(values: Sequence[int]) -> array[int]:
    """The first value and the steps between them, in 64 bits, folded: small ones of either sign
    have zeros above."""
    made: array[int] = array("Q")
    before = 0
    for value in values:
        step = wrapped(value - before)
        made.append(step << 1 if step >= 0 else ((-step - 1) << 1) | 1)
        before = value
    return made


@dataclass(frozen=True, slots=True)
class Loops:
    """How all numbers of a piece are decoded. `sums` returns the 64-bit integers whose folded steps
    these bytes are; with order 2 the bytes are steps between steps. `doubles` returns the float32
    of these bytes as float64."""

    sums: Callable[[bytes, int], array[int]]
    doubles: Callable[[bytes], array[float]]


def _sums(data: bytes, order: int) -> array[int]:
    folded: array[int] = array("Q", data)
    if sys.byteorder == "big":
        folded.byteswap()
    values: Iterable[int] = [~(step >> 1) if step & 1 else step >> 1 for step in folded]
    for _ in range(order):
        values = accumulate(values)
    whole = list(values)
    try:
        return array("q", whole)
    except OverflowError:  # bits of numbers that are far apart
        return array("q", map(wrapped, whole))


def pack_integers(values: Sequence[int]) -> bytes:
    """Integers of 64 bits whose steps are small, compressed."""
    return squeeze(to_bytes(folded_steps(values)), 8)


def _doubles(data: bytes) -> array[float]:
    return array("d", floats_of("f", data).tolist())


PLAIN = Loops(_sums, _doubles)


def unpack_integers(data: bytes, loops: Loops = PLAIN, *, order: int = 1) -> array[int]:
    """The inverse of `pack_integers`; of order 2, of what was packed as steps."""
    return loops.sums(expand(data, 8), order)


def pack_times(times: Sequence[float]) -> bytes:
    """Times, exactly, compressed: they come at nearly equal distances."""
    return pack_integers(steps_of(bits_of(times)))


def unpack_times(data: bytes, loops: Loops = PLAIN) -> array[float]:
    """The inverse of `pack_times`."""
    return from_bits(unpack_integers(data, loops, order=2))


def steps_of(values: Sequence[int]) -> array[int]:
    """The first value and the steps between them, in 64 bits."""
    made: array[int] = array("q")
    before = 0
    for value in values:
        made.append(wrapped(value - before))
        before = value
    return made


def pack_column(column: Sequence[float]) -> bytes:
    """A column of numbers with a float32's seven digits, compressed."""
    return squeeze(to_bytes(array("f", column)), 4)


def unpack_column(data: bytes, loops: Loops = PLAIN) -> array[float]:
    """The inverse of `pack_column`, as float64."""
    return loops.doubles(expand(data, 4))


def value_in_column(data: bytes, row: int) -> float:
    """One value of a column, without unpacking the others.

    Raises:
        DamagedError: the bytes are not what was written, or have no such row.
    """
    try:
        laid = zlib.decompress(data)
        count = len(laid) // 4
        (value,) = _FLOAT32.unpack(bytes(laid[plane * count + row] for plane in range(4)))
    except (zlib.error, IndexError) as error:
        raise DamagedError(str(error)) from error
    return float(value)


def same_throughout(column: Sequence[float]) -> bool:
    """Whether a column holds one value, or NaN, all along."""
    first = column[0]
    if math.isnan(first):
        return all(map(math.isnan, column))
    return column.count(first) == len(column)
