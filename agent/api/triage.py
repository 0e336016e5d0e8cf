"""`/api/v1/triage`: the diagnoses of targets, now or at any time in the store."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api.parameters import TRIAGE_FORMS, Asked, asked
from kneewatch.agent.api.past import (
    EngineInterval,
    History,
    damage_notices,
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
from kneewatch.agent.api.service import Service, late, shown, worst_first
from kneewatch.agent.api.triage_rendering import HINT, body, head, past
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState, watching
from kneewatch.diagnose.doc_links import OWN_DOCS, linked
from kneewatch.diagnose.verdict import documented

SCHEMA = "kneewatch.triage/1"
FLEET_NOTICE = "no single target is configured, only a fleet: see /api/v1/fleet for its diagnosis"


class Triage:
    """Answers triage requests from the board and the store."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._docs_url = service.settings.docs_url or OWN_DOCS
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
        query = asked(self._service.clock(), target, at, since)
        if form == HTML:
            return to_page(request, target)
        rendered = await run_in_threadpool(self._answer, query, form)
        return Response(rendered, media_type=MEDIA_TYPES[form])

    def _answer(self, query: Asked, form: str) -> bytes:
        """The rendered answer, from the board for now, and from the store for a past moment."""
        is_past, moment_s, history = query.at_s is not None, query.moment_s, self._history
        notices = history.notices(query.now_s)
        intervals: list[EngineInterval] | None = None
        stored: list[StoredEngine] = []
        if is_past or query.since_s is not None:
            stored = self._stored(query.target)
        if query.since_s is not None:
            intervals = history.intervals(stored, since_s=query.since_s, until_s=moment_s)
        states, pending = ([], {}) if is_past else self._present(query.target)
        late_s = {
            state.name: query.now_s - state.t_s for state in states if late(state, query.now_s)
        }
        if is_past:
            verdicts, damaged = history.verdicts(stored, moment_s)
            notices = [*damage_notices(damaged), *notices]
            if not verdicts and not intervals:
                raise _nothing_then(stored, damaged, notices)
        else:
            each = (shown(state, late=state.name in late_s) for state in states)
            verdicts = worst_first(chain.from_iterable(each))
            notices += [FLEET_NOTICE] if self._service.only_fleet else []
        if form == JSON:
            document: dict[str, Any] = {"schema": SCHEMA, "t": round(moment_s, 3)}
            document |= {"pending": list(pending), **({"notices": notices} if notices else {})}
            if intervals is not None:
                document["since"] = round(query.since_s or 0.0, 3)
                document["intervals"] = [interval_document(row) for row in intervals]
            document["targets"] = [documented(linked(each, self._docs_url)) for each in verdicts]
            document["watching"] = [watching(each, late=each.name in late_s) for each in states]
            return dumped(document) + b"\n"
        blocks = [
            head(form, verdicts, t_s=moment_s, past=is_past, late=list(late_s.items()),
                 pending=pending, notices=notices),
            body(form, verdicts, alone=bool(query.target), docs_url=self._docs_url),
        ]  # fmt: skip
        if intervals is not None:
            blocks.append(past(form, intervals, since_s=query.since_s or 0.0, t_s=moment_s))
        blocks += [HINT] if form == TEXT else []
        return (clean("\n\n".join(filter(None, blocks))) + "\n").encode()

    def _present(self, target: str) -> tuple[list[TargetState], dict[str, str]]:
        """The newest states of the targets, and for each target without a state the reason."""
        service = self._service
        configured = {spec.name: spec.pending_text for spec in service.targets()}
        if not target:
            states = service.states()
            names = {state.name for state in states if state.diagnoses}
            return states, {name: configured[name] for name in sorted(configured.keys() - names)}
        state = service.state(target)
        if state is None and target not in configured:
            raise no_such_target(list(configured))
        states = [] if state is None else [state]
        if state is not None and state.diagnoses:
            return states, {}
        return states, {target: configured.get(target, "no longer watched")}

    def _stored(self, target: str) -> list[StoredEngine]:
        """The stored engines of a target, or of all."""
        engines = self._history.engines(target or None)
        if target and not engines and self._service.state(target) is None:
            configured = [spec.name for spec in self._service.targets()]
            if target not in configured:
                raise no_such_target(configured)
        return engines


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
    engines: Sequence[StoredEngine], damaged: Sequence[str], notices: Sequence[str]
) -> Problem:
    if not engines:
        return Problem(HTTPStatus.NOT_FOUND, "; ".join(["nothing is stored yet", *notices]))
    if damaged:
        lines = [*notices, history_reach(engines)]
    elif notices:
        lines = ["no data at that moment", history_reach(engines), *notices]
    else:
        lines = ["nothing was watched at that moment", history_reach(engines)]
    return Problem(HTTPStatus.NOT_FOUND, "; ".join(lines))
