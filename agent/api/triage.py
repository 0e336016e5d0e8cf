"""`/api/v1/triage`: the diagnoses of targets, now or at any time in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api.parameters import TRIAGE_FORMS, moment
from kneewatch.agent.api.past import (
    EngineInterval,
    History,
    PastVerdicts,
    history_reach,
    interval_document,
)
from kneewatch.agent.api.responses import (
    HTML,
    JSON,
    MEDIA_TYPES,
    TEXT,
    Problem,
    clean,
    dumped,
    form_of,
    no_such_target,
)
from kneewatch.agent.api.service import Service
from kneewatch.agent.api.triage_rendering import HINT, Newest, RenderCache, body, head, past
from kneewatch.agent.store.records import StoredEngine
from kneewatch.diagnose.doc_links import OWN_DOCS, linked
from kneewatch.diagnose.verdict import Verdict, documented

SCHEMA = "kneewatch.triage/1"
FLEET_NOTICE = "no single target is configured, only a fleet: see /api/v1/fleet for its diagnosis"


class TriageRequest(Struct, frozen=True):
    """A parsed request. `target` is empty for all targets. `at_s` is None for now. `since_s` is
    None if no history is requested."""

    form: str
    target: str
    now_s: float
    at_s: float | None
    since_s: float | None

    @property
    def moment_s(self) -> float:
        """The requested moment, in Unix seconds."""
        return self.now_s if self.at_s is None else self.at_s


class Triage:
    """Answers triage requests from the board and the store."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._docs_url = service.settings.docs_url or OWN_DOCS
        self._cache = RenderCache(self._docs_url)
        self._history = History(service.reader, service.store)

    async def __call__(
        self,
        request: Request,
        target: str = "",
        *,
        at: str | None,
        since: str | None,
        form: str | None,
    ) -> Response:
        """The answer to a request. `form` overrides the Accept header of the request.

        Raises:
            Problem: the target is unknown, a parameter is wrong, or the history cannot be read.
        """
        form = form_of(form, request.headers.get("accept"), TRIAGE_FORMS)
        now_s = self._service.clock()
        at_s = moment("at", at, now_s=now_s) if at else None
        since_s = None
        if since:
            before_s = now_s if at_s is None else at_s
            since_s = moment("since", since, now_s=now_s, before_s=before_s)
        if form == HTML:
            return to_page(request, target)
        query = TriageRequest(form, target, now_s, at_s, since_s)
        if at_s is None and since_s is None:
            return await self._now(query)
        return await run_in_threadpool(self._then, query)

    async def _now(self, request: TriageRequest) -> Response:
        now, pending = self._present(request)
        rendered = self._cache.cached(request.form, request.target, now)
        if rendered is None:
            rendered = await run_in_threadpool(
                self._cache.render, request.form, request.target, now
            )
        notices = self._history.notices(request.now_s)
        if self._service.only_fleet:
            notices.append(FLEET_NOTICE)
        return _response(request, now, pending, rendered, notices)

    def _present(self, request: TriageRequest) -> tuple[Newest, dict[str, str]]:
        """The newest states of the targets, and for each target without a state the reason."""
        service, specs = self._service, self._service.targets()
        self._cache.only(specs)
        configured = {spec.name: spec.pending_text for spec in specs}
        if not request.target:
            states = service.states()
            names = {state.name for state in states if state.diagnoses}
            pending = {name: configured[name] for name in sorted(configured.keys() - names)}
            return Newest.of(states, request.now_s), pending
        state = service.state(request.target)
        if state is None and request.target not in configured:
            raise no_such_target(list(configured))
        states = [] if state is None else [state]
        if state is not None and state.diagnoses:
            return Newest.of(states, request.now_s), {}
        awaited = configured.get(request.target, "no longer watched")
        return Newest.of(states, request.now_s), {request.target: awaited}

    def _then(self, request: TriageRequest) -> Response:
        engines = self._history.engines(request.target or None)
        if request.target and not engines and self._service.state(request.target) is None:
            configured = [spec.name for spec in self._service.targets()]
            if request.target not in configured:
                raise no_such_target(configured)
        intervals: list[EngineInterval] | None = None
        if request.since_s is not None:
            intervals = self._history.intervals(
                engines, since_s=request.since_s, until_s=request.moment_s
            )
        notices = self._history.notices(request.now_s)
        if request.at_s is None:
            now, pending = self._present(request)
            rendered = self._cache.render(request.form, request.target, now)
            return _response(request, now, pending, rendered, notices, intervals)
        then = self._history.verdicts(engines, request.at_s)
        notices = [*then.notices(), *notices]
        if not then.verdicts and not intervals:
            raise _nothing_then(engines, then, notices)
        return _past_response(request, then.verdicts, notices, intervals, self._docs_url)


def _response(
    request: TriageRequest,
    now: Newest,
    pending: Mapping[str, str],
    rendered: bytes,
    notices: Sequence[str],
    intervals: Sequence[EngineInterval] | None = None,
) -> Response:
    """The answer about the present. Its parts that depend on the clock are not cached."""
    if request.form == JSON:
        about = _about(pending, notices)
        return _json(request, about, rendered, intervals)
    late = [
        (state.name, request.now_s - state.t_s) for state in now.states if state.name in now.late
    ]
    diagnoses = now.diagnoses()
    first = head(request.form, diagnoses, t_s=request.now_s, past=False, late=late, pending=pending,
                 notices=notices)  # fmt: skip
    return _text(request, [first, rendered.decode()], intervals)


def _past_response(
    request: TriageRequest,
    verdicts: Sequence[Verdict],
    notices: Sequence[str],
    intervals: Sequence[EngineInterval] | None,
    docs_url: str,
) -> Response:
    if request.form == JSON:
        rendered = b",".join(dumped(documented(linked(each, docs_url))) for each in verdicts)
        rendered = b'"targets":[%s],"watching":[]' % rendered
        return _json(request, _about((), notices), rendered, intervals)
    first = head(request.form, verdicts, t_s=request.moment_s, past=True, late=(), pending={},
                 notices=notices)  # fmt: skip
    rendered_text = body(request.form, verdicts, alone=bool(request.target), docs_url=docs_url)
    return _text(request, [first, rendered_text], intervals)


def _about(pending: Iterable[str], notices: Sequence[str]) -> dict[str, Any]:
    return {"pending": list(pending), **({"notices": list(notices)} if notices else {})}


def _json(
    request: TriageRequest,
    about: dict[str, Any],
    rendered: bytes,
    intervals: Sequence[EngineInterval] | None,
) -> Response:
    envelope = {"schema": SCHEMA, "t": round(request.moment_s, 3), **about}
    if intervals is not None:
        envelope["since"] = round(request.since_s or 0.0, 3)
        envelope["intervals"] = [interval_document(row) for row in intervals]
    # Replace the envelope's closing brace by the members that are already rendered.
    return Response(dumped(envelope)[:-1] + b"," + rendered + b"}\n", media_type=MEDIA_TYPES[JSON])


def _text(
    request: TriageRequest, parts: Sequence[str], intervals: Sequence[EngineInterval] | None
) -> Response:
    blocks = [part for part in parts if part]
    if intervals is not None:
        since_s = request.since_s or 0.0
        blocks.append(past(request.form, intervals, since_s=since_s, t_s=request.moment_s))
    if request.form == TEXT:
        blocks.append(HINT)
    whole = clean("\n\n".join(blocks) + "\n")
    return Response(whole, media_type=MEDIA_TYPES[request.form])


def to_page(request: Request, target: str) -> Response:
    """A redirect to the triage page, with the same parameters. The address is relative, for proxies
    with a path prefix."""
    up = "../" * (request.scope["raw_path"].count(b"/") - 1)
    return redirect(f"{up or './'}triage", request, ("at", "since"), target=target)


def redirect(path: str, request: Request, names: Sequence[str], *, target: str = "") -> Response:
    """A redirect to `path`. It keeps those parameters of the request that are listed in `names`."""
    query, given = {"target": target} if target else {}, request.query_params
    query |= {name: given[name] for name in names if name in given}
    suffix = f"?{urlencode(query)}" if query else ""
    return RedirectResponse(f"{path}{suffix}", HTTPStatus.TEMPORARY_REDIRECT)


def _nothing_then(
    engines: Sequence[StoredEngine], then: PastVerdicts, notices: Sequence[str]
) -> Problem:
    if not engines:
        return Problem(HTTPStatus.NOT_FOUND, "; ".join(["nothing is stored yet", *notices]))
    if then.damaged:
        lines = [*notices, history_reach(engines)]
    elif notices:
        lines = ["no data at that moment", history_reach(engines), *notices]
    else:
        lines = ["nothing was watched at that moment", history_reach(engines)]
    return Problem(HTTPStatus.NOT_FOUND, "; ".join(lines))
