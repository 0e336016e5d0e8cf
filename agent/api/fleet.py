"""`/api/v1/fleet`: the fleet that `kneewatch run --prometheus` watches, as it is now or was."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from threading import Lock
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from kneewatch.agent.api.fleet_past import SINCE, FleetPast
from kneewatch.agent.api.forms import JSON, MARKDOWN, MEDIA_TYPES, TEXT, form_of
from kneewatch.agent.api.moments import moment
from kneewatch.agent.api.problems import Problem, clean, dumped
from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis
from kneewatch.reports.fleet_document import document
from kneewatch.reports.fleet_markdown import markdown
from kneewatch.reports.fleet_text import text
from kneewatch.reports.text import Style

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetState, FleetWatch

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
