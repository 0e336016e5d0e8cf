"""Intervals of stages, causes and health states, updated scrape by scrape. Pure.

Used by the daemon's log and history, and by a report that replays a metrics system's samples.

- Start: the diagnosis's `since_s`, but not before the previous interval ended or the page became
  readable again, and not after the scrape.
- Last seen: the newest scrape whose diagnosis contains the condition. An interval keeps its worst
  severity.
- End: the first readable page without the condition ("ended"). A restart of the process ends
  everything except `target_down` at the time when it was last seen ("restarted").
- Unknown: the page cannot be read, the stage cannot be judged, or there was no scrape. There is no
  scrape if the daemon was restarted, the clock was set back, or the next scrape came later than
  `away_s`. Stages and health states then end when they were last seen ("unwatched"). Causes pause.

A paused cause continues if it is seen again within BRIDGED_S after it was last seen. Otherwise, or
if GRACE_S of readable pages lack it, it ended when it was last seen ("unwatched").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import OK, Severity

BRIDGED_S = 900.0
"""Longest pause, in seconds, after which an interval may continue."""

GRACE_S = 60.0
"""Seconds of readable pages within which a paused cause may return: rates need a window."""

AWAY_STEPS = 5
LEAST_STEP_S = 2.0
TIMES_KEPT = 4
"""Number of newest scrapes from which the scrape interval is measured."""

TARGET_DOWN = "target_down"
"""This cause ends with the first readable page."""

ENDED, RESTARTED, UNWATCHED = "ended", "restarted", "unwatched"

Name = tuple[str, str]
"""Kind and id of a condition."""

What = Literal["began", "worsened", "paused", "continued", "ended"]


class Interval(Struct):
    """A time during which an engine had a stage, a cause or a health; one moment in a verdict.

    `kind` is stage, cause or health. `id` is the number of the stage as text, the id of the cause,
    or the word for the health. `severity` is the worst during the interval. `last_s` is the last
    time at which it was observed. `end_s` is None while the interval is open. `ended` is "ended",
    "restarted" (the engine was replaced), "unwatched" (not scraped, or the page could not be read),
    or "" while the interval is open. `engine_id` is the engine's number in the store. `paused`: it
    is open, and unknown whether it continues.
    """

    kind: str
    id: str
    severity: Severity
    start_s: float
    last_s: float
    end_s: float | None = None
    ended: str = ""
    engine_id: int = 0
    paused: bool = False

    @property
    def until_s(self) -> float:
        """End of the interval in Unix seconds. If it is open, the time at which it was last
        observed."""
        return self.last_s if self.end_s is None else self.end_s


class Change(NamedTuple):
    """What happened to an interval at a scrape."""

    interval: Interval
    what: What


def away_s(times: Iterable[float]) -> float:
    """Seconds without a scrape that count as a gap.

    Computed from the longest distance between `times`, the newest scrapes; the longest, because
    failing targets are scraped less often.
    """
    return AWAY_STEPS * max((LEAST_STEP_S, *(now - before for before, now in pairwise(times))))


def conditions_of(verdict: Verdict) -> tuple[Interval, ...]:
    """A verdict's health, stage (left out if unknown) and causes, each as of its moment."""
    t_s, stage = verdict.t_s, verdict.stage
    conditions = [Interval("health", verdict.health, verdict.severity, t_s, t_s)]
    if stage.number is not None:
        since_s = stage.since_s or t_s
        conditions.append(Interval("stage", str(stage.number), stage.severity or OK, since_s, t_s))
    conditions += [
        Interval("cause", c.id, c.severity, c.since_s or t_s, t_s) for c in verdict.causes
    ]
    return tuple(conditions)


class IntervalBook:
    """The open intervals of one engine."""

    def __init__(self, opened: Iterable[Interval] = ()) -> None:
        self._open: dict[Name, Interval] = {
            (interval.kind, interval.id): interval for interval in opened
        }
        self._readable_s: float | None = None
        self._seen: deque[float] = deque(maxlen=TIMES_KEPT)
        self._ended_s: dict[str, float] = {}
        """When the last stage and health ended, and the last interval of each cause."""

    @property
    def opened(self) -> list[Interval]:
        return list(self._open.values())

    def pause(self) -> list[Change]:
        """Pause the causes and end everything else, because scraping stops. Returns the changes."""
        self._readable_s = None
        self._seen.clear()
        return self._pause([interval for interval in self.opened if not interval.paused])

    def forget_steps(self) -> None:
        """Forget the distances between scrapes: the next one may come at any later time."""
        self._seen.clear()

    def close(self, how: str = UNWATCHED) -> list[Change]:
        """End everything when it was last seen, because the engine is gone. Returns the changes."""
        return [self._end(interval, interval.last_s, how) for interval in self.opened]

    def take(
        self, t_s: float, conditions: Sequence[Interval], *, read: bool, restarted: bool
    ) -> list[Change]:
        """Update the intervals with the conditions of a verdict. Returns the changes.

        `read`: whether the page could be read. `restarted`: the process was replaced.
        """
        changes = self._notice_gap(t_s)
        named = {(condition.kind, condition.id): condition for condition in conditions}
        # The first scrape of a window: the page was read, but health is unknown.
        warming = read and ("health", "unknown") in named
        if warming and any(condition.paused for condition in self._open.values()):
            return changes
        if not read:
            self._readable_s = None
        elif self._readable_s is None:
            self._readable_s = t_s
        staged = any(condition.kind == "stage" for condition in conditions)
        for interval in [each for name, each in self._open.items() if name not in named]:
            if restarted and interval.kind != "health" and interval.id != TARGET_DOWN:
                changes.append(self._end(interval, interval.last_s, RESTARTED))
            elif interval.paused:
                if self._given_up(t_s, interval):
                    changes.append(self._end(interval, interval.last_s, UNWATCHED))
            elif interval.kind == "health" or (read and (interval.kind != "stage" or staged)):
                changes.append(self._end(interval, t_s, ENDED))
            else:
                changes += self._pause([interval])
        for condition in conditions:
            changes += self._observe(t_s, condition)
        return changes

    def _notice_gap(self, t_s: float) -> list[Change]:
        """Pause or end intervals after a gap between scrapes, or after the clock was set back."""
        changes: list[Change] = []
        if self._seen and t_s < self._seen[-1]:
            changes = [*self.pause(), *self.close()]
        elif len(self._seen) > 1 and t_s - self._seen[-1] > away_s(self._seen):
            changes = self.pause()
        self._seen.append(t_s)
        return changes

    def _given_up(self, t_s: float, interval: Interval) -> bool:
        """Whether a paused interval, whose condition the verdict lacks, has ended.

        It has ended if the pause was too long. It has also ended if the target is readable again:
        at once for `target_down`, otherwise after GRACE_S.
        """
        if t_s - interval.last_s > BRIDGED_S:
            return True
        if self._readable_s is None:
            return False
        return interval.id == TARGET_DOWN or t_s - self._readable_s >= GRACE_S

    def _observe(self, t_s: float, condition: Interval) -> list[Change]:
        interval = self._open.get((condition.kind, condition.id))
        changes: list[Change] = []
        if interval is not None and interval.paused and t_s - interval.last_s > BRIDGED_S:
            changes.append(self._end(interval, interval.last_s, UNWATCHED))
            interval = None
        if interval is None:
            start_s = self._start_s(t_s, condition)
            interval = replace(condition, start_s=start_s, last_s=t_s)
            self._open[condition.kind, condition.id] = interval
            return [*changes, Change(interval, "began")]
        interval.last_s = t_s
        worse = condition.severity > interval.severity
        if interval.paused or worse:
            interval.paused, interval.severity = False, max(interval.severity, condition.severity)
            changes.append(Change(interval, "worsened" if worse else "continued"))
        return changes

    def _start_s(self, t_s: float, condition: Interval) -> float:
        """Start of the condition's new interval in unix seconds.

        That is the condition's own start, but not before its last interval ended, not before the
        page became readable, and not after the scrape.
        """
        since_s = condition.start_s if condition.start_s <= t_s else t_s  # also where it is NaN
        ended_s = self._ended_s.get(_slot(condition), -math.inf)
        readable_s = -math.inf if self._readable_s is None else self._readable_s
        return min(max(since_s, ended_s, readable_s), t_s)

    def _pause(self, intervals: list[Interval]) -> list[Change]:
        changes: list[Change] = []
        for interval in intervals:
            if interval.kind == "cause":
                interval.paused = True
                changes.append(Change(interval, "paused"))
            else:
                changes.append(self._end(interval, interval.last_s, UNWATCHED))
        return changes

    def _end(self, interval: Interval, end_s: float, reason: str) -> Change:
        del self._open[interval.kind, interval.id]
        # If the clock was set back, the interval would otherwise end before it began.
        interval.end_s, interval.ended = max(end_s, interval.start_s), reason
        self._ended_s[_slot(interval)] = interval.end_s
        return Change(interval, "ended")


def _slot(condition: Interval) -> str:
    """A key: the stage, the health, or a cause's id. Only one interval per key is open."""
    return condition.id if condition.kind == "cause" else condition.kind
