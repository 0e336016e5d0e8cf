"""Signal expressions, evaluated on a window; promql.py has the same in PromQL. Pure.

An expression is bound to columns once per page layout, for all targets with that layout. It is then
evaluated once per scrape.

Its value is a float; None if the window has no series, fewer than two scrapes or no observation, or
if the expression divides by zero. PromQL returns an empty result in these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from operator import mul, sub
from typing import Protocol

from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import LARGEST
from kneewatch.collector.scrape_history import Columns, Where
from kneewatch.collector.window import Buckets, Window

Has = Callable[[str], bool]
"""Whether a metric is available, by canonical name."""

Value = Callable[[Window], float | None]
"""The value at a window's end, or None."""


class Expr(Protocol):
    """The interface of all expressions."""

    def bind(self, page_columns: Columns) -> Value:
        """A function that evaluates this expression on a window of any history with these
        columns."""
        ...

    def lacking(self, has: Has) -> tuple[str, ...]:
        """Canonical names of the metrics that the expression needs and `has` reports as not
        available."""
        ...


def average(values: Sequence[float]) -> float:
    """The mean of one or more values."""
    return sum(values) / len(values)


FOLDS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "avg": average,
    "min": min,
    "max": max,
    "sum": sum,
}
"""PromQL's aggregations by name."""


class OfMetric(Struct, frozen=True):
    """An expression over one metric; unknown if the metric is not available."""

    metric: str

    def lacking(self, has: Has) -> tuple[str, ...]:
        """The metric, if `has` reports it as not available."""
        return () if has(self.metric) else (self.metric,)


class Gauge(OfMetric, frozen=True):
    """The newest values of an engine's series (GPUs), by `fold`: avg, min, max or sum."""

    where: Where = ()
    fold: str = "sum"

    def bind(self, page_columns: Columns) -> Value:
        columns = page_columns.gauge_columns(self.metric, self.where)
        if len(columns) == 1:
            (at,) = columns
            return lambda window: window.newest_of(at)
        fold = FOLDS[self.fold]

        def value(window: Window) -> float | None:
            values = window.newest(columns)
            return fold(values) if values else None

        return value


class Count(OfMetric, frozen=True):
    """A counter's newest value, summed over its series."""

    where: Where = ()
    suffix: str = "_total"

    def bind(self, page_columns: Columns) -> Value:
        columns = page_columns.counter_columns(self.metric, self.where)

        def value(window: Window) -> float | None:
            counts = window.counted(columns)
            return sum(counts) if counts else None

        return value


class OverTime(OfMetric, frozen=True):
    """A gauge aggregated over the window by `fold`: avg, min or max (avg_over_time etc.).

    Several series are aggregated one by one and then together, by `across`.
    """

    fold: str
    where: Where = ()
    across: str = "sum"

    def bind(self, page_columns: Columns) -> Value:
        columns, fold = page_columns.gauge_columns(self.metric, self.where), FOLDS[self.fold]
        across = FOLDS[self.across]
        if len(columns) == 1:
            (only,) = columns

            def value_of_one(window: Window) -> float | None:
                values = window.over_time(only)
                return fold(values) if values else None

            return value_of_one

        def value(window: Window) -> float | None:
            series = [values for at in columns if (values := window.over_time(at))]
            return across([fold(values) for values in series]) if series else None

        return value


class BitShare(OfMetric, frozen=True):
    """Share of the window's scrapes in which a bit-mask gauge has any bit of `mask` set.

    If several series match, the greatest share is used.
    """

    mask: int
    where: Where = ()

    def bind(self, page_columns: Columns) -> Value:
        columns, mask = page_columns.gauge_columns(self.metric, self.where), self.mask

        def value(window: Window) -> float | None:
            series = [values for at in columns if (values := window.over_time(at))]
            shares = [average([bool(int(bits) & mask) for bits in each]) for each in series]
            return max(shares) if shares else None

        return value


class Slope(OfMetric, frozen=True):
    """A gauge's change per second by least squares over the window: deriv()."""

    where: Where = ()

    def bind(self, page_columns: Columns) -> Value:
        columns = page_columns.gauge_columns(self.metric, self.where)

        def value(window: Window) -> float | None:
            slopes = window.slopes(columns)
            return sum(slopes) if slopes else None

        return value


def no_value(window: Window) -> float | None:
    """Returns None: the value of an expression whose series do not exist."""
    del window
    return None


def rate_of(columns: tuple[int, ...]) -> Value:
    """The summed rate of counter columns; uses the window's precomputed rates where possible."""
    if not columns:
        return no_value
    if len(columns) == 1:
        return _rate_of_one(columns)

    def value(window: Window) -> float | None:
        total, rates = 0.0, window.rates
        for at in columns:
            rate = rates[at]
            if rate is None or rate != rate:
                return window.total_rate(columns)
            total += rate
        return total

    return value


def _rate_of_one(columns: tuple[int, ...]) -> Value:
    (at,) = columns

    def value(window: Window) -> float | None:
        rate = window.rates[at]
        return window.total_rate(columns) if rate is None or rate != rate else rate

    return value


class Rate(OfMetric, frozen=True):
    """Per-second increase of a counter over the window, resets counted as Prometheus does. With the
    suffix of a histogram's sum or count: of that part."""

    where: Where = ()
    suffix: str = "_total"

    def bind(self, page_columns: Columns) -> Value:
        part = self.suffix[1:] if self.suffix in HISTOGRAM_PARTS else ""
        return rate_of(page_columns.counter_columns(self.metric, self.where, part))


HISTOGRAM_PARTS = SUM, COUNT = "_sum", "_count"
"""The suffixes of a histogram's counters."""


class Arithmetic(Struct, frozen=True):
    """A number computed from the values of other expressions; unknown if one of them is.

    `compute` returns None where the result is unknown. `words` is the PromQL, with {0}, {1} etc.
    for the parts.
    """

    parts: tuple[Expr, ...]
    compute: Callable[..., float | None]
    words: str

    def bind(self, page_columns: Columns) -> Value:
        compute, bound = self.compute, [part.bind(page_columns) for part in self.parts]
        first_of = bound[0]
        if len(bound) > 2:
            return self._of_many(bound)
        second_of = bound[-1]

        def of_one(window: Window) -> float | None:
            first = first_of(window)
            return None if first is None else compute(first)

        def of_two(window: Window) -> float | None:
            first, second = first_of(window), second_of(window)
            return None if first is None or second is None else compute(first, second)

        return of_one if len(bound) == 1 else of_two

    def _of_many(self, bound: Sequence[Value]) -> Value:
        compute = self.compute

        def value(window: Window) -> float | None:
            values = [number for of in bound if (number := of(window)) is not None]
            return compute(*values) if len(values) == len(bound) else None

        return value

    def lacking(self, has: Has) -> tuple[str, ...]:
        return tuple(metric for part in self.parts for metric in part.lacking(has))


def ratio(over: Expr, under: Expr) -> Arithmetic:
    """One expression divided by another; unknown if the denominator is not positive."""
    return Arithmetic((over, under), _divided, "({0}) / (({1}) > 0)")


def _divided(over: float, under: float) -> float | None:
    return over / under if under > 0 else None


def product(left: Expr, right: Expr) -> Arithmetic:
    """The product of two expressions."""
    return Arithmetic((left, right), mul, "({0}) * ({1})")


def difference(left: Expr, right: Expr) -> Arithmetic:
    """The difference of two expressions, at least zero."""
    return Arithmetic((left, right), _beyond, "clamp_min(({0}) - ({1}), 0)")


def _beyond(left: float, right: float) -> float:
    return max(0.0, left - right)


def total(*parts: Expr) -> Arithmetic:
    """The sum of expressions."""
    return Arithmetic(parts, _total, " + ".join(f"({{{at}}})" for at in range(len(parts))))


def _total(*values: float) -> float:
    return sum(values, 0.0)


def scaled(of: Expr, scale: float) -> Arithmetic:
    """An expression times a constant."""
    return Arithmetic((of,), partial(mul, scale), f"{scale!r} * ({{0}})")


def complement(of: Expr) -> Arithmetic:
    """One minus a ratio."""
    return Arithmetic((of,), partial(sub, 1), "1 - ({0})")


def kept_if(of: Expr, sign: str, holds: Callable[[float, float], bool], bound: float) -> Arithmetic:
    """An expression's value where a comparison holds, else unknown. Above zero: zero often means
    that the server does not measure."""

    def kept(value: float) -> float | None:
        return value if holds(value, bound) else None

    return Arithmetic((of,), kept, f"({{0}}) {sign} {bound!r}")


class FirstValue(Struct, frozen=True):
    """The value of the first expression that has one (PromQL `or`)."""

    options: tuple[Expr, ...]

    def bind(self, page_columns: Columns) -> Value:
        bound = [
            expr.bind(page_columns) for expr in self.options if not expr.lacking(page_columns.has)
        ]

        def value(window: Window) -> float | None:
            for value_of in bound:
                first = value_of(window)
                if first is not None:
                    return first
            return None

        return bound[0] if len(bound) == 1 else value

    def lacking(self, has: Has) -> tuple[str, ...]:
        options = [option.lacking(has) for option in self.options]
        return () if () in options else options[0]


class HereOnly(Struct, frozen=True):
    """An expression over metrics without an engine label.

    If the page has one engine, the metrics belong to that engine. If it has several, they belong to
    none. PromQL cannot express this.
    """

    of: Expr

    def bind(self, page_columns: Columns) -> Value:
        return self.of.bind(page_columns)

    def lacking(self, has: Has) -> tuple[str, ...]:
        return self.of.lacking(has)


class Beside(Struct, frozen=True):
    """An expression combined with one over metrics without an engine label (see `HereOnly`).

    The value is the `fold` of both, or of the only one that has a value. PromQL gets only the
    first.
    """

    of: Expr
    here: Expr
    fold: str

    def bind(self, page_columns: Columns) -> Value:
        if self.here.lacking(page_columns.has):
            return self.of.bind(page_columns)
        if self.of.lacking(page_columns.has):
            return self.here.bind(page_columns)
        of_of, here_of = self.of.bind(page_columns), self.here.bind(page_columns)
        fold = FOLDS[self.fold]

        def value(window: Window) -> float | None:
            of, here = of_of(window), here_of(window)
            if of is None or here is None:
                return here if of is None else of
            return fold((of, here))

        return value

    def lacking(self, has: Has) -> tuple[str, ...]:
        lacks = self.of.lacking(has)
        return lacks if lacks and self.here.lacking(has) else ()


def of_buckets(metric: str, compute: Callable[[Buckets], float | None]) -> Value:
    """A value computed from a histogram's bucket rates."""

    def value(window: Window) -> float | None:
        buckets = window.buckets(metric)
        return None if buckets is None else compute(buckets)

    return value


class Quantile(OfMetric, frozen=True):
    """A histogram's q-quantile over the window: histogram_quantile of the bucket rates."""

    q: float

    def bind(self, page_columns: Columns) -> Value:
        q = self.q
        return of_buckets(self.metric, lambda buckets: buckets.quantile(q))


class ShareAtMost(OfMetric, frozen=True):
    """Share of a histogram's observations up to a bound, or up to the next bucket bound below."""

    bound: float

    def bind(self, page_columns: Columns) -> Value:
        bounds = page_columns.buckets_of(self.metric).bounds
        bound = next((own for own in reversed(bounds) if own <= self.bound), inf)

        def share(buckets: Buckets) -> float | None:
            # A bucket that was just added has no rate: one below would count too few.
            return buckets.share_at_most(bound) if bound in buckets.bounds[:-1] else None

        return of_buckets(self.metric, share)


def number_of_current(
    page_columns: Columns, metric: str, read: Callable[[Mapping[str, str]], float | None]
) -> Value:
    """A number that `read` extracts from the labels of an info metric's current series.

    The current series is the one with the greatest value.
    """
    columns = page_columns.gauge_columns(metric)
    rows = page_columns.gauges.by_metric.get(metric, ())
    numbers = {at: read(dict(column.labels)) for column, at in rows}
    if len(columns) == 1:
        (only,) = columns
        number = numbers[only]
        return lambda window: None if window.newest_of(only) is None else number

    def value(window: Window) -> float | None:
        at = window.current(columns)
        return None if at is None else numbers[at]

    return value


class InfoLabel(OfMetric, frozen=True):
    """A number that `read` gets from a label of an info metric's current series."""

    label: str
    read: Callable[[str], float | None]

    def bind(self, page_columns: Columns) -> Value:
        return number_of_current(page_columns, self.metric, self._number)

    def _number(self, labels: Mapping[str, str]) -> float | None:
        return self.read(labels[self.label]) if self.label in labels else None


def info_number(metric: str, label: str) -> InfoLabel:
    """The number that a label contains."""
    return InfoLabel(metric, label, count_in)


def count_in(text: str) -> float | None:
    """The number from 0 to LARGEST that a label contains; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= LARGEST else None


def info_names(metric: str, label: str) -> InfoLabel:
    """Number of comma-separated names in a label."""
    return InfoLabel(metric, label, _names)


def _names(text: str) -> float:
    return float(sum(1 for name in text.split(",") if name.strip()))


class InfoChanges(OfMetric, frozen=True):
    """Changes per second of an info metric. The metric's value is the time when it was last set."""

    def bind(self, page_columns: Columns) -> Value:
        columns = page_columns.gauge_columns(self.metric)

        def value(window: Window) -> float | None:
            reported, since_s = window.newest(columns), window.now_s - window.range_s
            return sum(t_s > since_s for t_s in reported) / window.range_s if reported else None

        return value


class SumOfKnown(Struct, frozen=True):
    """The sum of the expressions that have a value; unknown if none of them has."""

    parts: tuple[Expr, ...]

    def bind(self, page_columns: Columns) -> Value:
        bound = [part.bind(page_columns) for part in self.parts]
        parts = [part for part in bound if part is not no_value]
        if not parts:
            return no_value

        def value(window: Window) -> float | None:
            summands = [summand for part in parts if (summand := part(window)) is not None]
            return sum(summands) if summands else None

        return value

    def lacking(self, has: Has) -> tuple[str, ...]:
        lacking = [part.lacking(has) for part in self.parts]
        return () if () in lacking else lacking[0]


class SlowTimeShare(OfMetric, frozen=True):
    """Lower bound on the share of a histogram's total time in observations above the first edge.

    Each observation between two edges is counted as long as the lower edge. `edges` must be bucket
    bounds, ascending; edges that the histogram lacks add nothing. If it lacks the first one, its
    own bounds above that are the edges.
    """

    edges: tuple[float, ...]

    def bind(self, page_columns: Columns) -> Value:
        metric = self.metric
        total_of = Rate(metric, suffix=SUM).bind(page_columns)
        bounds = page_columns.buckets_of(metric).bounds
        own = tuple(bound for bound in bounds if self.edges[0] < bound < inf)
        weights = edge_weights(self.edges if self.edges[0] in bounds else own)

        def positions(bounds: Sequence[float]) -> list[tuple[float, int]]:
            return [(weight, bounds.index(edge)) for weight, edge in weights if edge in bounds]

        weighted = positions(bounds)

        def value(window: Window) -> float | None:
            buckets, total_s = window.buckets(metric), total_of(window)
            if buckets is None or total_s is None or not total_s > 0:
                return None
            # If some bucket has no rate in this window, the positions differ.
            here = weighted if buckets.bounds is bounds else positions(buckets.bounds)
            return sum([weight * buckets.above_at_per_s(at) for weight, at in here]) / total_s

        return value


def edge_weights(edges: Sequence[float]) -> list[tuple[float, float]]:
    """For each edge: how much longer than the edge before an observation above it counts, and the
    edge."""
    steps = zip(edges, (0.0, *edges), strict=False)
    return [(edge - before, edge) for edge, before in steps]


class AboveRate(OfMetric, frozen=True):
    """Observations per second above a bound, or above a histogram's next bucket bound."""

    bound: float

    def bind(self, page_columns: Columns) -> Value:
        bounds = page_columns.buckets_of(self.metric).bounds
        bound = next((own for own in bounds if self.bound <= own < inf), self.bound)
        return of_buckets(self.metric, lambda buckets: buckets.above_per_s(bound))
