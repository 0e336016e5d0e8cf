"""The columns of one engine's history: which series they are, and where pages have them. Pure.

They follow from the layouts of the engine's pages. Engines whose pages have the same layout share
them, and everything that is bound to them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.names.vllm_series import EngineKey

NAN = math.nan
LARGEST = sys.float_info.max
ANY = (-LARGEST, LARGEST)
"""The range of metrics that are in no table: any number."""

ZERO, ABSENT = -2, -1
"""Positions of the columns that the page does not show because they are 0, and that it lacks."""

BEHIND = (0.0, NAN)
"""The values of these columns; they stand behind the page's."""

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
    """The columns of one kind (counters or gauges) and their positions on pages of one layout:
    those of `before` in their order, then the new ones of `places`."""

    def __init__(self, places: Mapping[Column, int], before: Table | None = None) -> None:
        older = () if before is None else before.names
        names = tuple(dict.fromkeys((*older, *places)))
        self.names: tuple[Column, ...] = older if names == older else names
        """The columns in order; the same object until others come."""
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


class Columns:
    """The columns of an engine whose newest page has the series of `binding`."""

    def __init__(self, binding: EngineBinding, before: Columns | None = None) -> None:
        self.binding = binding
        counters, gauges = _places(binding)
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
    def of(cls, binding: EngineBinding) -> Columns:
        """The columns of an engine whose pages all had the series of `binding`; shared."""
        columns = _of_bindings.get(id(binding))
        if columns is None or columns.binding is not binding:
            columns = _of_bindings[id(binding)] = cls(binding)
        return columns

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
        """Whether these or earlier pages had a series of the metric."""
        return metric in self.counters.by_metric or metric in self.gauges.by_metric

    def shows(self, metric: str) -> bool:
        """Whether the newest page has the metric."""
        return metric in self._shown


_of_bindings: WeakValueDictionary[int, Columns] = WeakValueDictionary()
"""Shared columns in use, by the id of their binding, which they keep alive."""


def _places(binding: EngineBinding) -> tuple[dict[Column, int], dict[Column, int]]:
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


NO_COLUMNS = Columns(EngineBinding(EngineKey("", ""), {}, {}, {}, {}, (), frozenset()))
"""Those of an engine without a page."""
