"""The capture file format: gzip members and JSON lines, tolerant of damage. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import orjson
from msgspec import Struct, field
from zlib_ng import zlib_ng

KIB = 1024
CHUNK_BYTES = 32 * KIB
TEXT_MAX_BYTES = 1024 * KIB
"""Most bytes to decompress at a time: a small file can expand to a huge one."""

HELD_MAX_BYTES = 1024 * KIB
"""How far back, in bytes, the next gzip header is searched for after a decompression error."""

REDO_BYTES = 4 * KIB

HEAD = re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL)
"""The header of a gzip member (RFC 1952). Compressed data rarely contains such bytes by chance."""

HEAD_BYTES = 10
GZIP_MAGIC = b"\x1f\x8b"

# The stubs of zlib_ng lack the type of its error, and the method `copy`.
_ZLIB: Any = zlib_ng
INFLATE_ERROR: type[Exception] = _ZLIB.error


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...
    def copy(self) -> _Inflater: ...


class Damage(Struct, frozen=True):
    """A description of an unreadable part. The text before it and the text after it do not join."""

    text: str


class Members:
    """Decompresses a gzip file incrementally; after damage, continues at the next member's header.

    A killed recorder leaves a truncated member, and the next run appends new members after it. The
    decompressor then runs past the header of the next member and fails somewhere inside that
    member. So the bytes read so far are kept, and searched for that header.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._dropped_bytes = 0
        self._at = 0
        self._head: int = 0
        self._inflater: _Inflater | None = None
        self._lost = False

    def feed(self, data: bytes) -> Iterator[bytes | Damage]:
        """Yields the text that the bytes `data` decompress to."""
        self._held += data
        pending = True
        while pending:
            if self._inflater is not None:
                pending = yield from self._inflate(self._inflater)
            else:
                pending = yield from self._enter()
        self._forget()

    def finish(self) -> Iterator[bytes | Damage]:
        """Yields the text of the buffered bytes, and a `Damage` if the file ends inside a
        member."""
        while self._inflater is not None:
            # The first bytes of a next member may have been read as the end of a member that is cut
            # short.
            head = HEAD.search(self._held, max(self._head + 1, 0))
            if head is None:
                yield Damage("the file ends inside a gzip stream (cut short, or still written)")
                return
            yield self._leave(head.start(), head.start(), "a gzip member is cut short")
            yield from self.feed(b"")
        if not self._lost and self._held[self._at :].strip(b"\0"):
            yield self._foreign()

    def _enter(self) -> Generator[Damage, None, bool]:
        """Move to the next member's header. Returns whether there is one."""
        head = HEAD.search(self._held, self._at)
        start = head.start() if head else max(len(self._held) - HEAD_BYTES + 1, self._at)
        # Zeros may pad a gzip file; anything else between two members is damage.
        if not self._lost and self._held[self._at : start].strip(b"\0"):
            yield self._foreign()
            self._lost = True
        self._at = start
        if head is None:
            return False
        self._head = start
        self._inflater = _inflater()
        self._lost = False
        return True

    def _inflate(self, inflater: _Inflater) -> Generator[bytes | Damage, None, bool]:
        """Decompress one chunk. Returns whether more chunks may follow."""
        chunk = bytes(self._held[self._at : self._at + CHUNK_BYTES])
        before = inflater.copy() if self._at > self._head else None
        try:
            text = inflater.decompress(chunk, TEXT_MAX_BYTES)
        except INFLATE_ERROR as exc:
            yield from self._recover(before or _inflater(), chunk, exc)
            return True
        # At the end, zlib can leave the rest in both.
        rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        self._at += len(chunk) - len(rest)
        if text:
            yield text
        if inflater.eof:
            self._inflater = None
            return True
        return self._at < len(self._held) or len(text) == TEXT_MAX_BYTES

    def _recover(
        self, before: _Inflater, chunk: bytes, problem: Exception
    ) -> Iterator[bytes | Damage]:
        """Yields the text of the failed chunk up to the damage, then skips the rest of the
        member."""
        head = HEAD.search(self._held, max(self._head + 1, 0))
        whole = len(chunk)
        if head is not None:  # the header is in the chunk, after it, or before it
            whole = min(max(head.start() - self._at, 0), len(chunk))
        why = "a gzip member is cut short"
        for start in range(0, whole, REDO_BYTES):
            try:
                text = before.decompress(chunk[start : min(start + REDO_BYTES, whole)])
            except INFLATE_ERROR:
                why = f"a gzip member is damaged ({str(problem).partition(': ')[2] or problem})"
                break
            if text:
                yield text
        end = self._at + len(chunk)
        # If no header was found, one may have begun in the last bytes.
        to = head.start() if head else max(end - HEAD_BYTES + 1, self._head + 1, 0)
        yield self._leave(to, self._at + whole, why)

    def _leave(self, to: int, near: int, why: str) -> Damage:
        """Skip the member; the search for the next header starts at position `to`."""
        self._at = to
        self._inflater = None
        self._lost = True
        return Damage(f"near byte {self._dropped_bytes + near}: {why}")

    def _foreign(self) -> Damage:
        return Damage(f"near byte {self._dropped_bytes + self._at}: not gzip data")

    def _forget(self) -> None:
        needless = self._at if self._inflater is None else self._head
        needless = max(needless, self._at - HELD_MAX_BYTES)
        if needless > CHUNK_BYTES:
            del self._held[:needless]
            self._dropped_bytes += needless
            self._at -= needless
            self._head -= needless


def _inflater() -> _Inflater:
    inflater: _Inflater = _ZLIB.decompressobj(16 + zlib_ng.MAX_WBITS)
    return inflater


def text_of(chunks: Iterable[bytes]) -> Iterator[bytes | Damage]:
    """The text of a file that is read in chunks: its first bytes show whether it is gzip or plain
    text."""
    chunks = iter(chunks)
    start = b""
    for chunk in chunks:
        start += chunk
        if len(start) >= len(GZIP_MAGIC):
            break
    if start[: len(GZIP_MAGIC)] != GZIP_MAGIC:
        yield start
        yield from chunks
        return
    members = Members()
    yield from members.feed(start)
    for chunk in chunks:
        yield from members.feed(chunk)
    yield from members.finish()


# --- A line of a capture file: one scrape, as JSON ------------------------------------------------


LINE_MAX_BYTES = 64 * 1024 * 1024
END_S = 253_402_300_800.0
"""The end of the year 9999 in Unix seconds. Later times cannot be formatted."""

HOST_SIGNAL = "host_"
"""Prefix of the keys of signals about the server's host."""


class Entry(Struct, frozen=True):
    """One scrape: the page, or the error. `t_s` is unix time.

    `host` has the signals of the server's host at that time, by key; it is empty if the recorder
    ran on another host. `dcgm` is the page of the server's GPUs; it is empty if none was read.
    """

    t_s: float
    body: str | None
    error: str = ""
    status: int | None = None
    content_type: str = ""
    host: Mapping[str, float] = field(default_factory=dict[str, float])
    dcgm: str = ""


def entry_of(line: bytes) -> Entry | str:
    """The entry on a line, or the damage. Unknown keys are ignored."""
    try:
        record: object = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        return f"not JSON: {exc.msg}"
    if not isinstance(record, dict):
        return "not a JSON object"
    get = cast("dict[str, object]", record).get
    t, body, error, status = get("t"), get("body"), get("error"), get("status")
    dcgm = get("dcgm")
    if isinstance(t, bool) or not isinstance(t, (int, float)):
        return '"t" is missing' if t is None else '"t" is no number'
    if not 0 <= t < END_S:
        return '"t" is no time'
    if not isinstance(body, str | None) or not isinstance(error, str | None):
        return '"body" or "error" is no text'
    if not isinstance(dcgm, str | None):
        return '"dcgm" is no text'
    if body is None and not error:
        return 'neither "body" nor "error"'
    if isinstance(status, bool) or not isinstance(status, int | None):
        return '"status" is no integer'
    content_type = get("content_type")
    if not isinstance(content_type, str | None):
        return '"content_type" is no text'
    host = _host(get("host"))
    if host is None:
        return '"host" is no table of numbers'
    return Entry(float(t), body, error or "", status, content_type or "", host, dcgm or "")


def _host(table: object) -> dict[str, float] | None:
    """The host signals of `table`; other keys are dropped. {} if `table` is None.

    None if `table` is not a dict of finite numbers.
    """
    if table is None:
        return {}
    if not isinstance(table, dict):
        return None
    numbers: dict[str, float] = {}
    for key, value in cast("dict[str, object]", table).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return None
        numbers[key] = float(value)
    return {key: value for key, value in numbers.items() if key.startswith(HOST_SIGNAL)}


def line_of(entry: Entry) -> bytes:
    """The line of an entry, with its newline.

    Raises:
        ValueError: the entry's time is not valid, it has neither page nor error, or its line is
            longer than readers accept.
    """
    if not 0 <= entry.t_s < END_S:
        raise ValueError(f"an entry's time must be from 1970 to 9999, not {entry.t_s}")
    if entry.body is None and not entry.error:
        raise ValueError("an entry needs a body or an error")
    record: dict[str, object] = {"t": entry.t_s}  # first: readers skip lines by their time
    if entry.status is not None:
        record["status"] = entry.status
    if entry.error:
        record["error"] = _text(entry.error)
    if entry.content_type:
        record["content_type"] = _text(entry.content_type)
    if entry.host:
        record["host"] = dict(entry.host)
    if entry.dcgm:
        record["dcgm"] = _text(entry.dcgm)
    if entry.body is not None:
        record["body"] = _text(entry.body)
    line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    if len(line) > LINE_MAX_BYTES:
        raise ValueError(f"an entry of {len(line)} bytes is longer than {LINE_MAX_BYTES}")
    return line


def _text(text: str) -> str:
    # A lone surrogate cannot be encoded as UTF-8. isascii() is a stored flag, so the check is free.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def split_lines(pieces: Iterable[bytes | Damage]) -> Iterator[bytes | Damage]:
    """The lines of a text that is read in pieces, including an unfinished last line.

    A line that contains damage, or that is too long, is replaced by a `Damage`.
    """
    parts: list[bytes] = []
    held_bytes = 0
    for piece in pieces:
        if isinstance(piece, Damage):
            parts, held_bytes = [], 0
            yield piece
            continue
        start = end = 0
        while end >= 0:
            end = piece.find(b"\n", start)
            part = piece[start:] if end < 0 else piece[start:end]
            held_bytes += len(part)
            if held_bytes <= LINE_MAX_BYTES:
                parts.append(part)
            else:
                parts = []  # keep nothing of the line until its end
            if end >= 0:
                yield _line(parts, held_bytes)
                parts, held_bytes, start = [], 0, end + 1
    if held_bytes:
        yield _line(parts, held_bytes)


def _line(parts: list[bytes], size_bytes: int) -> bytes | Damage:
    if size_bytes > LINE_MAX_BYTES:
        return Damage(f"a line of {size_bytes} bytes is too long")
    return b"".join(parts)
