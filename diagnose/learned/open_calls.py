"""Calls in flight at the API server, an account beside the engine's gauges. Pure.

The gauges are those of the engine's last step. If the engine hangs between two steps, they say that
nothing runs; if all clients leave at once, they say that everything still runs, until the next
step. The API server tells both: it holds a connection open for each call, and counts calls as they
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from kneewatch.diagnose.account_signals import (
    ALL_CANCELLED,
    AT_THE_DOOR,
    CANCELLED,
    OPEN_CALLS_SIGNALS,
    PILED,
    SILENT,
)
from kneewatch.diagnose.learned.work import ACCEPTED, FINISHED
from kneewatch.diagnose.values import Signals, Values

LEVEL_S = 600.0
"""The level of open connections is the highest of this time."""

OPEN_MIN, LAG_S = 4.0, 30.0
"""Fewest connections beyond the level that are calls. The level is that of so long ago."""

IDLE_S, KEPT_S, GROWTH_MIN = 10.0, 120.0, 2
"""Connections that grow in so many scrapes are calls if they stay for 10 s without a token, others
after two minutes: the API server closes an idle connection after 5 s, or later if it is told so."""

PILED_MIN, PILED_S = 16.0, 180.0
"""So many more connections than at any time that long ago, and than all requests that were in
flight at once since, are calls that the engine never gets. Clients keep no more of them open."""

SOON_S = 20.0
"""Calls that end within so many seconds of the last token were cancelled, not timed out."""

MORE = 1.1
"""If more calls end than requests were in flight, by this ratio, new calls fail too: a stall."""


SILENT_FROM_S, SILENT_TO_S = 20.0, 1800.0
LONGER = 3.0
"""An end of traffic is unusual if it lasts so many times longer than any pause before it."""

BUSY_S, RECENT_S = 600.0, 1800.0
"""A server is judged after ten minutes of traffic, by the pauses of half an hour to an hour."""

FULL_RATE = 0.5
"""Traffic that falls below this share of its mean before it ends drains, and is not cut off."""


class Silence:
    """How long a server has been idle after its traffic ended from one scrape to the next.

    The router or the network may have cut it off, or the engine hangs and its gauges read 0.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._busy_s = self._rate = self._mean_rate = 0.0
        self._longest, self._longest_before, self._since_s = 0.0, 0.0, 0.0

    def update(self, t_s: float, values: Values, in_flight: float) -> float | None:
        """The seconds; None if the server is not idle, or if that is not unusual."""
        work = (values.generated or 0.0) + (values.arrivals or 0.0)
        if self._first_s is None:
            self._first_s = self._busy_s = self._since_s = t_s
        if work or in_flight or values.answered:
            self._note_pause(t_s)
            self._rate = work / max(1.0, t_s - self._busy_s)
            self._mean_rate += 0.05 * (self._rate - self._mean_rate)
            self._busy_s = t_s
            return None
        silent_s = t_s - self._busy_s
        least_s = max(SILENT_FROM_S, LONGER * max(self._longest, self._longest_before))
        is_busy_server = self._busy_s - self._first_s >= BUSY_S and self._mean_rate > 0
        cut_off = self._rate >= FULL_RATE * self._mean_rate
        is_due = least_s <= silent_s <= SILENT_TO_S
        return silent_s if is_busy_server and cut_off and is_due else None

    def _note_pause(self, t_s: float) -> None:
        if t_s - self._since_s >= RECENT_S:
            self._longest_before, self._longest, self._since_s = self._longest, 0.0, t_s
        self._longest = max(self._longest, t_s - self._busy_s)


class OpenCalls:
    """The calls in flight at one engine's API server."""

    def __init__(self) -> None:
        self.begun: tuple[float, tuple[float, ...]] | None = None
        """Time and totals of the scrape before the last one with a token."""
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._left_soon, self._grown, self._most = 0.0, 0, 0.0
        self._levels: deque[tuple[float, float, float]] = deque()
        """Connections beside the requests in flight, and those, by time, while tokens came."""
        self._silence = Silence()
        self.values: dict[str, float | None] = dict.fromkeys(OPEN_CALLS_SIGNALS)
        """The signals, as of the newest scrape."""

    def update(self, t_s: float, values: Values, signals: Signals, *, token: bool) -> None:
        """Take a scrape into account; `token`: tokens were generated since the one before."""
        running, files = signals.get("running"), signals.get("open_files")
        in_flight = (running or 0.0) + (signals.get("waiting") or 0.0)
        if values.totals is None:
            return
        now = (t_s, values.totals)
        if token:
            # Calls may have ended since the scrape before, after the last token.
            self.begun = self._before or now
            self._left_soon, self._grown, self._most = 0.0, 0, 0.0
            if files is not None:
                self._levels.append((t_s, files - in_flight, in_flight))
                while len(self._levels) > 1 and self._levels[1][0] < t_s - LEVEL_S:
                    self._levels.popleft()
        self._before = now
        self.values = dict.fromkeys(OPEN_CALLS_SIGNALS)
        self.values[SILENT] = self._silence.update(t_s, values, in_flight)
        if self.begun is None or running is None:
            return
        if token:  # the levels of ten minutes matter only once tokens stop
            self.values[CANCELLED] = 0.0
            if files is not None:
                self.values[AT_THE_DOOR], self.values[PILED] = 0.0, self._piled(t_s)
            return
        # Calls that do not reach the engine pile up while it still serves those before them.
        settled_s = self._levels[-1][0] - LAG_S if self._levels else 0.0
        levels = [level for at_s, level, _ in self._levels if at_s <= settled_s]
        is_open = None
        if files is not None:
            door = self._at_the_door(files - in_flight, levels, t_s - self.begun[0])
            self.values[AT_THE_DOOR], self.values[PILED] = door, 0.0
            is_open = files - min(levels) if levels else None
        self.values[CANCELLED] = self._cancelled(now, in_flight, is_open)

    def _piled(self, t_s: float) -> float:
        """Connections beyond any earlier level, while the engine serves others; 0 if few."""
        (_, first, _), (_, last, in_flight) = self._levels[0], self._levels[-1]
        if last - first - in_flight < PILED_MIN:  # it cannot be more than this
            return 0.0
        newest = [level for at_s, level, _ in self._levels if at_s >= t_s - LAG_S]
        earlier = [level for at_s, level, _ in self._levels if at_s <= t_s - PILED_S]
        kept = max(running for *_, running in self._levels)
        piled = min(newest) - max(earlier, default=inf) - kept
        return piled if piled >= PILED_MIN else 0.0

    def _at_the_door(self, beside: float, levels: Sequence[float], idle_s: float) -> float:
        """Connections beyond their level; 0 unless they are many, and grow or stay. They may have
        grown at the scrape with the last token already."""
        if not levels:
            return 0.0
        level = max(levels)
        self._note(self._levels[-1][1] - level)
        beyond = beside - level
        self._note(beyond)
        stay_s = IDLE_S if self._grown >= GROWTH_MIN else KEPT_S
        return beyond if beyond >= OPEN_MIN and idle_s >= stay_s else 0.0

    def _note(self, beyond: float) -> None:
        if beyond > self._most:
            self._most, self._grown = beyond, self._grown + 1

    def _cancelled(
        self, now: tuple[float, tuple[float, ...]], in_flight: float, is_open: float | None
    ) -> float | None:
        """1 if the calls of (nearly) all requests in flight were cancelled, else 0; None if
        unknown. `is_open`: the most calls that may be open, by the connections."""
        (t_s, totals), (begun_s, before) = now, self.begun or now
        if not totals[ACCEPTED] and is_open is None:
            return None
        if in_flight < 1:
            return 0.0
        ended = totals[ACCEPTED] - before[ACCEPTED] - (totals[FINISHED] - before[FINISHED])
        left = max(ended, 0.0 if is_open is None else in_flight - is_open)
        if t_s - begun_s <= SOON_S:
            self._left_soon = left
        share = min(left, self._left_soon) / in_flight
        return 1.0 if share >= ALL_CANCELLED and ended <= MORE * in_flight else 0.0
