"""Arithmetic that computes a figure and is printed, so that users can check it by hand. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.rules.formatting import figure, percent


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


class Sheet:
    """Lines of arithmetic, each computed by the formula that it prints.

    A formula has its quantities in braces, such as `ceil({peak RPS} / {usable RPS})` or
    `{weights:GB} / {rate:GB/s}`, and their values follow in the order in which they first occur.
    Behind the colon is how the value is printed: a key of UNITS, or a unit that follows the number;
    text behind it is printed too.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._lines: list[Callable[[], Step]] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(line() for line in self._lines)

    def line(
        self,
        title: str,
        formula: str,
        quantities: Sequence[float | Fraction],
        *,
        result: str | Callable[[float], str] = "{}",
        source: str = "",
    ) -> float:
        """Add a line, and return its figure.

        `result` is how the figure is printed: text with the figure in braces, or a function.
        """
        value = compiled(formula)(*quantities)
        value = float(value) if isinstance(value, Fraction) else value
        source = source or self._source
        self._lines.append(partial(_written, title, formula, quantities, value, result, source))
        return value

    def text(self, *steps: Step) -> None:
        """Add lines that are no arithmetic, such as a choice."""
        self._lines += [partial(replace, step) for step in steps]

    def add(self, other: Sheet, *, tier: str = "") -> None:
        """Add the lines of another sheet; `tier` goes before their titles."""
        self._lines += [partial(_of_tier, tier, line) for line in other._lines]


def _of_tier(tier: str, line: Callable[[], Step]) -> Step:
    step = line()
    return replace(step, title=f"{tier}: {step.title}") if tier else step


def _written(
    title: str,
    formula: str,
    quantities: Sequence[float | Fraction],
    value: float,
    result: str | Callable[[float], str],
    source: str,
) -> Step:
    by_name = dict(zip(names_of(formula), quantities, strict=True))
    return Step(
        title,
        _QUANTITY.sub(r"\1", formula),
        _QUANTITY.sub(lambda found: printed(by_name[found[1]], found[2] or ""), formula),
        _QUANTITY.sub(lambda found: printed(value, found[2] or ""), result)
        if isinstance(result, str)
        else result(value),
        source,
    )


# A quantity's name, and behind a colon how its value is printed.
_QUANTITY = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")


@lru_cache(maxsize=512)
def names_of(formula: str) -> tuple[str, ...]:
    """The names of a formula's quantities, in the order in which they first occur."""
    return tuple(dict.fromkeys(name[1] for name in _QUANTITY.finditer(formula)))


@lru_cache(maxsize=512)
def compiled(formula: str) -> Callable[..., float]:
    """The function of a formula's quantities that computes it."""
    places = {name: f"q{place}" for place, name in enumerate(names_of(formula))}
    code = _QUANTITY.sub(lambda found: places[found[1]], formula)
    code = code.replace(" x ", " * ").replace("^", "**")
    arguments = ", ".join(places.values())
    # Formulas are text of this package, never of a user.
    computes: Callable[..., float] = eval(f"lambda {arguments}: {code}", dict(_FUNCTIONS))
    return computes


Arithmetic = tuple[str, Sequence[float]]
"""A formula and its quantities."""


def evaluated(arithmetic: Arithmetic) -> float:
    """The figure that a formula gives for its quantities."""
    formula, quantities = arithmetic
    return compiled(formula)(*quantities)


def _ceil(value: float | Fraction) -> int:
    """The value rounded up; what a float is above a whole number by rounding costs nothing."""
    return math.ceil(value * (1 - _ROUNDING_RATIO) if isinstance(value, float) else value)


_ROUNDING_RATIO = 1e-12
_FUNCTIONS = {
    "ceil": _ceil,
    "floor": math.floor,
    "exp": math.exp,
    "ln": math.log,
    "max": max,
    "min": min,
}


def printed(value: float | Fraction, unit: str) -> str:
    """A value with its unit."""
    first, _, more = unit.partition(" ")
    if first not in UNITS:
        first, more = "", unit
    text = UNITS[first](float(value) if isinstance(value, Fraction) else value)
    return f"{text} {more}" if more else text


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


def gibibytes(amount_bytes: float) -> str:
    """Bytes as text in GiB with two decimals."""
    return f"{amount_bytes / GIB:,.2f} GiB"


UNITS: dict[str, Callable[[float], str]] = {
    "": figure,
    "GB": gigabytes,
    "GB/s": lambda rate: f"{gigabytes(rate)}/s",
    "TB/s": lambda rate: f"{figure(rate / 1e12)} TB/s",
    "e9": lambda count: f"{figure(count / 1e9)}e9",
    "GiB": gibibytes,
    "MiB": lambda amount_bytes: f"{figure(amount_bytes / (1 << 20))} MiB",
    "s": seconds,
    "%": percent,
}
"""How the values of a unit are printed; a unit that is not listed follows the number."""
