"""Parses a metrics page: Prometheus text 0.0.4 and OpenMetrics 1.0. Pure.

One grammar parses both formats. On OpenMetrics pages it also accepts syntax that only 0.0.4 allows:
tabs, repeated blanks, a comma after the last label. Valid OpenMetrics lines are parsed as the
standard says. Only timestamps and exemplars are handled by format.

Every pattern runs in linear time: its inner repeats are possessive, so there is no backtracking. No
capturing group is inside a possessive repeat: early releases of Python 3.11 handle that wrongly.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from io import BytesIO
from itertools import compress, islice
from typing import NamedTuple
from weakref import WeakValueDictionary

import orjson
from msgspec import Struct

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.collector.page_memory import PAGES

# --- The grammar of a line: names, labels, numbers, timestamps and exemplars ----------------------

Labels = tuple[tuple[str, str], ...]

_MIB = 1024 * 1024
_KIB = 1024

_BLOCK_CHARS = 64 * _KIB  # all labels of a series; vLLM's longest have 2 KiB
_EXCERPT = 80  # characters of a line that an error message shows

_TYPES_0_0_4 = {"counter", "gauge", "histogram", "summary", "untyped"}
_TYPES = _TYPES_0_0_4 | {"unknown", "gaugehistogram", "stateset", "info"}  # OpenMetrics adds these

_BLANK = r"[ \t]"
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*+"
_IN_QUOTES = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_IN_BRACES = rf'(?:[^"{{}}]++|"{_IN_QUOTES}")*+'

# The part of a sample line before its value, the blanks between them included.
_HEAD = re.compile(
    rf"{_BLANK}*+(?:({_NAME}))?(?:{_BLANK}*+\{{({_IN_BRACES})\}}{_BLANK}*+|{_BLANK}++)"
)
# One label, or a quoted metric name, with the comma or the end that follows it.
_LABEL = re.compile(
    rf'{_BLANK}*+(?:({_LABEL_NAME})|"({_IN_QUOTES})"){_BLANK}*+'
    rf'(?:={_BLANK}*+"({_IN_QUOTES})"{_BLANK}*+)?(?:,{_BLANK}*+|\Z)'
)
_TAIL = re.compile(
    rf"{_BLANK}*+([^ \t#]++)(?:{_BLANK}++([^ \t#]++))?"
    rf"(?:{_BLANK}++#{_BLANK}++\{{({_IN_BRACES})\}}{_BLANK}++([^ \t]++)(?:{_BLANK}++([^ \t]++))?)?"
    rf"{_BLANK}*+"
)
_COMMENT = re.compile(
    rf'#{_BLANK}++(HELP|TYPE|UNIT){_BLANK}++(?:({_NAME})|"({_IN_QUOTES})")(?:{_BLANK}++(.*))?'
)
_COMMENT_WORD = re.compile(rf"#{_BLANK}++(HELP|TYPE)(?:{_BLANK}|\Z)")

# float() accepts more than the formats do: 1_0, surrounding blanks, digits of other scripts. With
# these characters only, it accepts decimals and inf, infinity, nan in any case.
_NUMBER = re.compile(r"[0-9a-zA-Z.+-]+")
_NUMBERS = re.compile(rb"[0-9a-zA-Z.+,\n-]*")
_FLOATS = frozenset({float})
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")  # an int64 has at most 19 digits

_ESCAPE = re.compile(r'\\([\\"n])')
_ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}


class Limits(Struct, frozen=True):
    """Limits on one page; a page beyond any of them is refused as too large.

    `body_bytes` applies before and after decompression. `series` counts sample lines. `labels` is
    per series. `label_bytes` is the longest name or label value, in UTF-8.
    """

    body_bytes: int = 16 * _MIB
    series: int = 50_000
    labels: int = 128
    label_bytes: int = 16 * _KIB


class Head(NamedTuple):
    """A sample line up to its value: `prefix` is its text, including trailing blanks."""

    prefix: str
    name: str | None
    block: str | None


class Tail(NamedTuple):
    """The part of a sample line after name and labels."""

    value: float
    timestamp_s: float | None = None


def excerpt(text: str) -> str:
    """The start of a text in quotes, for a message: shortened, unprintable characters escaped."""
    shown = ascii(text[:_EXCERPT])
    return f"{shown}..." if len(text) > _EXCERPT else shown


def number(text: str) -> float:
    """The float of a text; infinity if the number is too large for a float, as in Python."""
    try:
        if _NUMBER.fullmatch(text):
            return float(text)
    except ValueError as exc:
        raise ExpositionError(f"{excerpt(text)} is not a number") from exc
    raise ExpositionError(f"{excerpt(text)} is not a number")


def numbers(tails: Sequence[bytes], joined: bytes) -> list[float] | None:
    """The float of each entry of `tails`; None if any of them is not a plain number.

    A tail is the part of a sample line after its labels; `joined` are the tails with commas between
    them. Several times faster than calling `number` for each.
    """
    try:
        # Most servers write each value as JSON writes a float. JSON also allows what a page may
        # not: a carriage return, whole lists.
        values: list[float] = orjson.loads(b"[%b]" % joined) if b"\r" not in joined else []
        if len(values) == len(tails) and _FLOATS.issuperset(map(type, values)):
            return values
    except orjson.JSONDecodeError:
        pass
    if not _NUMBERS.fullmatch(joined):
        return None
    try:
        return list(map(float, tails))  # float() strips the line ends
    except ValueError:
        return None


def split_head(line: str) -> Head:
    """The name and labels of a sample line, and where its value starts."""
    match = _HEAD.match(line)
    if match is None:
        raise ExpositionError("not a sample line: a name, optional labels and a value")
    return Head(match[0], match[1], match[2])


def read_labels(block: str, limits: Limits) -> tuple[str | None, Labels]:
    """The sorted labels of a `{...}` block, and the metric's name if the block contains it.

    Labels are sorted by name. A metric name with characters outside the classic alphabet is quoted
    inside the braces: {"a.b", c="d"}.
    """
    if len(block) > _BLOCK_CHARS:
        raise ExpositionError(f"labels of over {_BLOCK_CHARS} characters", kind="too_large")
    name: str | None = None
    labels: dict[str, str] = {}
    position = 0
    while position < len(block):
        match = _LABEL.match(block, position)
        if match is None:
            if not block.strip(" \t"):
                break
            raise ExpositionError(f"labels are malformed at {excerpt(block[position:])}")
        position = match.end()
        bare, quoted, text = match.groups()
        if text is not None:
            key = _bounded(bare if quoted is None else _unescape(quoted), limits)
            if key in labels or key in ("", "__name__"):
                raise ExpositionError(f"label {excerpt(key)} is given twice, empty or reserved")
            labels[key] = _bounded(_unescape(text), limits)
            if len(labels) > limits.labels:
                raise ExpositionError(f"more than {limits.labels} labels", kind="too_large")
        elif quoted and name is None:
            name = _bounded(_unescape(quoted), limits)
        else:
            raise ExpositionError(f"labels are malformed at {excerpt(match[0])}")
    return name, tuple(sorted(labels.items()))


def series_name(before: str | None, inner: str | None, limits: Limits) -> str:
    """The name of a series, which is before the braces or, if quoted, inside them."""
    if before is not None and inner is None:
        return _bounded(before, limits)
    if before is None and inner is not None:
        return inner
    raise ExpositionError("a sample needs exactly one name")


def read_tail(text: str, *, openmetrics: bool, limits: Limits) -> Tail:
    """The value of a sample, and its timestamp if it has one.

    Timestamps are whole milliseconds in 0.0.4 and seconds in OpenMetrics. Exemplars, which only
    OpenMetrics has, are checked and then dropped. The format's limit of 128 characters for exemplar
    labels is not enforced: a page that exceeds it is still readable.
    """
    match = _TAIL.fullmatch(text)
    if match is None:
        raise ExpositionError(f"{excerpt(text)} is not a value with an optional timestamp")
    value, at, block, exemplar_value, exemplar_at = match.groups()
    if block is not None:
        name, _ = read_labels(block, limits)
        if not openmetrics or name is not None:
            raise ExpositionError("an exemplar is misplaced or malformed")
        number(exemplar_value)
        _seconds(exemplar_at)
    timestamp_s = _seconds(at) if openmetrics else _milliseconds(at)
    return Tail(number(value), timestamp_s)


def read_type(line: str, limits: Limits) -> tuple[str, str] | None:
    """The metric family and type of a TYPE comment; None for any other comment."""
    match = _COMMENT.fullmatch(line)
    if match is None:
        if _COMMENT_WORD.match(line):
            raise ExpositionError("HELP or TYPE without a valid metric name")
        return None
    word, bare, quoted, text = match.groups()
    if word != "TYPE":
        return None
    kind = (text or "").strip(" \t")
    if kind not in _TYPES:
        raise ExpositionError(f"{excerpt(kind)} is not a metric type")
    return _bounded(bare if quoted is None else _unescape(quoted), limits), kind


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def _bounded(text: str, limits: Limits) -> str:
    """The text unchanged, if it is within the limit for names and label values.

    UTF-8 takes at most four bytes per character, so most texts need not be encoded.

    Raises:
        ExpositionError: the text is too long.
    """
    limit = limits.label_bytes
    if len(text) * 4 > limit and len(text.encode()) > limit:
        raise ExpositionError(f"a name or label value over {limit} bytes", kind="too_large")
    return text


def _milliseconds(text: str | None) -> float | None:
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        raise ExpositionError(f"{excerpt(text)} is not a timestamp in whole milliseconds")
    return int(text) / 1000


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    at_s = number(text)
    if not math.isfinite(at_s):
        raise ExpositionError(f"{excerpt(text)} is not a timestamp in seconds")
    return at_s


# --- The body of a page: decompression and limits -------------------------------------------------

_GZIP_MEMBERS = 16  # one is usual, more are legal; each costs a copy of all that follow it
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib then detects gzip or zlib by itself
_LINES_PER_SERIES = 4  # HELP, TYPE, UNIT and the sample


def decompress(body: bytes, content_encoding: str, limit_bytes: int) -> bytes:
    """The body without its content encoding (gzip, deflate or identity).

    Raises:
        ExpositionError: of kind too_large when the body is over `limit_bytes` before or after
            decompression; truncated when its end is missing; exposition for other damage.
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


def plain_bytes(body: str | bytes, content_encoding: str, limits: Limits) -> bytes:
    """A body without its content encoding, with LF as line ending. Not yet checked to be UTF-8.

    Raises:
        ExpositionError: the body cannot be decompressed or encoded as UTF-8, or is too long.
    """
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as exc:  # a lone surrogate
            line = exc.object.count("\n", 0, exc.start) + 1
            raise ExpositionError(f"not UTF-8: {exc.reason}", line=line) from exc
        content_encoding = ""
    plain = decompress(body, content_encoding, limits.body_bytes)
    return plain.replace(b"\r\n", b"\n") if b"\r" in plain else plain


def split_lines(plain: bytes, limits: Limits) -> list[str]:
    """The lines of a page, without line endings; text after the last line ending is a line too.

    Raises:
        ExpositionError: there are too many lines, or the page is not UTF-8.
    """
    lines_max = limits.series * _LINES_PER_SERIES
    if plain.count(b"\n") > lines_max:
        raise ExpositionError(f"more than {lines_max} lines", kind="too_large")
    try:
        return plain.decode().split("\n")
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        kind = "truncated" if exc.reason == "unexpected end of data" else "exposition"
        raise ExpositionError(f"not UTF-8: {exc.reason}", line=line, kind=kind) from exc


# --- A metrics page as series and values: Prometheus text 0.0.4 and OpenMetrics 1.0. Pure ---------
#
# A server's page keeps its lines from scrape to scrape but for the values, and servers that run the
# same model have the same lines. A page that was read in full leaves a template of its lines; the
# next page of any target that fits the template is split into values without looking at a name. A
# page that fits none is read in full, which also finds what is wrong and where.
#
# Not checked, because no page is misread without it: that the lines of a family stand together,
# that samples fit their type, that histograms add up.


_OPENMETRICS = "application/openmetrics-text"
_EOF = "# EOF"
_DEFAULTS = Limits()


class PageParser:
    """The parser of one target's pages.

    Pages with the same names, labels, types and order get the same object as `Page.layout`, also
    across targets. No other state is kept between pages.
    """

    def __init__(self, limits: Limits = _DEFAULTS) -> None:
        self._limits = limits
        self._template: _Template | None = None

    def parse(
        self, body: str | bytes, *, content_type: str = "", content_encoding: str = ""
    ) -> Page:
        """The parsed page of a response body.

        The format is OpenMetrics if the content type says so. Without a content type, it is
        OpenMetrics if the last line is `# EOF`. `content_encoding` applies to bytes; a str is
        already decompressed.

        Raises:
            ExpositionError: of kind exposition (malformed), truncated or too_large.
        """
        plain = plain_bytes(body, content_encoding, self._limits)
        openmetrics = _is_openmetrics(content_type, plain)
        template, page = self._template, None
        if template is not None and template.openmetrics == openmetrics:
            page = template.page(plain)
        if page is None:
            template = self._template = None  # its memory is free for the new page
            with PAGES.parsing(plain) as size:
                lines = split_lines(plain, self._limits)
                self._template, page = _read(lines, openmetrics=openmetrics, limits=self._limits)
                PAGES.keep(page.layout, size)
        return page


def parse(
    body: str | bytes,
    *,
    content_type: str = "",
    content_encoding: str = "",
    limits: Limits = _DEFAULTS,
) -> Page:
    """Parses one body with a new `PageParser`."""
    parser = PageParser(limits)
    return parser.parse(body, content_type=content_type, content_encoding=content_encoding)


class _Template(Struct, frozen=True, eq=False, weakref=True):
    """A page without its values, as lines with their line endings.

    `is_sample` and `is_other` have an entry for every line. `prefixes` has one for every sample
    line: its text before the value. `others` has the remaining lines. `fixed_bytes` is the length
    of all prefixes and other lines.
    """

    openmetrics: bool
    limits: Limits
    is_sample: tuple[bool, ...]
    is_other: tuple[bool, ...]
    prefixes: tuple[bytes, ...]
    others: tuple[bytes, ...]
    fixed_bytes: int
    layout: Layout

    def page(self, plain: bytes) -> Page | None:
        """The page parsed from these bytes with this template.

        None if the bytes differ from the template in more than values, or if a value is malformed.
        """
        # BytesIO splits lines three times as fast as bytes.split and str.split do.
        lines = list(islice(BytesIO(plain), len(self.is_sample) + 1))
        if len(lines) != len(self.is_sample):
            return None
        tails = list(map(bytes.removeprefix, compress(lines, self.is_sample), self.prefixes))
        if tuple(compress(lines, self.is_other)) != self.others:
            return None
        joined = b",".join(tails)
        commas = max(0, len(tails) - 1)
        if len(joined) - commas + self.fixed_bytes != len(plain):
            return None  # a line starts differently, so no prefix was removed from it
        values = numbers(tails, joined)
        if values is not None:
            return Page(self.layout, values)
        try:
            texts = [tail.decode().removesuffix("\n") for tail in tails]
            return self.full_page(
                [_tail(text, openmetrics=self.openmetrics, limits=self.limits) for text in texts]
            )
        except (ExpositionError, UnicodeDecodeError):
            return None  # reading in full raises the error

    def full_page(self, tails: Sequence[Tail]) -> Page:
        """The page with these values and timestamps."""
        return Page(
            self.layout,
            [tail.value for tail in tails],
            {at: t_s for at, tail in enumerate(tails) if (t_s := tail.timestamp_s) is not None},
        )


_templates: WeakValueDictionary[tuple[object, ...], _Template] = WeakValueDictionary()
_layouts: WeakValueDictionary[tuple[object, ...], Layout] = WeakValueDictionary()
"""Layouts in use, by content. Threads that add equal layouts at once may each keep their own."""


def _tail(text: str, *, openmetrics: bool, limits: Limits) -> Tail:
    if " " in text or "\t" in text:
        return read_tail(text, openmetrics=openmetrics, limits=limits)
    return Tail(number(text))


class _FullReader:
    """Reads a page line by line."""

    def __init__(self, *, openmetrics: bool, limits: Limits) -> None:
        self._openmetrics, self._limits = openmetrics, limits
        self.ended = False  # by # EOF
        self.is_sample: list[bool] = []
        self.tails: list[Tail] = []
        self._prefixes: list[str] = []
        self._others: list[str] = []
        self._series: list[Series] = []
        self._types: dict[str, str] = {}
        self._repeated: set[int] = set()
        self._seen: set[Series] = set()
        self._blocks: dict[str, tuple[str | None, Labels]] = {}  # buckets share them: read once

    def take(self, line: str) -> None:
        """Read the next line."""
        if self.ended and line.strip(" \t"):
            raise ExpositionError(f"text after {_EOF}")
        if line[:1] in ("", "#", " ", "\t") and line.strip(" \t")[:1] in ("", "#"):
            self._take_comment(line)
            self._others.append(line)
            self.is_sample.append(False)
            return
        prefix, name, block = split_head(line)
        self._take_series(name, block or "")
        tail = line[len(prefix) :]
        self.tails.append(_tail(tail, openmetrics=self._openmetrics, limits=self._limits))
        self._prefixes.append(prefix)
        self.is_sample.append(True)

    def _take_comment(self, line: str) -> None:
        if line == _EOF and self._openmetrics:
            self.ended = True
            return
        stated = read_type(line.strip(" \t"), self._limits)
        if stated is not None:
            self._types.setdefault(*stated)

    def _take_series(self, name: str | None, block: str) -> None:
        limits, position = self._limits, len(self._series)
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

    def template(self) -> _Template:
        """The template of the lines read so far; an equal template that is in use is returned
        instead."""
        is_sample, prefixes = tuple(self.is_sample), tuple(map(str.encode, self._prefixes))
        others = tuple([f"{line}\n".encode() for line in self._others])
        if others and not is_sample[-1]:  # what follows the last line end
            last = others[-1].removesuffix(b"\n")
            is_sample = is_sample if last else is_sample[:-1]
            others = (*others[:-1], last) if last else others[:-1]
        # The key leaves out what can be derived from its other parts.
        key = (self._openmetrics, self._limits, is_sample, prefixes, others)
        is_other = tuple([not sample for sample in is_sample])
        template = _templates.get(key)
        if template is None:
            template = _templates[key] = _Template(
                self._openmetrics,
                self._limits,
                is_sample,
                is_other,
                prefixes,
                others,
                sum(map(len, (*prefixes, *others))),
                self._layout(),
            )
        return template

    def _layout(self) -> Layout:
        series, repeated = tuple(self._series), frozenset(self._repeated)
        key = (series, frozenset(self._types.items()), repeated)
        layout = _layouts.get(key)
        if layout is None:
            layout = _layouts[key] = Layout(series, self._types, repeated)
        return layout


def _read(lines: list[str], *, openmetrics: bool, limits: Limits) -> tuple[_Template, Page]:
    """Parses every line in full; returns the template of the page, and the page."""
    reader = _FullReader(openmetrics=openmetrics, limits=limits)
    try:
        for line in lines:
            reader.take(line)
    except ExpositionError as exc:
        at = len(reader.is_sample) + 1
        # The last of the split lines is empty unless the page stops within a line: then it was
        # truncated. A page of one bad line is not a metrics page.
        cut = 1 < at == len(lines) and exc.kind == "exposition"
        kind = "truncated" if cut else exc.kind
        raise ExpositionError(f"{exc}: {excerpt(lines[at - 1])}", line=at, kind=kind) from exc
    if openmetrics and not reader.ended:
        raise ExpositionError(f"no {_EOF} at the end", line=len(lines), kind="truncated")
    template = reader.template()
    return template, template.full_page(reader.tails)


def _is_openmetrics(content_type: str, plain: bytes) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type:
        return media_type == _OPENMETRICS
    end = len(plain.rstrip(b" \t\n"))
    last = plain[plain.rfind(b"\n", 0, end) + 1 :] if end else b""
    return last.partition(b"\n")[0] == _EOF.encode()
