"""Signal expressions: each is evaluated on a window and compiled to PromQL, with one meaning. Pure.

An expression's value is a float, or None where the window holds nothing to say: no series, fewer
than two scrapes, no observation, a division by zero. PromQL says the same by returning no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import Protocol

from kneewatch.collector.history import Where
from kneewatch.collector.window import Window

Has = Callable[[str], bool]
"""Whether a metric, by its canonical name, is known."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a metrics system spells what an expression asks for.

    `names` maps canonical metric names to those on the pages (default: `vllm:` and the name);
    `by` are the labels that keep engines apart; `selector` restricts all series; `range_s` is the
    window.
    """

    range_s: float
    by: tuple[str, ...] = ("instance", "model_name", "engine")
    selector: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: str = "vllm:"

    def series(self, metric: str, suffix: str = "", where: Where = (), extra: str = "") -> str:
        """A selector: name, suffix and label matchers."""
        name = self.names.get(metric, self.prefix + metric) + suffix
        matchers = [f'{label}="{value}"' for label, value in where]
        matchers += [part for part in (self.selector, extra) if part]
        return f"{name}{{{','.join(matchers)}}}" if matchers else name

    @property
    def range(self) -> str:
        """The window as a PromQL duration, in whole milliseconds."""
        millis = round(self.range_s * 1000)
        return f"{millis // 1000}s" if millis % 1000 == 0 else f"{millis}ms"

    def sum(self, inner: str, *more: str) -> str:
        """sum by (engine labels and more) (inner)"""
        return f"sum by ({', '.join((*self.by, *more))}) ({inner})"


class Expr(Protocol):
    """What every expression can do."""

    def value(self, window: Window) -> float | None:
        """The number at the window's end, or None."""
        ...

    def promql(self, dialect: Dialect) -> str | None:
        """The same as PromQL; None where PromQL cannot express it (a number inside a label)."""
        ...

    def lacking(self, has: Has) -> tuple[str, ...]:
        """Canonical names of the metrics that `has` denies and without which there is no value."""
        ...


@dataclass(frozen=True, slots=True)
class Gauge:
    """The newest scrape's value, summed over an engine's series."""

    metric: str
    where: Where = ()

    def value(self, window: Window) -> float | None:
        return window.gauge(self.metric, self.where)

    def promql(self, dialect: Dialect) -> str | None:
        return dialect.sum(dialect.series(self.metric, where=self.where))

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class Across:
    """The newest scrape's values over an engine's series (GPUs): `fold` is avg, min, max or sum."""

    metric: str
    fold: str

    def value(self, window: Window) -> float | None:
        values = window.gauge_each(self.metric)
        if not values:
            return None
        if self.fold == "max":
            return max(values)
        if self.fold == "min":
            return min(values)
        return sum(values) / (len(values) if self.fold == "avg" else 1)

    def promql(self, dialect: Dialect) -> str | None:
        return f"{self.fold} by ({', '.join(dialect.by)}) ({dialect.series(self.metric)})"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class OverTime:
    """A gauge over the window: `fold` is avg, min or max (avg_over_time and its kin).

    Several series are folded one by one and then summed.
    """

    metric: str
    fold: str
    where: Where = ()

    def value(self, window: Window) -> float | None:
        series = window.gauge_points(self.metric, self.where)
        folded = [self._fold([value for _, value in points]) for points in series]
        return sum(folded) if folded else None

    def _fold(self, values: list[float]) -> float:
        if self.fold == "avg":
            return sum(values) / len(values)
        return min(values) if self.fold == "min" else max(values)

    def promql(self, dialect: Dialect) -> str | None:
        series = dialect.series(self.metric, where=self.where)
        return dialect.sum(f"{self.fold}_over_time({series}[{dialect.range}])")

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class Slope:
    """A gauge's change per second by least squares over the window: deriv()."""

    metric: str
    where: Where = ()

    def value(self, window: Window) -> float | None:
        each = map(least_squares_slope, window.gauge_points(self.metric, self.where))
        slopes = [slope for slope in each if slope is not None]
        return sum(slopes) if slopes else None

    def promql(self, dialect: Dialect) -> str | None:
        series = dialect.series(self.metric, where=self.where)
        return dialect.sum(f"deriv({series}[{dialect.range}])")

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class Rate:
    """Per-second increase of a counter over the window, resets counted as Prometheus does."""

    metric: str
    where: Where = ()
    suffix: str = "_total"

    def value(self, window: Window) -> float | None:
        return window.rate(self.metric, self.where)

    def promql(self, dialect: Dialect) -> str | None:
        series = dialect.series(self.metric, self.suffix, self.where)
        return dialect.sum(f"rate({series}[{dialect.range}])")

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class PartRate:
    """Per-second increase of a histogram's `sum` or `count`."""

    metric: str
    part: str

    def value(self, window: Window) -> float | None:
        return window.part_rate(self.metric, self.part)

    def promql(self, dialect: Dialect) -> str | None:
        return dialect.sum(f"rate({dialect.series(self.metric, '_' + self.part)}[{dialect.range}])")

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One expression over another, times `scale`; no value where the denominator is not
    positive."""

    over: Expr
    under: Expr
    scale: float = 1.0

    def value(self, window: Window) -> float | None:
        under = self.under.value(window)
        if under is None or not under > 0:
            return None
        over = self.over.value(window)
        return None if over is None else self.scale * over / under

    def promql(self, dialect: Dialect) -> str | None:
        over, under = self.over.promql(dialect), self.under.promql(dialect)
        if over is None or under is None:
            return None
        quotient = f"({over}) / (({under}) > 0)"
        return quotient if self.scale == 1 else f"{self.scale!r} * {quotient}"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return (*self.over.lacking(has), *self.under.lacking(has))


@dataclass(frozen=True, slots=True)
class Complement:
    """One minus a ratio."""

    of: Expr

    def value(self, window: Window) -> float | None:
        of = self.of.value(window)
        return None if of is None else 1 - of

    def promql(self, dialect: Dialect) -> str | None:
        of = self.of.promql(dialect)
        return None if of is None else f"1 - ({of})"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return self.of.lacking(has)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An expression times a constant."""

    of: Expr
    scale: float

    def value(self, window: Window) -> float | None:
        of = self.of.value(window)
        return None if of is None else self.scale * of

    def promql(self, dialect: Dialect) -> str | None:
        of = self.of.promql(dialect)
        return None if of is None else f"{self.scale!r} * ({of})"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return self.of.lacking(has)


@dataclass(frozen=True, slots=True)
class FirstOf:
    """The first of several expressions that has a value (PromQL `or`)."""

    options: tuple[Expr, ...]

    def value(self, window: Window) -> float | None:
        for option in self.options:
            value = option.value(window)
            if value is not None:
                return value
        return None

    def promql(self, dialect: Dialect) -> str | None:
        parts = [part for option in self.options if (part := option.promql(dialect)) is not None]
        return " or ".join(f"({part})" for part in parts) or None

    def lacking(self, has: Has) -> tuple[str, ...]:
        options = [option.lacking(has) for option in self.options]
        return () if () in options else options[0]


@dataclass(frozen=True, slots=True)
class Quantile:
    """A histogram's q-quantile over the window: histogram_quantile of the bucket rates."""

    metric: str
    q: float

    def value(self, window: Window) -> float | None:
        buckets = window.buckets(self.metric)
        return None if buckets is None else buckets.quantile(self.q)

    def promql(self, dialect: Dialect) -> str | None:
        rate = f"rate({dialect.series(self.metric, '_bucket')}[{dialect.range}])"
        # `>= 0` drops the NaN that an empty histogram gives: no observation is no value.
        return f"histogram_quantile({self.q}, {dialect.sum(rate, 'le')}) >= 0"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class ShareAtMost:
    """Share of a histogram's observations up to a bucket bound."""

    metric: str
    bound: float

    def value(self, window: Window) -> float | None:
        buckets = window.buckets(self.metric)
        return None if buckets is None else buckets.share_at_most(self.bound)

    def promql(self, dialect: Dialect) -> str | None:
        below = dialect.series(self.metric, "_bucket", extra=bound_matcher(self.bound))
        count = dialect.series(self.metric, "_count")
        total = dialect.sum(f"rate({count}[{dialect.range}])")
        return f"{dialect.sum(f'rate({below}[{dialect.range}])')} / ({total} > 0)"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class InfoNumber:
    """A number that a label of an info metric spells."""

    metric: str
    label: str

    def value(self, window: Window) -> float | None:
        labels = window.newest_labels(self.metric)
        try:
            return float(labels[self.label]) if labels else None
        except (KeyError, ValueError):
            return None

    def promql(self, dialect: Dialect) -> str | None:
        del dialect
        return None

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class InfoNames:
    """How many comma-separated names a label of an info metric's current series holds."""

    metric: str
    label: str

    def value(self, window: Window) -> float | None:
        labels = window.newest_labels(self.metric)
        if labels is None or self.label not in labels:
            return None
        return float(sum(1 for name in labels[self.label].split(",") if name.strip()))

    def promql(self, dialect: Dialect) -> str | None:
        del dialect
        return None

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class InfoChanges:
    """Changes per second of an info metric whose value is the time it was last current."""

    metric: str

    def value(self, window: Window) -> float | None:
        recent = window.recent_series(self.metric)
        return None if recent is None else recent / window.range_s

    def promql(self, dialect: Dialect) -> str | None:
        series, range_s = dialect.series(self.metric), round(dialect.range_s, 3)
        # With `bool`, old series alone are no change; without, they would be no value.
        return f"sum by (instance) ({series} > bool (time() - {range_s!r})) / {range_s!r}"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


@dataclass(frozen=True, slots=True)
class Product:
    """Two expressions multiplied; unknown where either is."""

    left: Expr
    right: Expr

    def value(self, window: Window) -> float | None:
        left, right = self.left.value(window), self.right.value(window)
        return None if left is None or right is None else left * right

    def promql(self, dialect: Dialect) -> str | None:
        left, right = self.left.promql(dialect), self.right.promql(dialect)
        return None if left is None or right is None else f"({left}) * ({right})"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return (*self.left.lacking(has), *self.right.lacking(has))


@dataclass(frozen=True, slots=True)
class Sum:
    """Expressions added; unknown where one is."""

    parts: tuple[Expr, ...]

    def value(self, window: Window) -> float | None:
        total = 0.0
        for part in self.parts:
            value = part.value(window)
            if value is None:
                return None
            total += value
        return total

    def promql(self, dialect: Dialect) -> str | None:
        parts = [part.promql(dialect) for part in self.parts]
        return None if None in parts else " + ".join(f"({part})" for part in parts)

    def lacking(self, has: Has) -> tuple[str, ...]:
        return tuple(metric for part in self.parts for metric in part.lacking(has))


@dataclass(frozen=True, slots=True)
class Difference:
    """One expression less another, not below zero."""

    left: Expr
    right: Expr

    def value(self, window: Window) -> float | None:
        left, right = self.left.value(window), self.right.value(window)
        return None if left is None or right is None else max(0.0, left - right)

    def promql(self, dialect: Dialect) -> str | None:
        left, right = self.left.promql(dialect), self.right.promql(dialect)
        return None if left is None or right is None else f"clamp_min(({left}) - ({right}), 0)"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return (*self.left.lacking(has), *self.right.lacking(has))


@dataclass(frozen=True, slots=True)
class Positive:
    """An expression where it is above zero; zero means that the server does not measure it."""

    of: Expr

    def value(self, window: Window) -> float | None:
        of = self.of.value(window)
        return of if of is not None and of > 0 else None

    def promql(self, dialect: Dialect) -> str | None:
        of = self.of.promql(dialect)
        return None if of is None else f"({of}) > 0"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return self.of.lacking(has)


def least_squares_slope(points: list[tuple[float, float]]) -> float | None:
    """Slope per second of (time, value) points; None with fewer than two."""
    if len(points) < 2:
        return None
    start_s, level = points[0]
    values = [value for _, value in points]
    if values.count(level) == len(values):
        return 0.0
    times_s = [round(t_s - start_s, 3) for t_s, _ in points]
    mean_s, mean = sum(times_s) / len(times_s), sum(values) / len(values)
    steps_s = [t_s - mean_s for t_s in times_s]
    covariance = sum(map(mul, steps_s, [value - mean for value in values]))
    variance = sum(map(mul, steps_s, steps_s))
    return covariance / variance if variance > 0 else None


@dataclass(frozen=True, slots=True)
class SlowTimeShare:
    """Least share of a histogram's total time that went into observations above the first edge.

    Each observation between two edges counts with the lower one, so the share is a lower bound.
    `edges` must be bucket bounds, ascending; one that the histogram lacks adds nothing.
    """

    metric: str
    edges: tuple[float, ...]

    def value(self, window: Window) -> float | None:
        buckets, total_s = window.buckets(self.metric), window.part_rate(self.metric, "sum")
        if buckets is None or total_s is None or not total_s > 0:
            return None
        above = ((weight, buckets.above_per_s(edge)) for weight, edge in self._weights())
        return sum(weight * (per_s or 0.0) for weight, per_s in above) / total_s

    def promql(self, dialect: Dialect) -> str | None:
        count = PartRate(self.metric, "count").promql(dialect)
        total_s = PartRate(self.metric, "sum").promql(dialect)
        terms = [
            f"{weight!r} * clamp_min({count} - ({self._at_most(dialect, edge)} or {count}), 0)"
            for weight, edge in self._weights()
        ]
        return f"({' + '.join(terms)}) / (({total_s}) > 0)"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)

    def _weights(self) -> list[tuple[float, float]]:
        steps = zip(self.edges, (0.0, *self.edges), strict=False)
        return [(edge - before, edge) for edge, before in steps]

    def _at_most(self, dialect: Dialect, edge: float) -> str:
        bucket = dialect.series(self.metric, "_bucket", extra=bound_matcher(edge))
        return dialect.sum(f"rate({bucket}[{dialect.range}])")


@dataclass(frozen=True, slots=True)
class AboveRate:
    """Observations per second of a histogram above a bucket bound."""

    metric: str
    bound: float

    def value(self, window: Window) -> float | None:
        buckets = window.buckets(self.metric)
        return None if buckets is None else buckets.above_per_s(self.bound)

    def promql(self, dialect: Dialect) -> str | None:
        count = PartRate(self.metric, "count").promql(dialect)
        bucket = dialect.series(self.metric, "_bucket", extra=bound_matcher(self.bound))
        at_most = dialect.sum(f"rate({bucket}[{dialect.range}])")
        # Extrapolation may give a bucket a little more than the count.
        return f"clamp_min({count} - {at_most}, 0)"

    def lacking(self, has: Has) -> tuple[str, ...]:
        return () if has(self.metric) else (self.metric,)


def bound_matcher(bound: float) -> str:
    """A label matcher for one bucket, which client libraries write as 1 or as 1.0."""
    spellings = dict.fromkeys((f"{bound:g}", repr(float(bound))))
    return 'le=~"' + "|".join(spelling.replace(".", "\\\\.") for spelling in spellings) + '"'
