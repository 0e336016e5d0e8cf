"""The body of a metrics page as lines: unpacked, decoded and bounded. Pure."""

from __future__ import annotations

import zlib

from kneewatch.collector.base import ExpositionError
from kneewatch.collector.exposition.grammar import Limits, excerpt

_GZIP_MEMBERS = 16  # one is usual, more are legal; each costs a copy of all that follow it
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # how zlib is told gzip and zlib apart
_LINES_PER_SERIES = 8  # HELP, TYPE, UNIT, the sample and as many again


def decompress(body: bytes, content_encoding: str, limit_bytes: int) -> bytes:
    """The body as it was before the encoding (gzip, deflate or identity) of its transfer.

    Raises:
        ExpositionError: of kind too_large when more than `limit_bytes` went in or would come out,
            truncated when the end is missing, exposition for other damage.
    """
    encoding = content_encoding.strip().lower()
    if len(body) > limit_bytes:
        raise ExpositionError(f"more than {limit_bytes} bytes", kind="too_large")
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW_BITS:
        raise ExpositionError(f"content encoding {excerpt(content_encoding)} is not supported")
    plain = b""
    for _ in range(_GZIP_MEMBERS):
        inflater = zlib.decompressobj(wbits=_WINDOW_BITS[encoding])
        try:
            plain += inflater.decompress(body, limit_bytes - len(plain) + 1)
        except zlib.error as exc:
            raise ExpositionError(f"damaged {encoding} body: {exc}") from exc
        if len(plain) > limit_bytes:
            raise ExpositionError(f"more than {limit_bytes} bytes unpacked", kind="too_large")
        if not inflater.eof:
            raise ExpositionError(f"the {encoding} body is cut off", kind="truncated")
        body = inflater.unused_data
        if not body:
            return plain
    raise ExpositionError(f"more than {_GZIP_MEMBERS} parts in one {encoding} body")


def split_lines(body: str | bytes, content_encoding: str, limits: Limits) -> list[str]:
    r"""The lines of a body without their ends, which are \n or \r\n; what follows the last is one.

    Raises:
        ExpositionError: the body cannot be unpacked, is not UTF-8 or holds too much.
    """
    raw = body if isinstance(body, str) else decompress(body, content_encoding, limits.body_bytes)
    text = _decode(raw, limits.body_bytes)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines_max = limits.series * _LINES_PER_SERIES
    lines = text.split("\n", lines_max + 1)
    if len(lines) > lines_max + 1:
        raise ExpositionError(f"more than {lines_max} lines", kind="too_large")
    return lines


def _decode(body: str | bytes, limit_bytes: int) -> str:
    try:
        if isinstance(body, bytes):
            return body.decode()
        # A str can hold half a surrogate pair, which has no UTF-8.
        size_bytes = len(body) if body.isascii() else len(body.encode())
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        kind = "truncated" if exc.reason == "unexpected end of data" else "exposition"
        raise ExpositionError(f"not UTF-8: {exc.reason}", line=line, kind=kind) from exc
    except UnicodeEncodeError as exc:
        line = exc.object.count("\n", 0, exc.start) + 1
        raise ExpositionError(f"not UTF-8: {exc.reason}", line=line) from exc
    if size_bytes > limit_bytes:
        raise ExpositionError(f"more than {limit_bytes} bytes", kind="too_large")
    return body
