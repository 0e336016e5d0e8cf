"""Characters, tones and lines of the screen. Text from other machines is never interpreted as
markup. Pure.

A line is a sequence of pieces. Each piece has a tone, and the screen maps tones to colours.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from unicodedata import combining, east_asian_width

from msgspec import Struct

from kneewatch.reports.lines import printable

UNIT = re.compile(r"(?<=\d) (?=%|(?:ms|s|min|h|days)\b)")
GLUE = "\u00a0"
"""A no-break space. It keeps a number and its unit together when lines are wrapped."""

Piece = tuple[str, str]
Line = tuple[Piece, ...]
"""Pieces of text, each with its tone: a key of TONES."""

TONES = {
    "": "",
    "ok": "green",
    "info": "cyan",
    "warning": "yellow",
    "critical": "bold red",
    "unknown": "magenta",
    "strong": "bold",
    "faint": "dim",
    "marked": "reverse",
    "bar": "cyan",
    "over": "red",
}
"""Styles in the terminal's 16 colours, which follow the user's theme."""

PLAIN_TONES = {
    **dict.fromkeys(TONES, ""),
    "critical": "bold",
    "warning": "bold",
    "strong": "bold",
    "faint": "dim",
    "marked": "reverse",
    "over": "bold",
}
"""Styles without colour. States are then shown by words alone."""


class Glyphs(Struct, frozen=True):
    """The characters to draw with. `bars` are ordered from the lowest bar to a full cell."""

    bars: str
    bound: str
    rule: str
    cut: str
    marker: str
    at_most: str
    unicode: bool

    def clean(self, text: str) -> str:
        """The text without control characters. Characters that the terminal cannot show are
        replaced."""
        text = printable(text)
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def fit(self, text: str, width: int) -> str:
        """The text in exactly `width` cells. If the text is longer, its middle is cut out."""
        text = self.clean(text)
        if cells(text) > width:
            head = _first(text, (width - cells(self.cut)) // 2)
            tail_cells = width - cells(head) - cells(self.cut)
            text = head + self.cut + _first(text[::-1], tail_cells)[::-1]
        return text + " " * (width - cells(text))

    def folded(self, text: str, width: int, *, indent: int = 0, more: int = 2) -> list[str]:
        """The text wrapped into lines of at most `width` cells. The first line is indented by
        `indent`, later lines by `indent` plus `more`.

        If the width is too small for the indent, it is raised so that one character fits.
        """
        text = self.clean(text)
        if cells(text) > len(text):
            width = max(width // 2, indent + more + 8)  # characters of two cells: wrapped early
        width = max(width, indent + more + 1)  # without room for a character textwrap never ends
        lines = textwrap.wrap(
            UNIT.sub(GLUE, text),
            width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + more),
            break_on_hyphens=False,
        )
        return [line.replace(GLUE, " ") for line in lines]


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "┄", "─", "…", "▶", "≤", unicode=True)
ASCII = Glyphs("_.:-=+*#", "-", "-", "~", ">", "<=", unicode=False)


def glyphs_for(environ: Mapping[str, str], encoding: str) -> Glyphs:
    """The characters that the terminal can show: Unicode if the locale is UTF-8, else ASCII.

    LC_CTYPE=C.UTF-8 is ignored, because Python itself sets it in the C locale.
    """
    if encoding.lower().replace("-", "") != "utf8" or environ.get("TERM") == "linux":
        return ASCII
    locales = [environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if locales[1] == "C.UTF-8":
        locales[1] = None
    locale = next((name for name in locales if name), "C")
    return UNICODE if "utf" in locale.lower() else ASCII


def cells(text: str) -> int:
    """The width of a text in terminal columns."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def toned(lines: Iterable[str], tone: str = "") -> list[Line]:
    """Convert lines of plain text to lines with a single tone."""
    return [((line, tone),) for line in lines]


def spread(left: Line, right: Line, width: int) -> Line:
    """A line with `left` at the left edge and `right` at the right edge. If there is no space for
    both, `right` is dropped."""
    used = sum(cells(text) for text, _ in (*left, *right))
    if used + 2 > width:
        return left
    return (*left, (" " * (width - used), ""), *right)


def _first(text: str, width: int) -> str:
    used = 0
    for at, character in enumerate(text):
        used += cells(character)
        if used > width:
            return text[:at]
    return text
