"""SQLite tables, migrations, row ids and the layouts of open rows. I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import orjson

from kneewatch.agent.store.chunks import column_of, column_row
from kneewatch.agent.store.columns import DamagedError
from kneewatch.collector.errors import StoreError
from kneewatch.collector.scrape_history import Column

APPLICATION_ID = 0x6B6E6565
"""Marks the file as kneewatch's ("knee")."""

SEQUENCE_BITS = 40
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1

SIGNALS, COUNTERS, SCRAPES = 0, 1, 2
"""Kinds of chunks: owned by an engine, an engine, a target."""

FIRST = """
CREATE TABLE targets (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE engines (
    id INTEGER PRIMARY KEY,
    target_id INTEGER NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    replica TEXT NOT NULL,
    labels TEXT NOT NULL,
    first_s REAL NOT NULL,
    last_s REAL NOT NULL,
    UNIQUE (target_id, model, engine, replica)
);

CREATE TABLE layouts (id INTEGER PRIMARY KEY, names BLOB NOT NULL UNIQUE);

CREATE TABLE open_scrapes (id INTEGER PRIMARY KEY, t_s REAL NOT NULL, error TEXT);

CREATE TABLE open_signals (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, layout_id INTEGER NOT NULL, body BLOB NOT NULL
);

CREATE TABLE open_counters (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, layout_id INTEGER NOT NULL, body BLOB NOT NULL
);

CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    kind INTEGER NOT NULL,
    owner_id INTEGER NOT NULL,
    step_s REAL NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    min_s REAL NOT NULL,
    max_s REAL NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX chunks_of_owner ON chunks (kind, owner_id, max_s, min_s);
CREATE INDEX chunks_by_age ON chunks (max_s);

CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    t_s REAL NOT NULL,
    base_id INTEGER,
    body BLOB NOT NULL
);
CREATE INDEX documents_of_engine ON documents (engine_id, t_s);

CREATE TABLE intervals (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    severity INTEGER NOT NULL,
    start_s REAL NOT NULL,
    end_s REAL,
    last_s REAL,
    ended TEXT NOT NULL DEFAULT ''
);
CREATE INDEX intervals_of_engine ON intervals (engine_id, end_s);

CREATE TABLE recommendations (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    name TEXT NOT NULL,
    document BLOB NOT NULL,
    first_s REAL NOT NULL,
    last_s REAL,
    fate TEXT NOT NULL DEFAULT 'open',
    watched_s REAL,
    applied_s REAL,
    measured TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX recommendations_of_engine ON recommendations (engine_id, fate);

CREATE TABLE configs (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    t_s REAL NOT NULL,
    labels TEXT NOT NULL,
    started_s REAL,
    restart TEXT NOT NULL
);
CREATE INDEX configs_of_engine ON configs (engine_id, id);
"""

EXACT = """
ALTER TABLE documents ADD COLUMN exact INTEGER NOT NULL DEFAULT 0;
"""
"""Allows chains of documents, and adds `exact`: whether a document holds for every scrape until the
next document. Documents of earlier versions have evidence up to minutes old."""

MIGRATIONS: tuple[str, ...] = (FIRST, EXACT)
"""Entry n migrates a store from version n to n + 1. A released migration is never changed."""


def version_of(connection: sqlite3.Connection) -> int:
    """Schema version of a store; 0 for an empty file."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def check(connection: sqlite3.Connection, name: str, *, newest: int = len(MIGRATIONS)) -> int:
    """Schema version of a store, after checking that this program may use it.

    Raises:
        StoreError: another program wrote the file, or a newer kneewatch.
        DamagedError: the store's header is damaged.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    except UnicodeDecodeError as error:
        raise DamagedError(f"{name} has unreadable table names: {error}") from error
    if application != APPLICATION_ID and tables:
        if "open_signals" in tables:
            raise DamagedError(f"{name} has lost its application id")
        raise StoreError(
            f"{name} is a database of another program; name another file (--store FILE)"
        )
    version = version_of(connection)
    if version > newest:
        raise StoreError(
            f"{name} was written by a newer kneewatch (its version is {version}, this program "
            f"knows up to {newest}); upgrade kneewatch, or name another file (--store FILE)"
        )
    return version


def migrate(
    connection: sqlite3.Connection, name: str, *, migrations: Sequence[str] = MIGRATIONS
) -> None:
    """Migrate a store to the newest version.

    Raises:
        StoreError: another program wrote the file, or a newer kneewatch.
    """
    for version in range(check(connection, name, newest=len(migrations)), len(migrations)):
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{migrations[version]}\n"
                f"PRAGMA application_id = {APPLICATION_ID};\n"
                f"PRAGMA user_version = {version + 1};\nCOMMIT;"
            )
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


# --- Row ids and layouts --------------------------------------------------------------------------


def rows_of(owner_id: int) -> tuple[int, int]:
    """First and last possible row id of an owner (engine or target)."""
    return owner_id << SEQUENCE_BITS, (owner_id << SEQUENCE_BITS) | SEQUENCE_MASK


def row_id(owner_id: int, sequence: int) -> int:
    """Row id of an owner in the cycle with that sequence number."""
    return owner_id << SEQUENCE_BITS | sequence


def keys_layout(keys: tuple[str, ...]) -> bytes:
    """A list of signals encoded as a layout."""
    return orjson.dumps(keys)


def columns_layout(columns: tuple[Column, ...]) -> bytes:
    """A list of counters encoded as a layout."""
    return orjson.dumps(list(map(column_row, columns)))


def keys_of(names: bytes) -> list[str]:
    """The signals of a layout.

    Raises:
        DamagedError: the layout cannot be decoded.
    """
    try:
        return [str(key) for key in orjson.loads(names)]
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a layout cannot be read: {error}") from error


def columns_of(names: bytes) -> tuple[Column, ...]:
    """The counters of a layout.

    Raises:
        DamagedError: the layout cannot be decoded.
    """
    try:
        return tuple(column_of(row) for row in orjson.loads(names))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a layout cannot be read: {error}") from error
