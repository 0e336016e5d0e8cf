"""Parses a metrics page: Prometheus text 0.0.4 and OpenMetrics 1.0. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import compress
from operator import eq, ne

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.exposition.grammar import (
    Labels,
    Limits,
    Tail,
    excerpt,
    number,
    numbers,
    read_labels,
    read_tail,
    read_type,
    series_name,
    split_head,
)
from kneewatch.collector.samples import Exemplar, Layout, Page, Series

_GZIP_MEMBERS = 16  # one is usual, more are legal; each costs a copy of all that follow it
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # how zlib is told gzip and zlib apart
_LINES_PER_SERIES = 8  # HELP, TYPE, UNIT, the sample and as many again


def decompress(body: bytes, content_encoding: str, limit_bytes: int) -> bytes:
    """The body without its content encoding (gzip, deflate or identity).

    Raises:
        ExpositionError: of kind too_large when the body is over `limit_bytes` before or after;
    truncated when its end is missing; exposition for other damage.
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
    """The lines of a body without their line ends (LF or CRLF); text after the last line end is a
    line too.

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


# --- A metrics page as series and values: Prometheus text 0.0.4 and OpenMetrics 1.0. Pure ---------
#
# A server's page keeps its layout from scrape to scrape, so a `PageParser` remembers the last
# page line by line: a line that did not change keeps its value, a line that starts as it did is a
# new value only. For anything else the page is read in full, which also finds what is wrong and
# where.
#
# Not checked, because no page is misread without it: that the lines of a family stand together,
# that samples fit their type, that histograms add up.


_OPENMETRICS = "application/openmetrics-text"
_EOF = "# EOF"
_NO_PREFIX = "\n"  # of a line without a sample: no line starts with it
_DEFAULTS = Limits()


class PageParser:
    """The parser of one target's pages. It keeps the last page's layout and reuses it.

    `Page.layout` is the same object as long as names, labels, types and order are the same. Nothing
    else carries over from page to page.
    """

    def __init__(self, limits: Limits = _DEFAULTS) -> None:
        self._limits = limits
        self._last: _Reading | None = None

    def parse(
        self, body: str | bytes, *, content_type: str = "", content_encoding: str = ""
    ) -> Page:
        """The page of a body.

        It is parsed as OpenMetrics if the content type says so, or if there is none and the last
        line is `# EOF`. `content_encoding` applies to bytes; a str is already decompressed.

        Raises:
            ExpositionError: of kind exposition (malformed), truncated or too_large.
        """
        lines = split_lines(body, content_encoding, self._limits)
        openmetrics = _is_openmetrics(content_type, lines)
        last = self._last
        if last is not None and last.openmetrics == openmetrics and last.update(lines):
            return last.page()
        reading = _read(lines, openmetrics=openmetrics, limits=self._limits)
        if last is not None and _same(last.layout, reading.layout):
            reading.layout = last.layout
        self._last = reading
        return reading.page()


def parse(
    body: str | bytes,
    *,
    content_type: str = "",
    content_encoding: str = "",
    limits: Limits = _DEFAULTS,
) -> Page:
    """The page of a body, as parsed by a new `PageParser`."""
    parser = PageParser(limits)
    return parser.parse(body, content_type=content_type, content_encoding=content_encoding)


@dataclass(slots=True)
class _Reading:
    """A page by its lines, to check whether the next page differs in values only."""

    lines: list[str]
    openmetrics: bool
    limits: Limits
    prefixes: list[str] = field(default_factory=list[str])  # of each line: all before the value
    positions: list[int] = field(default_factory=list[int])  # of each line: of its sample
    layout: Layout = field(default_factory=lambda: Layout((), {}))
    values: list[float] = field(default_factory=list[float])
    timestamps_s: dict[int, float] = field(default_factory=dict[int, float])
    exemplars: dict[int, Exemplar] = field(default_factory=dict[int, Exemplar])

    def page(self) -> Page:
        """A page with lists and mappings of its own."""
        values, timestamps_s = self.values.copy(), self.timestamps_s.copy()
        return Page(self.layout, values, timestamps_s, self.exemplars.copy())

    def put(self, position: int, tail: Tail) -> None:
        """Set a sample's value, timestamp and exemplar."""
        self.values[position] = tail.value
        self.timestamps_s.pop(position, None)
        self.exemplars.pop(position, None)
        if tail.timestamp_s is not None:
            self.timestamps_s[position] = tail.timestamp_s
        if tail.exemplar is not None:
            self.exemplars[position] = tail.exemplar

    def update(self, lines: list[str]) -> bool:
        """Update the values from these lines if nothing else differs. Returns whether it did."""
        if len(lines) != len(self.lines):
            return False
        changed = list(map(ne, lines, self.lines))
        fresh = list(compress(lines, changed))
        rests = list(map(str.removeprefix, fresh, compress(self.prefixes, changed)))
        if any(map(eq, rests, fresh)):  # a line that does not start as it did
            return False
        positions = compress(self.positions, changed)
        plain = None if self.timestamps_s or self.exemplars else numbers(rests)
        if plain is not None:
            for position, value in zip(positions, plain, strict=True):
                self.values[position] = value
        else:
            try:
                tails = [self.tail(rest) for rest in rests]
            except ExpositionError:
                return False  # reading in full says what is wrong
            for position, tail in zip(positions, tails, strict=True):
                self.put(position, tail)
        self.lines = lines
        return True

    def tail(self, text: str) -> Tail:
        """The value, timestamp and exemplar of a sample."""
        if " " in text or "\t" in text:
            return read_tail(text, openmetrics=self.openmetrics, limits=self.limits)
        return Tail(number(text))


class _FullReader:
    """Reads a page line by line into a `_Reading`."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.ended = False  # by # EOF
        self._series: list[Series] = []
        self._types: dict[str, str] = {}
        self._repeated: set[int] = set()
        self._seen: set[Series] = set()
        self._blocks: dict[str, tuple[str | None, Labels]] = {}  # buckets share them: read once

    def take(self, line: str) -> None:
        """Read the next line."""
        reading = self.reading
        if self.ended and line.strip(" \t"):
            raise ExpositionError(f"text after {_EOF}")
        if line[:1] in ("", "#", " ", "\t") and line.strip(" \t")[:1] in ("", "#"):
            self._take_comment(line)
            reading.prefixes.append(_NO_PREFIX)
            reading.positions.append(-1)
            return
        prefix, name, block = split_head(line)
        position = self._take_series(name, block or "")
        reading.values.append(0.0)
        reading.put(position, reading.tail(line[len(prefix) :]))
        reading.prefixes.append(prefix)
        reading.positions.append(position)

    def _take_comment(self, line: str) -> None:
        if line == _EOF and self.reading.openmetrics:
            self.ended = True
            return
        stated = read_type(line.strip(" \t"), self.reading.limits)
        if stated is not None:
            self._types.setdefault(*stated)

    def _take_series(self, name: str | None, block: str) -> int:
        limits, position = self.reading.limits, len(self._series)
        if position >= limits.series:
            raise ExpositionError(f"more than {limits.series} series", kind="too_large")
        parsed = self._blocks.get(block)
        if parsed is None:
            parsed = self._blocks[block] = read_labels(block, limits)
        series = Series(series_name(name, parsed[0], limits), parsed[1])
        if series in self._seen:
            self._repeated.add(position)
        self._seen.add(series)
        self._series.append(series)
        return position

    def layout(self) -> Layout:
        """The layout of all lines read."""
        return Layout(tuple(self._series), self._types, frozenset(self._repeated))


def _read(lines: list[str], *, openmetrics: bool, limits: Limits) -> _Reading:
    reading = _Reading(lines, openmetrics, limits)
    reader = _FullReader(reading)
    try:
        for line in lines:
            reader.take(line)
    except ExpositionError as exc:
        at = len(reading.prefixes) + 1
        # The last of the split lines is empty unless the page stops within a line. A page of one
        # bad line is something else.
        cut = 1 < at == len(lines) and exc.kind == "exposition"
        kind = "truncated" if cut else exc.kind
        raise ExpositionError(f"{exc}: {excerpt(lines[at - 1])}", line=at, kind=kind) from exc
    if openmetrics and not reader.ended:
        raise ExpositionError(f"no {_EOF} at the end", line=len(lines), kind="truncated")
    reading.layout = reader.layout()
    return reading


def _is_openmetrics(content_type: str, lines: list[str]) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type:
        return media_type == _OPENMETRICS
    return next((line for line in reversed(lines) if line.strip(" \t")), "") == _EOF


def _same(layout: Layout, other: Layout) -> bool:
    return (layout.series, layout.types, layout.repeated) == (
        other.series,
        other.types,
        other.repeated,
    )
