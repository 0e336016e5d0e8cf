"""Reads files that other programs write, and replaces own files. I/O edge."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

SECRET_MAX_BYTES = 64 * 1024
"""Maximum size of a file with tokens or a password."""

Stamp = tuple[int, int, int]

MayRead = Callable[[int, os.stat_result], bool]


def read_file(path: str | Path, most_bytes: int, may_read: MayRead | None = None) -> bytes:
    """The contents of a regular file. Links are followed. Never waits for another program, as a
    pipe does, and reads no more than the limit, whatever size the file claims.

    `may_read` gets the open file's descriptor and status, and returns whether it may be read.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most_bytes`.
    """
    try:
        # Without O_NONBLOCK, opening a pipe or a device could block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as exc:  # a zero byte in the path
        raise OSError(errno.EINVAL, "not a path", str(path)) from exc
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if may_read is not None and not may_read(descriptor, status):
            raise OSError(errno.EACCES, "not readable by the server's user", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return data


def stamp_of(file: str | Path | os.stat_result) -> Stamp:
    """Modification time, size and inode of a file, to detect changes.

    Raises:
        OSError: the file cannot be looked at.
    """
    status = file if isinstance(file, os.stat_result) else Path(file).stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file whole, so that a crash or a loss of power leaves the old or the new contents.
    Only its owner can read it; a link that somebody put in its place is not followed.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # else the new name may be lost with the power
    finally:
        os.close(folder)
