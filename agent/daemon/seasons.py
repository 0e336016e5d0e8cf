"""What each engine usually looks like at this hour of the week, from the history. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kneewatch.agent.daemon.weekly_peaks import ReadsHistory, engines_seen
from kneewatch.agent.store.model import StoredEngine
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.base import StoreError
from kneewatch.collector.names.page import EngineKey
from kneewatch.rules.baseline import TRACKED_SIGNALS
from kneewatch.rules.seasons import HOUR_S, earlier_hours, hour_start_s, hourly, usual

log = logging.getLogger(__name__)

SEASONS_JOB = "\0seasons"
"""No target's name: these are printable."""

EVERY_S = 900.0
"""Four times an hour: the next hour is known before it begins."""


Habits = Mapping[tuple[str, EngineKey], Mapping[str, float]]


class Seasons:
    """Reads this hour's and the next one's habits from the weeks before, each hour once."""

    def __init__(
        self,
        history: ReadsHistory,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._hours: dict[float, Habits] = {}

    def usual(self, target: str, key: EngineKey, t_s: float) -> Mapping[str, float]:
        """The tracked signals of an engine as they usually are at a moment; none where too few
        weeks are known."""
        return self._hours.get(hour_start_s(t_s), {}).get((target, key), {})

    def cycle(self) -> float | None:
        """Read what is not known yet."""
        now_s = self._wall()
        wanted = (hour_start_s(now_s), hour_start_s(now_s + HOUR_S))
        hours = {hour: habits for hour, habits in self._hours.items() if hour in wanted}
        try:
            for hour in wanted:
                hours.setdefault(hour, {})
                hours[hour] = {**self._missing(hour, now_s, hours[hour]), **hours[hour]}
        except StoreError as error:
            log.warning("habits of the week stay as they were error=%s", error)
            return None
        self._hours = hours
        return None

    def crashed(self, error: Exception) -> float | None:
        """What was read last holds on."""
        del error
        return None

    def _missing(self, hour_s: float, now_s: float, known: Habits) -> Habits:
        return {
            key: self._read(one, hour_s)
            for key, one in engines_seen(self._history, self._targets(), now_s)
            if key not in known
        }

    def _read(self, engine: StoredEngine, hour_s: float) -> Mapping[str, float]:
        weeks = [
            hourly(
                self._history.signals(engine.id, TRACKED_SIGNALS, from_s=from_s, to_s=to_s).values
            )
            for from_s, to_s in earlier_hours(hour_s)
            if to_s > engine.first_s
        ]
        return usual(weeks)
