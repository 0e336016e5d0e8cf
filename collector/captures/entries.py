"""A line of a capture file: one scrape, as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import orjson

from kneewatch.collector.captures.members import Damage

LINE_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One scrape: the page, or why there is none. `t_s` is Unix time."""

    t_s: float
    body: str | None
    error: str = ""
    status: int | None = None
    content_type: str = ""


def entry_of(line: bytes) -> Entry | str:
    """The entry that a line holds, or why it holds none. Keys that are not ours are passed over."""
    try:
        record: object = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        return f"not JSON: {exc.msg}"
    if not isinstance(record, dict):
        return "not a JSON object"
    get = cast("dict[str, object]", record).get
    t, body, error, status = get("t"), get("body"), get("error"), get("status")
    if isinstance(t, bool) or not isinstance(t, (int, float)):
        return '"t" is missing' if t is None else '"t" is no number'
    if not 0 <= t < math.inf:
        return '"t" is no time'
    if not isinstance(body, str | None) or not isinstance(error, str | None):
        return '"body" or "error" is no text'
    if body is None and not error:
        return 'neither "body" nor "error"'
    if isinstance(status, bool) or not isinstance(status, int | None):
        return '"status" is no integer'
    content_type = get("content_type")
    if not isinstance(content_type, str | None):
        return '"content_type" is no text'
    return Entry(float(t), body, error or "", status, content_type or "")


def line_of(entry: Entry) -> bytes:
    """The line that holds an entry, with its end.

    Raises:
        ValueError: it has no usable time, holds nothing, or is longer than readers take.
    """
    if not 0 <= entry.t_s < math.inf:
        raise ValueError(f"an entry's time must be finite and not negative, not {entry.t_s}")
    if entry.body is None and not entry.error:
        raise ValueError("an entry needs a body or an error")
    record: dict[str, object] = {"t": entry.t_s}  # first: readers pass over lines by it
    if entry.status is not None:
        record["status"] = entry.status
    if entry.error:
        record["error"] = _text(entry.error)
    if entry.content_type:
        record["content_type"] = _text(entry.content_type)
    if entry.body is not None:
        record["body"] = _text(entry.body)
    line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    if len(line) > LINE_MAX_BYTES:
        raise ValueError(f"an entry of {len(line)} bytes is longer than {LINE_MAX_BYTES}")
    return line


def _text(text: str) -> str:
    # Half a surrogate pair is no text and has no UTF-8; isascii() is known without looking.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def split_lines(pieces: Iterable[bytes | Damage]) -> Iterator[bytes | Damage]:
    """The lines of a text that comes in pieces, the last one too if it has no end.

    A line that damage interrupts is part of that damage; one that is too long is damage itself.
    """
    parts: list[bytes] = []
    held_bytes = 0
    for piece in pieces:
        if isinstance(piece, Damage):
            parts, held_bytes = [], 0
            yield piece
            continue
        first, end, rest = piece.partition(b"\n")
        held_bytes += len(first)
        if held_bytes <= LINE_MAX_BYTES:
            parts.append(first)
        else:
            parts = []  # and nothing is kept until the line has its end
        if not end:
            continue
        yield _line(parts, held_bytes)
        *lines, last = rest.split(b"\n")
        for line in lines:
            yield _line([line], len(line))
        parts, held_bytes = [last], len(last)
    if held_bytes:
        yield _line(parts, held_bytes)


def _line(parts: list[bytes], size_bytes: int) -> bytes | Damage:
    if size_bytes > LINE_MAX_BYTES:
        return Damage(f"a line of {size_bytes} bytes is too long")
    return b"".join(parts)
