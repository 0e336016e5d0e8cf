"""Chunks: about an hour of signals, counters or scrapes, each encoded as one blob. Pure."""

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
    PLAIN,
    DamagedError,
    Loops,
    bits_of,
    decoding,
    from_bits,
    pack_column,
    pack_integers,
    pack_times,
    same_throughout,
    unpack_column,
    unpack_integers,
    unpack_times,
    value_in_column,
)
from kneewatch.agent.store.records import Scrapes
from kneewatch.collector.history import Column

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


# --- An engine's counters over an hour or so as one blob. Pure ------------------------------------
#
# A chunk carries its own column names. Whole numbers are kept as steps, others by their bits:
# what comes out is what went in, to the last bit.


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


# --- A target's scrapes over an hour or so as one blob: when, and why some failed -----------------


def pack_scrapes(scrapes: Scrapes) -> bytes:
    """A chunk of scrapes, oldest first."""
    pieces = Pieces()
    directory = {
        "rows": len(scrapes.times),
        "times": pieces.lay(pack_times(scrapes.times)),
        "failed": list(scrapes.failed.items()),
    }
    return pack_body(directory, pieces.laid)


def unpack_scrapes(read: Read, loops: Loops = PLAIN) -> Scrapes:
    """The scrapes of a chunk.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    body = Body(read, loops)
    with decoding("scrapes"):
        failed = {int(at): str(error) for at, error in body.directory["failed"]}
    return Scrapes(body.times(), failed)


def joined(parts: Iterable[Scrapes]) -> Scrapes:
    """Scrapes of several chunks, one behind the other."""
    times: array[float] = array("d")
    failed: dict[int, str] = {}
    for part in parts:
        failed |= {len(times) + at: why for at, why in part.failed.items()}
        times.extend(part.times)
    return Scrapes(times, failed)


def chosen(scrapes: Scrapes, places: Sequence[int]) -> Scrapes:
    """Some of the scrapes, by their places."""
    failed = {kept: scrapes.failed[at] for kept, at in enumerate(places) if at in scrapes.failed}
    return Scrapes(array("d", [scrapes.times[at] for at in places]), failed)


def thinned(scrapes: Scrapes, *, step_s: float) -> Scrapes:
    """The scrapes that failed, and one a step of those that did not."""
    kept: list[int] = []
    told: float | None = None
    for at, t_s in enumerate(scrapes.times):
        if at not in scrapes.failed:
            if t_s // step_s == told:
                continue
            told = t_s // step_s
        kept.append(at)
    return chosen(scrapes, kept)
