"""The SQLite file of the store: its path, lock, connections, tables and migrations, and checks for
damage. I/O edge."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson

from kneewatch.agent.store.chunks import DamagedError, column_of, column_row, decoding
from kneewatch.collector.errors import StoreError
from kneewatch.collector.packaged import packaged_text
from kneewatch.collector.scrape_history import Column

APPLICATION_ID = 0x6B6E6565
"""SQLite application id of kneewatch's files ("knee")."""

SEQUENCE_BITS = 40
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1

SIGNALS, COUNTERS, SCRAPES = 0, 1, 2
"""Kinds of chunks. A chunk of signals or counters belongs to an engine, a chunk of scrapes to a
target."""

MIGRATIONS = tuple(packaged_text("agent.store", f"schema_{number}.sql") for number in (1, 2, 3))
"""Entry n migrates a store from version n to n + 1. A migration must not change once it is
released."""


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of a store; 0 for an empty file."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def check(connection: sqlite3.Connection, name: str, *, newest: int = len(MIGRATIONS)) -> int:
    """Check that this program can use a store. Returns the store's schema version.

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
            f"supports up to {newest}); upgrade kneewatch, or name another file (--store FILE)"
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
    """The first and the last possible row id of an owner (an engine or a target)."""
    return owner_id << SEQUENCE_BITS, (owner_id << SEQUENCE_BITS) | SEQUENCE_MASK


def row_id(owner_id: int, sequence: int) -> int:
    """The row id of an owner for the cycle with this sequence number."""
    return owner_id << SEQUENCE_BITS | sequence


def keys_layout(keys: tuple[str, ...]) -> bytes:
    """Encode a list of signals as a layout."""
    return orjson.dumps(keys)


def columns_layout(columns: tuple[Column, ...]) -> bytes:
    """Encode a list of counters as a layout."""
    return orjson.dumps(list(map(column_row, columns)))


def keys_of(names: bytes) -> list[str]:
    """The signals in a layout.

    Raises:
        DamagedError: the layout cannot be decoded.
    """
    with decoding("layout"):
        return [str(key) for key in orjson.loads(names)]


def columns_of(names: bytes) -> list[Column]:
    """The counters in a layout.

    Raises:
        DamagedError: the layout cannot be decoded.
    """
    with decoding("layout"):
        return [column_of(row) for row in orjson.loads(names)]


STORE_NAME = "kneewatch.db"
PRIVATE_MODE = 0o700


def store_path(stated: str | None, environ: Mapping[str, str]) -> Path:
    """The path of the store: the configured path; without one, in systemd's or the user's state
    folder, which is created if missing.

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
"""Maximum seconds for the check of a large file at the start."""

WRITER_CACHE_KIB = 2000
READER_CACHE_KIB = 1000
WAL_LIMIT_BYTES = 8 * 1024 * 1024
HEADER = b"SQLite format 3\x00"
APPLICATION_ID_AT = 68
WAL = "-wal"
SIDE_FILES = (WAL, "-shm")
ASIDE_MAX = 3
"""Most damaged stores that are kept beside a store."""


MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors of a disk that can be written again later."""


class Lock:
    """A lock file that prevents two programs from writing the same store. The kernel releases the
    lock when the process ends.

    `is_renewed`: the lock file was there before, as a store's is. `error` is why the lock is not
    held yet; None if it is.
    """

    def __init__(self, path: Path) -> None:
        """Acquire the lock. The lock file is in the store's folder; if the store's path is a
        symbolic link, in the folder of the link's target.

        Raises:
            StoreError: another process holds the lock, or the store has hard links.
            OSError: there cannot be a lock file.
        """
        self._path = path
        if path.is_file() and path.stat().st_nlink > 1:
            raise StoreError(
                f"{path.resolve()} has hard links, so its lock cannot exclude a second kneewatch; "
                "copy it, or name another file (--store FILE)"
            )
        self.is_renewed = self._name.exists()
        self._file: int | None = None
        self.error: OSError | None = None
        try:
            self.renew()
        except OSError as error:
            if not self.is_renewed or error.errno not in MAY_PASS:
                raise
            self.error = error

    @property
    def _name(self) -> Path:
        return Path(f"{self._path.resolve()}.lock")

    def renew(self) -> None:
        """Acquire the lock if it is not held, or if its file was deleted or moved: then it excludes
        nobody from the store at the path.

        Raises:
            StoreError: another process holds the lock now.
            OSError: the disk cannot be written.
        """
        while self._file is None or inode(self._name) != inode(self._file):
            before, self._file = self._file, self._locked()
            if before is not None:
                os.close(before)

    def release(self, *, unused: bool = False) -> None:
        """Release the lock. `unused`: the store was not written, so a lock file that was created
        here is deleted."""
        if unused and not self.is_renewed:
            with contextlib.suppress(OSError):
                self._name.unlink()
        if self._file is not None:
            os.close(self._file)

    def _locked(self) -> int:
        file = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise StoreError(
                f"another kneewatch writes to {self._path}; stop it, or name another file "
                "(--store FILE)"
            ) from error
        return file


def connect(path: Path) -> sqlite3.Connection:
    """A connection for writing. A missing file is created; only its owner can read it."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        check(connection, str(path))
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # no loss of power loses a cycle
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        migrate(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def open_checked(path: Path, *, is_ours: bool = False) -> sqlite3.Connection:
    """A connection for writing, after a check of the store. A damaged store is moved aside and a
    new one is created. `is_ours`: the file is a store, even if its first page no longer shows it.

    Raises:
        StoreError: the store cannot be opened; the message says what to do.
        sqlite3.Error, OSError: the disk is full or fails, which may pass.
    """
    try:
        connection = connect(path)
        reason = find_damage(connection) or _missing_tables(connection)
        if not reason:
            return connection
        connection.close()
    except (sqlite3.Error, OSError, DamagedError) as error:
        if may_pass(error, path):
            raise
        if not is_damage(error):
            raise StoreError(
                f"cannot write {path}: {error}; check that its folder exists, is writable and has "
                "free space, or name another file (--store FILE)"
            ) from error
        if not is_ours and not is_kneewatch_file(path):
            raise StoreError(
                f"{path} is not a kneewatch store; name another file (--store FILE)"
            ) from error
        reason = str(error)
    move_aside(path, reason)
    return connect(path)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A read-only connection. It can be used while another connection writes.

    Raises:
        StoreError: the store is missing, damaged or of an unsupported version.
    """
    try:
        is_there = path.is_file()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if not is_there:
        raise StoreError(
            f"no store at {path}: `kneewatch run` creates it; --store FILE reads another. The demo "
            "has its own, which its line `history` names, and deletes it at exit"
        )
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


def find_damage(connection: sqlite3.Connection) -> str:
    """The damage that SQLite's quick check finds. Empty if the check finds none within
    `CHECK_LIMIT_S` seconds."""
    # A timer, because SQLite calls no progress handler while it checks a table.
    alarm = threading.Timer(CHECK_LIMIT_S, connection.interrupt)
    alarm.start()
    try:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if is_damage(error):
            return str(error)
        log.warning("store check incomplete reason=%s limit_s=%s", error, CHECK_LIMIT_S)
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    finally:
        alarm.cancel()
        alarm.join()
    return "" if result == "ok" else str(result)


def _missing_tables(connection: sqlite3.Connection) -> str:
    """The tables and indexes that a store has and this one lacks, for a message; empty if none."""
    names = "SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'"
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as whole:
        migrate(whole, "a new store")
        missing = set(whole.execute(names)) - set(connection.execute(names))
    return f"no such table: {', '.join(sorted(name for (name,) in missing))}" if missing else ""


def find_file_damage(connection: sqlite3.Connection) -> str:
    """The damage of the file on disk; empty if there is none. The file is read through a new
    connection, because the cache of an old one can hide damage."""
    _, _, name = connection.execute("PRAGMA database_list").fetchone()
    try:
        with contextlib.closing(_read_only(Path(name), "mode=ro")) as fresh:
            return find_damage(fresh)
    except (sqlite3.DatabaseError, DamagedError) as error:
        if is_damage(error):
            return str(error)
        raise


def is_damage(error: Exception) -> bool:
    """Whether an error means that the content of the file is damaged."""
    if isinstance(error, DamagedError) or "no such table" in str(error):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def may_pass(error: Exception, path: Path) -> bool:
    """Whether an error at opening a store comes from a disk that is full or fails, and not from a
    wrong path or missing permissions."""
    if isinstance(error, OSError):
        return error.errno in MAY_PASS
    # CANTOPEN: no room for the -wal file, or no permission.
    passing = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    is_passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in passing
    return is_passing and path.is_file() and os.access(path, os.R_OK | os.W_OK)


def is_kneewatch_file(path: Path) -> bool:
    """Whether a file is empty, or is a kneewatch store, possibly damaged."""
    with path.open("rb") as file:
        head = file.read(APPLICATION_ID_AT + 4)
    marked = head[APPLICATION_ID_AT:] == APPLICATION_ID.to_bytes(4, "big")
    return not head or marked or head.startswith(HEADER)


def move_aside(path: Path, reason: str) -> Path:
    """Rename a damaged store and the files that SQLite keeps beside it. Of earlier ones the newest
    are kept: a bad disk must not be filled with them. Returns the new path."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    path.rename(aside)
    for suffix in SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    copies = sorted(path.parent.glob(f"{glob.escape(path.name)}.corrupt-*[0-9]"))
    for copy in copies[:-ASIDE_MAX]:
        for suffix in ("", *SIDE_FILES):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    log.warning(
        "store damaged, starting a new one path=%s reason=%s moved_to=%s", path, reason, aside
    )
    return aside


def size_bytes(path: Path, suffixes: Sequence[str] = ("", *SIDE_FILES)) -> int:
    """Total size of the store's files with these suffixes in bytes."""
    total = 0
    for suffix in suffixes:
        with contextlib.suppress(OSError):
            total += Path(f"{path}{suffix}").stat().st_size
    return total


Inode = tuple[int, int] | None


def inode(file: Path | int) -> Inode:
    """Device and inode of a file, by its path or descriptor. None if there is no file."""
    try:
        stat = os.stat(file)  # noqa: PTH116 - a descriptor has no Path
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def identity(path: Path) -> tuple[Inode, ...]:
    """The inodes of a store and of the files that SQLite keeps beside it. Once a connection has
    read, they stay the same until somebody replaces, moves or deletes a file."""
    return tuple(inode(Path(f"{path}{suffix}")) for suffix in ("", *SIDE_FILES))
