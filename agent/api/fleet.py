"""HTTP endpoint, `/api/v1/fleet`: the watched fleet, now or in the past, and its metrics. I/O
edge."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING

from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from kneewatch.agent.api.metrics import Families, described
from kneewatch.agent.api.responses import (
    HTML,
    JSON,
    MARKDOWN,
    MEDIA_TYPES,
    TRIAGE_FORMS,
    Problem,
    Unavailable,
    clean,
    dumped,
    form_of,
    moment,
)
from kneewatch.agent.api.service import Labels, Need
from kneewatch.agent.api.triage import to_page
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.fleet.absence import OF_A_POOL
from kneewatch.diagnose.fleet.diagnosis import FLEET_CAUSES
from kneewatch.diagnose.fleet.verdict import EngineVerdict, FleetVerdict, TierVerdict
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_rendering import markdown, text
from kneewatch.reports.health import RANKS
from kneewatch.rules.formatting import duration, plural

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetMoment, FleetState, FleetWatch


ANSWER_S = 60.0
"""Maximum seconds that a request waits for its answer. The queries continue in the background."""

CACHE_S = 60.0
"""Seconds for which an answer is cached."""

RETRY_AFTER_S = 5
NO_VLLM = "no_vllm"
"""Kind of the CollectError for a metrics system that has no series of vLLM."""

SINCE = (
    "since is not available for a fleet: use at for one moment, or for a period "
    "`kneewatch report --prometheus URL --since 2h --to TIME`"
)


class FleetPast:
    """Diagnoses of past moments. One query runs at a time, and the newest answer is cached for
    `CACHE_S`."""

    def __init__(
        self,
        ask: Callable[[float], FleetMoment],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._monotonic = ask, monotonic
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-past")
        self._at_s, self._ended_s = math.nan, math.inf
        self._newest: Future[FleetMoment] | None = None
        """The query for `_at_s`, answered at `_ended_s`; infinite while it runs."""

    async def at(self, at_s: float, *, answer_s: float = ANSWER_S) -> FleetMoment:
        """The fleet at a past moment; fractions of a second are dropped. Waits for at most
        `answer_s` seconds. Must be called from a single event loop.

        Raises:
            Problem: another query runs, there is no data of that moment, or the metrics system
                does not answer in time.
        """
        answer = self._answer(float(int(at_s)))
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(answer)), answer_s)
        except TimeoutError as exc:
            raise Problem(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"no answer from the metrics system within {duration(answer_s)}; the query "
                f"still runs: send at={at_s:.0f} again later",
                {"Retry-After": str(RETRY_AFTER_S)},
            ) from exc
        except CollectError as exc:
            status, why = HTTPStatus.SERVICE_UNAVAILABLE, "the metrics system does not answer"
            if exc.kind == NO_VLLM:
                status, why = HTTPStatus.NOT_FOUND, "no data of that moment"
            raise Problem(status, clean(f"{why}: {exc}")) from exc

    def _answer(self, at_s: float) -> Future[FleetMoment]:
        newest, is_same = self._newest, self._at_s == at_s
        if newest is not None and not newest.done() and not is_same:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "a query for another moment is running; only one may run: retry later",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        is_old = self._monotonic() - self._ended_s >= CACHE_S
        if newest is None or not is_same or is_old or (newest.done() and newest.exception()):
            self._at_s, self._ended_s = at_s, math.inf
            self._newest = newest = self._thread.submit(self._run, at_s)
        return newest

    def _run(self, at_s: float) -> FleetMoment:
        try:
            return self._ask(at_s)
        finally:
            self._ended_s = self._monotonic()


# --- Metrics of a fleet; an unknown value has no series -------------------------------------------


TIER = ("pool", "tier", "role")
QUERIES, TIERS = described("fleet"), described("tiers")


def fleet_replicas(state: FleetState, now_s: float) -> dict[Labels, Need]:
    """The replicas that each tier needs and has, by the labels of the tier. The need is unknown for
    a tier that cannot be judged, so that missing data never removes replicas."""
    verdict = state.current(now_s)
    return {
        (*zip(TIER, _labels(tier), strict=True), ("model", clean(tier.model))): (
            None if tier.size.needed is None else float(tier.size.needed),
            float(tier.replicas),
        )
        for tier in (verdict.tiers if verdict is not None and not verdict.lost else ())
    }


def fleet_families(state: FleetState, now_s: float) -> Families:
    """The metric families of a fleet: the state of its queries, and its newest diagnosis."""
    verdict, watching = state.current(now_s), state.watching
    current = verdict if verdict is not None and not verdict.lost else None
    families = Families(QUERIES if current is None else {**QUERIES, **TIERS})
    families.add("fleet_up", current is not None)
    families.add("fleet_interval_seconds", watching.interval_s)
    families.add("fleet_failing_cycles", watching.failing)
    families.add("fleet_last_answer_timestamp_seconds", watching.seen_s)
    families.add("fleet_cycles_total", watching.cycles)
    families.add("fleet_cycle_failures_total", watching.failures)
    families.add("fleet_queries_total", watching.queries)
    families.add("fleet_queries_retried_total", watching.retried)
    for word in RANKS:
        families.add("fleet_health", word == (current.health if current else "unknown"), word)
    if current is not None:
        _add_tiers(families, current)
    return families


def _add_tiers(families: Families, verdict: FleetVerdict) -> None:
    active: dict[tuple[str, str, str], int] = {}
    for cause in verdict.causes:
        row = cause.pool, cause.tier or "", cause.id
        active[row] = max(active.get(row, 0), int(cause.severity))
    causes = set(active)
    engines: dict[tuple[str, str, str], list[EngineVerdict]] = {}
    for engine in verdict.engines:
        engines.setdefault(_labels(engine), []).append(engine)
    for tier in verdict.tiers:
        labels = _labels(tier)
        healths = Counter(engine.health for engine in engines[labels])
        stages = Counter(engine.stage.number for engine in engines[labels] if engine.stage)
        counts: dict[str, int] = dict(healths.items())
        for word in RANKS:
            families.add("fleet_engines", counts.get(word, 0), *labels, word)
        for stage in range(5):
            families.add("fleet_stage_engines", stages[stage], *labels, str(stage))
        families.add("fleet_replicas", tier.replicas, *labels)
        # A partial answer does not prove that a cause is absent.
        for name in () if verdict.partial else FLEET_CAUSES:
            causes.add((tier.pool, "" if name == OF_A_POOL else tier.tier or "", name))
    for row in sorted(causes):
        families.add("fleet_cause", row in active, *row)
        families.add("fleet_cause_severity", active.get(row), *row)


def _labels(of: TierVerdict | EngineVerdict) -> tuple[str, str, str]:
    return clean(of.pool), clean(of.tier or ""), of.role or ""


# --- The endpoint ---------------------------------------------------------------------------------


def fleet_answers(
    watch: FleetWatch, past: FleetPast, clock: Callable[[], float], docs_url: str
) -> Callable[..., Awaitable[Response]]:
    """The endpoint: the newest verdict as text, JSON and Markdown; browsers are sent to the triage
    page."""

    async def answer(
        request: Request,
        at: str | None = None,
        format: str | None = None,
        since: Unavailable = None,
    ) -> Response:
        """The fleet that a metrics system monitors, with causes across replicas and the replicas
        that each tier needs. `health` is unknown while the metrics system does not answer. With
        `at`, the metrics system is queried for that moment: one query at a time, cached for 60
        s."""
        now_s = clock()
        form = form_of(format, request.headers.get("accept"), TRIAGE_FORMS)
        if since:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, SINCE)
        if form == HTML:
            return to_page(request, "")
        state = watch.state
        if at:
            then = (await past.at(moment("at", at, now_s=now_s))).verdict
            body = await run_in_threadpool(_rendered, form, state, then, docs_url, past=True)
            return Response(body, media_type=MEDIA_TYPES[form])
        verdict = state.current(now_s)
        if verdict is None:
            why = f"the fleet's state is unknown: {state.why_unknown(now_s)}"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, clean(why))
        body = await run_in_threadpool(_rendered, form, state, verdict, docs_url)
        return Response(body, media_type=MEDIA_TYPES[form])

    return answer


def _rendered(
    form: str, state: FleetState, verdict: FleetVerdict, docs_url: str, *, past: bool = False
) -> bytes:
    """A verdict with the state of the queries, rendered in the format `form`."""
    if form == JSON:
        return dumped(replace(verdict.linked(docs_url), watch=state.watching))
    rendered = (
        markdown(verdict, docs_url=docs_url)
        if form == MARKDOWN
        else text(verdict, Style(docs_url=docs_url))
    )
    load, watching = verdict.load, state.watching
    footer = (
        f"queried every {duration(watching.interval_s)}: {load.queries} queries in the last cycle, "
        f"{watching.queries} since the start; {plural(watching.failures, 'failed cycle')}"
    )
    if past:
        footer = (
            f"past moment, judged by today's settings: {load.queries} queries, "
            f"{duration(load.seconds)}"
        )
    return clean(f"{rendered}\n\n{footer}\n").encode("utf-8", "replace")
