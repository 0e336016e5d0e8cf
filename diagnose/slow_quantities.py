"""The quantities whose trends over hours are followed, and the keys of their signals. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kneewatch.diagnose.causes.record import Term, term
from kneewatch.rules.conditions import Condition
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import HOUR_S

LEVELS = 7
STEPS = LEVELS - 1
HALF_HOUR_S = 0.5 * HOUR_S

TREND_S = STEPS * HALF_HOUR_S
"""Seconds between the first and the last level of most trends."""

WORK_TOKENS, HOST_MEMORY_USED = "work_tokens", "host_memory_used_bytes"


class SlowQuantity(Struct, frozen=True):
    """A quantity whose trend is followed: the `fold` of a signal over each span.

    The keys of its derived signals begin with `name` and end with `unit`.
    """

    name: str
    signal: str
    unit: str
    fold: Literal["min", "avg"]
    span_s: float = HALF_HOUR_S

    @property
    def level(self) -> str:
        """Key of the level of the newest span."""
        return f"{self.name}_level_{self.unit}"

    @property
    def before(self) -> str:
        """Key of the trend line's value at its start."""
        return f"{self.name}_before_{self.unit}"

    @property
    def growth(self) -> str:
        """Key of the trend line's change from start to end; negative if it falls."""
        return f"{self.name}_growth_{self.unit}"

    @property
    def straight(self) -> str:
        """Key of the share of the levels' variance that a straight line explains."""
        return f"{self.name}_straight_ratio"

    @property
    def late(self) -> str:
        """Key of the newest step between two levels, divided by the line's step."""
        return f"{self.name}_late_ratio"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all derived signals."""
        return self.level, self.before, self.growth, self.straight, self.late


HOST_MEMORY = SlowQuantity("host_memory", HOST_MEMORY_USED, "bytes", "min")
KV_FLOOR = SlowQuantity("kv_floor", "kv_usage_ratio", "ratio", "min")
WORK = SlowQuantity("work", WORK_TOKENS, "tokens", "avg")
SPEC_ACCEPTED = SlowQuantity(
    "spec_accepted", "spec_accepted_per_draft_tokens", "tokens", "avg", HOUR_S
)
SLOW = (HOST_MEMORY, KV_FLOOR, WORK, SPEC_ACCEPTED)
"""The quantities whose trends over hours are followed."""


# --- A trend goes on ------------------------------------------------------------------------------


STRAIGHT_FROM = 0.9
"""Seven levels count as a line if a line explains at least this share of their variance.

Noise or a single step explains less.
"""

LATE_FROM = 2 / 3
"""If the newest step is below this share of the line's mean step, the growth is a warm-up that
ends."""

EQUAL_LOAD = 0.1
"""If work has grown by more than this share, it may explain the growth."""


def goes_on(slow: SlowQuantity, late_from: float = LATE_FROM) -> Condition:
    """The condition that a quantity has moved along a line for hours and is still moving."""
    return (Live(slow.straight) >= STRAIGHT_FROM) & (Live(slow.late) >= late_from)


WORK_GROWTH = Live(WORK.growth) / Live(WORK.before)
"""Growth of the work over the last hours, as a share; negative if there is less work."""

SAME_WORK = (WORK_GROWTH <= EQUAL_LOAD).assume(unknown=True)


def straight(slow: SlowQuantity, change: str) -> Term:
    """The evidence that a slow change follows a line."""
    text = f"a straight line explains {{value:%}} of the {change}"
    return term(Live(slow.straight), STRAIGHT_FROM, 0.8, text)
