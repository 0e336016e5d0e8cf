"""The SQLite file: its path, opening, checks, lock, recovery from damage. I/O edge."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kneewatch.agent.store.columns import DamagedError
from kneewatch.agent.store.schema import APPLICATION_ID, check, migrate
from kneewatch.collector.errors import StoreError

STORE_NAME = "kneewatch.db"
OURS_ALONE = 0o700


def store_path(stated: str | None, environ: Mapping[str, str]) -> Path:
    """The history's file: as stated, else in systemd's state folder, else in the user's; that
    folder is made where it is missing.

    Raises:
        StoreError: there is no such folder, and it cannot be made.
    """
    if stated:
        return Path(stated)
    folder = _folder(environ)
    try:
        folder.mkdir(mode=OURS_ALONE, parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"the folder for the history, {folder}, cannot be made: {exc.strerror or exc}; "
            "say with --store where the history is to be"
        ) from exc
    return folder / STORE_NAME


def _folder(environ: Mapping[str, str]) -> Path:
    # systemd names several folders with colons between; the first one is the unit's first.
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the standard says to ignore what is not
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as exc:
            raise StoreError(
                "there is no home folder for the history; say with --store where it is to be"
            ) from exc
    return base / "kneewatch"


# --- The SQLite file itself: opened, checked, locked, moved aside when it is damaged. I/O edge ----


log = logging.getLogger(__name__)

BUSY_S = 1.0
CHECK_LIMIT_S = 5.0
"""A start does not wait longer for the check of a large file; what it finds until then counts."""

WRITER_CACHE_KIB = 2000
READER_CACHE_KIB = 1000
WAL_LIMIT_BYTES = 8 * 1024 * 1024
HEADER = b"SQLite format 3\x00"
APPLICATION_ID_AT = 68
SIDE_FILES = ("-wal", "-shm")


class Lock:
    """Keeps a second writer from the same store; gone with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        """Takes the lock. It lies beside the file itself, whatever links lead there.

        Raises:
            StoreError: another process has it, or the file has names that the lock cannot know.
        """
        path = path.resolve()
        if path.is_file() and path.stat().st_nlink > 1:
            raise StoreError(
                f"{path} has more names than this one (hard links), so nothing could keep a second "
                "kneewatch from writing to it; copy it, or name another file (--store FILE)"
            )
        self._name = Path(f"{path}.lock")
        self._made = not self._name.exists()
        self._file = self._locked(path)
        while not os.fstat(self._file).st_nlink:  # taken away since it was opened: it keeps nobody
            os.close(self._file)
            self._file = self._locked(path)

    def release(self, *, unused: bool = False) -> None:
        """Let others have it. `unused`: nothing was written, so no file stays that was not there
        before."""
        if unused and self._made:
            with contextlib.suppress(OSError):
                self._name.unlink()
        os.close(self._file)

    def _locked(self, path: Path) -> int:
        file = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise StoreError(
                f"another kneewatch writes to {path}; stop it, or name another file (--store FILE)"
            ) from error
        return file


def connect(path: Path) -> sqlite3.Connection:
    """A connection that writes; the file is made, for its owner alone, where there is none."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        check(connection, str(path))
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        migrate(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def opened(path: Path) -> sqlite3.Connection:
    """A connection that writes to a store that was checked; a damaged one is moved aside.

    Raises:
        StoreError: it cannot be opened; the message says what to do.
    """
    try:
        connection = connect(path)
        why = damage(connection)
        if not why:
            return connection
        connection.close()
    except (sqlite3.Error, OSError, DamagedError) as error:
        if not is_damage(error):
            raise StoreError(
                f"cannot write {path}: {error}; see that its folder exists, has room and is yours,"
                " or name another file (--store FILE)"
            ) from error
        if not is_ours(path):
            raise StoreError(
                f"{path} is no store of kneewatch; name another file (--store FILE)"
            ) from error
        why = str(error)
    move_aside(path, why)
    return connect(path)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that only reads, beside one that writes.

    Raises:
        StoreError: there is no store, or it is not one that this program reads.
    """
    if not path.is_file():
        raise StoreError(f"there is no store at {path}; `kneewatch run --store FILE` makes one")
    try:
        return _read_only(path, "mode=ro")
    except sqlite3.OperationalError as error:
        # On read-only media the files beside it cannot be made; without them nobody writes.
        if not Path(f"{path}-wal").exists():
            with contextlib.suppress(sqlite3.Error):
                return _read_only(path, "mode=ro&immutable=1")
        raise StoreError(f"cannot read {path}: {error}; see who may read it") from error
    except (sqlite3.DatabaseError, DamagedError) as error:
        raise StoreError(f"{path} is no store, or it is damaged: {error}") from error


def _read_only(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
        version = check(connection, str(path))
    except BaseException:
        connection.close()
        raise
    if version == 0:
        connection.close()
        raise StoreError(f"the store at {path} is empty: nothing was written yet")
    return connection


def damage(connection: sqlite3.Connection, *, limit_s: float = CHECK_LIMIT_S) -> str:
    """What is wrong with the file; empty where nothing was found within `limit_s`."""
    # No progress handler: SQLite calls none while it checks a table, only interrupts reach it.
    alarm = threading.Timer(limit_s, connection.interrupt)
    alarm.start()
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if is_damage(error):
            return str(error)
        log.warning("store not checked to its end reason=%s limit_s=%s", error, limit_s)
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    finally:
        alarm.cancel()
        alarm.join()
    return "" if found == "ok" else str(found)


def file_damage(connection: sqlite3.Connection) -> str:
    """The same for the file as it is on disk, whatever the connection has in memory."""
    _, _, name = connection.execute("PRAGMA database_list").fetchone()
    try:
        with contextlib.closing(_read_only(Path(name), "mode=ro")) as fresh:
            return damage(fresh)
    except (sqlite3.DatabaseError, DamagedError) as error:
        if is_damage(error):
            return str(error)
        raise


def is_damage(error: Exception) -> bool:
    """Whether an error says that the file's content is not what was written."""
    if isinstance(error, DamagedError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_ours(path: Path) -> bool:
    """Whether a file is, or was before it was damaged, a store (or nothing yet)."""
    with path.open("rb") as file:
        head = file.read(APPLICATION_ID_AT + 4)
    marked = head[APPLICATION_ID_AT:] == APPLICATION_ID.to_bytes(4, "big")
    return not head or marked or head.startswith(HEADER)


def move_aside(path: Path, why: str) -> Path:
    """Where a damaged store lies now; its name is free."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    path.rename(aside)
    for suffix in SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    log.warning("store damaged, begun anew path=%s reason=%s kept=%s", path, why, aside)
    return aside


def size_bytes(path: Path) -> int:
    """What the store's files take."""
    total = 0
    for suffix in ("", *SIDE_FILES):
        with contextlib.suppress(OSError):
            total += Path(f"{path}{suffix}").stat().st_size
    return total


def identity(path: Path) -> tuple[int, int] | None:
    """Which file a name stands for; None where there is none."""
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_dev, told.st_ino
