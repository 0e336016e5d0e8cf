"""`/probe/{target}`: whether an engine is hung, for vLLM's livenessProbe."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import Response

from kneewatch.agent.api.service import Service, late
from kneewatch.agent.target_state import TargetState
from kneewatch.rules.rule import Severity

HUNG = "engine_stalled"
"""The cause that a restart ends. It is critical only after an engine's longest possible prefill."""


def probe(service: Service, target: str) -> Response:
    """503 while an engine of the target is hung, or of any target if it is empty; else 200.

    It is 200 also where kneewatch cannot know: a target that is not watched, does not answer, or
    was not scraped lately. A probe that fails then would restart servers that work.
    """
    states = [service.state(target)] if target else service.states()
    now_s = service.clock()
    watched = [state for state in states if state is not None]
    if any(_is_hung(state) for state in watched if not late(state, now_s)):
        return _answer(HTTPStatus.SERVICE_UNAVAILABLE, "hung")
    return _answer(HTTPStatus.OK, "not hung" if watched else "not watched")


def _is_hung(state: TargetState) -> bool:
    return any(
        cause.id == HUNG
        and cause.severity >= Severity.CRITICAL
        and (cause.seen_s or diagnosis.t_s)
        >= diagnosis.t_s  # one that is ending does not hold any more
        for diagnosis in state.diagnoses
        for cause in diagnosis.causes
    )


def _answer(status: HTTPStatus, words: str) -> Response:
    return Response(f"{words}\n", status, media_type="text/plain; charset=utf-8")
