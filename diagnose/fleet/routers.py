"""Faults of routers: no endpoint, stale data, a queue before idle engines, uneven picks. Pure.

A router is matched with engines by cluster and namespace, because none of a router's own labels
names vLLM's model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from msgspec import Struct, field

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.engine import Engine
from kneewatch.diagnose.fleet.inventory import Labels
from kneewatch.diagnose.fleet.tier import FleetCause, closed
from kneewatch.rules.facts import duration
from kneewatch.rules.formatting import percent
from kneewatch.rules.rule import Severity

UNREADY_S, QUEUED_S, PICKS_S = 120.0, 60.0, 300.0

QUEUED_MIN = 2.0
"""Requests that a router holds throughout a minute; a single one may be in transit at each
scrape."""

REJECTED_MIN = 5.0
"""Requests that a router rejects within five minutes; fewer may come from one client's deadline."""

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

    - `ready`: gauge of the endpoints that may be picked.
    - `queue`: gauge of the requests that the router holds.
    - `errors`: counter of failed reads of endpoints' metrics.
    - `picks`: counter of requests sent to an endpoint; already a rate if `rate`.
    - `endpoint`: the label of `picks` that names the endpoint.
    - `breaker`: gauge of an endpoint's circuit breaker, by the label `worker`: 0 is closed.
    - `stale`: gauge of endpoints whose metrics are too old. `saturation`: gauge of the pool, 1.0
      exactly if the router assumes so for lack of fresh metrics.
    - `rejected`: counter of requests that no engine got.
    - `lever`: what to do about a queue before engines that have room; `levers`: about the others.
    """

    title: str
    ready: str = ""
    queue: str = ""
    errors: str = ""
    picks: str = ""
    endpoint: str = ""
    rate: bool = False
    breaker: str = ""
    stale: str = ""
    saturation: str = ""
    rejected: str = ""
    lever: str = ""
    levers: dict[str, str] = field(default_factory=dict[str, str])


ROUTERS = tuple(
    Router(**row) for row in packaged_tables("diagnose.fleet", "routers.toml")["routers"]
)
"""The routers whose metrics are read. In each namespace, the first row with series is used."""

GAUGES = ("ready", "queue", "errors", "stale", "rejected")
QUESTIONS = (*GAUGES, "picks", "breaker")
NAMED = "router"
"""Label in query results: the row of ROUTERS that a result belongs to."""

PLACE = ("cluster", "namespace")


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
    metric: str = getattr(router, question)
    if not metric:
        return ""
    place = ", ".join(PLACE)
    match question:
        case "ready":
            return f"sum by ({place}) (max_over_time({metric}[{duration(UNREADY_S)}]))"
        case "queue":
            return f"sum by ({place}) (min_over_time({metric}[{duration(QUEUED_S)}]))"
        case "errors":
            # Errors in each of the last minutes: a pod that starts or ends fails for seconds.
            minutes = f"[{duration(PICKS_S)}:{duration(60.0)}]"
            return f"min_over_time(sum by ({place}) (increase({metric}[2m])){minutes})"
        case "breaker":
            # Open or half open in the whole minute.
            return f"min by ({place}, worker) (min_over_time({metric}[{duration(QUEUED_S)}])) > 0"
        case "stale":
            minute = f"[{duration(QUEUED_S)}]"
            exactly = (
                f"{fold} by ({place}) ({fold}_over_time({router.saturation}{minute})) == 1"
                for fold in ("min", "max")
            )
            stale = f"sum by ({place}) (min_over_time({metric}{minute}))"
            return f" and on ({place}) ".join(f"({each})" for each in (stale, *exactly))
        case "rejected":
            return f"sum by ({place}) (increase({metric}[{duration(PICKS_S)}]))"
        case _:
            over = f"avg_over_time({metric}[{duration(PICKS_S)}]) * {PICKS_S:g}"
            picks = over if router.rate else f"increase({metric}[{duration(PICKS_S)}])"
            return f"sum by ({place}, {router.endpoint}) ({picks})"


Answers = Mapping[str, Sequence[tuple[Labels, float]]]
"""Query results by question: labels and values."""


class RouterState(Struct, frozen=True):
    """The state of one router; None for metrics that it lacks.

    `picks`: requests within five minutes, by endpoint. `open_breakers`: endpoints that it has taken
    out.
    """

    router: Router
    place: tuple[str, ...]
    ready: float | None
    queue: float | None
    errors: float | None
    stale: float | None
    rejected: float | None
    picks: Mapping[str, float]
    open_breakers: frozenset[str]


def routers_of(answers: Answers) -> tuple[RouterState, ...]:
    """The routers that the query results contain, one per cluster and namespace."""
    states: dict[tuple[str, ...], RouterState] = {}
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
            gauges = {
                question: rows[0][1] if (rows := own[question]) else None for question in GAUGES
            }
            taken_out = frozenset(labels.get("worker", "") for labels, _ in own["breaker"])
            picks = {labels.get(router.endpoint, ""): value for labels, value in own["picks"]}
            states.setdefault(
                place, RouterState(router, place, **gauges, picks=picks, open_breakers=taken_out)
            )
    return tuple(states.values())


def router_faults(routers: Sequence[RouterState], engines: Sequence[Engine]) -> list[FleetCause]:
    """A cause for each pool whose router does not use the pool's engines as it could."""
    causes: list[FleetCause] = []
    for state in routers:
        here = [e for e in engines if _place(e) == state.place]
        for pool in sorted({engine.member.pool for engine in here}):
            cause = _fault(state, here, pool)
            causes += [] if cause is None else [cause]
    return causes


def _place(engine: Engine) -> tuple[str, ...]:
    return tuple(engine.member.labels.get(name, "") for name in PLACE)


def _fault(state: RouterState, here: Sequence[Engine], pool: str) -> FleetCause | None:
    """The worst fault of a router that affects a pool; `here` are all engines of its namespace."""
    title, own = state.router.title, [e for e in here if e.member.pool == pool]
    hot = _hot(state, own)
    if state.ready == 0 and not any(engine.get("arrival_per_s") for engine in here):
        return _cause(
            pool, own, Severity.CRITICAL, "router_ready", 0.0, 1.0,
            f"{title} has had no ready endpoint for {UNREADY_S / 60:.0f} minutes, while "
            f"{len(own)} engines can be scraped",
            "Check the selector and target port of the InferencePool or the router's service "
            "discovery, and the readiness of the pods.",
        )  # fmt: skip
    taken_out = [
        e for e in own if _is_among(state.open_breakers, e) and e.get("waiting") is not None
    ]
    if taken_out:
        names = ", ".join(engine.member.name for engine in taken_out)
        return _cause(
            pool, taken_out, Severity.WARNING, "router_breakers", float(len(taken_out)), 1.0,
            f"{title} has sent {names} nothing for {QUEUED_S:.0f} s: its circuit breaker is open, "
            "while the engine answers scrapes",
            state.router.levers["breaker"],
        )  # fmt: skip
    if state.stale and _idle(here):
        return _cause(
            pool, own, Severity.WARNING, "router_stale", state.stale, 1.0,
            f"{title} holds requests back for metrics that are too old: {state.stale:.0f} "
            "endpoints are stale and saturation is exactly 1.0, while no engine has a queue and "
            f"KV usage is below {percent(IDLE_KV)}",
            state.router.levers["stale"],
        )  # fmt: skip
    if state.queue is not None and state.queue >= QUEUED_MIN and _idle(here):
        return _cause(
            pool, own, Severity.WARNING, "router_queue", state.queue, QUEUED_MIN,
            f"{title} holds {state.queue:.0f} requests, while no engine has a queue and KV usage "
            f"is below {percent(IDLE_KV)}",
            state.router.lever,
        )  # fmt: skip
    if state.rejected is not None and state.rejected >= REJECTED_MIN and _idle(here):
        return _cause(
            pool, own, Severity.WARNING, "router_rejections", state.rejected, REJECTED_MIN,
            f"{title} rejected {state.rejected:.0f} requests within {PICKS_S / 60:.0f} minutes, "
            f"while no engine has a queue and KV usage is below {percent(IDLE_KV)}",
            state.router.levers["rejected"],
        )  # fmt: skip
    if hot is not None:
        name, times, waiting = hot
        return _cause(
            pool, own, Severity.WARNING, "router_picks", times, PICKED_MORE,
            f"{title} picks {name} {times:.1f}x as often as the median engine: {waiting:.0f} "
            "requests queue there, others have no queue",
            "Check the weights of the router's scorers (prefix affinity against load), or sticky "
            "sessions.",
        )  # fmt: skip
    if state.errors is not None and state.errors > 0:
        return _cause(
            pool, own, Severity.WARNING, "router_errors", state.errors, None,
            f"{title} failed to read its endpoints' metrics in each of the last "
            f"{PICKS_S / 60:.0f} minutes: it routes by stale data",
            "Read the router's log: a wrong metrics port or path, a TLS or network policy, or an "
            "endpoint that is gone and still listed.",
        )  # fmt: skip
    return None


def _idle(engines: Sequence[Engine]) -> bool:
    """Whether no engine has a queue and each has room for more requests; false if unknown."""
    rows = [(engine.get("waiting"), engine.get("kv_usage_ratio")) for engine in engines]
    return all(waiting == 0 and kv is not None and kv < IDLE_KV for waiting, kv in rows)


def _hot(state: RouterState, engines: Sequence[Engine]) -> tuple[str, float, float] | None:
    """The only engine with a queue, if the router also picks it far more often; otherwise None.

    Returns its name, its picks divided by the others' median, and its number of queued requests.
    """
    picks = {engine.member.name: _picked(state.picks, engine) for engine in engines}
    counts = {name: value for name, value in picks.items() if value is not None}
    if len(counts) < 2 or len(counts) < len(engines) or sum(counts.values()) < PICKS_MIN:
        return None
    waiting = {engine.member.name: engine.get("waiting") or 0.0 for engine in engines}
    name = max(counts, key=lambda each: counts[each])
    others = [value for each, value in counts.items() if each != name]
    times = counts[name] / max(median(others), 1.0)
    queues = waiting[name] >= 1 and not any(waiting[each] for each in counts if each != name)
    return (name, times, waiting[name]) if times >= PICKED_MORE and queues else None


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


def _cause(
    pool: str,
    engines: Sequence[Engine],
    severity: Severity,
    signal: str,
    value: float,
    threshold: float | None,
    text: str,
    lever: str,
) -> FleetCause | None:
    case = Case("router_fault", f"{text}.", lever, ("7.3",), severity, log_odds=0.5)
    case.weigh(signal, value, threshold, 1.5, text, below=signal == "router_ready")
    return closed(case, pool, "", engines)
