"""`/api/v1/fleet`: the watched fleet, now or in the past, and its metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from threading import Lock
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from kneewatch.agent.api.responses import (
    JSON,
    MARKDOWN,
    MEDIA_TYPES,
    TEXT,
    Problem,
    clean,
    dumped,
    form_of,
)
from kneewatch.agent.api.time_parameter import moment
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.fleet.diagnosis import FLEET_CAUSES, OF_A_POOL, FleetDiagnosis
from kneewatch.diagnose.fleet.tier import Tier
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_json import document
from kneewatch.reports.fleet_text import markdown, text

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetState, FleetWatch


ANSWER_S = 60.0
"""How long a request waits for its answer; the asking goes on behind it."""

KEPT_S = 60.0
"""How long an answer is kept for those who ask again."""

AGAIN_S = 5
NOTHING = "no_vllm"
"""CollectError's word for a metrics system without series of vLLM."""

SINCE = (
    "since is not told of a fleet, whose past its metrics system keeps: ask for one moment with "
    "at, or for a stretch with `kneewatch report --prometheus URL --since 2h --to TIME`"
)


@dataclass(slots=True)
class Asked:
    """A moment that is asked for, or was: `ended_s` is when its answer came."""

    at_s: float
    answer: Future[FleetDiagnosis]
    ended_s: float | None = None


class FleetPast:
    """Verdicts of past moments. The newest is kept for a while; another has to wait its turn."""

    def __init__(
        self,
        ask: Callable[[float], FleetDiagnosis],
        *,
        answer_s: float = ANSWER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._answer_s, self._monotonic = ask, answer_s, monotonic
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-past")
        self._asked: Asked | None = None

    async def at(self, at_s: float) -> FleetDiagnosis:
        """The verdict of a moment, to the second. Called by one event loop.

        Raises:
            Problem: another moment is being asked for, nothing was seen then, or there is no
                answer, or none in time.
        """
        answer = self._answer(float(int(at_s)))
        try:
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(answer)), self._answer_s
            )
        except TimeoutError as exc:
            raise Problem(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the metrics system has not told that moment within {self._answer_s:g} s; it is "
                f"waited for: ask again, with at={at_s:.0f}",
                {"Retry-After": str(AGAIN_S)},
            ) from exc
        except CollectError as exc:
            raise _untold(exc) from exc

    def _answer(self, at_s: float) -> Future[FleetDiagnosis]:
        asked = self._asked
        if asked is not None:
            if not asked.answer.done() and asked.at_s != at_s:
                raise Problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "another moment is being asked for: one at a time, for it is dear",
                    {"Retry-After": str(AGAIN_S)},
                )
            if asked.at_s == at_s and self._holds(asked):
                return asked.answer
        self._asked = asked = Asked(at_s, self._thread.submit(self._ask, at_s))
        asked.answer.add_done_callback(lambda _: self._ended(asked))
        return asked.answer

    def _holds(self, asked: Asked) -> bool:
        """Whether an answer is on its way, or is there, is no error, and is not old."""
        if not asked.answer.done():
            return True
        ended_s = self._monotonic() if asked.ended_s is None else asked.ended_s
        return asked.answer.exception() is None and self._monotonic() - ended_s < KEPT_S

    def _ended(self, asked: Asked) -> None:
        asked.ended_s = self._monotonic()


def _untold(error: CollectError) -> Problem:
    if error.kind == NOTHING:
        return Problem(HTTPStatus.NOT_FOUND, clean(f"nothing is known of that moment: {error}"))
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE, clean(f"the metrics system does not tell: {error}")
    )


# --- What kneewatch's own metrics say of a fleet. No series where something is not known ----------


HEALTHS = ("ok", "info", "warning", "critical", "unknown")
TIER = ("pool", "tier", "role")


def fleet_replicas(state: FleetState, now_s: float) -> Iterator[tuple[dict[str, str], float]]:
    """The replicas that each tier needs; none of what cannot be judged, so that nobody scales down
    on blindness."""
    found = state.told(now_s)
    for size in found.sizes if found is not None and not found.lost else ():
        if size.needed is not None:
            model = clean(size.tier.engines[0].member.model)
            yield {**dict(zip(TIER, _labels(size.tier), strict=True)), "model": model}, size.needed


def fleet_families(state: FleetState, now_s: float) -> Iterator[Metric]:
    """The families: how the asking goes, and what was found."""
    found = state.told(now_s)
    current = found if found is not None and not found.lost else None
    yield from _asking(state, up=current is not None)
    health = GaugeMetricFamily(
        "kneewatch_fleet_health", "1 for the verdict's word, 0 for the others.", labels=("health",)
    )
    for word in HEALTHS:
        health.add_metric((word,), float(word == (current.health if current else "unknown")))
    yield health
    if current is not None:
        yield from _tiers(current)
        yield _causes(current)


def _tiers(found: FleetDiagnosis) -> Iterator[Metric]:
    engines = GaugeMetricFamily(
        "kneewatch_fleet_engines", "Engines of a tier by health.", labels=(*TIER, "health")
    )
    stages = GaugeMetricFamily(
        "kneewatch_fleet_stage_engines",
        "Engines of a tier by stage of the KV cascade; those whose stage is not known in none.",
        labels=(*TIER, "stage"),
    )
    replicas = GaugeMetricFamily(
        "kneewatch_fleet_replicas", "Replicas that a tier has.", labels=TIER
    )
    for tier in found.tiers:
        labels = _labels(tier)
        healths = Counter(engine.health for engine in tier.engines)
        staged = Counter(engine.stage for engine in tier.engines)
        for word in HEALTHS:
            engines.add_metric((*labels, word), healths[word])
        for stage in range(5):
            stages.add_metric((*labels, str(stage)), staged[stage])
        replicas.add_metric(labels, tier.replicas)
    yield from (engines, stages, replicas)


def _causes(found: FleetDiagnosis) -> Metric:
    family = GaugeMetricFamily(
        "kneewatch_fleet_cause",
        "1 while a cause is concluded, else 0; without a tier of a whole pool.",
        labels=("pool", "tier", "cause"),
    )
    active = {(clean(one.pool), clean(one.tier), one.cause.id) for one in found.causes}
    # A partial answer does not say that a cause is not there.
    known = set(active)
    for tier in () if found.partial else found.tiers:
        pool, name, _ = _labels(tier)
        known |= {(pool, "" if cause == OF_A_POOL else name, cause) for cause in FLEET_CAUSES}
    for row in sorted(known):
        family.add_metric(row, float(row in active))
    return family


def _asking(state: FleetState, *, up: bool) -> Iterator[Metric]:
    gauges = (
        ("up", "1 while the metrics system answers.", float(up)),
        ("interval_seconds", "Time between diagnoses.", state.interval_s),
        ("failing_cycles", "Failed cycles in a row.", state.failing),
        ("last_answer_timestamp_seconds", "When it last answered; 0: never.", state.seen_s),
    )
    for name, told, value in gauges:
        yield GaugeMetricFamily(f"kneewatch_fleet_{name}", told, value=value)
    counters = (
        ("cycles", "Cycles since the start.", state.cycles),
        ("cycle_failures", "Cycles without an answer.", state.failures),
        ("queries", "Queries sent to the metrics system.", state.queries),
        ("queries_retried", "Queries that were sent again.", state.retried),
    )
    for name, told, count in counters:
        yield CounterMetricFamily(f"kneewatch_fleet_{name}", told, value=count)


def _labels(tier: Tier) -> tuple[str, str, str]:
    return clean(tier.pool), clean(tier.tier), tier.role


# --- `/api/v1/fleet`: the fleet that `kneewatch run --prometheus` watches, as it is now or was ----


FLEET_FORMS = (TEXT, JSON, MARKDOWN)


class FleetAnswers:
    """The newest verdict in every form. What was rendered is kept until there is another."""

    def __init__(self, watch: FleetWatch, now_s: Callable[[], float]) -> None:
        self._watch, self._now_s = watch, now_s
        self._past = FleetPast(watch.at)
        self._lock = Lock()
        self._kept: dict[str, tuple[FleetState, str, bytes]] = {}

    async def answer(self, request: Request) -> Response:
        """What is wrong with the fleet that a metrics system shows, now or at a moment.

        Raises:
            Problem: there is no answer, or a parameter is wrong.
        """
        query, now_s = request.query_params, self._now_s()
        form = form_of(query.get("format"), request.headers.get("accept"), FLEET_FORMS)
        if query.get("since"):
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, SINCE)
        state = self._watch.state
        if at := query.get("at"):
            then = await self._past.at(moment("at", at, now_s=now_s))
            made = await run_in_threadpool(_rendered, form, state, then, past=True)
            return Response(made, media_type=MEDIA_TYPES[form])
        found = state.told(now_s)
        if found is None:
            why = f"the metrics system has not answered yet: {state.error or 'it was not asked'}"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, clean(why))
        made = await run_in_threadpool(self._made, form, state, found)
        return Response(made, media_type=MEDIA_TYPES[form])

    def _made(self, form: str, state: FleetState, found: FleetDiagnosis) -> bytes:
        with self._lock:
            held = self._kept.get(form)
            if held is not None and held[0] is state and held[1] == found.lost:
                return held[2]
            made = _rendered(form, state, found)
            self._kept[form] = state, found.lost, made
            return made


def _rendered(form: str, state: FleetState, found: FleetDiagnosis, *, past: bool = False) -> bytes:
    """A verdict in a form; each tells how the asking goes as well."""
    if form == JSON:
        return dumped({**document(found), "watch": _watched(state)})
    told = markdown(found) if form == MARKDOWN else text(found, Style())
    load = found.observed.load
    asked = (
        f"asked every {state.interval_s:g} s: {load.queries} queries the last time, "
        f"{state.queries} since the start; {state.failures} times there was no answer"
    )
    if past:
        asked = (
            f"as it was then, by the settings of now: {load.queries} queries, {load.seconds:.1f} s"
        )
    return clean(f"{told}\n\n{asked}\n").encode("utf-8", "replace")


def _watched(state: FleetState) -> dict[str, float | int | str]:
    return {
        "interval_s": state.interval_s,
        "seen": round(state.seen_s, 3),
        "cycles": state.cycles,
        "failures": state.failures,
        "failing": state.failing,
        "error": state.error,
        "queries": state.queries,
        "retried": state.retried,
        "queries_per_s": round(state.queries_per_s, 3),
    }
