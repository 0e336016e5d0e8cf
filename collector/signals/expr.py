"""Signal expressions, evaluated on a window or compiled to PromQL with the same meaning. Pure.

An expression is bound to columns once per page layout, for all targets with that layout. It is then
evaluated once per scrape.

Its value is a float; None if the window has no series, fewer than two scrapes or no observation, or
if the expression divides by zero. PromQL returns an empty result in these cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from operator import mul, sub
from typing import Protocol

from msgspec import Struct, field

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, kind_of
from kneewatch.collector.names.vllm_metrics import LARGEST, VLLM_PREFIX
from kneewatch.collector.scrape_history import Columns, Where
from kneewatch.collector.window import Buckets, Window

Has = Callable[[str], bool]
"""Whether a metric is available, by canonical name."""

Value = Callable[[Window], float | None]
"""The value at a window's end, or None."""


PART = "kneewatch_part"
"""Label that keeps apart the series that are summed to one metric."""

NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
"""A metric name as PromQL writes it before the braces."""

ENGINE_LABELS = ("model_name", "engine")
"""A series without these labels belongs to all engines of its page."""


EXPORTED_BY_ROUTERS = frozenset({"num_requests_running", "num_requests_waiting"})
ENGINES_OWN = 'model_name!=""'
"""A matcher that leaves out the series of vLLM's production-stack router.

The router exports these metrics for each server behind it, with a label `server` and no model.
"""


class NoSeriesError(LookupError):
    """No series is this canonical metric, or several are that PromQL cannot add here."""


class Dialect(Struct, frozen=True):
    """How a metrics system names series and labels.

    - `names`: metric names on the pages, by canonical name; the default is `vllm:` and the name.
    - `by`: the labels that distinguish engines.
    - `selector`: label matchers added to every series.
    - `range_s`: the window in seconds.
    - `prefix`: of the metric names; it says of which kind the engines are, unless `kind` does.

    Alternatives for a label's value in a `where` are joined by `|`.
    """

    range_s: float
    by: tuple[str, ...] = ("instance", "model_name", "engine")
    selector: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: str = VLLM_PREFIX
    kind: EngineKind | None = None

    @property
    def program(self) -> EngineKind:
        return kind_of(self.prefix) if self.kind is None else self.kind

    def series(self, metric: str, suffix: str = "", where: Where = (), extra: str = "") -> str:
        """A selector: name, suffix and label matchers.

        Raises:
            NoSeriesError: no series of this kind of engine is the metric, or several are.
        """
        selectors = self.each(metric, suffix, where, extra)
        if len(selectors) > 1:
            raise NoSeriesError(metric)
        return selectors[0]

    def each(
        self, metric: str, suffix: str = "", where: Where = (), extra: str = ""
    ) -> Sequence[str]:
        """A selector for each of the series whose sum is a metric.

        Raises:
            NoSeriesError: no series of this kind of engine is the metric.
        """
        if self.program is not VLLM:
            more = [part for part in (self.selector, extra) if part]
            return [
                self.labelled(name, [*matchers, *more], suffix)
                for name, matchers in self._own(metric, dict(where))
            ]
        matchers = [f'{label}{"=~" if "|" in value else "="}"{value}"' for label, value in where]
        engines = ENGINES_OWN if metric in EXPORTED_BY_ROUTERS else ""
        matchers += [part for part in (self.selector, extra, engines) if part]
        return [self.labelled(metric, matchers, suffix)]

    def at_most(self, metric: str, bound: float) -> str:
        """The rate of a histogram's observations up to a bucket bound."""
        bucket = self.series(metric, "_bucket", extra=bound_matcher(bound))
        return self.sum(f"rate({bucket}[{self.range}])")

    def edges(self, metric: str, wanted: Sequence[float]) -> Sequence[float]:
        """Bucket bounds to count from: those of `wanted`, or the engine's own in their place."""
        own = self.program.bounds.get(metric, ())
        return [edge for edge in own if edge >= wanted[0]] or wanted

    def within(self, metric: str, bound: float) -> float:
        """A bucket bound to count up to: this one, or the engine's own next one below.

        Raises:
            NoSeriesError: all bounds of the engine are above it.
        """
        own = self.program.bounds.get(metric, (bound,))
        if bound < own[0]:
            raise NoSeriesError(metric)
        return max(edge for edge in own if edge <= bound)

    def names_of(self, metric: str) -> list[str]:
        """The names of a gauge's series."""
        if self.program is VLLM:
            return [self.prefix + metric]
        return [self.prefix + name for name, _ in self._own(metric, {})]

    def _own(self, metric: str, where: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
        """The names of an engine's own series that are a metric, with their matchers."""
        names: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
        sources = [each for each in self.program.all_sources if each.metric == metric]
        # A label that one source is given, no other one has.
        by_table = {label for source in sources for label in source.labels}
        for source in sources:
            is_plain = not (source.over or source.less or source.without) and source.scale == 1
            given = {label: source.labels.get(label) for label in where}
            agrees = all(given[label] in where[label].split("|") for label in by_table & {*where})
            if is_plain and agrees:
                values = names.setdefault((source.name, *source.where), {})
                for label, value in source.where.items():
                    values.setdefault(label, {})[value] = None
                own_labels = {canonical: own for own, canonical in source.renamed.items()}
                for label in [label for label, own in given.items() if own is None]:
                    texts = map(re.escape, where[label].split("|"))
                    values[own_labels.get(label, label)] = dict.fromkeys(texts)
        if not names:
            raise NoSeriesError(metric)
        for (name, *_), values in names.items():
            yield name, [f'{label}=~"{quoted("|".join(each))}"' for label, each in values.items()]

    def folded(
        self, words: str, metric: str, suffix: str = "", where: Where = (), extra: str = ""
    ) -> str:
        """A metric's value: PromQL `words`, with {} for a series, summed over its series."""
        parts = [words.format(each) for each in self.each(metric, suffix, where, extra)]
        if len(parts) == 1:
            return self.sum(parts[0])
        apart = " or ".join(
            f'label_replace({part}, "{PART}", "{at}", "", "")' for at, part in enumerate(parts)
        )
        folds = {s.fold for s in self.program.all_sources if s.metric == metric}
        return self.sum(apart, fold="max" if "max" in folds else "sum")

    def labelled(self, metric: str, matchers: Sequence[str], suffix: str = "") -> str:
        """A metric with label matchers, as PromQL writes it.

        With only `label="value"` pairs it is also the notation for a series in promtool tests.
        """
        name = self.names.get(metric, self.prefix + metric) + suffix
        if not NAME.fullmatch(name):  # PromQL takes a name with a dot as a matcher only
            matchers, name = [f'__name__="{name}"', *matchers], ""
        return f"{name}{{{','.join(matchers)}}}" if matchers else name

    @property
    def range(self) -> str:
        """The window as a PromQL duration, in whole milliseconds."""
        millis = round(self.range_s * 1000)
        return f"{millis // 1000}s" if millis % 1000 == 0 else f"{millis}ms"

    def sum(self, inner: str, *more: str, fold: str = "sum") -> str:
        """The PromQL `sum by (engine labels and more) (inner)`. Ranks that repeat values count
        once."""
        kind, by = self.program, (*self.by, *more)
        if kind.ranks:
            inner = f"max without ({', '.join(kind.ranks)}) ({inner})"
        if kind.engine_label and "engine" in by:
            inner = f'label_replace({inner}, "engine", "$1", "{kind.engine_label}", "(.+)")'
        return f"{fold} by ({', '.join(by)}) ({inner})"


class Expr(Protocol):
    """The interface of all expressions."""

    def bind(self, page_columns: Columns) -> Value:
        """A function that evaluates this expression on a window of any history with these
        columns."""
        ...

    def promql(self, dialect: Dialect) -> str | None:
        """The expression in PromQL; None if PromQL cannot express it, such as a number inside a
        label."""
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

    def promql(self, dialect: Dialect) -> str | None:
        if self.fold == "sum":
            return dialect.folded("{}", self.metric, where=self.where)
        return dialect.sum(dialect.series(self.metric, where=self.where), fold=self.fold)


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

    def promql(self, dialect: Dialect) -> str | None:
        return dialect.folded("{}", self.metric, self.suffix, self.where)


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

    def promql(self, dialect: Dialect) -> str | None:
        words = f"{self.fold}_over_time({{}}[{dialect.range}])"
        if self.across == "sum":
            return dialect.folded(words, self.metric, where=self.where)
        series = dialect.series(self.metric, where=self.where)
        return dialect.sum(words.format(series), fold=self.across)


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

    def promql(self, dialect: Dialect) -> str | None:
        del dialect
        return None


class Slope(OfMetric, frozen=True):
    """A gauge's change per second by least squares over the window: deriv()."""

    where: Where = ()

    def bind(self, page_columns: Columns) -> Value:
        columns = page_columns.gauge_columns(self.metric, self.where)

        def value(window: Window) -> float | None:
            slopes = window.slopes(columns)
            return sum(slopes) if slopes else None

        return value

    def promql(self, dialect: Dialect) -> str | None:
        return dialect.folded(f"deriv({{}}[{dialect.range}])", self.metric, where=self.where)


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

    def promql(self, dialect: Dialect) -> str | None:
        words = f"rate({{}}[{dialect.range}])"
        return dialect.folded(words, self.metric, self.suffix, self.where)


HISTOGRAM_PARTS = SUM, COUNT = "_sum", "_count"
"""The suffixes of a histogram's counters."""


class Computed(Struct, frozen=True):
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

    def promql(self, dialect: Dialect) -> str | None:
        parts = [part.promql(dialect) for part in self.parts]
        return None if None in parts else self.words.format(*parts)

    def lacking(self, has: Has) -> tuple[str, ...]:
        return tuple(metric for part in self.parts for metric in part.lacking(has))


def ratio(over: Expr, under: Expr) -> Computed:
    """One expression divided by another; unknown if the denominator is not positive."""
    return Computed((over, under), _divided, "({0}) / (({1}) > 0)")


def _divided(over: float, under: float) -> float | None:
    return over / under if under > 0 else None


def product(left: Expr, right: Expr) -> Computed:
    """The product of two expressions."""
    return Computed((left, right), mul, "({0}) * ({1})")


def difference(left: Expr, right: Expr) -> Computed:
    """The difference of two expressions, at least zero."""
    return Computed((left, right), _beyond, "clamp_min(({0}) - ({1}), 0)")


def _beyond(left: float, right: float) -> float:
    return max(0.0, left - right)


def total(*parts: Expr) -> Computed:
    """The sum of expressions."""
    return Computed(parts, _total, " + ".join(f"({{{at}}})" for at in range(len(parts))))


def _total(*values: float) -> float:
    return sum(values, 0.0)


def scaled(of: Expr, scale: float) -> Computed:
    """An expression times a constant."""
    return Computed((of,), partial(mul, scale), f"{scale!r} * ({{0}})")


def complement(of: Expr) -> Computed:
    """One minus a ratio."""
    return Computed((of,), partial(sub, 1), "1 - ({0})")


def kept_if(of: Expr, sign: str, holds: Callable[[float, float], bool], bound: float) -> Computed:
    """An expression's value where a comparison holds, else unknown. Above zero: zero often means
    that the server does not measure."""

    def kept(value: float) -> float | None:
        return value if holds(value, bound) else None

    return Computed((of,), kept, f"({{0}}) {sign} {bound!r}")


class FirstOf(Struct, frozen=True):
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

    def promql(self, dialect: Dialect) -> str | None:
        parts = [part for option in self.options if (part := _known(option, dialect)) is not None]
        return parts[0] if len(parts) == 1 else " or ".join(f"({part})" for part in parts) or None

    def lacking(self, has: Has) -> tuple[str, ...]:
        options = [option.lacking(has) for option in self.options]
        return () if () in options else options[0]


def _known(option: Expr, dialect: Dialect) -> str | None:
    with suppress(NoSeriesError):
        return option.promql(dialect)
    return None


class HereOnly(Struct, frozen=True):
    """An expression over metrics without an engine label.

    If the page has one engine, the metrics belong to that engine. If it has several, they belong to
    none. PromQL cannot express this.
    """

    of: Expr

    def bind(self, page_columns: Columns) -> Value:
        return self.of.bind(page_columns)

    def promql(self, dialect: Dialect) -> str | None:
        del dialect
        return None

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

    def promql(self, dialect: Dialect) -> str | None:
        return self.of.promql(dialect)

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

    def promql(self, dialect: Dialect) -> str | None:
        rate = f"rate({dialect.series(self.metric, '_bucket')}[{dialect.range}])"
        # `>= 0` drops the NaN that an empty histogram gives: no observation is no value.
        return f"histogram_quantile({self.q}, {dialect.sum(rate, 'le')}) >= 0"


class ShareAtMost(OfMetric, frozen=True):
    """Share of a histogram's observations up to a bucket bound."""

    bound: float

    def bind(self, page_columns: Columns) -> Value:
        bound = self.bound
        return of_buckets(self.metric, lambda buckets: buckets.share_at_most(bound))

    def promql(self, dialect: Dialect) -> str | None:
        below = dialect.at_most(self.metric, dialect.within(self.metric, self.bound))
        count = dialect.series(self.metric, "_count")
        total = dialect.sum(f"rate({count}[{dialect.range}])")
        return f"{below} / ({total} > 0)"


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

    def promql(self, dialect: Dialect) -> str | None:
        del dialect
        return None


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

    def promql(self, dialect: Dialect) -> str | None:
        series, range_s = dialect.series(self.metric), round(dialect.range_s, 3)
        # With `bool`, old series alone are no change; without, they would be no value.
        by = ", ".join(label for label in dialect.by if label not in ENGINE_LABELS)
        return f"sum by ({by}) ({series} > bool (time() - {range_s!r})) / {range_s!r}"


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

    def promql(self, dialect: Dialect) -> str | None:
        """None: PromQL cannot leave out parts without a value."""
        del dialect
        return None

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
        weights = self._weights(self.edges if self.edges[0] in bounds else own)

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

    def promql(self, dialect: Dialect) -> str | None:
        metric = self.metric
        count = Rate(metric, suffix=COUNT).promql(dialect)
        total_s = Rate(metric, suffix=SUM).promql(dialect)
        terms = [
            f"{weight!r} * clamp_min({count} - ({dialect.at_most(metric, edge)} or {count}), 0)"
            for weight, edge in self._weights(dialect.edges(metric, self.edges))
        ]
        return f"({' + '.join(terms)}) / (({total_s}) > 0)"

    @staticmethod
    def _weights(edges: Sequence[float]) -> list[tuple[float, float]]:
        steps = zip(edges, (0.0, *edges), strict=False)
        return [(edge - before, edge) for edge, before in steps]


class AboveRate(OfMetric, frozen=True):
    """Observations per second above a bound, or above a histogram's next bucket bound."""

    bound: float

    def bind(self, page_columns: Columns) -> Value:
        bounds = page_columns.buckets_of(self.metric).bounds
        bound = next((own for own in bounds if self.bound <= own < inf), self.bound)
        return of_buckets(self.metric, lambda buckets: buckets.above_per_s(bound))

    def promql(self, dialect: Dialect) -> str | None:
        count = Rate(self.metric, suffix=COUNT).promql(dialect)
        at_most = dialect.at_most(self.metric, dialect.edges(self.metric, (self.bound,))[0])
        # Extrapolation may give a bucket a little more than the count.
        return f"clamp_min({count} - {at_most}, 0)"


def bound_matcher(bound: float) -> str:
    """A label matcher for one bucket: client libraries write its bound as 1 or as 1.0."""
    return any_of("le", (f"{bound:g}", repr(float(bound))))


def any_of(label: str, values: Iterable[str]) -> str:
    """A matcher for any of several label values."""
    return f'{label}=~"{quoted("|".join(map(re.escape, dict.fromkeys(values))))}"'


def quoted(value: str) -> str:
    """A text, escaped for PromQL's double quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
