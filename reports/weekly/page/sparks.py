"""Charts the size of a word: a line with its band, and bars of shares. Geometry and words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.reports.weekly.figures import Spark
from kneewatch.reports.weekly.page.paths import path
from kneewatch.reports.weekly.page.telling import told

WIDE, TALL = 164, 28
"""Units of a sparkline's inside, which is stretched to the room there is."""

HEADROOM = 1.05
SQUARES_MOST = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LABEL_FROM = 6.0
"""Percent of a bar's width from which on a part has room for its letter."""


@dataclass(frozen=True, slots=True)
class SparkLine:
    """A drawn sparkline: its path, its band (top and height, None without bounds), in words."""

    path: str
    band: tuple[float, float] | None
    desc: str


def spark_line(spark: Spark, *, low: float | None, high: float | None) -> SparkLine | None:
    """A figure over the period, from nothing up; None where it was never known."""
    known = [value for value in spark.values if value is not None and math.isfinite(value)]
    if not known:
        return None
    bounds = [bound for bound in (low, high) if bound is not None and math.isfinite(bound)]
    least, most = min(0.0, *known), HEADROOM * max(*known, *bounds, 0.0)
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
    desc = f"From {told(min(known), spark.unit)} to {told(max(known), spark.unit)}."
    return SparkLine(path(points), band, desc)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: `x` and `width` in percent, its letter, what it is called and its value."""

    letter: str
    name: str
    value: str
    x: float
    width: float
    labelled: bool


def stack(parts: Sequence[tuple[str, float, str]], *, whole: float) -> tuple[Part, ...]:
    """Parts side by side, by name, size and words; empty where there is nothing to divide."""
    if not whole > 0:
        return ()
    made: list[Part] = []
    x = 0.0
    for letter, (name, size, words) in zip(LETTERS, parts, strict=False):
        width = max(0.0, min(100.0 * size / whole, 100.0 - x))
        made.append(Part(letter, name, words, x, width, width >= LABEL_FROM))
        x += width
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Squares:
    """GPUs as squares in a row: as a path, `width` by `height` units; `each` GPUs to a square."""

    path: str
    width: int
    height: int
    each: int


def squares(count: int, *, beside: int) -> Squares:
    """So many squares, at the scale that also holds `beside`; 16 to a row."""
    each = max(1, math.ceil(max(count, beside) / SQUARES_MOST))
    shown = math.ceil(count / each)
    drawn = "".join(f"M{place % 16 * 14} {place // 16 * 14}h11v11h-11z" for place in range(shown))
    most = math.ceil(max(count, beside, 1) / each)
    return Squares(drawn, 14 * min(16, most), 14 * max(1, math.ceil(shown / 16)), each)
