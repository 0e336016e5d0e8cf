"""The grammar of one exposition line: names, labels, numbers, timestamps and exemplars. Pure.

One grammar parses Prometheus text 0.0.4 and OpenMetrics 1.0. For OpenMetrics it also accepts what
only 0.0.4 allows (tabs, repeated blanks, a comma after the last label); valid lines parse the same.
Only timestamps and exemplars differ.

Every pattern is linear: its inner repeats are possessive, so nothing is tried twice. No capturing
group is inside a possessive repeat: early releases of Python 3.11 get that wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.samples import Exemplar

Labels = tuple[tuple[str, str], ...]

_MIB = 1024 * 1024
_KIB = 1024

_EXCERPT = 80  # characters of a line that an error message shows

_TYPES_0_0_4 = {"counter", "gauge", "histogram", "summary", "untyped"}
_TYPES = _TYPES_0_0_4 | {"unknown", "gaugehistogram", "stateset", "info"}  # those of OpenMetrics

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

# float() reads a bit more than the formats allow: 1_0, blanks around, digits of other scripts. What
# is left of it, with these characters only, is decimals and inf, infinity, nan in any case.
_NUMBER = re.compile(r"[0-9a-zA-Z.+-]+")
_NUMBERS = re.compile(r"[0-9a-zA-Z.+,-]*")
_FLOATS = frozenset({float})
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")  # an int64 has at most 19 digits

_ESCAPE = re.compile(r'\\([\\"n])')
_ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one page; a page beyond any of them is refused as too large.

    `body_bytes` applies before and after decompression. `series` counts sample lines. `labels` is
    per series. `label_bytes` is the longest name or label value, in UTF-8.
    """

    body_bytes: int = 64 * _MIB
    series: int = 200_000
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
    exemplar: Exemplar | None = None


def excerpt(text: str) -> str:
    """The start of a text in quotes, for a message: shortened, unprintable characters escaped."""
    shown = ascii(text[:_EXCERPT])
    return f"{shown}..." if len(text) > _EXCERPT else shown


def number(text: str) -> float:
    """The float of a text; a number too large for a float is infinite, as in Python."""
    try:
        if _NUMBER.fullmatch(text):
            return float(text)
    except ValueError as exc:
        raise ExpositionError(f"{excerpt(text)} is not a number") from exc
    raise ExpositionError(f"{excerpt(text)} is not a number")


def numbers(texts: Sequence[str]) -> list[float] | None:
    """The floats of several texts, as by `number` but several times faster; None if any of them is
    not a plain number."""
    joined = ",".join(texts)
    try:
        # Most servers write each value as JSON writes a float. JSON also allows what a page may
        # not: a carriage return, whole lists.
        values: list[float] = orjson.loads(f"[{joined}]") if "\r" not in joined else []
        if len(values) == len(texts) and _FLOATS.issuperset(map(type, values)):
            return values
    except orjson.JSONDecodeError:
        pass
    if not _NUMBERS.fullmatch(joined):
        return None
    try:
        return list(map(float, texts))
    except ValueError:
        return None


def split_head(line: str) -> Head:
    """The name and labels of a sample line, and where its value starts."""
    match = _HEAD.match(line)
    if match is None:
        raise ExpositionError("not a sample line: a name, optional labels and a value")
    return Head(match[0], match[1], match[2])


def read_labels(block: str, limits: Limits) -> tuple[str | None, Labels]:
    """The labels between two braces, sorted by name, and the metric's name if it is inside them.

    A metric name outside the classic alphabet is quoted and inside the braces: {"a.b", c="d"}.
    """
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
    """The name of a series: before its labels or, quoted, inside the braces."""
    if before is not None and inner is None:
        return _bounded(before, limits)
    if before is None and inner is not None:
        return inner
    raise ExpositionError("a sample needs exactly one name")


def read_tail(text: str, *, openmetrics: bool, limits: Limits) -> Tail:
    """The value of a sample, and its timestamp and exemplar if it has them.

    Timestamps are whole milliseconds in 0.0.4 and seconds in OpenMetrics; only OpenMetrics has
    exemplars. The format's limit of 128 characters for exemplar labels is not enforced: a page that
    exceeds it is still readable.
    """
    match = _TAIL.fullmatch(text)
    if match is None:
        raise ExpositionError(f"{excerpt(text)} is not a value with an optional timestamp")
    value, at, block, exemplar_value, exemplar_at = match.groups()
    exemplar = None
    if block is not None:
        name, labels = read_labels(block, limits)
        if not openmetrics or name is not None:
            raise ExpositionError("an exemplar is misplaced or malformed")
        exemplar = Exemplar(labels, number(exemplar_value), _seconds(exemplar_at))
    timestamp_s = _seconds(at) if openmetrics else _milliseconds(at)
    return Tail(number(value), timestamp_s, exemplar)


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
    """The text itself if it is short enough; UTF-8 takes at most four bytes per character."""
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
