"""Where the history is kept when nothing is stated."""

from __future__ import annotations

from pathlib import Path

import pytest

from kneewatch.agent.store.database import store_path
from kneewatch.collector.errors import StoreError


def test_what_is_stated_comes_first(tmp_path: Path) -> None:
    environ = {"STATE_DIRECTORY": str(tmp_path / "a"), "XDG_STATE_HOME": str(tmp_path / "b")}
    assert store_path("k.db", environ) == Path("k.db")
    assert store_path(None, environ) == tmp_path / "a" / "kneewatch.db"
    assert store_path(None, {"STATE_DIRECTORY": f"{tmp_path}/c:{tmp_path}/d"}).parent.name == "c"
    del environ["STATE_DIRECTORY"]
    path = store_path(None, environ)
    assert path == tmp_path / "b" / "kneewatch" / "kneewatch.db"
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", ["", "relative"])
def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = store_path(None, {"XDG_STATE_HOME": base})
    assert path == tmp_path / ".local" / "state" / "kneewatch" / "kneewatch.db"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StoreError, match=r"cannot create .*: Not a directory; set another path with --store"
    ):
        store_path(None, {"XDG_STATE_HOME": str(tmp_path / "file")})
