"""Reads files that other programs write, and replaces own files. I/O edge."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from yaml import Node, SafeLoader

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


def read_text(path: str | Path, most_bytes: int) -> str:
    """The contents of a regular file in UTF-8, without the byte order mark that some editors write.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read; see `read_file`.
    """
    return read_file(path, most_bytes).decode("utf-8-sig")


YAML_NODES_MAX = 100_000
"""Maximum number of keys, values, lists and tables of a YAML document, aliases written out: each
node takes about 1 kB while it is parsed."""


_YAML_ERRORS = (LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
"""PyYAML's constructors raise these on tags such as `!!int ""`."""


def yaml_document(text: str | bytes) -> object:
    """The contents of a YAML document.

    Raises:
        ValueError: the text is not YAML, or is too long. The message says where, on one line.
    """
    from yaml import YAMLError  # lazy: 1 MB of code, and few daemons have YAML files

    try:
        loader = _yaml_loader()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _written_out(node, {}) > YAML_NODES_MAX:
                raise _too_long()
            return cast("Any", loader).construct_document(node)
        finally:
            loader.dispose()
    except (ValueError, YAMLError) as exc:
        raise ValueError(" ".join(str(exc).split())) from None
    except _YAML_ERRORS as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from None


@cache
def _yaml_loader() -> type[SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """A loader that stops at `YAML_NODES_MAX`."""

        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - as in PyYAML
            """The next node."""
            self.nodes += 1
            if self.nodes > YAML_NODES_MAX:
                raise _too_long()
            return super().compose_node(parent, index)

    return Loader


def _written_out(node: Node, sizes: dict[int, float]) -> float:
    """The number of nodes below and including a node, with all aliases replaced by what they stand
    for. Infinite if a node contains itself."""
    size = sizes.get(id(node))
    if size is None:
        sizes[id(node)] = math.inf
        value = cast("str | list[Node | tuple[Node, Node]]", node.value)
        parts = () if isinstance(value, str) else value
        nodes = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
        size = sizes[id(node)] = 1 + sum(_written_out(each, sizes) for each in nodes)
    return size


def _too_long() -> ValueError:
    return ValueError(f"more than {YAML_NODES_MAX:,} keys and values, aliases written out")


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
