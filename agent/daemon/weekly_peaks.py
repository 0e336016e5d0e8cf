"""The most requests that each engine had at once within the last week, from the history, for who
would take replicas away. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kneewatch.agent.store.model import Series, StoredEngine
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.base import StoreError
from kneewatch.collector.names.page import EngineKey

log = logging.getLogger(__name__)

PEAKS_JOB = "\0weekly peaks"
"""No target's name: these are printable."""

EVERY_S = 3600.0
WEEK_S = 7 * 86_400.0
LEAST_SHARE = 0.9
"""Of the week's hours so many must have been seen: a peak may lie in those that were not."""

SEEN_S = 86_400.0
"""Of an engine that nobody has seen for longer nothing is read: of those that left may be many."""

KEYS = ("running", "waiting")


class ReadsHistory(Protocol):
    """The history, as far as it is read here."""

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The engines of a target."""
        ...

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """Signals of an engine."""
        ...


def engines_seen(
    history: ReadsHistory, targets: Sequence[TargetSpec], now_s: float
) -> Iterator[tuple[tuple[str, EngineKey], StoredEngine]]:
    """The engines of some targets that were seen lately, with what the daemon calls them."""
    for spec in targets:
        for one in history.engines(spec.name):
            if now_s - one.last_s < SEEN_S:
                yield (spec.name, one.key), one


class WeeklyPeaks:
    """Reads the peaks again and again; only of targets with several replicas, for the others have
    none to spare."""

    def __init__(
        self,
        history: ReadsHistory,
        targets: Callable[[], Sequence[TargetSpec]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._history, self._targets, self._wall = history, targets, wall
        self._peaks: dict[tuple[str, EngineKey], float | None] = {}

    def peak_requests(self, target: str, key: EngineKey) -> float | None:
        """Requests; None where less than a week is known."""
        return self._peaks.get((target, key))

    def cycle(self) -> float | None:
        """Read them once."""
        now_s = self._wall()
        spare = [spec for spec in self._targets() if (spec.settings["replicas"] or 1) > 1]
        try:
            self._peaks = {
                key: self._peak(one, now_s)
                for key, one in engines_seen(self._history, spare, now_s)
            }
        except StoreError as error:
            log.warning("weekly peaks stay as they were error=%s", error)
        return None

    def crashed(self, error: Exception) -> float | None:
        """What was read last holds on."""
        del error
        return None

    def _peak(self, engine: StoredEngine, now_s: float) -> float | None:
        from_s = now_s - WEEK_S
        if engine.first_s > from_s + (1 - LEAST_SHARE) * WEEK_S:
            return None
        return peak_of(self._history.signals(engine.id, KEYS, from_s=from_s, to_s=now_s))


def peak_of(week: Series) -> float | None:
    """The most requests that ran or waited at a scrape; None where too few hours of the week have
    a scrape that tells both."""
    running, waiting = (week.values[key] for key in KEYS)
    hours: set[int] = set()
    peak = 0.0
    for t_s, ran, waited in zip(week.times, running, waiting, strict=True):
        requests = ran + waited
        if requests == requests:  # NaN is a scrape that tells nothing
            hours.add(int(t_s // 3600))
            peak = max(peak, requests)
    return peak if len(hours) >= LEAST_SHARE * WEEK_S / 3600 else None
