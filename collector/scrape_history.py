"""The recent scrapes of one engine (or of one GPU page), stored as columns. Pure.

A column is one series of that engine. Engines whose pages have the same layout share the columns
and everything that is bound to them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter, lt
from struct import pack
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary

from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import LARGEST, EngineKey, metric_table
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.page import Page

NAN = math.nan
ANY = (-LARGEST, LARGEST)
"""The valid range of metrics that are not in the table."""

ZERO, ABSENT = -2, -1
"""Stand-in positions for columns that are not on the page.

ZERO: the page leaves the series out because it is 0. ABSENT: the page lacks the series.
"""

BEHIND = (0.0, NAN)
"""The values for ZERO and ABSENT, appended to the page's values: negative positions find them."""

Labels = tuple[tuple[str, str], ...]
ReadBuckets = Callable[[Sequence[float | None]], tuple[float, ...]]
Where = tuple[tuple[str, str], ...]
"""Pairs of label and value that a series must have; empty selects all series of a metric."""


class Column(NamedTuple):
    """One series of one engine: metric, labels and, for histograms, the part.

    A named tuple, because every new layout looks up hundreds of them: a dataclass takes several
    times as long to create and hash.
    """

    metric: str
    labels: Labels
    part: str = ""
    """"" for a gauge or counter; "sum", "count", or a bucket's upper bound for a histogram."""


def carries(column: Column, where: Where) -> bool:
    """Whether a series has all these labels with these values."""
    return not where or all(pair in column.labels for pair in where)


class BucketColumns(Struct, frozen=True):
    """A histogram's bounds, ascending, and for each bound its counter columns, one per label set.

    If there is only one label set, `single` has its columns, and `read` reads all of them from a
    scrape at once.
    """

    bounds: tuple[float, ...]
    columns: tuple[tuple[int, ...], ...]
    single: tuple[int, ...]
    read: ReadBuckets | None


class Table:
    """The columns of one kind (counters or gauges), and their positions on pages of one layout.

    The columns of `before` come first, in the same order; the new columns of `places` follow.
    """

    def __init__(self, places: Mapping[Column, int], before: Table | None = None) -> None:
        older = () if before is None else before.names
        names = tuple(dict.fromkeys((*older, *places)))
        self.names: tuple[Column, ...] = older if names == older else names
        """The columns in order; the same object until columns are added."""
        self.columns = {column: at for at, column in enumerate(names)}
        self.by_metric: dict[str, list[tuple[Column, int]]] = {}
        for column, at in self.columns.items():
            self.by_metric.setdefault(column.metric, []).append((column, at))
        metrics = metric_table().metrics
        self._bounds = [
            (0.0, metrics[column.metric].most) if column.metric in metrics else ANY
            for column in names
        ]
        self._shares = [(at, most) for at, (_, most) in enumerate(self._bounds) if most < LARGEST]
        positions = [places.get(column, ABSENT) for column in self.names]
        self.absent = [index for index, position in enumerate(positions) if position == ABSENT]
        self._read: Callable[[list[float]], tuple[float, ...]] = lambda _values: ()
        if len(positions) > 1:
            self._read = itemgetter(*positions)
        elif positions:
            self._read = lambda values, at=positions[0]: (values[at],)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, values: list[float]) -> tuple[float, ...]:
        """A page's values in column order; NaN for columns that the page lacks."""
        return self._read(values)

    def impossible(self, row: tuple[float, ...]) -> list[int]:
        """Columns whose value is NaN or outside the metric's valid range.

        Columns that the page lacks are left out.
        """
        # A finite sum has finite parts only: no page pays for comparing values with their bounds.
        plain = sum(row) <= LARGEST and min(row, default=0.0) >= 0.0
        if plain and all(row[at] <= most for at, most in self._shares):
            return []
        absent = set(self.absent)
        return [
            at
            for at, ((least, most), value) in enumerate(zip(self._bounds, row, strict=True))
            if not least <= value <= most and at not in absent
        ]


class Columns:
    """The columns of an engine; `binding` belongs to its newest page."""

    def __init__(
        self,
        binding: EngineBinding,
        before: Columns | None = None,
        *,
        metrics: frozenset[str] | None = None,
    ) -> None:
        self.binding = binding
        counters, gauges = _places(binding, metrics)
        self.counters: Table = Table(counters, None if before is None else before.counters)
        self.gauges: Table = Table(gauges, None if before is None else before.gauges)
        self.info: Mapping[str, Mapping[str, str]] = {
            metric: dict(slots[0].labels) for metric, slots in binding.infos.items() if slots
        }
        """The labels of the first series of each info metric."""
        self.bound: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Signals bound to these columns, by the id of their tuple."""
        self._shown = frozenset(
            (
                *(*binding.counters, *binding.zeros),
                *(*binding.gauges, *binding.histograms, *binding.infos),
            )
        )
        self._bucket_columns: dict[str, BucketColumns] = {}
        self._selected: dict[tuple[str, Where, str | None], tuple[int, ...]] = {}

    @classmethod
    def of(cls, binding: EngineBinding, metrics: frozenset[str] | None = None) -> Columns:
        """The columns of an engine whose pages all have the layout of `binding`; cached and shared.

        `metrics`: only columns of these metrics; None for all.
        """
        key = id(binding), metrics
        columns = _of_bindings.get(key)
        if columns is None or columns.binding is not binding:
            columns = _of_bindings[key] = cls(binding, metrics=metrics)
        return columns

    def counter_columns(self, metric: str, where: Where = (), part: str = "") -> tuple[int, ...]:
        """Positions of a metric's counter columns that have the labels of `where`.

        `part` selects a histogram's part; empty for a plain counter.
        """
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
        """Positions of a metric's gauge columns that have the labels of `where`."""
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
        """Whether the newest page or an earlier one had a series of the metric."""
        return metric in self.counters.by_metric or metric in self.gauges.by_metric

    def shows(self, metric: str) -> bool:
        """Whether the newest page has the metric."""
        return metric in self._shown


_of_bindings: WeakValueDictionary[tuple[int, frozenset[str] | None], Columns]
_of_bindings = WeakValueDictionary()
"""Shared columns in use, by metrics and the id of their binding.

The columns keep their binding alive, so its id stays valid.
"""


def _places(
    binding: EngineBinding, metrics: frozenset[str] | None
) -> tuple[dict[Column, int], dict[Column, int]]:
    """The page positions of an engine's counters (including histogram parts) and gauges."""
    counters = {Column(metric, ()): ZERO for metric in binding.zeros}
    gauges: dict[Column, int] = {}

    def of_these(slots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return (row for row in slots.items() if metrics is None or row[0] in metrics)

    for metric, slots in of_these(binding.counters):
        for slot in slots:
            counters[Column(metric, slot.labels)] = slot.position
    for metric, slots in (*of_these(binding.gauges), *of_these(binding.infos)):
        for slot in slots:
            gauges[Column(metric, slot.labels)] = slot.position
    for metric, histograms in of_these(binding.histograms):
        for histogram in histograms:
            for bound, position in zip(histogram.bounds, histogram.buckets, strict=True):
                counters[Column(metric, histogram.labels, repr(bound))] = position
            for part, at in (("sum", histogram.sum), ("count", histogram.count)):
                if at is not None:
                    counters[Column(metric, histogram.labels, part)] = at
    return counters, gauges


NO_COLUMNS = Columns(EngineBinding(EngineKey("", ""), {}, {}, {}, {}, (), frozenset()))
"""The columns of an engine before its first page."""


# --- The scrapes ----------------------------------------------------------------------------------

FRAMES_MAX = 4_000
"""Most scrapes kept: about an hour at one scrape per second."""

CLOCK_STEP_BACK_S = 1.0
"""If the clock jumps back by more than this, it was set; earlier scrapes are dropped."""

Row: TypeAlias = "tuple[float, ...] | array[float]"


class Frame(Struct):
    """One scrape. Shapes: `counters` (counter columns,), `gauges` (gauge columns,)."""

    t_s: float
    counters: Row
    gauges: Row


class Restart(Struct, frozen=True):
    """The process behind a target was replaced. `how` says how the restart was detected."""

    t_s: float
    how: str


class History:
    """The scrapes of one engine process, oldest first; a restart clears them.

    `metrics`: only the series of these metrics are kept; None keeps all.
    """

    def __init__(self, *, keep_s: float, metrics: frozenset[str] | None = None) -> None:
        self.keep_s, self._metrics = keep_s, metrics
        self.frames: list[Frame] = []
        self.times: list[float] = []
        self.columns = NO_COLUMNS
        self.info: Mapping[str, Mapping[str, str]] = {}
        """The labels of the first series of each info metric of the newest page."""
        self.impossible: Mapping[str, float] = {}
        """Metrics of the newest page with a value that they cannot have (NaN, infinite, negative,
        a share above 1), and the first such value. They count as if the page lacked the series."""
        self.restarts = 0
        self.out_of_order = 0
        self.clock_steps = 0
        self._uneven_until: dict[int, float] = {}
        self._uneven_newest_s = -math.inf
        """Counter column -> time of the newest scrape that lacked it or stood before its reset."""
        self._started: frozenset[float] = frozenset()
        self._start_at: tuple[int, ...] = ()
        self._start_is_created = False

    def append(
        self, t_s: float, page: Page, binding: EngineBinding, process_start: int | None
    ) -> Restart | None:
        """Add a scrape; a scrape that is not newer than the last one is dropped.

        Returns the restart of the process that this scrape shows; None if there was none.
        """
        if self.times and not t_s > self.times[-1]:
            if not math.isfinite(t_s) or t_s > self.times[-1] - CLOCK_STEP_BACK_S:
                self.out_of_order += 1
                return None
            self.clock_steps += 1
            self._forget()
        if binding is not self.columns.binding:
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
        if len(self.frames) > 1:
            # Older scrapes are seldom read; without an object for each number they take a quarter
            # of the memory.
            last = self.frames[-2]
            last.counters, last.gauges = _packed(last.counters), _packed(last.gauges)
        for index in (*self.counters.absent, *bad_counters):
            self._mark_uneven(index, t_s)
        self._trim(t_s)
        return restart

    @property
    def counters(self) -> Table:
        """The counter columns, including histogram parts."""
        return self.columns.counters

    @property
    def gauges(self) -> Table:
        return self.columns.gauges

    @property
    def started_s(self) -> float | None:
        """Start time of the process according to the newest page; None if the page lacks it."""
        return min(self._started, default=None)

    @property
    def first_s(self) -> float:
        """Time of the oldest scrape kept; NaN without one."""
        return self.times[0] if self.times else NAN

    def _bind(self, binding: EngineBinding, process_start: int | None) -> None:
        before = self.columns
        columns = fresh = Columns.of(binding, self._metrics)
        if before is not NO_COLUMNS:
            columns = Columns(binding, before, metrics=self._metrics)
        kept, needed = (len(each.counters) + len(each.gauges) for each in (before, fresh))
        if kept > 2 * needed + 500:
            # Series come and go without end (a label that carries an id): keep what is alive.
            self._forget()
            columns = fresh
        new_counters = len(columns.counters) - len(before.counters)
        new_gauges = len(columns.gauges) - len(before.gauges)
        if self.frames and (new_counters or new_gauges):
            for frame in self.frames:
                frame.counters = _wider(frame.counters, new_counters)
                frame.gauges = _wider(frame.gauges, new_gauges)
            for index in range(len(before.counters), len(columns.counters)):
                self._mark_uneven(index, self.times[-1])
        self.columns, self.info = columns, columns.info
        start_at = (process_start,) if process_start is not None else binding.created
        if (process_start is None) != self._start_is_created:
            self._started, self._start_is_created = frozenset(), process_start is None
        self._start_at = start_at

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
        if any(map(lt, frame.counters, last.counters)):  # seldom: positions are counted only then
            for at, (was, now) in enumerate(zip(last.counters, frame.counters, strict=True)):
                if now < was:
                    self._mark_uneven(at, last.t_s)

    def _mark_uneven(self, column: int, t_s: float) -> None:
        self._uneven_until[column] = t_s
        self._uneven_newest_s = max(self._uneven_newest_s, t_s)

    def uneven_since(self, t_s: float) -> frozenset[int]:
        """Counter columns that a scrape since `t_s` lacks, or that were reset after `t_s`."""
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


def _packed(row: Row) -> array[float]:
    """The row as an array, without a Python object per number."""
    return array("d", pack(f"{len(row)}d", *row))  # twice as fast as from the numbers


def _wider(row: Row, count: int) -> Row:
    """The row with `count` more columns, all NaN."""
    more = (NAN,) * count
    return row + array("d", more) if isinstance(row, array) else (*row, *more)


def _possible(
    table: Table, values: list[float], odd: dict[str, float]
) -> tuple[tuple[float, ...], list[int]]:
    """A page's values by column, NaN where impossible; and the columns with impossible values.

    Adds the metric and the first impossible value of each such column to `odd`.
    """
    row = table.read(values)
    bad = table.impossible(row)
    if not bad:
        return row, bad
    cleaned = list(row)
    for at in bad:
        odd.setdefault(table.names[at].metric, row[at])
        cleaned[at] = NAN
    return tuple(cleaned), bad
