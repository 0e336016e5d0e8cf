"""The SQLite file: its path, lock, connections, and detection of damage. I/O edge."""

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
PRIVATE_MODE = 0o700


def store_path(stated: str | None, environ: Mapping[str, str]) -> Path:
    """Path of the history: the configured one, else in systemd's or the user's state folder, which
    is created if missing.

    Raises:
        StoreError: the folder cannot be created.
    """
    if stated:
        return Path(stated)
    folder = _folder(environ)
    try:
        folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"cannot create the folder for the history, {folder}: {exc.strerror or exc}; "
            "set another path with --store FILE"
        ) from exc
    return folder / STORE_NAME


def _folder(environ: Mapping[str, str]) -> Path:
    # systemd separates several folders by colons; the first is the unit's main one.
    systemd_folder = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if systemd_folder:
        return Path(systemd_folder)
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as exc:
            raise StoreError(
                "no home folder for the history: set a path with --store FILE"
            ) from exc
    return base / "kneewatch"


# --- The file -------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

BUSY_S = 1.0
CHECK_LIMIT_S = 5.0
"""Longest check of a large file at start, in seconds."""

WRITER_CACHE_KIB = 2000
READER_CACHE_KIB = 1000
WAL_LIMIT_BYTES = 8 * 1024 * 1024
HEADER = b"SQLite format 3\x00"
APPLICATION_ID_AT = 68
SIDE_FILES = ("-wal", "-shm")


class Lock:
    """A lock file that prevents a second writer. The kernel releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        """Acquires the lock, a file beside the store with symbolic links resolved.

        Raises:
            StoreError: another process holds it, or the store has hard links.
        """
        path = path.resolve()
        if path.is_file() and path.stat().st_nlink > 1:
            raise StoreError(
                f"{path} has hard links, so its lock cannot exclude a second kneewatch; "
                "copy it, or name another file (--store FILE)"
            )
        self._name = Path(f"{path}.lock")
        self._created = not self._name.exists()
        self._file = self._locked(path)
        while not os.fstat(self._file).st_nlink:  # deleted since it was opened: no lock
            os.close(self._file)
            self._file = self._locked(path)

    def release(self, *, unused: bool = False) -> None:
        """Release the lock. `unused`: the store was not written, so delete a lock file created
        here."""
        if unused and self._created:
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
    """A writing connection; a missing file is created, readable by its owner only."""
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


def open_checked(path: Path) -> sqlite3.Connection:
    """A writing connection to a checked store; a damaged one is moved aside and a new one created.

    Raises:
        StoreError: the store cannot be opened; the message says what to do.
    """
    try:
        connection = connect(path)
        reason = find_damage(connection)
        if not reason:
            return connection
        connection.close()
    except (sqlite3.Error, OSError, DamagedError) as error:
        if not is_damage(error):
            raise StoreError(
                f"cannot write {path}: {error}; check that its folder exists, is writable and has "
                "free space, or name another file (--store FILE)"
            ) from error
        if not is_kneewatch_file(path):
            raise StoreError(
                f"{path} is not a kneewatch store; name another file (--store FILE)"
            ) from error
        reason = str(error)
    move_aside(path, reason)
    return connect(path)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A read-only connection, which may run beside a writing one.

    Raises:
        StoreError: the store is missing, damaged or of an unsupported version.
    """
    if not path.is_file():
        raise StoreError(f"no store at {path}; `kneewatch run --store FILE` creates one")
    try:
        return _read_only(path, "mode=ro")
    except sqlite3.OperationalError as error:
        # On read-only media SQLite cannot create its -wal file. Without one there is no writer.
        if not Path(f"{path}-wal").exists():
            with contextlib.suppress(sqlite3.Error):
                return _read_only(path, "mode=ro&immutable=1")
        raise StoreError(f"cannot read {path}: {error}; check its permissions") from error
    except (sqlite3.DatabaseError, DamagedError) as error:
        raise StoreError(f"{path} is not a kneewatch store, or it is damaged: {error}") from error


def _read_only(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{query}",
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
        raise StoreError(f"the store at {path} is empty: nothing has been written yet")
    return connection


def find_damage(connection: sqlite3.Connection, *, limit_s: float = CHECK_LIMIT_S) -> str:
    """Damage found by SQLite's quick check; empty if none was found within `limit_s`."""
    # A timer, because SQLite calls no progress handler while it checks a table.
    alarm = threading.Timer(limit_s, connection.interrupt)
    alarm.start()
    try:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if is_damage(error):
            return str(error)
        log.warning("store check incomplete reason=%s limit_s=%s", error, limit_s)
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    finally:
        alarm.cancel()
        alarm.join()
    return "" if result == "ok" else str(result)


def find_file_damage(connection: sqlite3.Connection) -> str:
    """Damage of the file on disk, read through a fresh connection with an empty cache."""
    _, _, name = connection.execute("PRAGMA database_list").fetchone()
    try:
        with contextlib.closing(_read_only(Path(name), "mode=ro")) as fresh:
            return find_damage(fresh)
    except (sqlite3.DatabaseError, DamagedError) as error:
        if is_damage(error):
            return str(error)
        raise


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file's content is damaged."""
    if isinstance(error, DamagedError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_kneewatch_file(path: Path) -> bool:
    """Whether a file is empty, or is a kneewatch store, possibly damaged."""
    with path.open("rb") as file:
        head = file.read(APPLICATION_ID_AT + 4)
    marked = head[APPLICATION_ID_AT:] == APPLICATION_ID.to_bytes(4, "big")
    return not head or marked or head.startswith(HEADER)


def move_aside(path: Path, reason: str) -> Path:
    """Rename a damaged store and its side files. Returns the new path."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    path.rename(aside)
    for suffix in SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    log.warning(
        "store damaged, starting a new one path=%s reason=%s moved_to=%s", path, reason, aside
    )
    return aside


def size_bytes(path: Path) -> int:
    """Size of the store's files, in bytes."""
    total = 0
    for suffix in ("", *SIDE_FILES):
        with contextlib.suppress(OSError):
            total += Path(f"{path}{suffix}").stat().st_size
    return total


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at a path; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
