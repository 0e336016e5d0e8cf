"""How long stages, causes and healths last: opened and closed by id, from scrape to scrape. Pure.

The daemon's history and a report's replay of a metrics system's samples both take their intervals
from here.

- Begin: with the first scrape that names it, at the time that this says (`since_s`), but not before
  the interval before it ended, the page could be read again, or after the scrape.
- Last seen: the newest scrape that names it. The worst severity stays.
- End: at the first page that names it no more ("ended"). A process that was replaced took what it
  had with it, when that was last seen ("restarted"), `target_down` apart.
- Not known: the page cannot be read, the stage cannot be judged, or nobody looked: the daemon was
  restarted, the clock was set back, or the next scrape came later than `away_s`. Stages and healths
  then ended when they were last seen ("unwatched"). Causes are neither over nor known to go on:
  they pause. One goes on if it is named again within BRIDGED_S of when it was last seen; else, and
  if pages of GRACE_S do not name it, it ended when it was last seen ("unwatched").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Severity

BRIDGED_S = 900.0
"""A pause longer than this is not bridged: nobody knows what went on."""

GRACE_S = 60.0
"""So long after a pause a cause may take to be concluded again: rates need a window."""

AWAY_STEPS = 5
LEAST_STEP_S = 2.0
TIMES_KEPT = 4
"""So many of the newest scrapes tell how far apart they come."""

TARGET_DOWN = "target_down"
"""The cause that is over with the first page that can be read."""

ENDED, RESTARTED, UNWATCHED = "ended", "restarted", "unwatched"

Name = tuple[str, str]
"""Kind and id."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A stage, a cause or a health that a diagnosis names, and since when it says."""

    kind: str
    id: str
    severity: Severity
    since_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a diagnosis says, as far as intervals go. `stage` is None where it could not be judged,
    `read` whether the page was read."""

    t_s: float
    health: Condition
    stage: Condition | None
    causes: tuple[Condition, ...]
    restarted: bool
    read: bool

    @property
    def warming(self) -> bool:
        """Whether the page was read and says nothing yet: the first scrape of a window."""
        return self.read and self.health.id == "unknown"


@dataclass(slots=True)
class Open:
    """An interval that has begun. `last_s` is when it was last seen; `paused`: not known to go
    on."""

    kind: str
    id: str
    severity: Severity
    start_s: float
    last_s: float
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """An interval that began, got worse, paused, went on, or (with `ended`) ended at `end_s`."""

    interval: Open
    began: bool = False
    ended: str = ""
    end_s: float = math.nan


def away_s(times: Iterable[float]) -> float:
    """After so long without a scrape nobody looked; `times` are those of the newest ones, in order.
    The longest of their distances counts: a target in trouble is asked less often."""
    return AWAY_STEPS * max((LEAST_STEP_S, *(now - before for before, now in pairwise(times))))


def verdict_of(diagnosis: Diagnosis, *, restarted: bool) -> Verdict:
    """What a diagnosis says, as far as intervals go."""
    t_s, stage = diagnosis.t_s, diagnosis.stage
    return Verdict(
        t_s,
        Condition("health", diagnosis.health, diagnosis.severity, t_s),
        None
        if stage is None
        else Condition("stage", str(stage.number), stage.severity, stage.since_s),
        tuple(Condition("cause", c.id, c.severity, c.since_s) for c in diagnosis.causes),
        restarted,
        diagnosis.was_read,
    )


class IntervalBook:
    """The open intervals of one engine."""

    def __init__(self, opened: Iterable[Open] = ()) -> None:
        self._open: dict[Name, Open] = {
            (interval.kind, interval.id): interval for interval in opened
        }
        self._readable_s: float | None = None
        self._seen: deque[float] = deque(maxlen=TIMES_KEPT)
        self._ended_s: dict[str, float] = {}
        """When the last stage and health ended, and the last interval of each cause."""

    @property
    def opened(self) -> list[Open]:
        """The intervals that have begun and not ended."""
        return list(self._open.values())

    def pause(self) -> list[Change]:
        """Nobody looks: what is open is not known to go on."""
        self._readable_s = None
        self._seen.clear()
        return self._pause([interval for interval in self.opened if not interval.paused])

    def close(self, how: str = UNWATCHED) -> list[Change]:
        """The engine is gone: everything ended when it was last seen."""
        return [self._end(interval, interval.last_s, how) for interval in self.opened]

    def take(self, verdict: Verdict) -> list[Change]:
        """What changes with a diagnosis."""
        changes = self._notice_gap(verdict.t_s)
        if verdict.warming and any(condition.paused for condition in self._open.values()):
            return changes
        conditions = [verdict.health, *([verdict.stage] if verdict.stage else []), *verdict.causes]
        names = {(condition.kind, condition.id) for condition in conditions}
        missing = [condition for name, condition in self._open.items() if name not in names]
        changes += self._end_missing(verdict, missing)
        for condition in conditions:
            changes += self._observe(verdict, condition)
        return changes

    def _notice_gap(self, t_s: float) -> list[Change]:
        """What is over because nobody looked for a while, or because the clock was set."""
        changes: list[Change] = []
        if self._seen and t_s < self._seen[-1]:
            changes = [*self.pause(), *self.close()]
        elif len(self._seen) > 1 and t_s - self._seen[-1] > away_s(self._seen):
            changes = self.pause()
        self._seen.append(t_s)
        return changes

    def _end_missing(self, verdict: Verdict, missing: list[Open]) -> list[Change]:
        changes: list[Change] = []
        readable = verdict.read
        if readable and self._readable_s is None:
            self._readable_s = verdict.t_s
        elif not readable:
            self._readable_s = None
        for interval in missing:
            if verdict.restarted and interval.kind != "health" and interval.id != TARGET_DOWN:
                changes.append(self._end(interval, interval.last_s, RESTARTED))
            elif interval.paused:
                if self._given_up(verdict, interval):
                    changes.append(self._end(interval, interval.last_s, UNWATCHED))
            elif interval.kind == "health" or (
                readable and (interval.kind != "stage" or verdict.stage)
            ):
                changes.append(self._end(interval, verdict.t_s, ENDED))
            else:
                changes += self._pause([interval])
        return changes

    def _given_up(self, verdict: Verdict, interval: Open) -> bool:
        """Whether a paused interval that is not told now is over."""
        if verdict.t_s - interval.last_s > BRIDGED_S:
            return True
        if self._readable_s is None:
            return False
        return interval.id == TARGET_DOWN or verdict.t_s - self._readable_s >= GRACE_S

    def _observe(self, verdict: Verdict, condition: Condition) -> list[Change]:
        interval = self._open.get((condition.kind, condition.id))
        changes: list[Change] = []
        if interval is not None and interval.paused and verdict.t_s - interval.last_s > BRIDGED_S:
            changes.append(self._end(interval, interval.last_s, UNWATCHED))
            interval = None
        if interval is None:
            interval = Open(
                condition.kind,
                condition.id,
                condition.severity,
                self._start_s(verdict, condition),
                verdict.t_s,
            )
            self._open[condition.kind, condition.id] = interval
            return [*changes, Change(interval, began=True)]
        interval.last_s = verdict.t_s
        if interval.paused or condition.severity > interval.severity:
            interval.paused, interval.severity = False, max(interval.severity, condition.severity)
            changes.append(Change(interval))
        return changes

    def _start_s(self, verdict: Verdict, condition: Condition) -> float:
        """Since when it says, but not before the one before it ended nor before the page could be
        read again, and not later than now."""
        since_s = condition.since_s if condition.since_s <= verdict.t_s else verdict.t_s
        ended_s = self._ended_s.get(_slot(condition), -math.inf)
        readable_s = -math.inf if self._readable_s is None else self._readable_s
        return min(max(since_s, ended_s, readable_s), verdict.t_s)

    def _pause(self, intervals: list[Open]) -> list[Change]:
        changes: list[Change] = []
        for interval in intervals:
            if interval.kind == "cause":
                interval.paused = True
                changes.append(Change(interval))
            else:
                changes.append(self._end(interval, interval.last_s, UNWATCHED))
        return changes

    def _end(self, interval: Open, end_s: float, reason: str) -> Change:
        del self._open[interval.kind, interval.id]
        # A clock that was set back would have it end before it began.
        end_s = max(end_s, interval.start_s)
        self._ended_s[_slot(interval)] = end_s
        return Change(interval, ended=reason, end_s=end_s)


def _slot(condition: Open | Condition) -> str:
    """What holds one interval at a time: there is one stage, one health, one of each cause."""
    return condition.id if condition.kind == "cause" else condition.kind
