"""The file that keeps a second writer away: there while there is a store, and of one inode only."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from kneewatch.agent.store.database import Lock
from kneewatch.collector.errors import StoreError


def test_a_lock_that_was_there_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Lock(path).release()
    Lock(path).release(unused=True)
    assert Path(f"{path}.lock").exists()


def test_a_lock_that_was_of_no_use_goes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Lock(path).release(unused=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_taken_away_before_it_is_locked_lets_no_second_writer_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "store.db", fcntl.flock
    loser = Lock(path)

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        loser.release(unused=True)  # between our opening of the file and our lock on it
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    winner = Lock(path)
    with pytest.raises(StoreError, match="another kneewatch writes"):
        Lock(path)
    winner.release()
