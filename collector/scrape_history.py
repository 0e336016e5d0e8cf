"""The recent scrapes of one engine (or of one GPU page). Pure."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, lt
from typing import NamedTuple, cast

from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.samples import Page

NAN = math.nan
LARGEST = sys.float_info.max
ANY = (-LARGEST, LARGEST)
"""The range of metrics that are in no table: any number."""

ZERO, ABSENT = -2, -1
"""Positions of the columns that the page does not show because they are 0, and that it lacks."""

BEHIND = (0.0, NAN)
"""The values of these columns; they stand behind the page's."""

FRAMES_MAX = 4_000
"""Most scrapes kept, however short the interval (an hour at one per second)."""

FRESH_FRAMES = 2
"""Number of newest scrapes kept unpacked: they are compared value by value."""

CLOCK_STEP_BACK_S = 1.0
"""A clock that jumps back by more than this was set: earlier scrapes cannot be compared."""

Labels = tuple[tuple[str, str], ...]
ReadBuckets = Callable[[Sequence[float | None]], tuple[float, ...]]
Where = tuple[tuple[str, str], ...]
"""Labels with values that a series must have; empty selects all series of a metric."""


class Column(NamedTuple):
    """One series of one engine: metric, labels and (for histograms) the part.

    A named tuple, because a page has hundreds and each new layout looks up all of them: a dataclass
    takes several times as long to create and hash.
    """

    metric: str
    labels: Labels
    part: str = ""
    """"" for a gauge or counter; "sum", "count", or a bucket's upper bound for a histogram."""


def carries(column: Column, where: Where) -> bool:
    """Whether a series has all these labels with these values."""
    return not where or all(pair in column.labels for pair in where)


@dataclass(slots=True)
class Frame:
    """One scrape. Shapes: `counters` (counter columns,), `gauges` (gauge columns,)."""

    t_s: float
    counters: tuple[float, ...] | array[float]
    gauges: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BucketColumns:
    """A histogram's bounds, ascending, and the counter columns of each, one per label set.

    With a single label set, `single` holds its columns and `read` reads them from a scrape at once.
    """

    bounds: tuple[float, ...]
    columns: tuple[tuple[int, ...], ...]
    single: tuple[int, ...]
    read: ReadBuckets | None


class Table:
    """The columns of one kind (counters or gauges) and their positions on the current page."""

    def __init__(self) -> None:
        self.columns: dict[Column, int] = {}
        self.by_metric: dict[str, list[tuple[Column, int]]] = {}
        self.absent: list[int] = []
        self._bounds: list[tuple[float, float]] = []
        self._shares: list[tuple[int, float]] = []
        self._read: Callable[[list[float]], tuple[float, ...]] = lambda _values: ()

    def __len__(self) -> int:
        return len(self.columns)

    def bind(self, places: Mapping[Column, int]) -> int:
        """Set the positions of a new page layout, by column. Returns the number of new columns."""
        before = len(self.columns)
        metrics = metric_table().metrics
        for column in places:
            at = self.columns.setdefault(column, len(self.columns))
            if at == len(self._bounds):
                self.by_metric.setdefault(column.metric, []).append((column, at))
                metric = metrics.get(column.metric)
                self._bounds.append(ANY if metric is None else (0.0, metric.most))
        self._shares = [(at, most) for at, (_, most) in enumerate(self._bounds) if most < LARGEST]
        positions = [places.get(column, ABSENT) for column in self.columns]
        self.absent = [index for index, position in enumerate(positions) if position == ABSENT]
        if len(positions) > 1:
            self._read = itemgetter(*positions)
        elif positions:
            self._read = lambda values, at=positions[0]: (values[at],)  # type: ignore[misc]
        return len(self.columns) - before

    def read(self, values: list[float]) -> tuple[float, ...]:
        """A page's values in column order; NaN where the page lacks one."""
        return self._read(values)

    def impossible(self, row: tuple[float, ...]) -> list[int]:
        """Columns with a value outside the metric's possible range or NaN; columns that the page
        lacks are left out."""
        # A finite sum has finite parts only: no page pays for looking at its values one by one.
        plain = sum(row) <= LARGEST and min(row, default=0.0) >= 0
        if plain and all(row[at] <= most for at, most in self._shares):
            return []
        absent = set(self.absent)
        return [
            at
            for at, ((least, most), value) in enumerate(zip(self._bounds, row, strict=True))
            if not least <= value <= most and at not in absent
        ]


@dataclass(frozen=True, slots=True)
class Restart:
    """The process behind a target was replaced. `how` says how that was detected."""

    t_s: float
    how: str


class History:
    """The scrapes of one engine process, oldest first; a restart starts over."""

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self.frames: list[Frame] = []
        self.times: list[float] = []
        self.counters = Table()
        self.gauges = Table()
        self.info: Mapping[str, Mapping[str, str]] = {}
        self.impossible: Mapping[str, float] = {}
        """Metrics of the newest page with a value that they cannot have (NaN, infinite, negative,
        a share above 1), and the first such value. They count as if the page lacked the series."""
        self.generation = 0
        """Changes whenever the set of known series changes; caches hang on it."""
        self.restarts = 0
        self.out_of_order = 0
        self.clock_steps = 0
        self._uneven_until: dict[int, float] = {}
        self._uneven_newest_s = -math.inf
        """Counter column -> time of the newest scrape that lacked it or stood before its reset."""
        self._bucket_columns: dict[str, BucketColumns] = {}
        self._selected: dict[tuple[str, Where, str | None], tuple[int, ...]] = {}
        self._binding: EngineBinding | None = None
        self._shown: frozenset[str] = frozenset()
        self._started: frozenset[float] = frozenset()
        self._start_at: tuple[int, ...] = ()
        self._start_is_created = False

    def append(
        self, t_s: float, page: Page, binding: EngineBinding, process_start: int | None
    ) -> Restart | None:
        """Add a scrape; one that is not newer is dropped. Returns the restart that it reveals, if
        any."""
        if self.times and not t_s > self.times[-1]:
            if not math.isfinite(t_s) or t_s > self.times[-1] - CLOCK_STEP_BACK_S:
                self.out_of_order += 1
                return None
            self.clock_steps += 1
            self._forget()
        if binding is not self._binding:
            self._bind(binding, process_start)
        values = [*page.values, *BEHIND]
        odd: dict[str, float] = {}
        counters, bad_counters = _possible(self.counters, values, odd)
        gauges, _ = _possible(self.gauges, values, odd)
        self.impossible = odd
        frame = Frame(t_s, counters, gauges)
        restart = self._restart(frame, values)
        if restart is not None:
            self._forget()
            self.restarts += 1
        self._mark_resets(frame)
        self.frames.append(frame)
        self.times.append(t_s)
        if len(self.frames) > FRESH_FRAMES:
            # Seldom read again, and half as large without an object for each number.
            old = self.frames[-1 - FRESH_FRAMES]
            old.counters = array("d", old.counters)
        for index in (*self.counters.absent, *bad_counters):
            self._mark_uneven(index, t_s)
        self._trim(t_s)
        return restart

    def counter_columns(self, metric: str, where: Where = (), part: str = "") -> tuple[int, ...]:
        """Counter columns of a metric (or of a histogram's part) with the labels of `where`."""
        key = (metric, where, part)
        selected = self._selected.get(key)
        if selected is None:
            selected = tuple(
                at
                for column, at in self.counters.by_metric.get(metric, ())
                if column.part == part and carries(column, where)
            )
            self._selected[key] = selected
        return selected

    def gauge_columns(self, metric: str, where: Where = ()) -> tuple[int, ...]:
        """Gauge columns of a metric that carry the labels of `where`."""
        key = (metric, where, None)
        selected = self._selected.get(key)
        if selected is None:
            selected = tuple(
                at for column, at in self.gauges.by_metric.get(metric, ()) if carries(column, where)
            )
            self._selected[key] = selected
        return selected

    def buckets_of(self, metric: str) -> BucketColumns:
        """A histogram's buckets and their columns."""
        buckets = self._bucket_columns.get(metric)
        if buckets is None:
            by_bound: dict[float, list[int]] = {}
            for column, at in self.counters.by_metric.get(metric, ()):
                if column.part not in ("", "sum", "count"):
                    by_bound.setdefault(float(column.part), []).append(at)
            bounds = tuple(sorted(by_bound))
            columns = tuple(tuple(by_bound[bound]) for bound in bounds)
            plain = len(bounds) > 1 and all(len(group) == 1 for group in columns)
            single = tuple(group[0] for group in columns) if plain else ()
            read = cast("ReadBuckets", itemgetter(*single)) if single else None
            buckets = BucketColumns(bounds, columns, single, read)
            self._bucket_columns[metric] = buckets
        return buckets

    def has(self, metric: str) -> bool:
        """Whether this process has ever shown a series of the metric."""
        return metric in self.counters.by_metric or metric in self.gauges.by_metric

    def shows(self, metric: str) -> bool:
        """Whether the newest page has the metric."""
        return metric in self._shown

    @property
    def started_s(self) -> float | None:
        """Start time of the process according to the newest page; None if the page lacks it."""
        return min(self._started, default=None)

    @property
    def first_s(self) -> float:
        """Time of the oldest scrape kept; NaN without one."""
        return self.times[0] if self.times else NAN

    def _bind(self, binding: EngineBinding, process_start: int | None) -> None:
        counters, gauges = columns_of(binding)
        if len(self.counters) + len(self.gauges) > 2 * (len(counters) + len(gauges)) + 500:
            # Series come and go without end (a label that carries an id): keep what is alive.
            self._forget()
            self.counters, self.gauges = Table(), Table()
        new_counters, new_gauges = self.counters.bind(counters), self.gauges.bind(gauges)
        if new_counters or new_gauges:
            for frame in self.frames:
                wider = (*frame.counters, *(NAN,) * new_counters)
                packed = isinstance(frame.counters, array)
                frame.counters = array("d", wider) if packed else wider
                frame.gauges += (NAN,) * new_gauges
            if self.times:
                for index in range(len(self.counters) - new_counters, len(self.counters)):
                    self._mark_uneven(index, self.times[-1])
        self._binding = binding
        self._shown = frozenset(
            (
                *(*binding.counters, *binding.zeros),
                *(*binding.gauges, *binding.histograms, *binding.infos),
            )
        )
        start_at = (process_start,) if process_start is not None else binding.created
        if (process_start is None) != self._start_is_created:
            self._started, self._start_is_created = frozenset(), process_start is None
        self._start_at = start_at
        self.info = {metric: dict(rows[0][0]) for metric, rows in _info(binding).items() if rows}
        self._bucket_columns.clear()
        self._selected.clear()
        self.generation += 1

    def _restart(self, frame: Frame, values: list[float]) -> Restart | None:
        # Series come and go with their `_created`; a new process leaves none of the old times.
        started = frozenset(value for at in self._start_at if (value := values[at]) == value)
        before, self._started = self._started, started
        if not self.frames:
            return None
        if started and before:
            same = not started.isdisjoint(before)
            return None if same else Restart(frame.t_s, "the process has a new start time")
        last = self.frames[-1].counters
        live = sum(1 for value in last if value > 0)
        fallen = sum(map(lt, frame.counters, last))
        if live >= 3 and fallen >= live / 2:
            return Restart(frame.t_s, f"{fallen} of {live} counters went back")
        return None

    def _mark_resets(self, frame: Frame) -> None:
        last = self.frames[-1] if self.frames else frame
        if any(map(lt, frame.counters, last.counters)):
            for at, (was, now) in enumerate(zip(last.counters, frame.counters, strict=True)):
                if now < was:
                    self._mark_uneven(at, last.t_s)

    def _mark_uneven(self, column: int, t_s: float) -> None:
        self._uneven_until[column] = t_s
        self._uneven_newest_s = max(self._uneven_newest_s, t_s)

    def uneven_since(self, t_s: float) -> frozenset[int]:
        """Counter columns that are missing from a scrape since `t_s`, or were reset after it."""
        if self._uneven_newest_s < t_s:
            return frozenset()
        return frozenset(at for at, until_s in self._uneven_until.items() if until_s >= t_s)

    def _forget(self) -> None:
        self.frames.clear()
        self.times.clear()
        self._uneven_until.clear()
        self._uneven_newest_s = -math.inf

    def _trim(self, t_s: float) -> None:
        # In batches: deleting from a list's front moves everything behind it.
        if t_s - self.times[0] > 1.25 * self.keep_s or len(self.times) > FRAMES_MAX:
            cut = max(bisect_left(self.times, t_s - self.keep_s), len(self.times) - FRAMES_MAX)
            del self.frames[:cut], self.times[:cut]


def _possible(
    table: Table, values: list[float], odd: dict[str, float]
) -> tuple[tuple[float, ...], list[int]]:
    """A page's values by column with NaN for impossible ones, and the columns of those. Adds their
    metrics to `odd`."""
    row = table.read(values)
    bad = table.impossible(row)
    if not bad:
        return row, bad
    columns, cleaned = list(table.columns), list(row)
    for at in bad:
        odd.setdefault(columns[at].metric, row[at])
        cleaned[at] = NAN
    return tuple(cleaned), bad


def _info(binding: EngineBinding) -> Mapping[str, Sequence[tuple[Labels, int]]]:
    return {
        metric: [(slot.labels, slot.position) for slot in slots]
        for metric, slots in binding.infos.items()
    }


def columns_of(binding: EngineBinding) -> tuple[dict[Column, int], dict[Column, int]]:
    """The page positions of an engine's counter columns (with histogram parts) and gauges."""
    counters = {Column(metric, ()): ZERO for metric in binding.zeros}
    gauges: dict[Column, int] = {}
    for metric, slots in binding.counters.items():
        for slot in slots:
            counters[Column(metric, slot.labels)] = slot.position
    for metric, slots in (*binding.gauges.items(), *binding.infos.items()):
        for slot in slots:
            gauges[Column(metric, slot.labels)] = slot.position
    for metric, histograms in binding.histograms.items():
        for histogram in histograms:
            for bound, position in zip(histogram.bounds, histogram.buckets, strict=True):
                counters[Column(metric, histogram.labels, repr(bound))] = position
            for part, at in (("sum", histogram.sum), ("count", histogram.count)):
                if at is not None:
                    counters[Column(metric, histogram.labels, part)] = at
    return counters, gauges
