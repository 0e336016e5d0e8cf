"""Causes over time: since when, and no flapping. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.causes.record import CauseRecord


@dataclass(slots=True)
class Held:
    """A cause as it was last concluded."""

    cause: Cause
    since_s: float
    seen_s: float
    told: bool


class CauseTracker:
    """The causes of one engine over time. `scale` stretches the durations with the window, which
    are those of the `records`."""

    def __init__(self, *, scale: float, records: Mapping[str, CauseRecord] = BY_ID) -> None:
        self._scale, self._records = scale, records
        self._held: dict[str, Held] = {}

    def forget(self) -> None:
        """The process was replaced: what was wrong with the old one has ended."""
        self._held.clear()

    def update(self, now_s: float, concluded: Sequence[Cause]) -> list[Cause]:
        """The causes that stand at `now_s`, each with the time it began."""
        for cause in concluded:
            held = self._held.get(cause.id)
            if held is None:
                held = self._held[cause.id] = Held(cause, now_s, now_s, told=False)
            held.cause, held.seen_s = cause, now_s
            onset_s = self._records[cause.id].onset_s.value * self._scale
            held.told = held.told or now_s - held.since_s >= onset_s
        fresh = {cause.id for cause in concluded}
        for cause_id, held in list(self._held.items()):
            lost = cause_id not in fresh
            clear_s = self._records[cause_id].clear_s.value * self._scale
            over = now_s - held.seen_s >= clear_s
            if lost and (over or not held.told):
                del self._held[cause_id]
        return [
            replace(held.cause, since_s=held.since_s, seen_s=held.seen_s)
            for held in self._held.values()
            if held.told
        ]
