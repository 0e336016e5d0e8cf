"""Questions about routers, as expressions over their pages or compiled to PromQL. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import product

from msgspec import Struct, field

from kneewatch.collector.engines.engine_kind import EngineKind, OwnMetric, Source
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.collector.page import Layout
from kneewatch.collector.scrape_history import Columns, History, Where
from kneewatch.collector.signals.expr import Expr
from kneewatch.collector.signals.promql import Dialect, promql
from kneewatch.collector.signals.table import expression
from kneewatch.collector.window import Window

PICKS_S, QUEUED_S, UNREADY_S = 300.0, 60.0, 120.0

MOST_OF = 0.9
"""Share of a time that must have been watched; the first and last scrape are slightly off."""

NAMED = "router"
"""Label in query results: the row of ROUTERS that a result belongs to."""

OF = "kneewatch_of"
"""Label of a value of `own` and `reuse`: the router's own name of the metric."""

ENDPOINT = "engine"
"""Canonical label that names an endpoint."""

PLACE = ("cluster", "namespace")

PARTS = ("_sum", "_count")
GAUGES = ("ready", "queue", "running", "health", "breaker", "stale", "saturation", "picks_per_s")
COUNTERS = ("errors", "picks", "rejected", "reuse", *map("".join, product(("own", "ttft"), PARTS)))
QUANTITIES = {
    f"router_{name}": OwnMetric("gauge" if name in GAUGES else "counter", "", "", (ENDPOINT,))
    for name in (*GAUGES, *COUNTERS)
}


NO_LABELS: Sequence[dict[str, str]] = ({},)


class Question(Struct, frozen=True):
    """What is asked about a router. The head of routers.toml explains the fields."""

    expr: str
    seconds: float
    apart: str = ""
    holds: bool = False
    minutes: int = 1


class Router(Struct, frozen=True, dict=True):
    """A router. The head of routers.toml explains the fields."""

    title: str
    prefixes: tuple[str, ...] = ()
    older_than: str = ""
    endpoint: str = "worker"
    metrics: dict[str, str] = field(default_factory=dict[str, str])
    own: dict[str, float] = field(default_factory=dict[str, float])
    reuse: tuple[str, ...] = ()
    where: dict[str, list[dict[str, str]]] = field(default_factory=dict[str, list[dict[str, str]]])
    levers: dict[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def kind(self) -> EngineKind:
        """The router's metrics, each with the canonical one that it is."""
        return EngineKind(
            self.title,
            sources=tuple(self._sources()),
            quantities=QUANTITIES,
            engine_label=self.endpoint,
        )

    def _sources(self) -> Iterator[Source]:
        rows = [(key, name) for key, name in self.metrics.items() if key != "ttft"]
        rows += [("reuse", name) for name in self.reuse]
        means = [("own", name) for name in self.own]
        means += [("ttft", self.metrics[key]) for key in self.metrics if key == "ttft"]
        for (key, name), part in (*product(rows, ("",)), *product(means, PARTS)):
            labels = {OF: name} if key in ("own", "reuse") else {}
            for where in self.where.get(name, NO_LABELS):
                yield Source(name + part, f"router_{key}{part}", where, labels)

    @cached_property
    def asks(self) -> Mapping[str, tuple[str, ...]]:
        """The questions that it answers, each with the values of OF."""
        metrics = {source.metric for source in self.kind.sources}
        several = {"own": tuple(self.own), "reuse": self.reuse}
        return {
            key: several.get(key, ("",))
            for key in QUESTIONS
            if not asked(key).lacking(metrics.__contains__)
        }


_TABLES = packaged_tables("collector.signals", "routers.toml")
QUESTIONS = read_as(_TABLES["questions"], dict[str, Question])
ROUTERS = read_as(_TABLES["routers"], tuple[Router, ...])
"""The routers whose metrics are read."""


@lru_cache(maxsize=4096)
def asked(key: str, of: str = "", where: Where = ()) -> Expr:
    """The expression of a question, for one of a router's metrics and for series with some
    labels."""
    return expression(QUESTIONS[key].expr, {}, ((OF, of), *where) if of else where)


@cache
def router_queries() -> Mapping[str, str]:
    """A query for each question about routers; every query covers the metrics of all known
    routers."""
    return {
        f"router_{key}": " or ".join(
            f'label_replace({query}, "{NAMED}", "{at}", "", "")'
            for at, router in enumerate(ROUTERS)
            for query in _queries(router, key)
        )
        for key in QUESTIONS
    }


def _queries(router: Router, key: str) -> Iterator[str]:
    """The queries for one question about one router, by cluster and namespace. A label of each
    sample names the metric if there are several."""
    question = QUESTIONS[key]
    by = (*PLACE, question.apart) if question.apart else PLACE
    dialect = Dialect(question.seconds, by, prefix="", kind=router.kind)
    for of in router.asks.get(key, ()):
        query = promql(asked(key, of), dialect)
        if question.minutes > 1:
            query = f"min_over_time(({query})[{question.minutes}m:1m])"
        yield f'label_replace({query}, "{OF}", "{of}", "", "")' if of else f"({query})"


def router_of(layout: Layout) -> Router | None:
    """The router whose page this is; None if it is none that is read."""
    names = {series.name for series in layout.series}
    return next(
        (each for each in ROUTERS if any(name.startswith(each.prefixes) for name in names)), None
    )


Answers = Mapping[str, Mapping[tuple[str, str], float]]
"""Values by question, each by what keeps it apart and the value of OF."""


def answers_of(router: Router, history: History, now_s: float, scale: float) -> Answers:
    """The answers of a router's pages. A condition must have been watched for its time."""
    columns, watched_s = history.columns, now_s - history.first_s
    values: dict[str, dict[tuple[str, str], float]] = {}
    for key, several in router.asks.items():
        question = QUESTIONS[key]
        if question.holds and watched_s < MOST_OF * QUEUED_S * scale:
            continue
        range_s = question.seconds * (scale if question.holds else 1.0)
        windows = [
            Window(history, now_s=now_s - 60.0 * minute, range_s=range_s, few=True)
            for minute in range(question.minutes)
        ]
        for name, of in product(_values_of(columns, question.apart), several):
            bound = asked(key, of, ((question.apart, name),) if name else ()).bind(columns)
            of_windows = [value for each in windows if (value := bound(each)) is not None]
            if len(of_windows) == len(windows):
                values.setdefault(key, {})[name, of] = min(of_windows)
    return values


def _values_of(columns: Columns, label: str) -> Sequence[str]:
    """The values of a label on any series; "" alone if there is no label."""
    if not label:
        return ("",)
    labels = (dict(each.labels) for each in (*columns.counters.names, *columns.gauges.names))
    return sorted({each[label] for each in labels if label in each})
