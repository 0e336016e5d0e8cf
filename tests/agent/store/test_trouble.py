"""Full and read-only disks, damaged and vanished files: cycles go on, and so does the store."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.report.history import History
from kneewatch.agent.store import writer
from kneewatch.agent.store.chunks import ChunkBody, bytes_reader
from kneewatch.agent.store.database import Lock, connect, move_aside
from kneewatch.agent.store.downsampling_and_retention import ROUND_INTERVAL_S, Maintenance
from kneewatch.agent.store.ingest import flush_engine
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle
from kneewatch.agent.store.writer import BATCH_CYCLES, INBOX_CYCLES, Backlog, Store
from kneewatch.collector.errors import StoreError
from kneewatch.rules.rule import DAY_S
from tests.agent.store.disks import as_nobody, files_of_at_most, mount, small_disk, unchangeable
from tests.agent.store.factories import (
    EVER,
    KEEP_ALL,
    START_S,
    STEP_S,
    cause,
    counted,
    cycle,
    diagnosis,
    settle,
    written,
)
from tests.reports.documents import document_then
from tests.waiting import PATIENCE_S, until


def numbered(at: int) -> Cycle:
    """The cycle of a number, with numbers that do not compress."""
    rng = random.Random(at)
    values = {"n": float(at), **{f"s{column}": rng.random() for column in range(100)}}
    causes = [cause("kv_pressure")] if at % 7 == 0 else []
    verdict = diagnosis(START_S + STEP_S * at, values=values, causes=causes, stage_since_s=START_S)
    return cycle(verdict, raw=counted(rng.random()))


def numbers(path: Path) -> list[float]:
    """The numbers of the cycles that a store has, oldest first."""
    reader = Reader(path)
    stored = [n for e in reader.engines() for n in reader.signals(e.id, ["n"], **EVER).values["n"]]
    reader.close()
    return stored


def opened(path: Path) -> Store:
    return Store.open(path, retention=KEEP_ALL)


def put_until_full(store: Store) -> int:
    """Put cycles until the disk takes no more; how many were put."""
    for at in range(100_000):
        store.put(numbered(at))
        if at % 20 == 0:
            settle_or_fail(store)
            if store.stats().last_error:
                return at + 1
    raise AssertionError("the disk never was full")


def settle_or_fail(store: Store) -> None:
    store.flush()
    until(lambda: not store.stats().queued or bool(store.stats().last_error))


def pack(store: Store) -> None:
    """Wait until everything that was put is packed, while nothing can be written."""
    store.flush()
    backlog = store._backlog  # pyright: ignore[reportPrivateUsage]
    until(lambda: store.stats().queued == len(backlog))


def test_a_full_disk_loses_nothing_that_fits_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    with files_of_at_most(600_000):
        put = put_until_full(store)
        put_more = put + 50
        for at in range(put, put_more):
            store.put(numbered(at))
        until(lambda: store.stats().queued > 40)
    settle(store)
    stats = store.stats()
    assert (stats.last_error, stats.dropped, stats.written) == ("", 0, put_more)
    store.close(PATIENCE_S)
    assert numbers(path) == list(range(put_more))


def test_a_file_system_without_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="2m") as disk:
        store = opened(disk / "store.db")
        put = put_until_full(store)
        assert "full" in store.stats().last_error
        mount("-o", "remount,size=20m", str(disk))
        settle(store)
        store.close(PATIENCE_S)
        assert numbers(disk / "store.db") == list(range(put))


FILLER_BYTES = 4096


@contextmanager
def filled(disk: Path) -> Generator[None]:
    """No byte is left on a disk."""
    file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(file, bytes(FILLER_BYTES))
    os.close(file)
    yield
    (disk / "filler").unlink()


@contextmanager
def crowded(disk: Path) -> Generator[None]:
    """No inode is left on a disk."""
    with suppress(OSError):
        for at in itertools.count():
            (disk / f"{at}.filler").touch()
    yield
    for file in disk.glob("*.filler"):
        file.unlink()


@contextmanager
def frozen(disk: Path) -> Generator[None]:
    """A disk is read-only."""
    mount("-o", "remount,ro", str(disk))
    yield
    mount("-o", "remount,rw", str(disk))


@pytest.mark.parametrize("ill", [filled, crowded, frozen])
def test_a_disk_that_is_ill_at_the_start_stops_nothing(
    tmp_path: Path, ill: Callable[[Path], AbstractContextManager[None]]
) -> None:
    with small_disk(tmp_path / "disk", size="4m,nr_inodes=40") as disk:
        path = disk / "store.db"
        written(path, numbered(0))
        with ill(disk):
            store = opened(path)
            reader = Reader(path, may_be_late=True)
            for at in range(1, 20):
                store.put(numbered(at))
            until(lambda: bool(store.stats().last_error))
            pack(store)
            assert store.stats().queued == 19
        settle(store)
        store.close(PATIENCE_S)
        with closing(reader):
            assert len(reader.scrapes("a", **EVER).times) == 20
        assert numbers(path) == list(range(20))


def test_files_that_become_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "ERROR_EVERY_S", 0.0)
    path = tmp_path / "store.db"
    store = opened(path)
    store.put(numbered(0))
    settle(store)
    with unchangeable(path, tmp_path / "store.db-wal"):
        store.put(numbered(1))
        until(lambda: bool(store.stats().last_error))
        reader = Reader(path)
        assert document_then(reader, 1, START_S) is not None
        reader.close()
        until(lambda: caplog.text.count("store cannot write") > 1)
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    settle(store)
    store.close(PATIENCE_S)
    assert numbers(path) == [0, 1]


def test_a_queue_that_is_full_drops_the_oldest_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    with files_of_at_most(1):
        more = INBOX_CYCLES * 9
        for at in range(more):
            store.put(numbered(at))
            if at % 100 == 0:  # what is not packed yet is dropped too, and makes a gap
                pack(store)
        until(lambda: store.stats().dropped > 0 and bool(store.stats().last_error))
    settle(store)
    stats = store.stats()
    store.close(PATIENCE_S)
    assert stats.dropped + stats.written == more
    kept = numbers(path)
    assert kept == list(range(more - len(kept), more))
    reader = Reader(path)
    first = document_then(reader, 1, START_S + STEP_S * kept[0])
    assert first is not None, "what dropped cycles said is said again"


def test_what_a_dropped_cycle_said_the_next_ones_say() -> None:
    backlog = Backlog(max_bytes=10_000)
    for at in range(1, 7):
        backlog.add(numbered(at))
    first, *others = backlog.next(100)
    assert backlog.dropped == 7 - 1 - len(others) - 1
    assert first.engines[0].document is not None
    assert others[0].engines[0].document is None
    backlog.drop(first)
    while len(backlog) > 1:
        backlog.drop(backlog.next(1)[0])
    (last,) = backlog.next(1)
    assert last.engines[0].document == first.engines[0].document
    backlog.drop(last)
    backlog.add(numbered(8))
    assert backlog.next(1)[0].engines[0].document is not None


def test_what_waits_since_maintenance_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise OSError("no room")

    monkeypatch.setattr(writer, "IDLE_S", 0.01)
    monkeypatch.setattr(writer, "BACKOFF_S", (PATIENCE_S, PATIENCE_S))
    monkeypatch.setattr(Maintenance, "step", fail)
    store = opened(tmp_path / "store.db")
    until(lambda: store.stats().last_error)
    assert store.stats().unwritten_s is None, "nothing waits"
    store.put(numbered(0))
    pack(store)
    assert store.stats().unwritten_s == START_S
    store.close(PATIENCE_S)
    assert store.stats().written == 1


def test_a_flush_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GATHER_S", 2 * PATIENCE_S)
    store = opened(tmp_path / "store.db")
    for at in range(3):
        store.put(numbered(at))
        settle(store)
    for at in range(BATCH_CYCLES):
        store.put(numbered(at))
    until(lambda: not store.stats().queued)  # a full batch waits for no more
    store.put(numbered(3))
    store.close(PATIENCE_S)
    assert store.stats().written == 3 + BATCH_CYCLES + 1


def test_putting_never_waits_for_the_disk(tmp_path: Path) -> None:
    store = opened(tmp_path / "store.db")
    locker = os.open(tmp_path / "store.db", os.O_RDWR)
    cycles = [numbered(at) for at in range(100)]
    with files_of_at_most(1):
        for scrape in cycles:  # nothing is written meanwhile: who waits for that waits for ever
            store.put(scrape)
        assert store.stats().written == 0
    os.close(locker)
    store.close(PATIENCE_S)


def test_a_cycle_that_cannot_be_packed_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    bad = diagnosis(START_S + 1, values={"n": "no number"})  # type: ignore[dict-item]
    surrogate = diagnosis(START_S + 2, target="\ud800", values={"n": 1.0})
    with caplog.at_level(logging.CRITICAL):
        for scrape in (numbered(0), cycle(bad), cycle(surrogate), numbered(1)):
            store.put(scrape)
        settle(store)
    stats = store.stats()
    assert (stats.written, stats.dropped, stats.last_error) == (2, 2, "")
    store.close(PATIENCE_S)
    assert numbers(path) == [0, 1]


def flipped(path: Path, seed: int, *, share: float = 0.02) -> None:
    """Flip a bit in some bytes of a file."""
    rng = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(max(8, int(share * len(data)))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_store_is_moved_aside_at_the_start(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.db"
    written(path, *[numbered(at) for at in range(900)])
    flipped(path, seed)
    store = opened(path)
    store.put(numbered(0))
    settle(store)
    assert store.stats().last_error == ""
    store.close(PATIENCE_S)
    assert numbers(path) == [0]
    (aside,) = tmp_path.glob("store.db.corrupt-*")
    assert aside.stat().st_size > 100_000


def lose_first_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))


def test_a_store_without_its_first_page_is_moved_aside_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, numbered(0))
    lose_first_page(path)
    store = opened(path)
    store.put(numbered(1))
    settle(store)
    store.close(PATIENCE_S)
    assert numbers(path) == [1]
    assert any(tmp_path.glob("*.corrupt-*"))


def test_a_bad_disk_is_not_filled_with_damaged_stores(tmp_path: Path) -> None:
    path, asides = tmp_path / "store[1].db", list[Path]()
    for _ in range(6):
        written(path, numbered(0))
        Path(f"{path}-wal").touch()
        asides.append(move_aside(path, "damage"))
    kept = {file for file in tmp_path.iterdir() if "corrupt" in file.name}
    assert kept == {Path(f"{aside}{suffix}") for aside in asides[-3:] for suffix in ("", "-wal")}


def test_a_first_page_that_is_lost_under_a_daemon_and_a_reader_costs_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    written(path, numbered(0))
    store = opened(path)
    with closing(Reader(path, on_damage=store.check)) as reader:
        reader.engines()
        lose_first_page(path)
        for at in range(1, 50):
            store.put(numbered(at))
        settle(store)
        assert len(reader.scrapes("a", **EVER).times) == 50
        store.close(PATIENCE_S)
    assert numbers(path) == list(range(50))


def destroy(path: Path, seed: int, begin: int = 0) -> None:
    """Write nonsense into every page of a file, under the feet of who has it open."""
    rng = random.Random(seed)
    with path.open("r+b") as file:
        for at in range(begin, path.stat().st_size, 512):
            file.seek(at)
            file.write(rng.randbytes(300))


@pytest.mark.parametrize("seed", range(3))
def test_damage_at_run_time_stops_nothing(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.db"
    written(path, *[numbered(at) for at in range(900)])
    store = opened(path)
    store.put(numbered(900))
    settle(store)
    destroy(path, seed)
    for at in range(901, 1000):
        store.put(numbered(at))
        time.sleep(0.001)
    settle(store)
    stats = store.stats()
    assert (stats.dropped, stats.last_error) == (0, "")
    store.close(PATIENCE_S)
    again = opened(path)
    again.put(numbered(1000))
    settle(again)
    again.close(PATIENCE_S)
    assert numbers(path)[-1] == 1000


@pytest.mark.parametrize("read", [False, True])
def test_damage_is_found_within_a_day_and_soon_if_a_reader_comes_across_it(
    tmp_path: Path, *, read: bool
) -> None:
    path, now_s = tmp_path / "store.db", START_S
    written(path, *[numbered(at) for at in range(900)])
    store = Store.open(path, retention=KEEP_ALL, clock=lambda: now_s)
    reader = Reader(path, on_damage=store.check)
    destroy(path, 1, begin=4096)
    now_s = START_S + DAY_S
    if read:
        now_s = START_S + ROUND_INTERVAL_S
        with pytest.raises(StoreError, match="is damaged"):
            reader.engines()
    store.put(numbered(901))
    until(lambda: any(tmp_path.glob("*.corrupt-*")))
    reader.close()
    store.put(numbered(902))
    settle(store)
    store.close(PATIENCE_S)
    assert numbers(path)[-1] == 902


def test_one_flipped_bit_in_a_chunk_costs_one_column(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    written(path, *[numbered(at) for at in range(800)])
    with closing(connect(path)) as connection:
        flush_engine(connection, 1)
        ((chunk, body),) = connection.execute("SELECT id, body FROM chunks WHERE kind = 0")
        offset, length = ChunkBody(bytes_reader(body)).directory["columns"]["s3"]
        changed = bytearray(body)
        changed[4 + int.from_bytes(body[:4], "little") + offset + length // 2] ^= 4
        connection.execute("UPDATE chunks SET body = ? WHERE id = ?", (bytes(changed), chunk))
    keys = ["n", *(f"s{at}" for at in range(100))]
    with closing(History(path)) as history:
        (engine,) = history.engines()
        arrays = history.signal_arrays(engine.id, keys, **EVER)
        series = history.signals(engine.id, keys, **EVER)
    for times, values in ((list(series.times), series.values), (arrays.times, arrays.values)):
        assert len(times) == 800
        assert {key for key in keys if any(map(math.isnan, values[key]))} == {"s3"}
        assert list(values["n"]) == list(range(800))


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    store.put(numbered(0))
    settle(store)
    reader = Reader(path)
    assert document_then(reader, 1, START_S) is not None
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    store.put(numbered(1))
    settle(store)
    store.put(numbered(2))
    settle(store)
    assert document_then(reader, 1, START_S + 2 * STEP_S) is not None
    assert numbers(path) == [1, 2]
    store.close(PATIENCE_S)


def test_a_store_that_is_replaced_is_read_without_what_belongs_to_the_one_before(
    tmp_path: Path,
) -> None:
    path, backup = tmp_path / "store.db", tmp_path / "backup.db"
    written(backup, *map(numbered, range(1000, 1040)))
    store = opened(path)
    for at in range(40):
        store.put(numbered(at))
        settle(store)
    assert Path(f"{path}-wal").stat().st_size, "SQLite would apply it to the backup"
    with closing(Reader(path)) as reader:
        (engine,) = reader.engines()
        backup.rename(path)
        store.put(numbered(1040))
        settle(store)
        assert list(reader.signals(engine.id, ["n"], **EVER).values["n"]) == list(range(1000, 1041))
    store.close(PATIENCE_S)
    assert numbers(path) == list(range(1000, 1041))
    assert not list(tmp_path.glob("store.db.corrupt-*"))


@pytest.mark.parametrize("suffixes", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_a_log_that_is_deleted_under_the_store_loses_nothing(
    tmp_path: Path, suffixes: tuple[str, ...]
) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    for at in range(20):
        store.put(numbered(at))
    settle(store)
    with closing(Reader(path)) as reader:
        (engine,) = reader.engines()
        for suffix in suffixes:
            Path(f"{path}{suffix}").unlink()
        store.put(numbered(20))
        settle(store)
        assert list(reader.signals(engine.id, ["n"], **EVER).values["n"]) == list(range(21))
        left = shutil.copytree(tmp_path, tmp_path / "left")  # as a kill would leave it
        assert numbers(left / "store.db") == list(range(21))
    store.close(PATIENCE_S)
    assert not list(tmp_path.glob("store.db.corrupt-*"))


def test_a_folder_that_is_moved_away_leaves_its_place_to_one_writer(tmp_path: Path) -> None:
    folder, aside = tmp_path / "state", tmp_path / "aside"
    store = opened(folder / "store.db")
    store.put(numbered(0))
    settle(store)
    folder.rename(aside)
    store.put(numbered(1))
    until(lambda: "No such file" in store.stats().last_error)
    other = opened(folder / "store.db")  # a second daemon at the old place
    until(lambda: "another kneewatch writes" in store.stats().last_error)
    other.close(PATIENCE_S)
    settle(store)
    store.close(PATIENCE_S)
    assert (numbers(aside / "store.db"), numbers(folder / "store.db")) == ([0], [1])


def test_a_link_that_leads_elsewhere_is_locked_there(tmp_path: Path) -> None:
    link, paths = tmp_path / "store.db", [tmp_path / name / "s.db" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
    link.symlink_to(paths[0])
    store = opened(link)
    store.put(numbered(0))
    settle(store)
    link.unlink()
    link.symlink_to(paths[1])
    store.put(numbered(1))
    settle(store)
    with pytest.raises(StoreError, match="another kneewatch writes"):
        opened(paths[1])
    store.close(PATIENCE_S)
    assert list(map(numbers, paths)) == [[0], [1]]


def test_a_store_of_another_user_is_refused_with_the_reason() -> None:
    with as_nobody() as folder:
        written(folder / "store.db", numbered(0))
        folder.chmod(0)
        with pytest.raises(StoreError, match="Permission denied; check its permissions"):
            Reader(folder / "store.db")
        folder.chmod(0o700)


def test_who_may_not_write_is_told_what_to_do() -> None:
    with as_nobody() as folder:
        path = folder / "store.db"
        written(path, numbered(0))
        path.chmod(0o400)
        folder.chmod(0o500)
        with pytest.raises(StoreError, match="--store FILE"):
            opened(path)
        with pytest.raises(StoreError, match="--store FILE"):
            opened(folder / "other" / "store.db")
        assert numbers(path) == [0], "it can still be read"
        folder.chmod(0o700)


def test_only_its_owner_reads_the_store(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(tmp_path / "made" / "store.db")
        store.put(numbered(0))
        settle(store)
        for file in (tmp_path / "made").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
        store.close(PATIENCE_S)
    finally:
        os.umask(before)


def test_another_name_of_the_store_is_the_same_store(tmp_path: Path) -> None:
    store = opened(tmp_path / "store.db")
    (tmp_path / "soft.db").symlink_to(tmp_path / "store.db")
    with pytest.raises(StoreError, match="another kneewatch writes"):
        opened(tmp_path / "soft.db")
    (tmp_path / "hard.db").hardlink_to(tmp_path / "store.db")
    with pytest.raises(StoreError, match="has hard links"):
        opened(tmp_path / "hard.db")
    store.close(PATIENCE_S)


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "store.db")
    with pytest.raises(StoreError, match="another kneewatch writes"):
        opened(tmp_path / "store.db")
    store.close(PATIENCE_S)
    opened(tmp_path / "store.db").close(PATIENCE_S)


def test_a_store_whose_lock_was_deleted_is_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store, lock = opened(path), tmp_path / "store.db.lock"
    store.put(numbered(0))
    settle(store)
    lock.unlink()
    store.put(numbered(1))
    settle(store)
    with pytest.raises(StoreError, match="another kneewatch writes"):
        opened(path)
    lock.unlink()
    other = Lock(path)  # a second daemon was quicker
    store.put(numbered(2))
    until(lambda: "another kneewatch writes" in store.stats().last_error)
    other.release()
    until(lambda: not store.stats().last_error)
    store.close(PATIENCE_S)
    assert numbers(path) == [0, 1, 2], "the cycles waited"


def test_closing_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    store = opened(tmp_path / "store.db")
    with files_of_at_most(1):
        store.put(numbered(0))
        store.close(0.5)  # the disk stays full: without a limit it would not end
    assert store.stats().queued == 1


def test_a_cycle_that_ends_after_the_store_leaves_the_history_whole(tmp_path: Path) -> None:
    store = opened(tmp_path / "store.db")
    store.put(numbered(0))
    store.close(PATIENCE_S)
    store.put(numbered(1))
    assert store.stats().queued == 0
    assert numbers(tmp_path / "store.db") == [0.0]


@pytest.mark.parametrize("name", ["a folder", "a pipe", "a text", "another program's"])
def test_what_is_no_store_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    if name == "a folder":
        path.mkdir()
    elif name == "a pipe":
        os.mkfifo(path)
    elif name == "a text":
        path.write_text("listen = 'here'\n" * 100)
    else:
        subprocess.run(["sqlite3", path, "CREATE TABLE theirs (x)"], check=True)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match="--store FILE"):
        opened(path)
    with pytest.raises(StoreError):
        Reader(path)
    assert not path.is_file() or path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file"], "nothing is left beside it"


def test_a_reader_calls_a_damaged_store_damaged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = opened(path)
    store.put(numbered(0))
    store.close(5.0)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * (path.stat().st_size - 4096))
    with (
        closing(Reader(path)) as reader,
        pytest.raises(StoreError, match=r"is damaged: .* moves a damaged store aside"),
    ):
        reader.engines()


@pytest.mark.parametrize("running", [False, True])
def test_a_store_that_lacks_a_table_is_moved_aside(tmp_path: Path, *, running: bool) -> None:
    path = tmp_path / "store.db"
    written(path, *[numbered(at) for at in range(3)])
    store = opened(path) if running else None
    with closing(connect(path)) as connection:
        connection.execute("DROP TABLE intervals")
        connection.execute("DROP TABLE open_scrapes")
    store = store or opened(path)
    store.put(numbered(3))
    settle(store)
    assert store.stats().last_error == ""
    store.close(PATIENCE_S)
    assert numbers(path) == [3]
    assert list(tmp_path.glob("store.db.corrupt-*"))


def test_a_readers_snapshot_does_not_let_the_files_grow(tmp_path: Path) -> None:
    path, most_bytes = tmp_path / "store.db", 1_048_576
    written(path, numbered(0))
    store = Store.open(path, retention=replace(KEEP_ALL, max_bytes=most_bytes))
    with closing(connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM chunks").fetchone()
        for at in range(1, 600):
            store.put(numbered(at))
            time.sleep(0.0005)
        until(lambda: "another program reads for too long" in store.stats().last_error)
        assert sum(file.stat().st_size for file in tmp_path.glob("store.db*")) < most_bytes
        reader.execute("ROLLBACK")
    settle(store)
    assert store.stats().last_error == ""
    store.close(PATIENCE_S)
    assert numbers(path) == list(range(600))
