"""Faults of routers: no endpoint, stale data, a queue before idle engines, uneven picks. Pure.

A router is matched with engines by cluster and namespace, because none of a router's own labels
names vLLM's model; where there are none, by the addresses of its workers. Of a router's page alone,
its engines are unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from msgspec import Struct, convert, field

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.engine import Engine
from kneewatch.diagnose.fleet.inventory import Labels
from kneewatch.diagnose.fleet.routing import COMPUTED_MORE, FALLEN_BY, computed_more
from kneewatch.diagnose.fleet.tier import FleetCause, closed
from kneewatch.rules.facts import duration
from kneewatch.rules.formatting import duration as latency
from kneewatch.rules.formatting import percent, span
from kneewatch.rules.rule import Severity

UNREADY_S, QUEUED_S, PICKS_S, TTFT_OVER_S = 120.0, 60.0, 300.0, 120.0

QUEUED_MIN = 2.0
"""Requests that a router holds throughout a minute; a single one may be in transit at each
scrape."""

REJECTED_MIN = 5.0
"""Requests that a router rejects within five minutes; fewer may come from one client's deadline."""

OWN_S, OWN_MIN = 0.1, 20.0
"""Mean seconds that a step of the router itself may take, over at least so many within five
minutes. Users see them in each first token."""

TTFT_MORE, TTFT_MORE_S = 2.0, 1.0
"""First tokens wait before the engines if the router measures a mean TTFT of this multiple of the
engines', and so many seconds more."""

REUSE_TOKENS = 100_000.0
"""Fewer prompt tokens within five minutes do not show whether reuse is lost."""

IDLE_KV = 0.5
"""An engine can take more requests below this KV usage if it has no queue.

The routers' own limits are 0.8 and a queue of five.
"""

PICKS_MIN, PICKED_MORE = 100.0, 3.0
"""Thresholds for uneven picks.

PICKS_MIN: least picks in five minutes for a comparison. PICKED_MORE: an endpoint is picked unevenly
from this multiple of the median on.
"""


class Router(Struct, frozen=True):
    """The metric names of a router; empty for metrics that it lacks.

    - `prefixes`: a page with a name that begins with one of them is this router's.
    - `older_than`: the router that has the same metrics under newer names; it takes precedence.
    - `ready`: gauge of the endpoints that may be picked.
    - `queue`: gauge of the requests that the router holds.
    - `running`: gauge of the requests that it has sent to engines.
    - `errors`: counter of failed reads of endpoints' metrics.
    - `picks`: counter of requests sent to an endpoint; already a rate if `rate`.
    - `endpoint`: the label of `picks`, `health` and `breaker` that names the endpoint.
    - `health`: gauge of an endpoint's health check: 0 has failed.
    - `breaker`: gauge of an endpoint's circuit breaker: 0 is closed.
    - `stale`: gauge of endpoints whose metrics are too old. `saturation`: gauge of the pool, 1.0
      exactly if the router assumes so for lack of fresh metrics.
    - `rejected`: counter of requests that no engine got.
    - `own`: histograms of the router's own work, with the seconds of their unit.
    - `ttft`: histogram of seconds to the first token, as clients see it.
    - `reuse`: counters of prompt tokens: all, those cached on the best worker, on the picked one,
      and those that it reused.
    - `levers`: what to do first about a fault, by question.
    """

    title: str
    prefixes: tuple[str, ...] = ()
    older_than: str = ""
    ready: str = ""
    queue: str = ""
    running: str = ""
    errors: str = ""
    picks: str = ""
    endpoint: str = "worker"
    rate: bool = False
    health: str = ""
    breaker: str = ""
    stale: str = ""
    saturation: str = ""
    rejected: str = ""
    own: dict[str, float] = field(default_factory=dict[str, float])
    ttft: str = ""
    reuse: tuple[str, ...] = ()
    levers: dict[str, str] = field(default_factory=dict[str, str])


ROUTERS = tuple(
    convert(row, Router) for row in packaged_tables("diagnose.fleet", "routers.toml")["routers"]
)
"""The routers whose metrics are read."""

GAUGES = ("ready", "queue", "errors", "stale", "rejected", "ttft")
BY_NAME = ("picks", "health", "breaker", "own")
"""Questions with a value for each endpoint or histogram."""

QUESTIONS = (*GAUGES, *BY_NAME, "reuse")
NAMED = "router"
"""Label in query results: the row of ROUTERS that a result belongs to."""

OF = "kneewatch_of"
"""Label in query results: the metric of a value of `own` and `reuse`."""

PLACE = ("cluster", "namespace")


class Asked(Struct, frozen=True):
    """How a metric answers a question: each of its series over the last seconds, then all series,
    or those of each endpoint (`apart`). Evaluated on a router's pages, and compiled to PromQL."""

    over: Literal["min", "max", "avg", "increase"]
    seconds: float
    fold: Literal["sum", "min", "max"] = "sum"
    apart: bool = False

    def promql(self, metric: str, apart_by: str) -> str:
        """The query, by cluster and namespace, and by a label if series are kept apart."""
        labels = ", ".join((*PLACE, *([apart_by] if self.apart else [])))
        words = "increase" if self.over == "increase" else f"{self.over}_over_time"
        query = f"{words}({metric}[{duration(self.seconds)}])"
        query = f"{query} * {self.seconds:g}" if self.over == "avg" else query
        return f"{self.fold} by ({labels}) ({query})"


ASKED = {
    "ready": Asked("max", UNREADY_S),
    "queue": Asked("min", QUEUED_S),
    "stale": Asked("min", QUEUED_S),
    "rejected": Asked("increase", PICKS_S),
    "picks": Asked("increase", PICKS_S, apart=True),
    "health": Asked("max", QUEUED_S, "max", apart=True),
    "breaker": Asked("min", QUEUED_S, "min", apart=True),  # not closed in the whole minute
}
"""Questions about one metric."""

RATED = Asked("avg", PICKS_S, apart=True)
"""`picks` of a router whose metric is a rate already."""

PINNED = (Asked("min", QUEUED_S, "min"), Asked("max", QUEUED_S, "max"))
"""Both are exactly 1 while the router assumes a saturated pool for lack of fresh metrics."""

REUSED = Asked("increase", PICKS_S, apart=True)
"""A counter of `reuse`, by model."""


def router_queries() -> dict[str, str]:
    """A query for each question about routers; every query covers the metrics of all known
    routers."""
    return {
        f"router_{question}": " or ".join(
            f'label_replace({query}, "{NAMED}", "{at}", "", "")'
            for at, router in enumerate(ROUTERS)
            if (query := router_query(router, question))
        )
        for question in QUESTIONS
    }


def router_query(router: Router, question: str) -> str:
    """The query for one question about one router, by cluster and namespace.

    Empty if the router has no metric for it.
    """
    metric = getattr(router, question)
    if not metric:
        return ""
    place = ", ".join(PLACE)
    if question in ASKED:
        picks = question == "picks" and router.rate
        query = (RATED if picks else ASKED[question]).promql(metric, router.endpoint)
        if question == "breaker":
            return f"{query} > 0"
        exactly = [f"({each.promql(router.saturation, '')} == 1)" for each in PINNED]
        return (
            f" and on ({place}) ".join([f"({query})", *exactly]) if question == "stale" else query
        )
    match question:
        case "errors":
            # Errors in each of the last minutes: a pod that starts or ends fails for seconds.
            steps = f"[{duration(PICKS_S)}:{duration(60.0)}]"
            return f"min_over_time(sum by ({place}) (increase({metric}[2m])){steps})"
        case "own":
            return _each(
                (name, f"{scale:g} * {_mean(name, PICKS_S, OWN_MIN)}")
                for name, scale in router.own.items()
            )
        case "ttft":
            return _mean(metric, TTFT_OVER_S, 1.0)
        case _:
            return _each((name, REUSED.promql(name, "model")) for name in router.reuse)


def parts_of(histogram: str) -> tuple[str, str]:
    """The series of a histogram's sum and count, with its matchers."""
    name, brace, matchers = histogram.partition("{")
    return f"{name}_sum{brace}{matchers}", f"{name}_count{brace}{matchers}"


def _mean(histogram: str, over_s: float, least: float) -> str:
    """A histogram's mean over some seconds, of at least so many observations."""
    gained = Asked("increase", over_s)
    total, count = (gained.promql(part, "") for part in parts_of(histogram))
    return f"({total} / ({count} >= {least:g}))"


def _each(queries: Iterable[tuple[str, str]]) -> str:
    """One query for several metrics; a label of each sample names the metric."""
    return " or ".join(
        f'label_replace({query}, "{OF}", "{name.partition("{")[0]}", "", "")'
        for name, query in queries
    )


Answers = Mapping[str, Sequence[tuple[Labels, float]]]
"""Query results by question: labels and values."""

NO_VALUES: Mapping[str, float] = {}


class RouterState(Struct, frozen=True):
    """The state of one router; None for metrics that it lacks.

    `watched_s`: how long it was watched. `picks`: requests within five minutes, by endpoint.
    `health`: 0 for endpoints that fail its health checks. `breaker`: endpoints that it has taken
    out. `own`: mean seconds of its own steps. `reuse`: prompt tokens within five minutes, by
    model and counter.
    """

    router: Router
    place: tuple[str, ...] = ("", "")
    watched_s: float = PICKS_S
    ready: float | None = None
    queue: float | None = None
    errors: float | None = None
    stale: float | None = None
    rejected: float | None = None
    ttft: float | None = None
    picks: Mapping[str, float] = NO_VALUES
    health: Mapping[str, float] = NO_VALUES
    breaker: Mapping[str, float] = NO_VALUES
    own: Mapping[str, float] = NO_VALUES
    reuse: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def over(self, seconds: float) -> str:
        """The time for which a condition was watched, in words."""
        return span(min(seconds, self.watched_s))

    @property
    def workers(self) -> Mapping[str, float]:
        """How often each endpoint was picked, also those that it never picked."""
        return {**dict.fromkeys((*self.health, *self.breaker), 0.0), **self.picks}


def routers_of(answers: Answers) -> tuple[RouterState, ...]:
    """The routers that the query results contain, by cluster and namespace."""
    states: dict[tuple[tuple[str, ...], str], RouterState] = {}
    for at, router in enumerate(ROUTERS):
        of_router = {
            question: [
                (tuple(labels.get(name, "") for name in PLACE), labels, value)
                for labels, value in answers.get(f"router_{question}", ())
                if labels.get(NAMED) == str(at) and value == value
            ]
            for question in QUESTIONS
        }
        for place in sorted({row[0] for rows in of_router.values() for row in rows}):
            own = {
                question: [(labels, value) for there, labels, value in rows if there == place]
                for question, rows in of_router.items()
            }
            answered: dict[str, Any] = {
                key: rows[0][1] if (rows := own[key]) else None for key in GAUGES
            }
            for key in BY_NAME:
                answered[key] = {
                    labels.get(OF) or labels.get(router.endpoint, ""): value
                    for labels, value in own[key]
                }
            reuse: dict[str, dict[str, float]] = {}
            for labels, value in own["reuse"]:
                reuse.setdefault(labels.get("model", ""), {})[labels[OF]] = value
            if (place, router.older_than) not in states:
                states[place, router.title] = RouterState(router, place, reuse=reuse, **answered)
    return tuple(states.values())


def router_faults(routers: Sequence[RouterState], engines: Sequence[Engine]) -> list[FleetCause]:
    """A cause for each pool whose router does not use the pool's engines as it could."""
    causes: list[FleetCause] = []
    for state in routers:
        here = [e for e in engines if _place(e) == state.place] or [
            e for e in engines if _is_among(state.workers, e)
        ]
        for pool in sorted({engine.member.pool for engine in here}):
            own = [engine for engine in here if engine.member.pool == pool]
            fault = _fault(state, Behind(here, own))
            cause = None if fault is None else closed(fault[0], pool, "", fault[1])
            causes += [] if cause is None else [cause]
    return causes


def _place(engine: Engine) -> tuple[str, ...]:
    return tuple(engine.member.labels.get(name, "") for name in PLACE)


class Behind(Struct, frozen=True):
    """The engines behind a router: all, and those of one pool. Without any, they are unknown."""

    here: Sequence[Engine] = ()
    own: Sequence[Engine] = ()


def _while_idle(behind: Behind) -> str:
    """What is known about the engines, to follow a fault."""
    if not behind.here:
        return ""
    return f", while no engine has a queue and KV usage is below {percent(IDLE_KV)}"


Fault = tuple[Case, Sequence[Engine]]


def fault_of(state: RouterState) -> Cause | None:
    """The worst fault of a router that its page alone shows."""
    fault = _fault(state, Behind())
    return None if fault is None else fault[0].close()


def _fault(state: RouterState, behind: Behind) -> Fault | None:
    """The worst fault of a router that affects a pool."""
    examined = (_unready, _taken_out, _holding, _uneven, _blind, _slow, _late, _losing_reuse)
    return next((fault for examine in examined if (fault := examine(state, behind))), None)


def _unready(state: RouterState, behind: Behind) -> Fault | None:
    if state.ready != 0 or any(engine.get("arrival_per_s") for engine in behind.here):
        return None
    engines = f", while {len(behind.own)} engines can be scraped" if behind.own else ""
    return _case(
        behind.own, Severity.CRITICAL, "router_ready", 0.0, 1.0,
        f"{state.router.title} has had no ready endpoint for {state.over(UNREADY_S)}{engines}",
        "Check the selector and target port of the InferencePool or the router's service "
        "discovery, and the readiness of the pods.",
    )  # fmt: skip


def _taken_out(state: RouterState, behind: Behind) -> Fault | None:
    """An endpoint that gets nothing although its engine answers scrapes, or may."""
    failing = [name for name, healthy in state.health.items() if not healthy]
    for out, why, question in (
        (failing, "it fails the router's health check", "health"),
        (state.breaker, "its circuit breaker is open", "breaker"),
    ):
        engines = [e for e in behind.own if _is_among(out, e) and e.get("waiting") is not None]
        named = [e.member.name for e in engines] if behind.here else sorted(out)
        if named:
            answers = ", while the engine answers scrapes" if behind.here else ""
            # Of a breaker that is closed a router need not say anything: other workers may serve.
            worst = len(out) == len(state.workers) > 1
            severity = Severity.CRITICAL if worst else Severity.WARNING
            return _case(
                engines, severity, f"router_{question}", float(len(named)), 1.0,
                f"{state.router.title} has sent {', '.join(named)} nothing for "
                f"{state.over(QUEUED_S)}: {why}{answers}",
                state.router.levers.get(question, ""),
            )  # fmt: skip
    return None


def _holding(state: RouterState, behind: Behind) -> Fault | None:
    """Requests that wait or end in the router."""
    title, levers = state.router.title, state.router.levers
    if not _idle(behind.here):
        return None
    if state.stale:
        return _case(
            behind.own, Severity.WARNING, "router_stale", state.stale, 1.0,
            f"{title} holds requests back for metrics that are too old: {state.stale:.0f} "
            f"endpoints are stale and saturation is exactly 1.0{_while_idle(behind)}",
            levers["stale"],
        )  # fmt: skip
    if state.queue is not None and state.queue >= QUEUED_MIN:
        return _case(
            behind.own, Severity.WARNING, "router_queue", state.queue, QUEUED_MIN,
            f"{title} holds {state.queue:.0f} requests{_while_idle(behind)}", levers["queue"],
        )  # fmt: skip
    if state.rejected is not None and state.rejected >= REJECTED_MIN:
        return _case(
            behind.own, Severity.WARNING, "router_rejections", state.rejected, REJECTED_MIN,
            f"{title} rejected {state.rejected:.0f} requests within {state.over(PICKS_S)}"
            f"{_while_idle(behind)}",
            levers["rejected"],
        )  # fmt: skip
    return None


def _uneven(state: RouterState, behind: Behind) -> Fault | None:
    queues = {engine.member.name: engine.get("waiting") or 0.0 for engine in behind.own}
    counts = {
        engine.member.name: count
        for engine in behind.own
        if (count := _picked(state.workers, engine)) is not None
    } if behind.here else dict(state.workers)  # fmt: skip
    if len(counts) < max(2, len(behind.own)) or sum(counts.values()) < PICKS_MIN:
        return None
    name = max(counts, key=lambda each: counts[each])
    others = [each for each in counts if each != name]
    times = counts[name] / max(median(counts[each] for each in others), 1.0)
    waiting = queues.get(name, 0.0)
    only_there = waiting >= 1 and not any(queues[each] for each in others)
    if times < PICKED_MORE or (behind.here and not only_there):
        return None
    queue = f": {waiting:.0f} requests queue there, others have no queue" if behind.here else ""
    return _case(
        # Of a page alone, uneven picks may be those of prefix affinity.
        behind.own, Severity.WARNING if behind.here else Severity.INFO,
        "router_picks", times, PICKED_MORE,
        f"{state.router.title} picks {name} {times:.1f}x as often as the median engine{queue}",
        "Check the weights of the router's scorers (prefix affinity against load), or sticky "
        "sessions.",
    )  # fmt: skip


def _blind(state: RouterState, behind: Behind) -> Fault | None:
    if not state.errors:
        return None
    return _case(
        behind.own, Severity.WARNING, "router_errors", state.errors, None,
        f"{state.router.title} failed to read its endpoints' metrics in each of the last "
        f"{PICKS_S / 60:.0f} minutes: it routes by stale data",
        "Read the router's log: a wrong metrics port or path, a TLS or network policy, or an "
        "endpoint that is gone and still listed.",
    )  # fmt: skip


def _slow(state: RouterState, behind: Behind) -> Fault | None:
    name = max(state.own, key=lambda each: state.own[each], default="")
    if not name or state.own[name] < OWN_S:
        return None
    return _case(
        behind.own, Severity.WARNING, "router_own_s", state.own[name], OWN_S,
        f"{state.router.title} itself is slow: {name.partition('{')[0]} has a mean of "
        f"{latency(state.own[name])}",
        state.router.levers["own"],
    )  # fmt: skip


def _late(state: RouterState, behind: Behind) -> Fault | None:
    """First tokens that clients get later than the engines make them."""
    rows = [(e.get("ttft_mean_s"), e.get("arrival_per_s") or 0.0) for e in behind.here]
    measured = [(ttft_s, rate) for ttft_s, rate in rows if ttft_s is not None]
    total = sum(rate for _, rate in measured)
    if state.ttft is None or len(measured) < len(rows) or not total:
        return None
    engines_s = sum(ttft_s * rate for ttft_s, rate in measured) / total
    more_s = state.ttft - engines_s
    if more_s < TTFT_MORE_S or state.ttft < TTFT_MORE * engines_s:
        return None
    return _case(
        behind.own, Severity.WARNING, "router_ttft_s", more_s, TTFT_MORE_S,
        f"First tokens wait {latency(more_s)} before the engines: their mean TTFT is "
        f"{latency(engines_s)}, {state.router.title} measures {latency(state.ttft)}",
        "Compare the router's queue, its own steps and the network to the engines; scale the "
        "router out if its CPU is busy.",
    )  # fmt: skip


def _losing_reuse(state: RouterState, behind: Behind) -> Fault | None:
    """Prompt tokens of a model that a worker had cached and that were computed again."""
    lost = (_lost_of(model, state, behind) for model in sorted(state.reuse))
    return next((fault for fault in lost if fault is not None), None)


def _lost_of(model: str, state: RouterState, behind: Behind) -> Fault | None:
    tokens = [state.reuse[model].get(name, 0.0) for name in state.router.reuse]
    if tokens[0] < REUSE_TOKENS:
        return None
    best, picked, reused = (min(1.0, each / tokens[0]) for each in tokens[1:])
    # Workers that never report a reused token do not count them.
    is_counted = reused > 0
    kept = reused if is_counted else picked
    more = computed_more(kept, best)
    if best - kept < FALLEN_BY or more < COMPUTED_MORE:
        return None
    which = "routing" if best - picked >= picked - kept else "eviction"
    used = f"{percent(reused)} were reused" if is_counted else "how many were reused is unknown"
    times = f"{'' if is_counted else 'at least '}{more:.1f}x"
    return _case(
        behind.own, Severity.WARNING, "router_reuse", more, COMPUTED_MORE,
        f"{percent(best)} of the prompt tokens{f' of {model}' * bool(model)} were cached on the "
        f"best worker, {percent(picked)} on the picked one, {used}: {times} the "
        "prompt tokens needed are computed",
        state.router.levers[which],
    )  # fmt: skip


def _case(
    engines: Sequence[Engine],
    severity: Severity,
    signal: str,
    value: float,
    threshold: float | None,
    text: str,
    lever: str,
) -> Fault:
    case = Case("router_fault", f"{text}.", lever, ("7.3",), severity, log_odds=0.5)
    case.weigh(signal, value, threshold, 1.5, text, below=signal == "router_ready")
    return case, engines


def _idle(engines: Sequence[Engine]) -> bool:
    """Whether no engine has a queue and each has room for more requests; false if unknown."""
    rows = [(engine.get("waiting"), engine.get("kv_usage_ratio")) for engine in engines]
    return all(waiting == 0 and kv is not None and kv < IDLE_KV for waiting, kv in rows)


def _picked(picks: Mapping[str, float], engine: Engine) -> float | None:
    """How often an engine was picked within five minutes; None if the router does not list it."""
    own = [value for endpoint, value in picks.items() if _names(endpoint, engine)]
    return sum(own) if own else None


def _is_among(endpoints: Collection[str], engine: Engine) -> bool:
    return any(_names(endpoint, engine) for endpoint in endpoints)


def _names(endpoint: str, engine: Engine) -> bool:
    """Whether a router's endpoint is this engine. Routers name endpoints by pod or by address."""
    pod, address = engine.member.labels.get("pod", ""), engine.member.labels.get("instance", "")
    return bool(pod and (endpoint == pod or endpoint.startswith(f"{pod}-rank-"))) or bool(
        address and endpoint.partition("://")[2].rstrip("/") == address
    )
