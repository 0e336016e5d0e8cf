"""Tracks causes over time: when each began, with onset and clear times against flapping. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.ranking import BY_ID, EXPLAINS
from kneewatch.diagnose.causes.record import CauseRecord

OUTLASTS_S = 60.0
"""Seconds for which a cause stays ahead of its consequence once it is no longer concluded."""


@dataclass(slots=True)
class TrackedCause:
    """A cause as it was last concluded. `reported`: its onset time has passed."""

    cause: Cause
    since_s: float
    seen_s: float
    reported: bool


class CauseTracker:
    """The causes of one engine over time. Onset and clear times come from `records`; `scale`
    stretches them with the window."""

    def __init__(self, *, scale: float, records: Mapping[str, CauseRecord] = BY_ID) -> None:
        self._scale, self._records = scale, records
        self._tracked: dict[str, TrackedCause] = {}

    def forget(self) -> None:
        """Drop all causes after a restart: those of the old process have ended."""
        self._tracked.clear()

    def update(self, now_s: float, concluded: Sequence[Cause]) -> list[Cause]:
        """The causes to report at `now_s`, each with the time it began."""
        for cause in concluded:
            tracked = self._tracked.get(cause.id)
            if tracked is None:
                tracked = TrackedCause(cause, now_s, now_s, reported=False)
                self._tracked[cause.id] = tracked
            tracked.cause, tracked.seen_s = cause, now_s
            onset_s = self._records[cause.id].onset_s.value * self._scale
            tracked.reported = tracked.reported or now_s - tracked.since_s >= onset_s
        current = {cause.id for cause in concluded}
        for cause_id, tracked in list(self._tracked.items()):
            record = self._records[cause_id]
            clear_s = record.clear_s.value
            if record.outlasts and not current.isdisjoint(EXPLAINS[cause_id]):
                clear_s = OUTLASTS_S
            cleared = now_s - tracked.seen_s >= clear_s * self._scale
            if cause_id not in current and (cleared or not tracked.reported):
                del self._tracked[cause_id]
        return [
            replace(tracked.cause, since_s=tracked.since_s, seen_s=tracked.seen_s)
            for tracked in self._tracked.values()
            if tracked.reported
        ]
