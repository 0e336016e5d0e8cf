"""A refused request's answer: a page for a browser, RFC 9457's JSON for everybody else."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from kneewatch.agent.api.forms import HTML, JSON, MEDIA_TYPES, form_of
from kneewatch.agent.api.problems import NAMES_SHOWN, Problem, clean, response_of
from kneewatch.reports.triage import page
from kneewatch.reports.triage.standing import sentence

API = "/api/"
"""Below it programs ask, also where a person types the address: they get JSON."""

ROOT = "../"


def refused(problem: Problem, scope: Scope) -> Response:
    """The problem as whoever asked reads it."""
    if scope["path"].startswith(API) or not _wants_page(scope):
        return response_of(problem)
    told = page.refusal(
        status=problem.status.value,
        title=problem.status.phrase,
        words=sentence(problem.brief),
        known=problem.known[:NAMES_SHOWN],
        more=max(0, len(problem.known) - NAMES_SHOWN),
        up=ROOT * (scope.get("raw_path", b"/").count(b"/") - 1),
    )
    return Response(
        clean(told),
        status_code=problem.status,
        headers=dict(problem.headers),
        media_type=MEDIA_TYPES[HTML],
    )


def _wants_page(scope: Scope) -> bool:
    accept = ",".join(
        told.decode("latin-1") for name, told in scope["headers"] if name == b"accept"
    )
    try:
        return form_of(None, accept, (JSON, HTML)) == HTML
    except Problem:
        return False
