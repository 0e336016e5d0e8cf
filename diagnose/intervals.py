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
class Told:
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
    health: Told
    stage: Told | None
    causes: tuple[Told, ...]
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


def verdict(diagnosis: Diagnosis, *, restarted: bool) -> Verdict:
    """What a diagnosis says, as far as intervals go."""
    t_s, stage = diagnosis.t_s, diagnosis.stage
    return Verdict(
        t_s,
        Told("health", diagnosis.health, diagnosis.severity, t_s),
        None if stage is None else Told("stage", str(stage.number), stage.severity, stage.since_s),
        tuple(Told("cause", c.id, c.severity, c.since_s) for c in diagnosis.causes),
        restarted,
        diagnosis.was_read,
    )


class IntervalBook:
    """The open intervals of one engine."""

    def __init__(self, opened: Iterable[Open] = ()) -> None:
        self._open: dict[Name, Open] = {(one.kind, one.id): one for one in opened}
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
        return self._pause([one for one in self.opened if not one.paused])

    def close(self, how: str = UNWATCHED) -> list[Change]:
        """The engine is gone: everything ended when it was last seen."""
        return [self._end(one, one.last_s, how) for one in self.opened]

    def take(self, seen: Verdict) -> list[Change]:
        """What changes with a diagnosis."""
        changes = self._unwatched(seen.t_s)
        if seen.warming and any(one.paused for one in self._open.values()):
            return changes
        told = [seen.health, *([seen.stage] if seen.stage else []), *seen.causes]
        names = {(one.kind, one.id) for one in told}
        gone = [one for name, one in self._open.items() if name not in names]
        changes += self._over(seen, gone)
        for one in told:
            changes += self._tell(seen, one)
        return changes

    def _unwatched(self, t_s: float) -> list[Change]:
        """What is over because nobody looked for a while, or because the clock was set."""
        changes: list[Change] = []
        if self._seen and t_s < self._seen[-1]:
            changes = [*self.pause(), *self.close()]
        elif len(self._seen) > 1 and t_s - self._seen[-1] > away_s(self._seen):
            changes = self.pause()
        self._seen.append(t_s)
        return changes

    def _over(self, seen: Verdict, gone: list[Open]) -> list[Change]:
        changes: list[Change] = []
        readable = seen.read
        if readable and self._readable_s is None:
            self._readable_s = seen.t_s
        elif not readable:
            self._readable_s = None
        for one in gone:
            if seen.restarted and one.kind != "health" and one.id != TARGET_DOWN:
                changes.append(self._end(one, one.last_s, RESTARTED))
            elif one.paused:
                if self._given_up(seen, one):
                    changes.append(self._end(one, one.last_s, UNWATCHED))
            elif one.kind == "health" or (readable and (one.kind != "stage" or seen.stage)):
                changes.append(self._end(one, seen.t_s, ENDED))
            else:
                changes += self._pause([one])
        return changes

    def _given_up(self, seen: Verdict, one: Open) -> bool:
        """Whether a paused interval that is not told now is over."""
        if seen.t_s - one.last_s > BRIDGED_S:
            return True
        if self._readable_s is None:
            return False
        return one.id == TARGET_DOWN or seen.t_s - self._readable_s >= GRACE_S

    def _tell(self, seen: Verdict, told: Told) -> list[Change]:
        one = self._open.get((told.kind, told.id))
        changes: list[Change] = []
        if one is not None and one.paused and seen.t_s - one.last_s > BRIDGED_S:
            changes.append(self._end(one, one.last_s, UNWATCHED))
            one = None
        if one is None:
            one = Open(told.kind, told.id, told.severity, self._start_s(seen, told), seen.t_s)
            self._open[told.kind, told.id] = one
            return [*changes, Change(one, began=True)]
        one.last_s = seen.t_s
        if one.paused or told.severity > one.severity:
            one.paused, one.severity = False, max(one.severity, told.severity)
            changes.append(Change(one))
        return changes

    def _start_s(self, seen: Verdict, told: Told) -> float:
        """Since when it says, but not before the one before it ended nor before the page could be
        read again, and not later than now."""
        since_s = told.since_s if told.since_s <= seen.t_s else seen.t_s
        ended_s = self._ended_s.get(_slot(told), -math.inf)
        readable_s = -math.inf if self._readable_s is None else self._readable_s
        return min(max(since_s, ended_s, readable_s), seen.t_s)

    def _pause(self, ones: list[Open]) -> list[Change]:
        changes: list[Change] = []
        for one in ones:
            if one.kind == "cause":
                one.paused = True
                changes.append(Change(one))
            else:
                changes.append(self._end(one, one.last_s, UNWATCHED))
        return changes

    def _end(self, one: Open, end_s: float, how: str) -> Change:
        del self._open[one.kind, one.id]
        # A clock that was set back would have it end before it began.
        end_s = max(end_s, one.start_s)
        self._ended_s[_slot(one)] = end_s
        return Change(one, ended=how, end_s=end_s)


def _slot(one: Open | Told) -> str:
    """What holds one interval at a time: there is one stage, one health, one of each cause."""
    return one.id if one.kind == "cause" else one.kind
