"""An hour or so of one engine's signals as one blob: a directory, then a column each. Pure.

Any column can be read by itself: a chart of three signals reads three columns. The bytes are a
length, the directory as compressed JSON, the columns. A signal that did not change is a number in
the directory.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import orjson

from kneewatch.agent.store.arrays import (
    LEVEL,
    PLAIN,
    DamagedError,
    Loops,
    decoding,
    pack_column,
    pack_times,
    same_throughout,
    unpack_column,
    unpack_integers,
    unpack_times,
    value_in_column,
)

Read = Callable[[int, int], bytes]
"""Reads so many bytes from a place of a blob: (length, offset)."""

_LENGTH = struct.Struct("<I")
DIRECTORY_MAX_BYTES = 1 << 24


def pack_body(directory: Mapping[str, Any], pieces: Sequence[bytes]) -> bytes:
    """A blob of a directory and the pieces it tells of."""
    head = zlib.compress(orjson.dumps(directory), LEVEL)
    return b"".join((_LENGTH.pack(len(head)), head, *pieces))


class Body:
    """A blob: its directory, and its pieces as they are asked for. `rows` are its scrapes."""

    def __init__(self, read: Read, loops: Loops = PLAIN) -> None:
        """Reads the directory.

        Raises:
            DamagedError: it is not one.
        """
        self._read, self._loops = read, loops
        try:
            (length,) = _LENGTH.unpack(read(_LENGTH.size, 0))
            if length > DIRECTORY_MAX_BYTES:
                raise DamagedError(f"a directory of {length} bytes")
            found = orjson.loads(zlib.decompress(read(length, _LENGTH.size)))
        except (struct.error, zlib.error, ValueError) as error:
            raise DamagedError(f"the directory cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DamagedError("the directory is none")
        self.directory = cast("dict[str, Any]", found)
        self._from = _LENGTH.size + length
        with decoding("directory"):
            self.rows = int(self.directory["rows"])

    def piece(self, place: Sequence[int]) -> bytes:
        """A piece by its offset behind the directory and its length."""
        with decoding("directory"):
            offset, length = place
            return self._read(length, self._from + offset)

    def times(self) -> array[float]:
        """The scrapes' times.

        Raises:
            DamagedError: they are not what was written.
        """
        with decoding("times"):
            place = self.directory["times"]
        return self.whole(unpack_times(self.piece(place), self._loops))

    def _integers(self, key: str) -> array[int]:
        """Integers of a piece that the directory names.

        Raises:
            DamagedError: they are not what was written.
        """
        with decoding(key):
            place = self.directory[key]
        return unpack_integers(self.piece(place), self._loops)

    def whole(self, values: array[float]) -> array[float]:
        """Values of which each scrape has one.

        Raises:
            DamagedError: it has not.
        """
        if len(values) != self.rows:
            raise DamagedError(f"{len(values)} values for {self.rows} scrapes")
        return values


def reading_from(data: bytes) -> Read:
    """Reads from bytes in memory."""
    return lambda length, offset: data[offset : offset + length]


class Pieces:
    """Pieces laid one behind the other."""

    def __init__(self) -> None:
        self.laid: list[bytes] = []
        self._end = 0

    def lay(self, data: bytes) -> tuple[int, int]:
        """Where a piece lies: offset and length."""
        self.laid.append(data)
        self._end += len(data)
        return self._end - len(data), len(data)


def pack_signals(times: Sequence[float], columns: Mapping[str, Sequence[float]]) -> bytes:
    """A chunk. Shapes: `times` (scrapes,), each column (scrapes,), at least one scrape."""
    pieces = Pieces()
    directory: dict[str, Any] = {"rows": len(times), "times": pieces.lay(pack_times(times))}
    directory["columns"] = {
        key: column[0]  # NaN becomes null
        if same_throughout(column) and not math.isinf(column[0])
        else pieces.lay(pack_column(column))
        for key, column in columns.items()
    }
    return pack_body(directory, pieces.laid)


class SignalChunk(Body):
    """A chunk, read column by column."""

    def __init__(self, read: Read, loops: Loops = PLAIN) -> None:
        """Reads the directory.

        Raises:
            DamagedError: it is not one.
        """
        super().__init__(read, loops)
        with decoding("directory"):
            self._columns: Mapping[str, Any] = self.directory["columns"]

    @property
    def keys(self) -> list[str]:
        """The signals it holds."""
        return list(self._columns)

    def column(self, key: str) -> array[float]:
        """A signal; NaN throughout where the chunk has none of it.

        Raises:
            DamagedError: it is not what was written.
        """
        place = self._columns.get(key)
        if isinstance(place, list):
            return self.whole(unpack_column(self.piece(cast("list[int]", place)), self._loops))
        return array("d", [math.nan if place is None else float(place)]) * self.rows

    def values(self, row: int) -> dict[str, float]:
        """All signals of one scrape; those that are damaged are left out."""
        found: dict[str, float] = {}
        for key, place in self._columns.items():
            if not isinstance(place, list):
                found[key] = math.nan if place is None else float(place)
                continue
            with contextlib.suppress(DamagedError):
                found[key] = value_in_column(self.piece(cast("list[int]", place)), row)
        return found
