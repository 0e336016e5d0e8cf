"""Readers beside the writing daemon: many, at once, from threads and processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kneewatch.agent.store.ingest import FLUSH_ROWS
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.stored_series import read_signals
from kneewatch.agent.store.writer import Store
from kneewatch.collector.errors import StoreError
from tests.agent.store.factories import (
    EVER,
    KEEP_ALL,
    START_S,
    STEP_S,
    counted,
    cycle,
    diagnosis,
    settle,
    written,
)
from tests.agent.store.snapshots import snapshots
from tests.reports.documents import document_then
from tests.waiting import PATIENCE_S, until

SCRAPES = 2500


def numbered(at: int) -> Cycle:
    verdict = diagnosis(START_S + STEP_S * at, values={"n": float(at)}, stage=at // 50 % 3)
    return cycle(verdict, raw=counted(float(at)))


def whole(reader: Reader, engine_id: int) -> int:
    """How many scrapes a reader sees; what it sees has no gap, nothing twice."""
    series = reader.signals(engine_id, ["n"], **EVER)
    assert list(series.values["n"]) == list(range(len(series.times)))
    last_s = series.times[-1]
    document = document_then(reader, engine_id, last_s)
    assert document is not None
    assert document["signals"]["n"] >= series.values["n"][-1]
    raw = [set(snapshot.values.values()) for snapshot in snapshots(reader.path, engine_id, **EVER)]
    assert raw[0] == {0.0}
    assert max(raw[-1]) >= series.values["n"][-1]
    stages = reader.intervals(kinds=("stage",), **EVER)
    assert [stage.id for stage in stages] == [str(at % 3) for at in range(len(stages))]
    return len(series.times)


def test_readers_see_a_whole_history_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store.open(path, retention=KEEP_ALL)
    store.put(numbered(0))
    settle(store)
    shared = Reader(path)
    seen: list[int] = []
    wrong: list[Exception] = []
    stop = threading.Event()

    def look(reader: Reader) -> None:
        try:
            while not stop.is_set():
                seen.append(whole(reader, 1))
        except (AssertionError, StoreError) as error:
            wrong.append(error)

    readers = [shared, shared, Reader(path)]
    threads = [threading.Thread(target=look, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for at in range(1, SCRAPES):
        store.put(numbered(at))
        if at % 10 == 0:
            settle(store)
        if at % 250 == 0:  # every reader has read something of what is there
            before = len(seen)
            until(lambda before=before: wrong or len(seen) > before + len(readers))  # type: ignore[misc]
    settle(store)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert whole(shared, 1) == SCRAPES
    assert len({count for count in seen if 1 < count < SCRAPES}) > 3, "they read in between"
    assert (store.stats().dropped, store.stats().last_error) == (0, "")
    for reader in readers:
        reader.close()
    store.close(PATIENCE_S)


def test_what_is_sealed_while_somebody_reads_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store.open(path, retention=KEEP_ALL, clock=lambda: START_S)
    for at in range(FLUSH_ROWS - 1):
        store.put(numbered(at))
    settle(store)
    reader = Reader(path)
    with reader._snapshot() as connection:  # pyright: ignore[reportPrivateUsage]
        chunks = "SELECT count(*) FROM chunks"
        assert connection.execute(chunks).fetchone() == (0,)
        for at in range(FLUSH_ROWS - 1, FLUSH_ROWS + 50):
            store.put(numbered(at))
            settle(store)
        with closing(sqlite3.connect(path)) as other:
            assert other.execute(chunks).fetchone() != (0,), "it was sealed meanwhile"
        series = read_signals(connection, 1, ["n"], **EVER)
    assert list(series.values["n"]) == list(range(FLUSH_ROWS - 1))
    reader.close()
    store.close(PATIENCE_S)


def test_another_process_reads_the_store_of_a_running_daemon(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store.open(path, retention=KEEP_ALL)
    store.put(numbered(0))
    settle(store)
    program = (
        "import sys; from pathlib import Path; from kneewatch.agent.store.reader import Reader;"
        "print(Reader(Path(sys.argv[1])).engines()[0].target)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "a\n"
    store.put(numbered(1))
    settle(store)
    assert store.stats().last_error == ""
    store.close(PATIENCE_S)


def test_a_copy_on_read_only_media_can_be_read(tmp_path: Path) -> None:
    written(tmp_path / "store.db", *map(numbered, range(10)))
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "store.db").write_bytes((tmp_path / "store.db").read_bytes())
    folder.chmod(0o500)
    reader = Reader(folder / "store.db")
    assert whole(reader, 1) == 10
    reader.close()
    folder.chmod(0o700)


def test_a_reader_without_a_store_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="kneewatch run"):
        Reader(tmp_path / "none.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreError, match="empty"):
        Reader(tmp_path / "empty.db")


def test_stats_tell_how_the_store_does(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store.db", retention=Retention())
    assert store.stats().oldest_s is None
    for at in range(3):
        store.put(numbered(at))
    settle(store)
    stats = store.stats()
    assert (stats.queued, stats.written, stats.dropped, stats.last_error) == (0, 3, 0, "")
    assert stats.oldest_s == START_S
    assert stats.bytes > 4096
    store.close(PATIENCE_S)


def test_a_closed_reader_opens_again_when_it_is_asked(tmp_path: Path) -> None:
    written(tmp_path / "store.db", numbered(0))
    reader = Reader(tmp_path / "store.db")
    reader.close()
    reader.close()
    assert [e.target for e in reader.engines()] == ["a"]
    assert reader.engines("b") == []
    assert len(reader.scrapes("b", **EVER).times) == 0
    reader.close()
