"""Lines of Markdown in which nothing that came from elsewhere is markup. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kneewatch.reports.markdown import escaped
from kneewatch.reports.weekly.figures import FlagChange
from kneewatch.reports.weekly.page.telling import flag

NAME = re.compile(r"[\w.:/+-]+")


def text(value: str) -> str:
    """Text on one line, in which nothing is markup."""
    return escaped(" ".join(value.split()))


def code(value: str) -> str:
    """A name as code where it is one; else as text: a backtick in it would end the code."""
    return f"`{value}`" if NAME.fullmatch(value) else text(value)


def sections(*parts: Sequence[str]) -> list[str]:
    """Parts with a line between them; what is empty is left out."""
    lines: list[str] = []
    for part in parts:
        if part:
            lines += [*([""] if lines else []), *part]
    return lines


def rows(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table; nothing without rows. The cells are Markdown already, their bars escaped."""
    lines = [f"| {' | '.join(cell.strip() or '-' for cell in cells)} |" for cells in body]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines] if lines else []


def bullets(lines: Iterable[str]) -> list[str]:
    """A list; what is empty is left out."""
    return [f"- {line.strip()}" for line in lines if line.strip()]


def flags(changes: Iterable[FlagChange]) -> str:
    """Changes of flags; empty for none. No code: a backtick in one would end it."""
    told = ", ".join(f"**{text(flag(made))}**" for made in changes)
    return f"{told}." if told else ""
