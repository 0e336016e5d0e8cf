"""What an engine's counters gained between any two times, over restarts and gaps.

As Prometheus counts: a counter that went back began anew at nothing. What was gained while nobody
looked is spread evenly over that time; of a process that was replaced then, only what the new one
had counted is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.history import NO_TIMES, Counted, Floats
from kneewatch.collector.history import Column
from kneewatch.reports.weekly.measures import COMPLETED, COMPUTED, FAILED
from kneewatch.reports.weekly.tally import Tally

BY_SOURCE = "prompt_tokens_by_source"
LOCAL = ("source", "local_compute")
FAILED_REASONS = ("error", "abort")
NO_BOUNDS = ("", "sum", "count")
Truths = npt.NDArray[np.bool_]

Part = tuple[str, str]
"""A metric and the part of it: "" for a counter, else "sum", "count" or a bucket's bound."""


class Increases:
    """The increases of an engine's counters, label sets of a metric added up."""

    def __init__(self, counted: Iterable[Counted], *, restarts_s: Sequence[float]) -> None:
        parts = list(counted)
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = np.concatenate(([True], times[1:] > np.maximum.accumulate(times)[:-1]))
        keep = keep[: len(times)]
        self.times: Floats = times[keep]
        anew = np.searchsorted(self.times, np.asarray(sorted(restarts_s), dtype=np.float64))
        self._anew: npt.NDArray[np.int64] = np.unique(anew[anew < len(self.times)])
        self._gained: dict[Part, Floats] = {}
        self._told: dict[Part, Truths] = {}
        """Of parts that some page lacked: the steps between snapshots of which they tell."""
        for column, whole in _joined(parts, len(times)).items():
            values = whole[keep]
            gained, told = self._of(values), self._steps_told(values)
            for part in _parts(column):
                before = self._gained.get(part)
                self._gained[part] = gained if before is None else before + gained
                if told is not None:
                    self._told[part] = told & self._told.get(part, np.True_)

    def _steps_told(self, values: Floats) -> Truths | None:
        """The steps between snapshots of which a column tells: from its birth to its last page, but
        for a time without it in which the process was replaced. None: all of them."""
        known = np.flatnonzero(~np.isnan(values))
        if len(known) in (0, len(values)):
            return None
        told = np.zeros(max(len(values) - 1, 0), dtype=np.bool_)
        told[max(known[0] - 1, 0) : known[-1]] = True
        anew = set(self._anew.tolist())
        for first, last in zip(known[:-1].tolist(), known[1:].tolist(), strict=True):
            if last - first > 1 and (
                values[last] < values[first] or anew.intersection(range(first + 1, last + 1))
            ):
                told[first:last] = False
        return told

    def _of(self, values: Floats) -> Floats:
        """What a column had gained by each time since the first."""
        known = np.flatnonzero(~np.isnan(values))
        if len(known) < 2 and (len(known) == 0 or known[0] == 0):
            return np.zeros(len(values))
        # A series that appears while it is watched was born with nothing.
        first = 0.0 if known[0] > 0 else values[known[0]]
        seen = values[known]
        steps = np.diff(seen, prepend=first)
        anew = np.zeros(len(values), dtype=np.bool_)
        anew[self._anew] = True
        fresh = np.diff(np.cumsum(anew)[known], prepend=0) > 0
        fresh[0] = False
        back = (steps < 0) | fresh
        steps[back] = seen[back]
        gained = np.cumsum(steps)
        if len(known) == len(values):
            return gained
        # Between two pages that had it, it rose evenly; before the first it was nothing.
        begun = max(known[0] - 1, 0)
        at = self.times[known] if known[0] == 0 else np.append(self.times[begun], self.times[known])
        rose = gained if known[0] == 0 else np.append(0.0, gained)
        return np.interp(self.times, at, rose)

    def between(self, part: Part, edges_s: Floats) -> Floats | None:
        """What was gained between each two neighbouring times; None where it was never there."""
        gained = self._gained.get(part)
        if gained is None:
            return None
        return np.diff(np.interp(edges_s, self.times, gained))

    def covered(self, edges_s: Floats, *, gap_s: float) -> Floats:
        """Seconds between each two neighbouring times that the counters tell of: not those in
        which the process was replaced while nobody looked."""
        if len(self.times) < 2:
            return np.zeros(len(edges_s) - 1)
        steps = np.diff(self.times)
        anew = self._anew[self._anew > 0] - 1
        lost = anew[steps[anew] > gap_s]
        steps[lost] = 0.0
        return np.diff(np.interp(edges_s, self.times, np.append(0.0, np.cumsum(steps))))

    def tallies(self, metric: str, edges_s: Floats) -> list[Tally | None]:
        """A histogram between each two neighbouring times; None where it was not there.

        Its bounds are those that were there all the time between: buckets change with a version.
        """
        parts = sorted(
            (part for part in self._gained if part[0] == metric and part[1] not in NO_BOUNDS),
            key=lambda part: float(part[1]),
        )
        if not parts:
            return [None] * (len(edges_s) - 1)
        bounds = tuple(float(part) for _, part in parts)
        rows = [self.between(part, edges_s) for part in parts]
        counts = np.array([row for row in rows if row is not None]).T
        total = self.between((metric, "sum"), edges_s)
        sums = np.zeros(len(counts)) if total is None else total
        lacking = self._lacking(parts, edges_s)
        made: list[Tally | None] = []
        for at, (row, observed) in enumerate(zip(counts.tolist(), sums.tolist(), strict=True)):
            lacks = {place for place, missing in lacking.items() if missing[at]}
            made.append(_without(Tally(bounds, tuple(row), observed), lacks))
        return made

    def _lacking(self, parts: Sequence[Part], edges_s: Floats) -> dict[int, Truths]:
        """Places of the buckets that some page lacked, and between which times it did."""
        steps = np.diff(self.times)
        # All buckets of a histogram that comes with use are born together: the last is +Inf.
        whole = self._told.get(parts[-1], np.ones(len(steps), dtype=np.bool_))
        found: dict[int, Truths] = {}
        for place, part in enumerate(parts):
            told = self._told.get(part)
            if told is not None:
                lost_s = np.append(0.0, np.cumsum(steps * (whole & ~told)))
                found[place] = np.diff(np.interp(edges_s, self.times, lost_s)) > 0
        return found


def _without(tally: Tally, lacks: Collection[int]) -> Tally:
    """A histogram without some of its buckets."""
    if not lacks:
        return tally
    kept = [place for place in range(len(tally.bounds)) if place not in lacks]
    return Tally(
        tuple(tally.bounds[place] for place in kept),
        tuple(tally.counts[place] for place in kept),
        tally.sum,
    )


def _parts(column: Column) -> list[Part]:
    """What a column counts for."""
    if column.metric == BY_SOURCE:
        return [(COMPUTED, "")] if LOCAL in column.labels else []
    parts: list[Part] = [(column.metric, column.part)]
    reasons = [value for name, value in column.labels if name == "finished_reason"]
    if column.metric == COMPLETED and reasons and reasons[0] in FAILED_REASONS:
        parts.append((FAILED, ""))
    return parts


def _joined(parts: Sequence[Counted], rows: int) -> dict[Column, Floats]:
    """Each column over all times; NaN where a page lacks it."""
    made: dict[Column, Floats] = {}
    at = 0
    for part in parts:
        for column, values in zip(part.columns, part.values, strict=True):
            whole = made.get(column)
            if whole is None:
                whole = made[column] = np.full(rows, np.nan)
            whole[at : at + len(values)] = values
        at += len(part.times)
    return made
