"""Charts of a signal's recent history in rows of characters, with its bound drawn in. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kneewatch.agent.terminal.glyphs import Glyphs, Line, Piece

CELL_LADDER_S = (1, 2, 3, 4, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
"""How much time a column may stand for."""

SCRAPES_IN_CELL = 1.5
RECENT = 9
"""How many scrapes tell how far they are apart."""

ROOM = 1.25
"""A chart reaches a quarter beyond its bound, so that the bound is seen before it is crossed."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time that charts cover: `columns` of `cell_s` seconds each, up to `end_s`."""

    columns: int
    cell_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds from the first column to the last."""
        return self.columns * self.cell_s


def span(times_s: Sequence[float], columns: int) -> Span:
    """The span that shows the whole history with the finest columns that hold it.

    A column is longer than the time between two scrapes, so that none of them is empty by chance.
    """
    if not times_s:
        return Span(columns, CELL_LADDER_S[0], 0.0)
    length_s, end_s = times_s[-1] - times_s[0], times_s[-1]
    apart_s = sorted(b - a for a, b in pairwise(times_s[-RECENT:]))
    usual_s = apart_s[len(apart_s) // 2] if apart_s else 0.0
    wanted_s = max(SCRAPES_IN_CELL * usual_s, length_s / columns)
    cell_s = next((cell for cell in CELL_LADDER_S if cell >= wanted_s), CELL_LADDER_S[-1])
    return Span(columns, cell_s, end_s)


def cells_of(times_s: Sequence[float], values: Sequence[float], over: Span) -> list[float | None]:
    """The worst value of each column's time; None where there was none.

    Columns begin at multiples of their length: a value stays in its column as time goes on.
    """
    found: list[float | None] = [None] * over.columns
    last = math.floor(over.end_s / over.cell_s)
    for t_s, value in zip(reversed(times_s), reversed(values), strict=True):
        at = over.columns - 1 - (last - math.floor(t_s / over.cell_s))
        if at < 0:
            break
        if not math.isnan(value):
            before = found[at]
            found[at] = value if before is None else max(before, value)
    return found


def chart(
    values: Sequence[float | None],
    *,
    rows: int,
    top: float,
    bound: float | None,
    glyphs: Glyphs,
) -> list[Line]:
    """So many lines, the highest first. Columns beyond the bound are marked, unknown ones empty."""
    steps = len(glyphs.bars)
    bound_row = None if bound is None else min(rows - 1, int(bound / top * rows))
    lines: list[Line] = []
    for row in range(rows - 1, -1, -1):
        pieces: list[Piece] = []
        for value in values:
            level = 0 if value is None else _level(value, top, rows * steps) - row * steps
            if level > 0:
                over = bound is not None and value is not None and value > bound
                piece = glyphs.bars[min(level, steps) - 1], "over" if over else "bar"
            elif row == bound_row and rows > 1:
                piece = glyphs.bound, "faint"
            else:
                piece = " ", ""
            _join(pieces, piece)
        lines.append(tuple(pieces))
    return lines


def top_of(values: Sequence[float | None], bound: float | None, *, least: float) -> float:
    """The value at a chart's upper edge."""
    highest = max((value for value in values if value is not None), default=0.0)
    return max(highest, least, ROOM * (bound or 0.0))


def _level(value: float, top: float, steps: int) -> int:
    """The height in steps; a known value shows at least one."""
    return min(steps, max(1, round(value / top * steps)))


def _join(pieces: list[Piece], piece: Piece) -> None:
    if pieces and pieces[-1][1] == piece[1]:
        pieces[-1] = (pieces[-1][0] + piece[0], piece[1])
    else:
        pieces.append(piece)
