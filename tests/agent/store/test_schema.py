"""Versions: earlier ones are taken up, newer ones and other programs' files are refused."""

from __future__ import annotations

import gzip
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kneewatch.agent.store import database as schema
from kneewatch.agent.store.database import (
    APPLICATION_ID,
    MIGRATIONS,
    check,
    connect,
    migrate,
    version_of,
)
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.writer import Store
from kneewatch.collector.errors import StoreError
from tests.agent.store.factories import KEEP_ALL, Span, recorded, settle, written
from tests.agent.store.snapshots import snapshots
from tests.reports.documents import document_then
from tests.waiting import PATIENCE_S

VERSIONS = Path(__file__).parent / "versions"
"""A store of every version as that version wrote it: the first cycles of a recording.

Made by `python -m tests.agent.store.test_schema` when a version is new; never made anew.
"""

NEXT = "ALTER TABLE targets ADD COLUMN note TEXT NOT NULL DEFAULT 'old'; CREATE TABLE more (x);"
BROKEN = "CREATE TABLE half (x); INSERT INTO no_such_table VALUES (1);"
RECORDING, CYCLES = "kv_pressure_cascade", 60


def of_version(version: int, folder: Path) -> Path:
    """A store that a version wrote."""
    path = folder / "store.db"
    path.write_bytes(gzip.decompress((VERSIONS / f"{version}.db.gz").read_bytes()))
    return path


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_store_of_every_version_is_taken_up_with_all_it_holds(
    version: int, tmp_path: Path
) -> None:
    path = of_version(version, tmp_path)
    cycles = recorded(RECORDING)
    store = Store.open(path, retention=KEEP_ALL)
    for cycle in cycles[CYCLES:]:
        store.put(cycle)
    settle(store)
    store.close(PATIENCE_S)
    reader = Reader(path)
    (engine,) = [engine for engine in reader.engines() if engine.model]
    span: Span = {"from_s": cycles[0].t_s, "to_s": cycles[-1].t_s}
    assert list(reader.scrapes(engine.target, **span).times) == [scrape.t_s for scrape in cycles]
    assert list(reader.signals(engine.id, ["running"], **span).times) == [
        scrape.t_s for scrape in cycles if scrape.engines
    ]
    before = document_then(reader, engine.id, cycles[CYCLES - 1].t_s)
    assert before is not None
    assert before["signals"]["kv_capacity_tokens"] > 0
    assert {interval.kind for interval in reader.intervals(**span)} == {"stage", "cause", "health"}
    assert reader.configs(engine.id, **span)
    assert snapshots(path, engine.id, **span)[0].t_s == cycles[0].t_s
    reader.close()


def test_there_is_a_store_of_every_version() -> None:
    assert {int(file.name.split(".")[0]) for file in VERSIONS.glob("*.db.gz")} == set(
        range(1, len(MIGRATIONS) + 1)
    )


def test_a_migration_keeps_what_is_there(tmp_path: Path) -> None:
    path = of_version(len(MIGRATIONS), tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, "it", migrations=(*MIGRATIONS, NEXT))
        assert version_of(connection) == len(MIGRATIONS) + 1
        assert connection.execute("SELECT note FROM targets").fetchall() == [("old",)]
        migrate(connection, "it", migrations=(*MIGRATIONS, NEXT))
        assert connection.execute("SELECT count(*) FROM more").fetchone() == (0,)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = of_version(len(MIGRATIONS), tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="no_such_table"):
            migrate(connection, "it", migrations=(*MIGRATIONS, BROKEN))
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
        assert "half" not in tables
        assert version_of(connection) == len(MIGRATIONS)


def test_a_newer_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer kneewatch"):
        Store.open(path, retention=KEEP_ALL)
    with pytest.raises(StoreError, match="newer kneewatch"):
        Reader(path)
    assert path.read_bytes() == before


def test_a_store_knows_its_mark_and_version(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "store.db")) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert check(connection, "it") == len(MIGRATIONS) == version_of(connection)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def main() -> None:
    """Write a store of the newest version, where there is none yet."""
    file = VERSIONS / f"{len(schema.MIGRATIONS)}.db.gz"
    if file.exists():
        sys.exit(f"{file} is there: what a version wrote is not written anew")
    VERSIONS.mkdir(exist_ok=True)
    path = VERSIONS / "made.db"
    written(path, *recorded(RECORDING)[:CYCLES])
    file.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    for old_file in VERSIONS.glob("made.db*"):
        old_file.unlink()


if __name__ == "__main__":
    main()
