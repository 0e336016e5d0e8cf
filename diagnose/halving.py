"""Where a condition ends, by halving the range in which it does. Pure."""

from __future__ import annotations

from collections.abc import Callable


def end_of(stands: Callable[[float], bool], *, holds: float, falls: float, halvings: int) -> float:
    """The value nearest to `holds`, for which a condition stands, at which it does not stand.

    `falls`, on either side, is another such value.
    """
    for _ in range(halvings):
        middle = (holds + falls) / 2
        holds, falls = (middle, falls) if stands(middle) else (holds, middle)
    return falls
