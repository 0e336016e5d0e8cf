"""The quantities whose trends over hours are followed, and the keys of their signals. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

LEVELS = 7
STEPS = LEVELS - 1
HALF_HOUR_S, HOUR_S = 1800.0, 3600.0

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
