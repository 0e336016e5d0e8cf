"""Long ranges in pieces that a server answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

POINTS_MOST = 11_000
"""Prometheus refuses more points a series than this (web/api/v1)."""

SAMPLES_MOST = 2_000_000
"""What one piece may hold: about 60 MB of JSON."""


def steps_of(*, from_s: float, to_s: float, step_s: float) -> int:
    """How many steps a range has, both ends in it."""
    return max(0, math.floor((to_s - from_s) / step_s + 1e-9) + 1)


def steps_a_piece(series: int) -> int:
    """How many steps of so many series one piece may hold."""
    return max(1, min(POINTS_MOST, SAMPLES_MOST // max(1, series)))


def pieces(
    *, from_s: float, to_s: float, step_s: float, steps: int
) -> Iterator[tuple[float, float]]:
    """First and last moment of each piece: every step of the range is in exactly one."""
    for first in range(0, steps_of(from_s=from_s, to_s=to_s, step_s=step_s), steps):
        last = min(first + steps, steps_of(from_s=from_s, to_s=to_s, step_s=step_s)) - 1
        yield from_s + first * step_s, from_s + last * step_s


def halves(from_s: float, to_s: float, step_s: float) -> list[tuple[float, float]]:
    """A piece in two; empty where it is a single step."""
    steps = steps_of(from_s=from_s, to_s=to_s, step_s=step_s)
    if steps < 2:
        return []
    middle_s = from_s + (steps // 2) * step_s
    return [(from_s, middle_s - step_s), (middle_s, to_s)]
