"""What each route does."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from anyio import CapacityLimiter, to_thread
from fastapi import Path
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api import metrics
from kneewatch.agent.api.access import READ
from kneewatch.agent.api.forms import HTML, JSON, MEDIA_TYPES
from kneewatch.agent.api.guard import GRANTED, need_admin
from kneewatch.agent.api.problems import Problem, clean, dumped
from kneewatch.agent.api.ready import reasons
from kneewatch.agent.api.service import Service
from kneewatch.agent.api.sizing import Sizes, json_object
from kneewatch.agent.api.triage import Triage, to_page
from kneewatch.agent.api.views import Views, shown
from kneewatch.agent.notify import alerts
from kneewatch.agent.notify.payload import AlertsError
from kneewatch.collector.base import KneewatchError
from kneewatch.reports.triage import page

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 2
"""Pages that are made at the same time: more would take the processor from the cycles."""

TargetName = Annotated[str, Path(description="A target's name, %-encoded.")]


class Routes:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._triage, self._sizes, self._views = Triage(service), Sizes(), Views(service)
        self._pages = CapacityLimiter(PAGES_AT_ONCE)
        self._scrapes = CapacityLimiter(1)

    @property
    def _only_fleet(self) -> bool:
        return self._service.fleet is not None and not self._service.targets()

    async def healthz(self) -> Response:
        """The process answers."""
        return Response("ok\n", media_type="text/plain; charset=utf-8")

    async def readyz(self, request: Request) -> Response:
        """Whether every target has had a cycle; why not is for those who may read."""
        why = reasons(self._service)
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        told: dict[str, Any] = {"ready": not why}
        if READ in _granted(request):
            told["reasons"] = why
            told["restart_needed"] = list(self._service.restart_needed())
        return Response(dumped(told) + b"\n", status, media_type=MEDIA_TYPES[JSON])

    async def metrics(self) -> Response:
        """kneewatch's own metrics."""
        made = await to_thread.run_sync(metrics.exposition, self._service, limiter=self._scrapes)
        return Response(made, headers={"content-type": metrics.CONTENT_TYPE})

    async def triage(self, request: Request) -> Response:
        """What is wrong with all targets; where only a fleet is watched, the past is a fleet's."""
        if self._only_fleet and {"at", "since"} & request.query_params.keys():
            return _to_fleet(request, "../../")
        return await self._triage(request)

    async def triage_target(self, request: Request, target: TargetName) -> Response:
        """What is wrong with one target."""
        return await self._triage(request, target)

    async def size(self, request: Request) -> Response:
        """What fits, how fast, how many GPUs, at what price."""
        return await self._sizes(request)

    async def alerts(self, request: Request) -> Response:
        """The diagnosis for what Alertmanager posts."""
        need_admin(_granted(request))
        payload = await json_object(request)
        try:
            told = await run_in_threadpool(alerts.answer, payload, self._service)
        except AlertsError as exc:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, clean(str(exc))) from exc
        except KneewatchError as exc:
            log.warning("alerts could not be answered error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "not now; the log of kneewatch says why"
            ) from exc
        return Response(dumped(told), media_type=MEDIA_TYPES[JSON])

    async def home(self) -> Response:
        """To the page."""
        return RedirectResponse("triage", HTTPStatus.TEMPORARY_REDIRECT)

    async def page(self, request: Request) -> Response:
        """The page for people; where only a fleet is watched, the way to what is told of it."""
        if self._only_fleet:
            return _to_fleet(request, "")
        asked = shown(request.query_params, self._service.clock())

        def made() -> str:
            return page.render(self._views.view(asked))

        told = await to_thread.run_sync(made, limiter=self._pages)
        return Response(clean(told), media_type=MEDIA_TYPES[HTML])

    async def page_target(self, request: Request, target: TargetName) -> Response:
        """One of the page's files; else the way to the page of a target."""
        kind = page.ASSETS.get(target)
        if kind is None:
            return to_page(request, target)
        return Response(page.asset(target), headers={"content-type": kind})


def _granted(request: Request) -> frozenset[str]:
    granted: frozenset[str] = getattr(request.state, GRANTED)
    return granted


def _to_fleet(request: Request, up: str) -> Response:
    """The way to what is told of the fleet; `up` leads to its root."""
    query = {name: request.query_params[name] for name in ("at", "since", "format") if name in
             request.query_params}  # fmt: skip
    asked = f"?{urlencode(query)}" if query else ""
    return RedirectResponse(f"{up}api/v1/fleet{asked}", HTTPStatus.TEMPORARY_REDIRECT)
