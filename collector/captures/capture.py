"""Capture files: gzipped JSON lines, one per scrape. I/O edge.

A killed recorder loses none of the written lines.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kneewatch.collector.captures.format import (
    GZIP_MAGIC,
    Damage,
    Entry,
    entry_of,
    line_of,
    split_lines,
    text_of,
)
from kneewatch.collector.errors import CaptureError

__all__ = ["CaptureReader", "CaptureWriter", "Entry", "is_capture"]

READ_BYTES = 128 * 1024
COMPRESSION_LEVEL = 6
HOPELESS_LINES = 100_000
"""If the first lines of a file, this many, are all unusable, the file is not a capture."""

TIME_FIRST = re.compile(rb'\s*\{\s*"t"\s*:\s*([0-9]{1,12}(?:\.[0-9]{1,20})?)\s*[,}]')
EXPECTED = 'expected a capture: JSON lines (gzip or plain), each {"t": seconds, "body": "page"}'


def is_capture(target: str) -> bool:
    """Whether the target means a capture file, not a server.

    It does if it has a capture's file extension, if it can only be a path, or if such a file
    exists. A directory counts only if the target contains a slash: without one it is taken for a
    host name.
    """
    if "://" in target:
        return False
    if target.endswith((".jsonl", ".jsonl.gz")) or target.startswith(("/", "./", "../", "~")):
        return True
    try:
        path = Path(target)
        # A bare name is a host name, even if a directory here has the same name.
        return path.exists() and ("/" in target or not path.is_dir())
    except (OSError, ValueError):  # longer than a path can be
        return False


class CaptureReader:
    """Iterates over the entries of a capture in file order; counts and skips unreadable parts.

    Iterating updates `entries`, `damaged` and `first_damage`; a new iteration resets them.

    Raises:
        CaptureError: the file does not exist; or, at the end of iteration, it had no usable entry.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        from_s: float | None = None,
        to_s: float | None = None,
    ) -> None:
        self.path = Path(path)
        self._from_s = -math.inf if from_s is None else from_s
        self._to_s = math.inf if to_s is None else to_s
        self._reset()
        _check_readable(self.path)

    def _reset(self) -> None:
        self.entries = 0
        self.damaged = 0
        self.first_damage = ""
        self._lines = 0
        self._passed_over = 0
        self._first_s, self._last_s = math.inf, -math.inf

    def __iter__(self) -> Iterator[Entry]:
        self._reset()
        try:
            for item in split_lines(text_of(self._chunks())):
                entry = self._entry(item)
                if entry is not None:
                    self.entries += 1
                    yield entry
        except OSError as exc:
            raise CaptureError(f"{self.path}: {exc.strerror or exc}; {EXPECTED}") from exc
        if not self.entries:
            raise self._unusable()

    def _chunks(self) -> Iterator[bytes]:
        # A pipe whose writer is gone has no data; without O_NONBLOCK, opening it would block.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while chunk := file.read(READ_BYTES):
                yield chunk

    def _entry(self, item: bytes | Damage) -> Entry | None:
        if isinstance(item, Damage):
            self._damage(f"after line {self._lines}: {item.text}")
            return None
        self._lines += 1
        if not item or item.isspace():
            self._give_up_hopeless()
            return None
        head = TIME_FIRST.match(item)
        if head is not None and not self._in_period(float(head[1])):
            return None  # before the cost of decoding the page
        entry = entry_of(item)
        if isinstance(entry, str):
            self._damage(f"line {self._lines}: {entry}")
            return None
        if not self._in_period(entry.t_s):
            return None
        return entry

    def _in_period(self, t_s: float) -> bool:
        if self._from_s <= t_s <= self._to_s:
            return True
        self._passed_over += 1
        self._first_s, self._last_s = min(self._first_s, t_s), max(self._last_s, t_s)
        return False

    def _damage(self, text: str) -> None:
        self.damaged += 1
        self.first_damage = self.first_damage or text
        self._give_up_hopeless()

    def _give_up_hopeless(self) -> None:
        unusable = max(self._lines, self.damaged)
        if unusable >= HOPELESS_LINES and not self.entries and not self._passed_over:
            raise self._unusable()

    def _unusable(self) -> CaptureError:
        if self._passed_over:
            return CaptureError(
                f"{self.path}: no entry in the time asked for;"
                f" its times go from {self._first_s:.3f} to {self._last_s:.3f}"
            )
        why = self.first_damage or "it is empty"
        return CaptureError(f"{self.path}: nothing in it can be used ({why}); {EXPECTED}")


class CaptureWriter:
    """Appends entries to a capture; a kill leaves all written entries readable.

    Each entry is a gzip member of its own, written in one call. A single long member with flushes
    would be only 3% smaller (deflate looks back 32 KiB, and a page is larger), but damage would
    make everything after it unreadable. A new file whose name ends in .jsonl is written
    uncompressed.

    Raises:
        CaptureError: the file cannot be written, or holds something other than a capture.
    """

    def __init__(self, path: str | Path, *, level: int = COMPRESSION_LEVEL) -> None:
        self.path = Path(path)
        self._level = level
        self._fd = -1
        try:
            start = _start(self.path)
            self._plain = self.path.suffix == ".jsonl" if not start else start != GZIP_MAGIC
            if start:
                next(iter(CaptureReader(self.path)))  # another program's file is left alone
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            if (
                self._plain
                and start
                and os.pread(self._fd, 1, os.fstat(self._fd).st_size - 1) != b"\n"
            ):
                self._put(b"\n")  # a kill cut the last line
        except OSError as exc:
            self.close()
            raise self._failed(exc) from exc

    def write(self, entry: Entry) -> None:
        """Append one entry.

        Raises:
            CaptureError: the entry cannot be written, for example because the disk is full.
            ValueError: a reader could not read the entry back, or the writer is closed.
        """
        if self._fd < 0:
            raise ValueError("the capture is closed")
        line = line_of(entry)
        if not self._plain:
            packer = zlib.compressobj(self._level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
            line = packer.compress(line) + packer.flush()
        try:
            self._put(line)
        except OSError as exc:
            raise self._failed(exc) from exc

    def _put(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _failed(self, exc: OSError) -> CaptureError:
        return CaptureError(f"{self.path}: cannot be written: {exc.strerror or exc}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_readable(path: Path) -> None:
    try:
        if path.is_dir() or path.is_char_device() or path.is_block_device():
            raise CaptureError(f"{path}: is a directory or a device; {EXPECTED}")
        if not path.exists():
            raise CaptureError(f"{path}: no such file; {EXPECTED}")
        if not os.access(path, os.R_OK):
            raise CaptureError(f"{path}: may not be read; {EXPECTED}")
    except (OSError, ValueError) as exc:
        raise CaptureError(f"{path}: {exc}; {EXPECTED}") from exc


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(GZIP_MAGIC))
    except FileNotFoundError:
        return b""
