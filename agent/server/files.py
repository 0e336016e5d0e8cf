"""Reads files that a server's command line names. I/O edge.

Another program chose the names: only regular files of a limited size are opened.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from kneewatch.collector.errors import KneewatchError

YAML_MAX_BYTES = 64 * 1024


class FileError(KneewatchError):
    """A file is missing, too large, or not of the expected kind; never quotes its contents."""


def read_file(path: Path, most_bytes: int, *, user_id: int) -> bytes:
    """The contents of a regular file that the user may read; links are followed.

    Raises:
        FileError: there is none, it has more than `most_bytes`, or the user may not read it:
            kneewatch may have more rights than the program that names it.
    """
    try:
        # A pipe or a device must not block: without O_NONBLOCK, opening it could.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileError(f"{path} is not a regular file")
            if not _may_read(descriptor, status, user_id):
                raise FileError(f"{path} is not readable by the server's user")
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a path"
        raise FileError(f"{path} cannot be read: {reason}") from exc
    if len(data) > most_bytes:
        raise FileError(f"{path} is larger than {most_bytes} bytes")
    return data


def _may_read(descriptor: int, status: os.stat_result, user_id: int) -> bool:
    """Whether a user may read an opened file and enter all folders above it."""
    if user_id == 0:
        return True
    groups = _groups(user_id)
    # Where the file is that was opened, whatever its path leads to by now.
    opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - may be no path
    return _permits(status, os.R_OK, user_id, groups) and all(
        _permits(folder.stat(), os.X_OK, user_id, groups) for folder in opened.parents
    )


def _permits(status: os.stat_result, right: int, user_id: int, groups: Sequence[int]) -> bool:
    """Whether a file's mode gives a user a right (R_OK, X_OK)."""
    if status.st_uid == user_id:
        return bool(status.st_mode >> 6 & right)
    return bool(status.st_mode >> (3 if status.st_gid in groups else 0) & right)


def _groups(user_id: int) -> Sequence[int]:
    try:
        user = pwd.getpwuid(user_id)
    except KeyError:
        return ()
    return os.getgrouplist(user.pw_name, user.pw_gid)


def read_yaml(path: Path, *, user_id: int) -> Mapping[str, object]:
    """The keys of a YAML file, as `vllm serve --config` takes it.

    Raises:
        FileError: it cannot be read, or is no such file.
    """
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise FileError(f"{path} is not named .yaml or .yml, as vLLM requires")
    data = read_file(path, YAML_MAX_BYTES, user_id=user_id)
    try:
        # Aliases can make a small file huge.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(data)):
            raise FileError(f"{path} has YAML aliases, which are not read")
        document: object = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        raise FileError(f"{path} is not YAML") from None
    if not isinstance(document, dict):
        raise FileError(f"{path} is not a table of flags")
    keys = cast("Mapping[object, object]", document)
    return {str(key): value for key, value in keys.items()}
