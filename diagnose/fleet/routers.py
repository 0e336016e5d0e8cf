"""Faults of routers: no endpoint, stale data, a queue before idle engines, uneven picks. Pure.

A router is matched with engines by cluster and namespace, because none of a router's own labels
names vLLM's model; where there are none, by the addresses of its workers. A router's page is judged
beside those of its engines if all of them are targets too; else its engines are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.names.vllm_resolver import Binding, bound_as
from kneewatch.collector.page import Layout, Page
from kneewatch.collector.scrape_history import History
from kneewatch.collector.signals.expr import Gauge
from kneewatch.collector.signals.routers import (
    NAMED,
    OF,
    PICKS_S,
    PLACE,
    QUESTIONS,
    QUEUED_S,
    ROUTERS,
    UNREADY_S,
    Answers,
    Router,
    answers_of,
    router_of,
)
from kneewatch.collector.window import Window
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.fleet.inventory import Labels, Member
from kneewatch.diagnose.fleet.routing import COMPUTED_MORE, FALLEN_BY, computed_more
from kneewatch.diagnose.fleet.tier import Engine, FleetCause, closed, engine_of
from kneewatch.diagnose.verdict import NO_STAGE, Verdict
from kneewatch.rules.formatting import duration as latency
from kneewatch.rules.formatting import percent, span
from kneewatch.rules.rule import OK, Severity

QUEUED_MIN = 2.0
"""Requests that a router holds throughout a minute; a single one may be in transit at each
scrape."""

REJECTED_MIN = 5.0
"""Requests that a router rejects within five minutes; fewer may come from one client's deadline."""

OWN_S = 0.1
"""Mean seconds that a step of the router itself may take. Users see them in each first token."""

NO_ENGINES = (
    f"{NO_STAGE}a router has no KV cache",
    "engines: a router's page does not show whether its engines have room; give their addresses "
    "too, or --prometheus",
)

KEPT_S = 2 * PICKS_S
"""Seconds of a router's pages that are kept: each of the last minutes has a range of its own."""

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


class RouterState(Struct, frozen=True):
    """The state of one router: `values` are the answers to questions. `watched_s`: how long it was
    watched. `here` are the engines behind it, unknown if there are none; `own` those of one
    pool."""

    router: Router
    values: Answers
    place: tuple[str, ...] = ("", "")
    watched_s: float = PICKS_S
    here: Sequence[Engine] = ()
    own: Sequence[Engine] = ()

    def value(self, question: str) -> float | None:
        """The answer to a question; None if there is none."""
        return self.values.get(question, {}).get(("", ""))

    def each(self, question: str) -> Mapping[str, float]:
        """The answers of each endpoint, or for each of the router's metrics."""
        return {"".join(key): value for key, value in self.values.get(question, {}).items()}

    def over(self, seconds: float) -> str:
        """The time for which a condition was watched, in words."""
        return span(min(seconds, self.watched_s))

    @property
    def workers(self) -> Mapping[str, float]:
        """How often each endpoint was picked, also those that it never picked."""
        named = (*self.each("health"), *self.each("breaker"))
        return {**dict.fromkeys(named, 0.0), **self.each("picks")}


def routers_of(answers: Mapping[str, Sequence[tuple[Labels, float]]]) -> list[RouterState]:
    """The routers that the results of `router_queries` contain, by cluster and namespace."""
    by_router: dict[tuple[tuple[str, ...], int], dict[str, dict[tuple[str, str], float]]] = {}
    for key, question in QUESTIONS.items():
        for labels, value in answers.get(f"router_{key}", ()):
            values = by_router.setdefault((_place(labels), int(labels[NAMED])), {})
            name = labels.get(question.apart, ""), labels.get(OF, "")
            values.setdefault(key, {}).update({name: value} if value == value else {})
    states = [
        RouterState(ROUTERS[at], each, place) for (place, at), each in sorted(by_router.items())
    ]
    newer = {(state.place, state.router.title) for state in states}
    return [state for state in states if (state.place, state.router.older_than) not in newer]


def router_faults(routers: Sequence[RouterState], engines: Sequence[Engine]) -> list[FleetCause]:
    """A cause for each pool whose router does not use the pool's engines as it could."""
    causes: list[FleetCause] = []
    for state in routers:
        here = [e for e in engines if _place(e.member.labels) == state.place] or [
            e for e in engines if _is_among(state.workers, e)
        ]
        for pool in sorted({engine.member.pool for engine in here}):
            own = [engine for engine in here if engine.member.pool == pool]
            fault = _fault(replace(state, here=here, own=own))
            cause = None if fault is None else closed(fault[0], pool, "", fault[1])
            causes += [] if cause is None else [cause]
    return causes


def _place(labels: Labels) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in PLACE)


def _while_idle(state: RouterState) -> str:
    """What is known about the engines, to follow a fault."""
    if not state.here:
        return ""
    return f", while no engine has a queue and KV usage is below {percent(IDLE_KV)}"


Fault = tuple[Case, Sequence[Engine]]


def _fault(state: RouterState) -> Fault | None:
    """The worst fault of a router that affects a pool."""
    examined = (_unready, _taken_out, _holding, _uneven, _blind, _slow, _late, _losing_reuse)
    return next((fault for examine in examined if (fault := examine(state))), None)


def _unready(state: RouterState) -> Fault | None:
    if state.value("ready") != 0 or any(engine.get("arrival_per_s") for engine in state.here):
        return None
    engines = f", while {len(state.own)} engines can be scraped" if state.own else ""
    return _case(
        state.own, Severity.CRITICAL, "router_ready", 0.0, 1.0,
        f"{state.router.title} has had no ready endpoint for {state.over(UNREADY_S)}{engines}",
        "Check the selector and target port of the InferencePool or the router's service "
        "discovery, and the readiness of the pods.",
    )  # fmt: skip


def _taken_out(state: RouterState) -> Fault | None:
    """An endpoint that gets nothing although its engine answers scrapes, or may."""
    breaker = state.each("breaker")
    failing = [name for name, healthy in state.each("health").items() if not healthy]
    for out, why, question in (
        (failing, "it fails the router's health check", "health"),
        (breaker, "its circuit breaker is open", "breaker"),
    ):
        engines = [e for e in state.own if _is_among(out, e) and e.get("waiting") is not None]
        named = [e.member.name for e in engines] if state.here else sorted(out)
        if named:
            answers = ", while the engine answers scrapes" if state.here else ""
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


def _holding(state: RouterState) -> Fault | None:
    """Requests that wait or end in the router."""
    title, levers = state.router.title, state.router.levers
    stale, queue, rejected = map(state.value, ("stale", "queue", "rejected"))
    if not _idle(state.here):
        return None
    if stale:
        return _case(
            state.own, Severity.WARNING, "router_stale", stale, 1.0,
            f"{title} holds requests back for metrics that are too old: {stale:.0f} "
            f"endpoints are stale and saturation is exactly 1.0{_while_idle(state)}",
            levers["stale"],
        )  # fmt: skip
    if queue is not None and queue >= QUEUED_MIN:
        return _case(
            state.own, Severity.WARNING, "router_queue", queue, QUEUED_MIN,
            f"{title} holds {queue:.0f} requests{_while_idle(state)}", levers["queue"],
        )  # fmt: skip
    if rejected is not None and rejected >= REJECTED_MIN:
        return _case(
            state.own, Severity.WARNING, "router_rejections", rejected, REJECTED_MIN,
            f"{title} rejected {rejected:.0f} requests within {state.over(PICKS_S)}"
            f"{_while_idle(state)}",
            levers["rejected"],
        )  # fmt: skip
    return None


def _uneven(state: RouterState) -> Fault | None:
    queues = {engine.member.name: engine.get("waiting") or 0.0 for engine in state.own}
    counts = {
        engine.member.name: count
        for engine in state.own
        if (count := _picked(state.workers, engine)) is not None
    } if state.here else dict(state.workers)  # fmt: skip
    if len(counts) < max(2, len(state.own)) or sum(counts.values()) < PICKS_MIN:
        return None
    name = max(counts, key=lambda each: counts[each])
    others = [each for each in counts if each != name]
    times = counts[name] / max(median(counts[each] for each in others), 1.0)
    waiting = queues.get(name, 0.0)
    only_there = waiting >= 1 and not any(queues[each] for each in others)
    if times < PICKED_MORE or (state.here and not only_there):
        return None
    queue = f": {waiting:.0f} requests queue there, others have no queue" if state.here else ""
    return _case(
        # Of a page alone, uneven picks may be those of prefix affinity.
        state.own, Severity.WARNING if state.here else Severity.INFO,
        "router_picks", times, PICKED_MORE,
        f"{state.router.title} picks {name} {times:.1f}x as often as the median engine{queue}",
        "Check the weights of the router's scorers (prefix affinity against load), or sticky "
        "sessions.",
    )  # fmt: skip


def _blind(state: RouterState) -> Fault | None:
    errors = state.value("errors")
    if not errors:
        return None
    return _case(
        state.own, Severity.WARNING, "router_errors", errors, None,
        f"{state.router.title} failed to read its endpoints' metrics in each of the last "
        f"{PICKS_S / 60:.0f} minutes: it routes by stale data",
        "Read the router's log: a wrong metrics port or path, a TLS or network policy, or an "
        "endpoint that is gone and still listed.",
    )  # fmt: skip


def _slow(state: RouterState) -> Fault | None:
    steps = [(each * state.router.own[name], name) for name, each in state.each("own").items()]
    mean_s, name = max(steps, default=(0.0, ""))
    if mean_s < OWN_S:
        return None
    return _case(
        state.own, Severity.WARNING, "router_own_s", mean_s, OWN_S,
        f"{state.router.title} itself is slow: {name} has a mean of {latency(mean_s)}",
        state.router.levers["own"],
    )  # fmt: skip


def _late(state: RouterState) -> Fault | None:
    """First tokens that clients get later than the engines make them."""
    rows = [(e.get("ttft_mean_s"), e.get("arrival_per_s") or 0.0) for e in state.here]
    measured = [(ttft_s, rate) for ttft_s, rate in rows if ttft_s is not None]
    total = sum(rate for _, rate in measured)
    ttft_s = state.value("ttft")
    if ttft_s is None or len(measured) < len(rows) or not total:
        return None
    engines_s = sum(ttft_s * rate for ttft_s, rate in measured) / total
    more_s = ttft_s - engines_s
    if more_s < TTFT_MORE_S or ttft_s < TTFT_MORE * engines_s:
        return None
    return _case(
        state.own, Severity.WARNING, "router_ttft_s", more_s, TTFT_MORE_S,
        f"First tokens wait {latency(more_s)} before the engines: their mean TTFT is "
        f"{latency(engines_s)}, {state.router.title} measures {latency(ttft_s)}",
        "Compare the router's queue, its own steps and the network to the engines; scale the "
        "router out if its CPU is busy.",
    )  # fmt: skip


def _losing_reuse(state: RouterState) -> Fault | None:
    """Prompt tokens of a model that a worker had cached and that were computed again."""
    models = sorted({model for model, _ in state.values.get("reuse", ())})
    lost = (_lost_of(model, state) for model in models)
    return next((fault for fault in lost if fault is not None), None)


def _lost_of(model: str, state: RouterState) -> Fault | None:
    reuse = state.values["reuse"]
    tokens = [reuse.get((model, name), 0.0) for name in state.router.reuse]
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
        state.own, Severity.WARNING, "router_reuse", more, COMPUTED_MORE,
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
    case = Case("router_fault", f"{text}.", lever, severity, log_odds=0.5)
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


Beside = Callable[[], Sequence[tuple[Labels, Verdict]]]


def _engines_of(state: RouterState, others: Sequence[tuple[Labels, Verdict]]) -> list[Engine]:
    """The engines that are the router's workers; none unless all workers are among them."""
    engines = [
        engine_of(Member((), verdict.target, "", verdict.model, "", labels=labels), verdict)
        for labels, verdict in others
        if verdict.was_read
    ]
    named = [each for each in engines if _is_among(state.workers, each)]
    complete = all(any(_names(worker, each) for each in named) for worker in state.workers)
    return named if complete else []


class RouterPages:
    """The pages of a router over the last minutes, beside the pages of its engines."""

    def __init__(self, name: str, profile: Profile, beside: Beside = tuple) -> None:
        self._name, self._scale, self._beside = name, profile.scale, beside
        self._history = History(keep_s=KEPT_S)
        self._tracker = CauseTracker[Cause](scale=profile.scale)
        self._bound: tuple[Layout, Router, Binding] | None = None

    def judged(self, t_s: float, page: Page) -> Verdict | None:
        """The verdict on the router after a page; None if it is no router's page."""
        if self._bound is None or self._bound[0] is not page.layout:
            router = router_of(page.layout)
            if router is None:
                return None
            self._bound = page.layout, router, bound_as(page.layout, router.kind)
        _, router, binding = self._bound
        history = self._history
        history.append(t_s, binding.completed(page), binding.engines[0], binding.process_start)
        t_s, watched_s = history.times[-1], history.times[-1] - history.times[0]
        state = RouterState(
            router,
            answers_of(router, history, t_s, self._scale),
            watched_s=min(watched_s, PICKS_S),
        )
        engines = _engines_of(state, self._beside())
        fault = _fault(replace(state, here=engines, own=engines))
        # What is concluded has held for its time already.
        concluded = [cause] if fault and (cause := fault[0].close()) else []
        causes = self._tracker.update(t_s, concluded, developed=[each.id for each in concluded])
        window = Window(history, now_s=t_s, range_s=QUEUED_S, few=True)
        values = {
            name: Gauge(f"router_{metric}").bind(history.columns)(window)
            for name, metric in (("running", "running"), ("waiting", "queue"))
        }
        return Verdict(
            t_s=t_s,
            target=self._name,
            program=router.title,
            health=max((cause.severity for cause in causes), default=OK).word,
            causes=causes,
            values=values,
            unknown=NO_ENGINES[:1] if engines else NO_ENGINES,
            window_s=state.watched_s,
            judged_against="nothing: latency is judged at the engines",
        )
