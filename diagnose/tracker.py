"""Causes over time: since when, and no flapping. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.case import Cause

ONSET_S = 5.0
"""A cause is told once it has been concluded for this long."""

AT_ONCE = frozenset(
    {
        "kv_pressure",
        "queue_saturation",
        "admission_limit",
        "adapter_thrash",
        "engine_stalled",
        "engine_restarted",
        "metrics_missing",
    }
)
"""Causes whose evidence has a duration of its own."""

ENDS_AT_ONCE = frozenset({"kv_pressure", "engine_restarted"})
"""Causes that end with a state that has a hysteresis of its own."""

LINGERS = frozenset({"queue_saturation", "admission_limit", "prefill_interference"})
"""Causes that stay three times as long: a queue at the edge of capacity comes and goes, and so do
the pauses behind prompts of a rare length."""

CLEAR_S = 15.0
"""A cause leaves the list once it has not been concluded for this long."""


@dataclass(slots=True)
class Held:
    """A cause as it was last concluded."""

    cause: Cause
    since_s: float
    seen_s: float
    told: bool


class CauseTracker:
    """The causes of one engine over time. `scale` stretches the durations with the window."""

    def __init__(self, *, scale: float) -> None:
        self._onset_s, self._clear_s = ONSET_S * scale, CLEAR_S * scale
        self._held: dict[str, Held] = {}

    def forget(self) -> None:
        """The process was replaced: what was wrong with the old one has ended."""
        self._held.clear()

    def update(self, now_s: float, concluded: Sequence[Cause]) -> list[Cause]:
        """The causes that stand at `now_s`, each with the time it began."""
        for cause in concluded:
            held = self._held.get(cause.id)
            if held is None:
                held = Held(cause, now_s, now_s, told=cause.id in AT_ONCE)
                self._held[cause.id] = held
            held.cause, held.seen_s = cause, now_s
            held.told = held.told or now_s - held.since_s >= self._onset_s
        fresh = {cause.id for cause in concluded}
        for cause_id, held in list(self._held.items()):
            lost = cause_id not in fresh
            clear_s = self._clear_s * (3 if cause_id in LINGERS else 1)
            over = cause_id in ENDS_AT_ONCE or now_s - held.seen_s >= clear_s
            if lost and (over or not held.told):
                del self._held[cause_id]
        return [
            replace(held.cause, since_s=held.since_s) for held in self._held.values() if held.told
        ]
