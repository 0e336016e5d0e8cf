"""The load that one engine can carry, as learned from its own history. Pure."""

from __future__ import annotations

from msgspec import Struct

STEPS_PER_DOUBLING = 2
HALF_A_STEP = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""Factor from the middle of a step to its edge."""


class Range(Struct, frozen=True):
    """A value with the range of the middle half of its windows."""

    low: float
    expected: float
    high: float


class LearnedKnee(Struct, frozen=True):
    """The concurrency that one engine can serve, learned from its own history.

    `c_max` is in requests in flight: up to `low` is safe, above `high` is past the knee. If no load
    past the knee was seen, `reached` is False and C_max is a lower bound. `basis` says how the knee
    was found.
    """

    c_max: Range
    usable_requests_per_s: Range
    reached: bool
    basis: str
    points: int
    steps: int

    @property
    def past_from(self) -> float | None:
        """Requests in flight above which the engine is certainly overloaded.

        None if no overload was seen.
        """
        return self.c_max.high * HALF_A_STEP if self.reached else None

    @property
    def before_to(self) -> float:
        """Requests in flight up to which the engine is certainly not overloaded."""
        return self.c_max.low * HALF_A_STEP
