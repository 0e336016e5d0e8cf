"""The causes that comparing replicas concludes, over time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.fleet.tier import FleetCause

Place = tuple[str, str, str]
"""Pool and tier of a cause, and its replica if each replica has a cause of its own."""

OF_ONE_REPLICA = frozenset({"bad_node"})


class Comparisons:
    """Applies the onset and clear times of causes to those that compare replicas.

    `scale` is the short window divided by its default; the times are multiplied by it.
    """

    def __init__(self, *, scale: float) -> None:
        self._scale = scale
        self._trackers: dict[Place, CauseTracker] = {}
        self._newest: dict[tuple[Place, str], FleetCause] = {}

    def update(self, t_s: float, concluded: Sequence[FleetCause]) -> list[FleetCause]:
        """The causes to report at `t_s`, each with its start time."""
        by_place: dict[Place, list[FleetCause]] = {}
        for cause in concluded:
            place = _place(cause)
            by_place.setdefault(place, []).append(cause)
            self._newest[place, cause.cause.id] = cause
        reported: list[FleetCause] = []
        for place in {**self._trackers, **by_place}:
            tracker = self._trackers.setdefault(place, CauseTracker(scale=self._scale))
            causes = tracker.update(t_s, [each.cause for each in by_place.get(place, ())])
            reported += [replace(self._newest[place, cause.id], cause=cause) for cause in causes]
            if not tracker:
                del self._trackers[place]
        self._newest = {
            (place, cause): newest
            for (place, cause), newest in self._newest.items()
            if place in self._trackers
        }
        return reported


def _place(cause: FleetCause) -> Place:
    own = cause.replicas[0] if cause.cause.id in OF_ONE_REPLICA else ""
    return cause.pool, cause.tier, own
