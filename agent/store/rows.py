"""Ids and layouts of the open rows: whose a row is, and what its numbers are. Pure."""

from __future__ import annotations

import orjson

from kneewatch.agent.store.arrays import DamagedError
from kneewatch.agent.store.counters import column_of, column_row
from kneewatch.agent.store.schema import SEQUENCE_BITS, SEQUENCE_MASK
from kneewatch.collector.history import Column


def rows_of(owner_id: int) -> tuple[int, int]:
    """The first and the last id that an owner's rows can have."""
    return owner_id << SEQUENCE_BITS, (owner_id << SEQUENCE_BITS) | SEQUENCE_MASK


def row_id(owner_id: int, sequence: int) -> int:
    """The id of an owner's row of a cycle."""
    return owner_id << SEQUENCE_BITS | sequence


def keys_layout(keys: tuple[str, ...]) -> bytes:
    """A list of signals as a layout."""
    return orjson.dumps(keys)


def columns_layout(columns: tuple[Column, ...]) -> bytes:
    """A list of counters as a layout."""
    return orjson.dumps(list(map(column_row, columns)))


def keys_of(names: bytes) -> list[str]:
    """The signals of a layout.

    Raises:
        DamagedError: the layout is not what was written.
    """
    try:
        return [str(key) for key in orjson.loads(names)]
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a layout cannot be read: {error}") from error


def columns_of(names: bytes) -> tuple[Column, ...]:
    """The counters of a layout.

    Raises:
        DamagedError: the layout is not what was written.
    """
    try:
        return tuple(column_of(row) for row in orjson.loads(names))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a layout cannot be read: {error}") from error
