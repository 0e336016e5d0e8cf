"""Checks of sizing inputs, and the error that names the input. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kneewatch.collector.errors import KneewatchError


class SizingError(KneewatchError):
    """An input that cannot be used for sizing.

    `name` is the input's parameter name, such as `tensor_parallel`; the command line shows it as a
    flag. `choices` are the valid values, if they can be listed.
    """

    def __init__(self, message: str, *, name: str, choices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.choices = tuple(choices)


def positive(name: str, value: float) -> None:
    """Check that a value is finite and above 0.

    Raises:
        SizingError: it is not; the error has the input's name and its value.
    """
    if not (math.isfinite(value) and value > 0):
        raise SizingError(f"{name} is {value:g}; it must be above 0", name=name)


def not_negative(name: str, value: float) -> None:
    """Check that a value is finite and 0 or more.

    Raises:
        SizingError: it is not; the error has the input's name and its value.
    """
    if not (math.isfinite(value) and value >= 0):
        raise SizingError(f"{name} is {value:g}; it must be 0 or more", name=name)


def within(name: str, value: float, *, low: float, high: float) -> None:
    """Check that a value is from `low` to `high`, both included.

    Raises:
        SizingError: it is not; the error has the input's name, its value and the range.
    """
    if not low <= value <= high:
        raise SizingError(f"{name} is {value:g}; it must be from {low:g} to {high:g}", name=name)
