"""The FastAPI app: the routes of the HTTP endpoint."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Path
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api import metrics
from kneewatch.agent.api.auth import READ
from kneewatch.agent.api.guard import GRANTED, Guard, Policy, need_admin
from kneewatch.agent.api.responses import (
    HTML,
    JSON,
    MARKDOWN,
    MEDIA_TYPES,
    Problem,
    clean,
    dumped,
    form_of,
    refused,
)
from kneewatch.agent.api.service import Service, reasons
from kneewatch.agent.api.sizing import Sizes, json_object
from kneewatch.agent.api.triage import Triage, to_page
from kneewatch.agent.api.triage_page import Views, page_request
from kneewatch.agent.notify import alerts
from kneewatch.agent.notify.forward import PayloadError
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.doc_links import OWN_DOCS
from kneewatch.reports.triage import page

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 2
"""Triage pages rendered at the same time; more would take CPU time from the scrape cycles."""

TargetName = Annotated[str, Path(description="A target's name, %-encoded.")]


class Routes:
    """The endpoints of one service."""

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
        """Whether every target was scraped; the reasons need the read token."""
        why = reasons(self._service)
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        body: dict[str, Any] = {"ready": not why}
        if READ in _granted(request):
            body["reasons"] = why
            body["restart_needed"] = list(self._service.restart_needed())
        return Response(dumped(body) + b"\n", status, media_type=MEDIA_TYPES[JSON])

    async def metrics(self) -> Response:
        """kneewatch's own metrics."""
        exposition = await to_thread.run_sync(
            metrics.exposition, self._service, limiter=self._scrapes
        )
        return Response(exposition, headers={"content-type": metrics.CONTENT_TYPE})

    async def triage(self, request: Request) -> Response:
        """The diagnosis of all targets. Where only a fleet is watched, past moments redirect to
        it."""
        if self._only_fleet and {"at", "since"} & request.query_params.keys():
            return _to_fleet(request, "../../")
        return await self._triage(request)

    async def triage_target(self, request: Request, target: TargetName) -> Response:
        """The diagnosis of one target."""
        return await self._triage(request, target)

    async def size(self, request: Request) -> Response:
        """A size: whether a model fits, its speed, the number of GPUs and the price."""
        return await self._sizes(request)

    async def alerts(self, request: Request) -> Response:
        """Alertmanager's alerts with the diagnosis of their targets."""
        need_admin(_granted(request))
        payload = await json_object(request)
        try:
            answer = await run_in_threadpool(alerts.answer, payload, self._service)
        except PayloadError as exc:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, clean(str(exc))) from exc
        except KneewatchError as exc:
            log.warning("cannot answer alerts error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "not available now; see kneewatch's log"
            ) from exc
        return Response(dumped(answer), media_type=MEDIA_TYPES[JSON])

    async def home(self) -> Response:
        """A redirect to the triage page."""
        return RedirectResponse("triage", HTTPStatus.TEMPORARY_REDIRECT)

    async def page(self, request: Request) -> Response:
        """The triage page; where only a fleet is watched, a redirect to its diagnosis."""
        if self._only_fleet:
            return _to_fleet(request, "")
        parameters = page_request(request.query_params, self._service.clock())

        def render() -> str:
            return page.render(self._views.view(parameters))

        html = await to_thread.run_sync(render, limiter=self._pages)
        return Response(clean(html), media_type=MEDIA_TYPES[HTML])

    async def page_target(self, request: Request, target: TargetName) -> Response:
        """A file of the triage page, or a redirect to the page of a target."""
        kind = page.ASSETS.get(target)
        if kind is None:
            return to_page(request, target)
        return Response(page.asset(target), headers={"content-type": kind})


def _granted(request: Request) -> frozenset[str]:
    granted: frozenset[str] = getattr(request.state, GRANTED)
    return granted


def _to_fleet(request: Request, up: str) -> Response:
    """A redirect to the fleet's diagnosis; `up` is the relative path to the root."""
    query = {name: request.query_params[name] for name in ("at", "since", "format") if name in
             request.query_params}  # fmt: skip
    suffix = f"?{urlencode(query)}" if query else ""
    return RedirectResponse(f"{up}api/v1/fleet{suffix}", HTTPStatus.TEMPORARY_REDIRECT)


# --- The app --------------------------------------------------------------------------------------


GET, POST = ("GET",), ("POST",)

Endpoint = Callable[..., Awaitable[Response]]


class App(FastAPI):
    """FastAPI with a complete OpenAPI document, built at the first request for it."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            # Imported here to save memory: most daemons never serve the schemas and examples.
            from kneewatch.agent.api.openapi import completed

            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema


def make_app(service: Service) -> FastAPI:
    """The app over a service.

    Raises:
        SettingsError: a token file cannot be used.
    """
    app = App(
        title="kneewatch",
        version=service.version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Newer versions of FastAPI can export telemetry by environment variables: keep it off.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        middleware=[Middleware(Guard, policy=Policy.of(service.settings))],
        exception_handlers={Problem: _problem, HTTPException: _unrouted},
    )
    routes = Routes(service)
    documented: tuple[tuple[str, Endpoint, tuple[str, ...]], ...] = (
        ("/healthz", routes.healthz, GET),
        ("/readyz", routes.readyz, GET),
        ("/metrics", routes.metrics, GET),
        ("/api/v1/triage", routes.triage, GET),
        ("/api/v1/triage/{target:path}", routes.triage_target, GET),
        ("/api/v1/size", routes.size, GET),
        ("/api/v1/size", routes.size, POST),
        ("/api/v1/alerts", routes.alerts, POST),
        ("/triage", routes.page, GET),
    )
    if service.fleet is not None:
        from kneewatch.agent.api.fleet import FleetAnswers  # here: few daemons watch one

        docs_url = service.settings.docs_url or OWN_DOCS
        fleet = FleetAnswers(service.fleet, service.clock, docs_url)
        documented += (("/api/v1/fleet", fleet.answer, GET),)
    for path, endpoint, methods in documented:
        app.add_api_route(path, endpoint, methods=list(methods), response_class=Response)
    hidden: tuple[tuple[str, Endpoint], ...] = (
        ("/", routes.home),
        ("/triage/{target:path}", routes.page_target),
        ("/openapi.json", _document(app)),
        ("/docs", _reference(app)),
        ("/docs/reference.css", _stylesheet),
        ("/docs/glossary", _glossary),
        ("/docs/{folder}/{name}", _doc_page),
    )
    for path, endpoint in hidden:
        app.add_api_route(path, endpoint, include_in_schema=False, response_class=Response)
    return app


def _document(app: App) -> Endpoint:
    async def document() -> Response:
        return Response(orjson.dumps(app.openapi()), media_type=MEDIA_TYPES[JSON])

    return document


def _reference(app: App) -> Endpoint:
    async def reference() -> Response:
        from kneewatch.agent.api.docs_page import page

        return Response(page(app.openapi()), media_type=MEDIA_TYPES[HTML])

    return reference


async def _stylesheet() -> Response:
    from kneewatch.agent.api.docs_page import stylesheet

    return Response(stylesheet(), headers={"content-type": "text/css; charset=utf-8"})


async def _glossary(request: Request) -> Response:
    return await _doc_page(request, "", "glossary")


async def _doc_page(request: Request, folder: str, name: str) -> Response:
    """A page of the documentation: HTML for a browser, its Markdown for others."""
    from kneewatch.agent.api import doc_pages

    form = form_of(
        request.query_params.get("format"), request.headers.get("accept"), (MARKDOWN, HTML)
    )
    markdown = doc_pages.source(folder, name)
    if markdown is None:
        raise Problem(HTTPStatus.NOT_FOUND, "there is no such page; see /docs/causes/index")
    up = "../" if folder else ""
    text = doc_pages.rendered(markdown, up=up) if form == HTML else markdown
    return Response(text, media_type=MEDIA_TYPES[form])


async def _problem(request: Request, problem: Exception) -> Response:
    if not isinstance(problem, Problem):
        raise problem
    return refused(problem, request.scope)


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or no such method on it."""
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    return refused(Problem(status, "see /docs for the endpoints", error.headers), request.scope)
