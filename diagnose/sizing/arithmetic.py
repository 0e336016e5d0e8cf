"""One line of pencil arithmetic, so that every number shown can be checked by hand. Pure."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from msgspec import Struct


class Step(Struct, frozen=True):
    """One line of arithmetic: formula, figures, result and source.

    `formula` has names, `values` the same formula with figures, `result` the outcome with its
    unit, `source` the guide's section, a paper or a file.
    """

    title: str
    formula: str
    values: str
    result: str
    source: str

    @property
    def cited(self) -> str:
        """The source in brackets, without sections of the guide, which readers do not have; empty
        where nothing else is cited."""
        parts = [part for part in self.source.split("; ") if not part.startswith("guide ")]
        return f" [{'; '.join(parts)}]" if parts else ""

    def line(self) -> str:
        """The step as `title: formula = values = result [source]`."""
        return f"{self.title}: {self.formula} = {self.values} = {self.result}{self.cited}"


def figure(value: float) -> str:
    """A number as written by hand: whole ones in full, others to four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def gigabytes(amount_bytes: float) -> str:
    """Bytes as text in GB, below 1 GB in MB."""
    gigabyte, megabyte = 1e9, 1e6
    if amount_bytes >= gigabyte:
        return f"{figure(amount_bytes / gigabyte)} GB"
    return f"{figure(amount_bytes / megabyte)} MB"


def seconds(value_s: float) -> str:
    """Seconds as text: in ms below 1 s."""
    return f"{figure(value_s)} s" if value_s >= 1 else f"{figure(value_s * 1e3)} ms"


def counted(count: int, noun: str) -> str:
    """The count with its noun: 1 GPU, 2 GPUs."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@lru_cache(maxsize=256)
def exact(value: float) -> Fraction:
    """The number as it was written in decimals: 1.1 is 11/10, not its nearest binary fraction.

    Rounding up needs it: 4.2 / 1.4 is a little above 3 in binary, and would round up to 4.
    """
    return Fraction(str(value))
