"""Signal expressions in PromQL, with the meaning that they have on a window. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct, field

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, kind_of
from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.expr import (
    COUNT,
    SUM,
    AboveRate,
    Arithmetic,
    Beside,
    Count,
    Expr,
    FirstValue,
    Gauge,
    InfoChanges,
    OverTime,
    Quantile,
    Rate,
    ShareAtMost,
    Slope,
    SlowTimeShare,
    edge_weights,
)

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
        """The window as a PromQL duration."""
        return duration(self.range_s)

    def sum(self, inner: str, *more: str, fold: str = "sum") -> str:
        """The PromQL `sum by (engine labels and more) (inner)`. Ranks that repeat values count
        once."""
        kind, by = self.program, (*self.by, *more)
        if kind.ranks:
            inner = f"max without ({', '.join(kind.ranks)}) ({inner})"
        if kind.engine_label and "engine" in by:
            inner = f'label_replace({inner}, "engine", "$1", "{kind.engine_label}", "(.+)")'
        return f"{fold} by ({', '.join(by)}) ({inner})"


def promql(expr: Expr, dialect: Dialect) -> str | None:
    """An expression in PromQL; None if PromQL cannot express it: it cannot read a number inside a
    label, leave out parts without a value, or know whether a page has one engine.

    Raises:
        NoSeriesError: no series of this kind of engine is a metric of it.
    """
    match expr:
        case Gauge(metric, where, fold):
            return _aggregated("{}", metric, where, fold, dialect)
        case OverTime(metric, fold, where, across):
            words = f"{fold}_over_time({{}}[{dialect.range}])"
            return _aggregated(words, metric, where, across, dialect)
        case Slope(metric, where):
            return dialect.folded(f"deriv({{}}[{dialect.range}])", metric, where=where)
        case Count(metric, where, suffix):
            return dialect.folded("{}", metric, suffix, where)
        case Rate(metric, where, suffix):
            return dialect.folded(f"rate({{}}[{dialect.range}])", metric, suffix, where)
        case Arithmetic(operands, _, words):
            parts = [promql(operand, dialect) for operand in operands]
            return None if None in parts else words.format(*parts)
        case FirstValue(options):
            known = [part for option in options if (part := _known(option, dialect)) is not None]
            joined = " or ".join(f"({part})" for part in known) or None
            return known[0] if len(known) == 1 else joined
        case Beside(of):
            return promql(of, dialect)
        case Quantile(metric, q):
            rate = f"rate({dialect.series(metric, '_bucket')}[{dialect.range}])"
            # `>= 0` drops the NaN that an empty histogram gives: no observation is no value.
            return f"histogram_quantile({q}, {dialect.sum(rate, 'le')}) >= 0"
        case ShareAtMost(metric, bound):
            below = dialect.at_most(metric, dialect.within(metric, bound))
            total = dialect.sum(f"rate({dialect.series(metric, '_count')}[{dialect.range}])")
            return f"{below} / ({total} > 0)"
        case InfoChanges(metric):
            series, range_s = dialect.series(metric), round(dialect.range_s, 3)
            # With `bool`, old series alone are no change; without, they would be no value.
            by = ", ".join(label for label in dialect.by if label not in ENGINE_LABELS)
            return f"sum by ({by}) ({series} > bool (time() - {range_s!r})) / {range_s!r}"
        case SlowTimeShare(metric, edges):
            return _slow_time_share(metric, edges, dialect)
        case AboveRate(metric, bound):
            count = promql(Rate(metric, suffix=COUNT), dialect)
            at_most = dialect.at_most(metric, dialect.edges(metric, (bound,))[0])
            # Extrapolation may give a bucket a little more than the count.
            return f"clamp_min({count} - {at_most}, 0)"
        case _:
            return None


def _aggregated(words: str, metric: str, where: Where, fold: str, dialect: Dialect) -> str:
    if fold == "sum":
        return dialect.folded(words, metric, where=where)
    return dialect.sum(words.format(dialect.series(metric, where=where)), fold=fold)


def _known(option: Expr, dialect: Dialect) -> str | None:
    with suppress(NoSeriesError):
        return promql(option, dialect)
    return None


def _slow_time_share(metric: str, edges: Sequence[float], dialect: Dialect) -> str:
    count = promql(Rate(metric, suffix=COUNT), dialect)
    total_s = promql(Rate(metric, suffix=SUM), dialect)
    terms = [
        f"{weight!r} * clamp_min({count} - ({dialect.at_most(metric, edge)} or {count}), 0)"
        for weight, edge in edge_weights(dialect.edges(metric, edges))
    ]
    return f"({' + '.join(terms)}) / (({total_s}) > 0)"


def bound_matcher(bound: float) -> str:
    """A label matcher for one bucket: client libraries write its bound as 1 or as 1.0."""
    return any_of("le", (f"{bound:g}", repr(float(bound))))


def any_of(label: str, values: Iterable[str]) -> str:
    """A matcher for any of several label values."""
    return f'{label}=~"{quoted("|".join(map(re.escape, dict.fromkeys(values))))}"'


def quoted(value: str) -> str:
    """A text, escaped for PromQL's double quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """A number in PromQL syntax."""
    return f"{value:.12g}"


def duration(seconds: float) -> str:
    """A PromQL duration in whole milliseconds."""
    millis = max(1, round(1000 * seconds))
    return f"{millis // 1000}s" if millis % 1000 == 0 else f"{millis}ms"


SCRAPES_PER_RANGE = 4
"""Scrapes that a counter's range must cover. A rate needs two, and scrapes can fail or be late."""


def range_s(least_s: float, scrape_s: float) -> float:
    """Length in seconds of a range over scraped counters: at least `least_s` and at least four
    scrapes."""
    return max(least_s, SCRAPES_PER_RANGE * scrape_s)
