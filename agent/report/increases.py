"""Counter increases of an engine over restarts and gaps. Pure.

As in Prometheus: a counter that decreases restarted from 0. An increase over a gap is spread evenly
over the gap; if the process was replaced in it, only the new process's count is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.series import NO_TIMES, Floats, Truths, in_order
from kneewatch.collector.columns import Column
from kneewatch.reports.weekly.aggregation import Tally
from kneewatch.reports.weekly.measures import COMPLETED, COMPUTED, FAILED

BY_SOURCE = "prompt_tokens_by_source"
LOCAL = ("source", "local_compute")
FAILED_REASONS = ("error", "abort")
NO_BOUNDS = ("", "sum", "count")

Part = tuple[str, str]
"""A metric and the part of it: "" for a counter, else "sum", "count" or a bucket's bound."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of consecutive snapshots. Shapes: `times` (snapshots,), `values` (columns,
    snapshots); NaN if a page lacks a column. Equal `columns` are the same object."""

    times: Floats
    columns: tuple[Column, ...]
    values: Floats


class Increases:
    """Increases of an engine's counters, summed over the label sets of a metric."""

    def __init__(self, counted: Iterable[Counted], *, restarts_s: Sequence[float]) -> None:
        parts = list(counted)
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = in_order(times)
        self.times: Floats = times[keep]
        anew = np.searchsorted(self.times, np.asarray(sorted(restarts_s), dtype=np.float64))
        self._anew: npt.NDArray[np.int64] = np.unique(anew[anew < len(self.times)])
        self._gained: dict[Part, Floats] = {}
        self._covered: dict[Part, Truths] = {}
        """For parts that some page lacks: the steps between snapshots that they cover."""
        for column, whole in _joined(parts, len(times)).items():
            values = whole[keep]
            gained, covered = self._of(values), self._covered_steps(values)
            for part in _parts(column):
                before = self._gained.get(part)
                self._gained[part] = gained if before is None else before + gained
                if covered is not None:
                    self._covered[part] = covered & self._covered.get(part, np.True_)

    def _covered_steps(self, values: Floats) -> Truths | None:
        """The steps between snapshots that a column covers: from its first to its last page,
        without gaps in which the process was replaced. None if it covers all."""
        present = np.flatnonzero(~np.isnan(values))
        if len(present) in (0, len(values)):
            return None
        covered = np.zeros(max(len(values) - 1, 0), dtype=np.bool_)
        covered[max(present[0] - 1, 0) : present[-1]] = True
        anew = set(self._anew.tolist())
        for first, last in zip(present[:-1].tolist(), present[1:].tolist(), strict=True):
            if last - first > 1 and (
                values[last] < values[first] or anew.intersection(range(first + 1, last + 1))
            ):
                covered[first:last] = False
        return covered

    def _of(self, values: Floats) -> Floats:
        """The increase of a column since the first time. Shape: (snapshots,)."""
        present = np.flatnonzero(~np.isnan(values))
        if len(present) < 2 and (len(present) == 0 or present[0] == 0):
            return np.zeros(len(values))
        # A series that appears while the engine is watched started at 0.
        first = 0.0 if present[0] > 0 else values[present[0]]
        seen = values[present]
        steps = np.diff(seen, prepend=first)
        anew = np.zeros(len(values), dtype=np.bool_)
        anew[self._anew] = True
        fresh = np.diff(np.cumsum(anew)[present], prepend=0) > 0
        fresh[0] = False
        back = (steps < 0) | fresh
        steps[back] = seen[back]
        gained = np.cumsum(steps)
        if len(present) == len(values):
            return gained
        # Linear between two pages that have the column; 0 before the first.
        begun = max(present[0] - 1, 0)
        at = (
            self.times[present]
            if present[0] == 0
            else np.append(self.times[begun], self.times[present])
        )
        rose = gained if present[0] == 0 else np.append(0.0, gained)
        return np.interp(self.times, at, rose)

    def between(self, part: Part, edges_s: Floats) -> Floats | None:
        """The increase between consecutive edges; None if the part never existed."""
        gained = self._gained.get(part)
        if gained is None:
            return None
        return np.diff(np.interp(edges_s, self.times, gained))

    def covered(self, edges_s: Floats, *, gap_s: float) -> Floats:
        """Seconds between consecutive edges that the counters cover; gaps in which the process
        was replaced are not covered."""
        if len(self.times) < 2:
            return np.zeros(len(edges_s) - 1)
        steps = np.diff(self.times)
        anew = self._anew[self._anew > 0] - 1
        lost = anew[steps[anew] > gap_s]
        steps[lost] = 0.0
        return np.diff(np.interp(edges_s, self.times, np.append(0.0, np.cumsum(steps))))

    def tallies(self, metric: str, edges_s: Floats) -> list[Tally | None]:
        """A histogram between consecutive edges; None if it did not exist.

        Only buckets present during the whole interval are used: versions change buckets.
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
        by_slot: list[Tally | None] = []
        for at, (row, observed) in enumerate(zip(counts.tolist(), sums.tolist(), strict=True)):
            lacks = {place for place, missing in lacking.items() if missing[at]}
            by_slot.append(_without(Tally(bounds, tuple(row), observed), lacks))
        return by_slot

    def _lacking(self, parts: Sequence[Part], edges_s: Floats) -> dict[int, Truths]:
        """Indices of buckets that some page lacks, and the intervals in which one did."""
        steps = np.diff(self.times)
        # All buckets of a histogram appear together, so +Inf (the last) shows when it existed.
        whole = self._covered.get(parts[-1], np.ones(len(steps), dtype=np.bool_))
        by_place: dict[int, Truths] = {}
        for place, part in enumerate(parts):
            covered = self._covered.get(part)
            if covered is not None:
                lost_s = np.append(0.0, np.cumsum(steps * (whole & ~covered)))
                by_place[place] = np.diff(np.interp(edges_s, self.times, lost_s)) > 0
        return by_place


def _without(tally: Tally, lacks: Collection[int]) -> Tally:
    """A histogram without the buckets at the indices `lacks`."""
    if not lacks:
        return tally
    kept = [place for place in range(len(tally.bounds)) if place not in lacks]
    return Tally(
        tuple(tally.bounds[place] for place in kept),
        tuple(tally.counts[place] for place in kept),
        tally.sum,
    )


def _parts(column: Column) -> list[Part]:
    """The parts that a column adds to."""
    if column.metric == BY_SOURCE:
        return [(COMPUTED, "")] if LOCAL in column.labels else []
    parts: list[Part] = [(column.metric, column.part)]
    reasons = [value for name, value in column.labels if name == "finished_reason"]
    if column.metric == COMPLETED and reasons and reasons[0] in FAILED_REASONS:
        parts.append((FAILED, ""))
    return parts


def _joined(parts: Sequence[Counted], rows: int) -> dict[Column, Floats]:
    """Each column over all times; NaN if a page lacks it."""
    joined: dict[Column, Floats] = {}
    at = 0
    for part in parts:
        for column, values in zip(part.columns, part.values, strict=True):
            whole = joined.get(column)
            if whole is None:
                whole = joined[column] = np.full(rows, np.nan)
            whole[at : at + len(values)] = values
        at += len(part.times)
    return joined
