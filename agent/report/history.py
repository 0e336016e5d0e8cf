"""The history read in bulk as numpy arrays: signals, counter increases, scrape gaps. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kneewatch.agent.store.chunks import ColumnRow, CounterChunk, column_of
from kneewatch.agent.store.columns import DamagedError, Decoders, decoding
from kneewatch.agent.store.history import (
    chunk_reader,
    chunk_rows,
    columns_by_name,
    log_damage,
    open_counters,
    signal_parts,
)
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Scrapes
from kneewatch.agent.store.schema import COUNTERS
from kneewatch.collector.history import Column
from kneewatch.reports.weekly.aggregation import Tally
from kneewatch.reports.weekly.measures import COMPLETED, COMPUTED, FAILED
from kneewatch.reports.weekly.observed import TargetObserved, Unread

Floats = npt.NDArray[np.float64]
NO_TIMES: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals per scrape, oldest first. Shapes: `times` and each of `values` (scrapes,); NaN if
    unknown."""

    times: Floats
    values: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of consecutive snapshots. Shapes: `times` (snapshots,), `values` (columns,
    snapshots); NaN if a page lacks a column. Equal `columns` are the same object."""

    times: Floats
    columns: tuple[Column, ...]
    values: Floats


def _sums(data: bytes, order: int) -> array[int]:
    # Overflow wraps around here exactly as it did when the differences were encoded.
    folded = np.frombuffer(data, dtype="<u8")
    signs = (folded & np.uint64(1)).view(np.int64)
    values = (folded >> np.uint64(1)).view(np.int64)
    values ^= np.negative(signs, out=signs)
    for _ in range(order):
        np.cumsum(values, out=values)
    sums: array[int] = array("q")
    sums.frombytes(values.data.cast("B"))
    return sums


def _doubles(data: bytes) -> array[float]:
    doubles: array[float] = array("d")
    doubles.frombytes(np.frombuffer(data, dtype="<f4").astype(np.float64).data.cast("B"))
    return doubles


NUMPY = Decoders(_sums, _doubles)
"""The store's loops over numbers, with numpy."""


class History(Reader):
    """A store's reader that also reads in bulk."""

    def __init__(self, path: Path) -> None:
        """Opens the store.

        Raises:
            StoreError: there is none, or it cannot be read; the message says what to do.
        """
        super().__init__(path, NUMPY)

    def signal_arrays(
        self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float
    ) -> Signals:
        """Signals of an engine; one value per minute where they were downsampled."""
        span = {"from_s": from_s, "to_s": to_s}
        with self._snapshot() as connection:
            parts = list(signal_parts(connection, engine_id, keys, NUMPY, **span))
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = in_order(times)
        return Signals(
            times[keep],
            {
                key: np.concatenate([NO_TIMES, *(part.values[key] for part in parts)])[keep]
                for key in keys
            },
        )

    def counter_arrays(
        self, engine_id: int, metrics: Collection[str], *, from_s: float, to_s: float
    ) -> Iterator[Counted]:
        """Counters of `metrics`, about an hour per item; the first and the last item reach a
        little outside of the range."""
        chosen = _Chosen(metrics)
        with self._snapshot() as connection:
            for row in chunk_rows(connection, COUNTERS, engine_id, from_s=from_s, to_s=to_s):
                try:
                    with chunk_reader(connection, row.id) as read:
                        yield chosen.counted(CounterChunk(read, NUMPY))
                except DamagedError as error:
                    log_damage("counters", row.id, error)
            opened = [
                (t_s, row)
                for _, t_s, row in open_counters(connection, engine_id)
                if from_s <= t_s <= to_s
            ]
        if opened:
            times, rows = zip(*opened, strict=True)
            columns = {
                column: values
                for column, values in columns_by_name(rows).items()
                if column.metric in chosen.metrics and any(value == value for value in values)
            }
            table = np.array(list(columns.values())).reshape(len(columns), len(times))
            yield Counted(np.array(times), tuple(columns), table)


class _Chosen:
    """Selects the columns of some metrics. Caches them: successive chunks share columns."""

    def __init__(self, metrics: Collection[str]) -> None:
        self.metrics = frozenset(metrics)
        self._rows: list[ColumnRow] = []
        self._columns: tuple[Column, ...] = ()
        self._places: list[int] = []

    def counted(self, chunk: CounterChunk) -> Counted:
        """A chunk's counters.

        Raises:
            DamagedError: the columns or the times are not what was written.
        """
        integers, floats = np.asarray(chunk.integers), np.asarray(chunk.floats)
        with decoding("counters"):
            rows = [row for row, _ in chunk.columns]
            if rows != self._rows:
                self._places = [at for at, row in enumerate(rows) if row[0] in self.metrics]
                self._columns = tuple(column_of(rows[at]) for at in self._places)
                self._rows = rows
            values = np.empty((len(self._places), chunk.rows))
            for row, place in enumerate(self._places):
                (_, kind), at = chunk.columns[place], chunk.starts[place]
                if kind == "i":
                    values[row] = integers[at : at + chunk.rows]
                elif kind == "b":
                    values[row] = floats[at : at + chunk.rows]
                else:
                    values[row] = kind
        return Counted(np.asarray(chunk.times()), self._columns, values)


def in_order(times: Floats) -> npt.NDArray[np.bool_]:
    """Mask of scrapes newer than all before them: the clock may have been set back."""
    if len(times) == 0:
        return np.empty(0, dtype=np.bool_)
    newest = np.maximum.accumulate(times)
    return np.concatenate(([True], times[1:] > newest[:-1]))


# --- Counter increases over restarts and gaps -----------------------------------------------------
#
# As in Prometheus: a counter that decreases restarted from 0. An increase over a gap is spread
# evenly over the gap; if the process was replaced in it, only the new process's count is known.


BY_SOURCE = "prompt_tokens_by_source"
LOCAL = ("source", "local_compute")
FAILED_REASONS = ("error", "abort")
NO_BOUNDS = ("", "sum", "count")
Truths = npt.NDArray[np.bool_]

Part = tuple[str, str]
"""A metric and the part of it: "" for a counter, else "sum", "count" or a bucket's bound."""


class Increases:
    """Increases of an engine's counters, summed over the label sets of a metric."""

    def __init__(self, counted: Iterable[Counted], *, restarts_s: Sequence[float]) -> None:
        parts = list(counted)
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = np.concatenate(([True], times[1:] > np.maximum.accumulate(times)[:-1]))
        keep = keep[: len(times)]
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


# --- Scrapes of a target: interval, failures, gaps -----------------------------------------------


GAP_SCRAPES = 3.0
GAP_LEAST_S = 30.0
"""Scrapes further apart than max(GAP_SCRAPES intervals, GAP_LEAST_S) have a gap between them."""


def usual_step_s(times: Floats) -> float:
    """The median scrape interval in seconds; 0 with fewer than two scrapes."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def gap_s(times: Floats) -> float:
    """The longest distance of two scrapes in seconds that is not a gap."""
    return max(GAP_SCRAPES * usual_step_s(times), GAP_LEAST_S)


def runs(holds: npt.NDArray[np.bool_], *, bridged: int = 1) -> list[npt.NDArray[np.intp]]:
    """Runs of true values, as arrays of indices; runs at most `bridged` apart are merged.

    Shape: `holds` (scrapes,) or (steps,).
    """
    places = np.flatnonzero(holds)
    apart = np.flatnonzero(np.diff(places) > bridged) + 1
    return np.split(places, apart) if len(places) else []


def target_observed(target: str, scrapes: Scrapes, *, from_s: float, to_s: float) -> TargetObserved:
    """Scrapes, failures and gaps of a target. `from_s` is the later of the period's start and the
    target's first scrape ever, so that the time before it is not a gap."""
    times = np.asarray(scrapes.times)
    places = np.flatnonzero(in_order(times))
    times, failed = times[places], np.isin(places, list(scrapes.failed))
    usual_s, gap = usual_step_s(times), gap_s(times)
    # A failure lasts until the next scrape; a row of failures has the reason of the first.
    ends = np.append(times[1:], times[-1:] + usual_s)
    unread = [
        Unread(float(times[run[0]]), float(ends[run[-1]]), scrapes.failed[int(places[run[0]])])
        for run in runs(failed)
    ]
    bounds = np.concatenate(([from_s], times, [to_s]))
    for at in np.flatnonzero(np.diff(bounds) > gap).tolist():
        unread.append(Unread(float(bounds[at]), float(bounds[at + 1]), ""))
    unread.sort(key=lambda gap: gap.from_s)
    lost_s = sum(gap.to_s - gap.from_s for gap in unread)
    return TargetObserved(
        target=target,
        scrapes=len(times),
        failed=int(failed.sum()),
        interval_s=usual_s or None,
        watched_s=max(to_s - from_s - lost_s, 0.0) if len(times) else 0.0,
        unread=unread,
    )
