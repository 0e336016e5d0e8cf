"""The FastAPI app: every route of the daemon's HTTP endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from kneewatch.agent.api.forms import HTML, JSON, MEDIA_TYPES
from kneewatch.agent.api.guard import Guard, Policy
from kneewatch.agent.api.problems import Problem
from kneewatch.agent.api.refusals import refused
from kneewatch.agent.api.routes import Routes
from kneewatch.agent.api.service import Service

GET, POST = ("GET",), ("POST",)

Endpoint = Callable[..., Awaitable[Response]]


class App(FastAPI):
    """FastAPI whose OpenAPI document is complete, and made when it is first asked for."""

    def openapi(self) -> dict[str, Any]:
        """The document."""
        if self.openapi_schema is None:
            # Here, so that a daemon that nobody asks does not carry schemas and examples.
            from kneewatch.agent.api.openapi import completed

            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema


def make_app(service: Service) -> FastAPI:
    """The app that answers from a service.

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
        # Newer versions can report requests elsewhere, as the environment says: never from here.
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

        documented += (("/api/v1/fleet", FleetAnswers(service.fleet, service.clock).answer, GET),)
    for path, endpoint, methods in documented:
        app.add_api_route(path, endpoint, methods=list(methods), response_class=Response)
    hidden: tuple[tuple[str, Endpoint], ...] = (
        ("/", routes.home),
        ("/triage/{target:path}", routes.page_target),
        ("/openapi.json", _document(app)),
        ("/docs", _reference(app)),
        ("/docs/reference.css", _stylesheet),
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
        from kneewatch.agent.api.reference import page

        return Response(page(app.openapi()), media_type=MEDIA_TYPES[HTML])

    return reference


async def _stylesheet() -> Response:
    from kneewatch.agent.api.reference import stylesheet

    return Response(stylesheet(), headers={"content-type": "text/css; charset=utf-8"})


async def _problem(request: Request, problem: Exception) -> Response:
    if not isinstance(problem, Problem):
        raise problem
    return refused(problem, request.scope)


async def _unrouted(request: Request, trouble: Exception) -> Response:
    """No such path, or no such method on it."""
    if not isinstance(trouble, HTTPException):
        raise trouble
    status = HTTPStatus(trouble.status_code)
    return refused(Problem(status, "see /docs for what there is", trouble.headers), request.scope)
