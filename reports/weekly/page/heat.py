"""The week as a field of hours: how fast each spent the error budget. Geometry and words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.reports.weekly.page.moments import WEEKDAYS
from kneewatch.reports.weekly.service import WeekdayHour
from kneewatch.reports.words import number

CELL = 13
LEFT, TOP = 30, 14
HOURS, DAYS = 24, 7
WIDTH, HEIGHT = LEFT + HOURS * CELL, TOP + DAYS * CELL

LEVELS: tuple[tuple[str, float, str, int], ...] = (
    ("heat-0", 0.0, "nothing late", 2),
    ("heat-1", 1.0, "within the budget", 5),
    ("heat-2", 6.0, "up to 6 times the budget", 8),
    ("heat-3", 14.4, "up to 14.4 times", 10),
    ("heat-4", math.inf, "more", 12),
)
"""Class, upper end of the burn, words, and side of the square: size tells what colour tells. A
square is a short line, as thick as it is long: the stylesheet knows the sides.

Above 14.4 a month's budget is gone within two days, above 6 within five."""

SILENT, UNSEEN = "heat-none", "heat-unseen"
UNSEEN_SIDE = 12


@dataclass(frozen=True, slots=True)
class Heat:
    """A drawn field: paths by class, the table behind it by hour, and it in words."""

    paths: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    desc: str


def heat(cells: Sequence[WeekdayHour]) -> Heat | None:
    """The field of a tier's hours of the week; None where none is known."""
    by_place = {(cell.weekday, cell.hour): cell for cell in cells}
    burns = [cell for cell in cells if cell.burn is not None]
    if not burns:
        return None
    drawn: dict[str, list[str]] = {}
    for weekday in range(DAYS):
        for hour in range(HOURS):
            name, side = _level(by_place.get((weekday, hour)))
            x, y = LEFT + hour * CELL + (CELL - side) / 2, TOP + weekday * CELL + CELL / 2
            drawn.setdefault(name, []).append(f"M{x:g} {y:g}h{side}")
    names = [name for name, *_ in LEVELS] + [SILENT, UNSEEN]
    rows = [
        (f"{hour:02}:00", tuple(_told(by_place.get((weekday, hour))) for weekday in range(DAYS)))
        for hour in range(HOURS)
    ]
    worst = max(burns, key=lambda cell: cell.burn or 0.0)
    return Heat(
        tuple((name, "".join(drawn[name])) for name in names if name in drawn),
        tuple(rows),
        f"The error budget's burn by hour and weekday. The worst is "
        f"{WEEKDAYS[worst.weekday % DAYS]} {worst.hour:02}:00 with {number(worst.burn)} times the "
        f"budget.",
    )


def _level(cell: WeekdayHour | None) -> tuple[str, int]:
    if cell is None or cell.requests is None:
        return UNSEEN, UNSEEN_SIDE
    if cell.burn is None:
        return (SILENT, 2) if cell.requests <= 0 else (UNSEEN, UNSEEN_SIDE)
    return next((name, side) for name, top, _, side in LEVELS if cell.burn <= top)


def _told(cell: WeekdayHour | None) -> str:
    if cell is None or cell.requests is None:
        return "?"
    if cell.burn is None:
        return "-" if cell.requests <= 0 else "?"
    return number(cell.burn)
