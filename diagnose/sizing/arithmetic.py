"""One line of arithmetic, written so that users can check every number by hand. Pure."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from msgspec import Struct

from kneewatch.rules.formatting import figure


class Step(Struct, frozen=True):
    """One line of arithmetic.

    - `formula`: with names.
    - `values`: the same formula with figures.
    - `result`: the result with its unit.
    - `source`: the guide's section, a paper or a file.
    """

    title: str
    formula: str
    values: str
    result: str
    source: str

    @property
    def cited(self) -> str:
        """The source in brackets; empty if there is none to show.

        Sections of the guide are left out, because readers do not have the guide.
        """
        parts = [part for part in self.source.split("; ") if not part.startswith("guide ")]
        return f" [{'; '.join(parts)}]" if parts else ""

    def line(self) -> str:
        """The step as `title: formula = values = result [source]`."""
        return f"{self.title}: {self.formula} = {self.values} = {self.result}{self.cited}"


def gigabytes(amount_bytes: float) -> str:
    """Bytes as text in GB, or in MB below 1 GB."""
    gigabyte, megabyte = 1e9, 1e6
    if amount_bytes >= gigabyte:
        return f"{figure(amount_bytes / gigabyte)} GB"
    return f"{figure(amount_bytes / megabyte)} MB"


def seconds(value_s: float) -> str:
    """Seconds as text, in ms below 1 s."""
    return f"{figure(value_s)} s" if value_s >= 1 else f"{figure(value_s * 1e3)} ms"


@lru_cache(maxsize=256)
def exact(value: float) -> Fraction:
    """The exact decimal value of a number: 1.1 is 11/10, not the nearest binary fraction.

    Needed for rounding up: in binary, 4.2 / 1.4 is slightly above 3 and would be rounded up to 4.
    """
    return Fraction(str(value))
