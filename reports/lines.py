"""Lines of text for users: wrapped, cut, without control characters; moments and money. Pure."""

from __future__ import annotations

import textwrap

from kneewatch.rules.formatting import as_sentence, clock, date, span

WIDTH = 100
"""Greatest line length; a longer single word is not broken."""


def usd(value: float) -> str:
    """An amount of money, below 100 USD with cents: 2,688 USD, 0.51 USD, under 0.01 USD."""
    if 0 < value < 0.005:
        return "under 0.01 USD"
    return f"{value:,.2f} USD" if 0 < abs(value) < 100 else f"{value:,.0f} USD"


def moment(t_s: float, now_s: float) -> str:
    """A UTC time; with its date unless that is the same day as `now_s`."""
    day = "" if date(t_s) == date(now_s) else f"{date(t_s)} "
    return f"{day}{clock(t_s)} UTC"


def lasting(since_s: float, now_s: float) -> str:
    """How long something has lasted and since when: for 12 min, since 03:07:12 UTC."""
    if now_s - since_s < 1:
        return f"as of {moment(since_s, now_s)}"
    return f"for {span(now_s - since_s)}, since {moment(since_s, now_s)}"


def printable(text: str) -> str:
    """The text with control characters replaced: names and errors from other machines may contain
    some."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def wrapped(line: str, *, width: int = WIDTH, indent: int = 0, more: int = 2) -> list[str]:
    """A line wrapped at `width`, continuation lines indented by `more`; words are not broken."""
    return textwrap.wrap(
        printable(line),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + more),
        break_long_words=False,
        break_on_hyphens=False,
    )


def first_sentence(text: str) -> str:
    """The first sentence of a text. What follows in a recommendation is its derivation."""
    return as_sentence(text.partition(". ")[0])


def cut_after_sentence(text: str, width: int) -> str:
    """A text on one line, cut to `width` characters, if possible at the end of a sentence."""
    whole, stop, _ = printable(text)[: width - 1].rpartition(". ")
    is_cut = len(printable(text)) > width and len(whole) >= width / 2
    return f"{whole}{stop}…" if is_cut else cut(text, width)


def cut(line: str, width: int = WIDTH) -> str:
    """A line cut to `width` characters, with an ellipsis where text was removed."""
    line = printable(line)
    return line if len(line) <= width else line[: width - 1] + "…"
