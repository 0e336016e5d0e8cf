"""Sparklines, stacked bars and the heat map of a week. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.reports.formatting import number
from kneewatch.reports.weekly.figures import Spark
from kneewatch.reports.weekly.page.formatting import WEEKDAYS, with_unit
from kneewatch.reports.weekly.page.svg import path
from kneewatch.reports.weekly.tier_sections import WeekdayHour

WIDE, TALL = 164, 28
"""Size of a sparkline in SVG units; it is stretched to the available space."""

HEADROOM = 1.05
SQUARES_MOST = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LABEL_FROM = 6.0
"""A part of a bar that is at least this wide, in percent, shows its letter."""


@dataclass(frozen=True, slots=True)
class SparkLine:
    """A drawn sparkline: path, target band (top and height, None without bounds), text."""

    path: str
    band: tuple[float, float] | None
    desc: str


def spark_line(spark: Spark, *, low: float | None, high: float | None) -> SparkLine | None:
    """A figure over the period, on a scale from 0; None without data."""
    values = [value for value in spark.values if value is not None and math.isfinite(value)]
    if not values:
        return None
    bounds = [bound for bound in (low, high) if bound is not None and math.isfinite(bound)]
    least, most = min(0.0, *values), HEADROOM * max(*values, *bounds, 0.0)
    per_unit = TALL / (most - least) if most > least else 0.0
    per_step = WIDE / max(1, len(spark.values) - 1)
    points = [
        None if value is None or not math.isfinite(value)
        else (place * per_step, TALL - (value - least) * per_unit)
        for place, value in enumerate(spark.values)
    ]  # fmt: skip
    band = None
    if bounds:
        top = 0.0 if high is None else TALL - (high - least) * per_unit
        bottom = TALL if low is None else TALL - (low - least) * per_unit
        band = (top, bottom - top) if bottom > top else None
    desc = f"From {with_unit(min(values), spark.unit)} to {with_unit(max(values), spark.unit)}."
    return SparkLine(path(points), band, desc)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: `x` and `width` in percent, letter, name and value."""

    letter: str
    name: str
    value: str
    x: float
    width: float
    labelled: bool


def stack(parts: Sequence[tuple[str, float, str]], *, whole: float) -> tuple[Part, ...]:
    """The parts of a bar, side by side, from names, sizes and texts; empty if all are 0."""
    if not whole > 0:
        return ()
    segments: list[Part] = []
    x = 0.0
    for letter, (name, size, words) in zip(LETTERS, parts, strict=False):
        width = max(0.0, min(100.0 * size / whole, 100.0 - x))
        segments.append(Part(letter, name, words, x, width, width >= LABEL_FROM))
        x += width
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Squares:
    """GPUs as squares: a path of `width` by `height` units; a square is `each` GPUs."""

    path: str
    width: int
    height: int
    each: int


def squares(count: int, *, beside: int) -> Squares:
    """`count` GPUs as squares, 16 per row, at a scale that also fits `beside` GPUs."""
    per_square = max(1, math.ceil(max(count, beside) / SQUARES_MOST))
    shown = math.ceil(count / per_square)
    drawn = "".join(f"M{place % 16 * 14} {place // 16 * 14}h11v11h-11z" for place in range(shown))
    most = math.ceil(max(count, beside, 1) / per_square)
    return Squares(drawn, 14 * min(16, most), 14 * max(1, math.ceil(shown / 16)), per_square)


# --- Heat map of the week: the burn rate of the error budget by hour -----------------------------


CELL = 13
LEFT, TOP = 30, 14
HOURS, DAYS = 24, 7
WIDTH, HEIGHT = LEFT + HOURS * CELL, TOP + DAYS * CELL

LEVELS: tuple[tuple[str, float, str, int], ...] = (
    ("heat-0", 0.0, "no late requests", 2),
    ("heat-1", 1.0, "up to 1x the budget", 5),
    ("heat-2", 6.0, "up to 6x", 8),
    ("heat-3", 14.4, "up to 14.4x", 10),
    ("heat-4", math.inf, "above 14.4x", 12),
)
"""Class, upper end of the burn, legend, and side of the square: its size shows the burn where
colours cannot be told apart. A square is a short line, as thick as it is long: the stylesheet has
the sides.

Above 14.4 a month's budget is gone within two days, above 6 within five."""

SILENT, UNSEEN = "heat-none", "heat-unseen"
UNSEEN_SIDE = 12


@dataclass(frozen=True, slots=True)
class Heat:
    """A drawn heat map: paths by CSS class, its table by hour, its text alternative."""

    paths: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    desc: str


def heat(cells: Sequence[WeekdayHour]) -> Heat | None:
    """The heat map of a tier's hours of the week; None without data."""
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
        (
            f"{hour:02}:00",
            tuple(_cell_text(by_place.get((weekday, hour))) for weekday in range(DAYS)),
        )
        for hour in range(HOURS)
    ]
    worst = max(burns, key=lambda cell: cell.burn or 0.0)
    return Heat(
        tuple((name, "".join(drawn[name])) for name in names if name in drawn),
        tuple(rows),
        "Burn rate of the error budget by hour and weekday. Highest: "
        f"{WEEKDAYS[worst.weekday % DAYS]} {worst.hour:02}:00 at {number(worst.burn)}x the budget.",
    )


def _level(cell: WeekdayHour | None) -> tuple[str, int]:
    if cell is None or cell.requests is None:
        return UNSEEN, UNSEEN_SIDE
    if cell.burn is None:
        return (SILENT, 2) if cell.requests <= 0 else (UNSEEN, UNSEEN_SIDE)
    return next((name, side) for name, top, _, side in LEVELS if cell.burn <= top)


def _cell_text(cell: WeekdayHour | None) -> str:
    if cell is None or cell.requests is None:
        return "?"
    if cell.burn is None:
        return "-" if cell.requests <= 0 else "?"
    return number(cell.burn)
