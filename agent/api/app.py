"""HTTP endpoint: the FastAPI app and its routes. I/O edge."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec
from anyio import CapacityLimiter, to_thread
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api import alerts
from kneewatch.agent.api.access import READ, Auth
from kneewatch.agent.api.docs import add_docs
from kneewatch.agent.api.guard import GRANTED, Guard, need_admin
from kneewatch.agent.api.responses import (
    HTML,
    JSON,
    MEDIA_TYPES,
    Asked,
    Problem,
    clean,
    dumped,
    refused,
    unknown_parameter,
)
from kneewatch.agent.api.service import Service, has_diagnosed, probe, source_problems
from kneewatch.agent.api.sizing import converted, json_object, parameters_of, size_of
from kneewatch.agent.api.triage import Triage, page_request, page_view, redirect, to_page
from kneewatch.agent.stream import AcceptRequest
from kneewatch.collector.errors import KneewatchError
from kneewatch.collector.packaged import read_as
from kneewatch.diagnose.doc_links import OWN_DOCS
from kneewatch.diagnose.fleet.verdict import IN_FLEET
from kneewatch.diagnose.verdict_json import DocumentError

if TYPE_CHECKING:
    from fastapi.params import Param

    from kneewatch.agent.api.fleet import FleetPast
    from kneewatch.agent.fleet.watch import FleetMoment

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 2
"""Triage pages rendered at the same time; more would take CPU time from the scrape cycles."""

PAGE_WAIT_S = 15.0
"""Maximum seconds that a page waits for the metrics system."""


class Routes:
    """The endpoints of one service. Their docstrings are the descriptions in the OpenAPI document.
    Answers are not validated against their schemas."""

    def __init__(self, service: Service, fleet_past: FleetPast | None) -> None:
        self._service, self._fleet_past = service, fleet_past
        self._triage = Triage(service)
        self._pages = CapacityLimiter(PAGES_AT_ONCE)
        self._scrapes, self._sizes = CapacityLimiter(1), CapacityLimiter(1)

    async def healthz(self) -> Response:
        """Liveness: answers while the process runs."""
        return Response("ok\n", media_type="text/plain; charset=utf-8")

    async def readyz(self, request: Request, strict: str | None = None) -> Response:
        """Ready once a target or the fleet has been diagnosed, and from then on. If a source fails
        later, the endpoints report since when its state is unknown. `reasons` lists the sources
        that fail now; it is included only with the read token."""
        problems = source_problems(self._service)
        is_strict = strict is not None and converted("strict", bool, strict)
        ready = not problems if is_strict else has_diagnosed(self._service)
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        body: dict[str, Any] = {"ready": ready}
        if READ in _granted(request):
            body["reasons"] = problems
            body["restart_needed"] = list(self._service.restart_needed())
        return Response(dumped(body) + b"\n", status, media_type=MEDIA_TYPES[JSON])

    async def probe(self) -> Response:
        """503 while an engine of any target is hung, for vLLM's livenessProbe; 200 whenever
        kneewatch cannot know."""
        return probe(self._service, "")

    async def probe_target(self, target: str) -> Response:
        """503 while an engine of the target is hung, for vLLM's livenessProbe; 200 whenever
        kneewatch cannot know."""
        return probe(self._service, target)

    async def metrics(self) -> Response:
        """kneewatch's own metrics in Prometheus's text format."""
        return await to_thread.run_sync(_own_metrics, self._service, limiter=self._scrapes)

    async def triage(
        self,
        request: Request,
        target: str | None = None,
        at: str | None = None,
        since: str | None = None,
        format: str | None = None,
    ) -> Response:
        """All targets, worst first, or one target. `at` selects a past moment. The text is for
        people and may change; the JSON is stable."""
        if self._service.only_fleet and (at is not None or since is not None):
            return redirect("../../api/v1/fleet", request, ("at", "since", "format"))
        return await self._triage(request, target or "", at=at, since=since, form=format)

    async def triage_target(
        self,
        request: Request,
        target: str,
        at: str | None = None,
        since: str | None = None,
        format: str | None = None,
    ) -> Response:
        """One target. `at` selects a past moment. The text is for people and may change; the JSON
        is stable."""
        return await self._triage(request, target, at=at, since=since, form=format)

    async def size(self, request: Request) -> Response:
        """The same sizing as `kneewatch size`: whether a model fits, its speed, the number of GPUs
        and the price. The model must be a catalogue id: requests cannot open files."""
        given = await parameters_of(request)
        # One at a time: a search takes about 0.3 s of CPU time.
        document = await to_thread.run_sync(size_of, given, limiter=self._sizes)
        return Response(dumped(document), media_type=MEDIA_TYPES[JSON])

    async def alerts(self, request: Request) -> Response:
        """Alertmanager's webhook (version 4). Returns each alert with the diagnoses of the matched
        servers when the alert started and now. Configured receivers are notified. Requires the
        admin token if tokens are set."""
        need_admin(_granted(request))
        payload = await json_object(request)
        try:
            answer = await run_in_threadpool(alerts.answer, payload, self._service)
        except DocumentError as exc:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, clean(str(exc))) from exc
        except KneewatchError as exc:
            log.warning("cannot answer alerts error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "temporarily unavailable; see kneewatch's log"
            ) from exc
        return Response(dumped(answer), media_type=MEDIA_TYPES[JSON])

    async def accept(self, request: Request) -> Response:
        """Makes present values that deviate the usual ones of a target's engines, as `kneewatch
        accept`. Returns each value with what was usual before. Requires the admin token if tokens
        are set."""
        need_admin(_granted(request))
        try:
            asked = read_as(await json_object(request), AcceptRequest)
        except msgspec.ValidationError as exc:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, clean(str(exc))) from exc
        accepted = await run_in_threadpool(self._service.accept, asked)
        if not accepted:
            target = clean(f"{asked.target!r:.80}")
            raise Problem(HTTPStatus.NOT_FOUND, f"target {target} has no such engine")
        if not asked.dry_run:
            log.info(
                "accepted usual values target=%s what=%s from=%s values=%s",
                asked.target,
                ",".join(asked.what) or "all",
                request.client.host if request.client else "?",
                "; ".join(each.words() for engine in accepted for each in engine.deviations)
                or "none deviated",
            )
        document = {"accepted": not asked.dry_run, "engines": accepted}
        return Response(msgspec.json.encode(document), media_type=MEDIA_TYPES[JSON])

    async def home(self) -> Response:
        return RedirectResponse("triage", HTTPStatus.TEMPORARY_REDIRECT)

    async def page(
        self,
        request: Request,
        target: str | None = None,
        at: str | None = None,
        since: str | None = None,
    ) -> Response:
        """The triage page: all targets and the pools of a fleet, or one of them, or a replica."""
        parameters = page_request(self._service.clock(), target=target, at=at, since=since)
        fleet, parameters = await self._fleet(parameters)

        def render() -> str:
            # Lazy, as below: jinja2 stays out of the daemon until somebody opens the page.
            from kneewatch.reports.triage import page

            return page.render(page_view(self._service, parameters, fleet))

        html = await to_thread.run_sync(render, limiter=self._pages)
        return Response(clean(html), media_type=MEDIA_TYPES[HTML])

    async def _fleet(self, asked: Asked) -> tuple[FleetMoment | None, Asked]:
        """The watched fleet at the moment of a page, and the request with a notice if it cannot be
        known. The metrics system is asked only for a pool or replica."""
        if self._service.fleet is None or self._fleet_past is None:
            return None, asked
        if asked.at_s is None:
            return self._service.fleet.state.moment_at(self._service.clock()), asked
        if not asked.target.startswith(IN_FLEET):
            return None, asked
        try:
            return await self._fleet_past.at(asked.at_s, answer_s=PAGE_WAIT_S), asked
        except Problem as problem:
            notice = f"The replicas at that moment are unknown: {problem.detail}."
            return None, replace(asked, notices=(*asked.notices, notice))

    async def page_target(self, request: Request, target: str) -> Response:
        """A file of the triage page, or a redirect to the triage page of a target."""
        from kneewatch.reports.triage import page

        kind = page.ASSETS.get(target)
        if kind is None:
            return to_page(request, target)
        return Response(page.asset(target), headers={"content-type": kind})


def _granted(request: Request) -> frozenset[str]:
    granted: frozenset[str] = getattr(request.state, GRANTED)
    return granted


async def _check_parameters(request: Request) -> None:
    """Raise a problem if the request has a query parameter that the route does not declare."""
    route: APIRoute = request.scope["route"]
    declared = {
        field.alias: cast("Param", field.field_info) for field in route.dependant.query_params
    }
    for name in request.query_params:
        if name not in declared:
            documented = [other for other, query in declared.items() if query.include_in_schema]
            raise unknown_parameter(name, documented)


def _own_metrics(service: Service) -> Response:
    # Lazy: prometheus_client brings an HTTP server, and not every daemon is scraped.
    from kneewatch.agent.api import metrics

    return Response(metrics.exposition(service), headers={"content-type": metrics.CONTENT_TYPE})


# --- The app --------------------------------------------------------------------------------------


Endpoint = Callable[..., Awaitable[Response]]

ABOUT = (
    "Diagnosis of the watched servers: what is wrong, since when, the evidence, and what to "
    "change. Times are UTC. Where a token is set, send it as `Authorization: Bearer TOKEN` or as "
    "the password of Basic authentication. Errors are RFC 9457 problem documents; outside /api, "
    "browsers get an HTML page."
)


class App(FastAPI):
    """FastAPI with a complete OpenAPI document, built at the first request for it."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            # Imported here to save memory: most daemons never serve the schemas and examples.
            from kneewatch.agent.api.openapi import completed

            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema

    def serve(
        self, path: str, endpoint: Endpoint, *, post: bool = False, any_parameter: bool = False
    ) -> None:
        """Add a GET endpoint, or a POST endpoint, that endpoints.toml documents.

        `any_parameter`: the names of query parameters are not checked here, because the endpoint
        checks or ignores them.
        """
        self.add_api_route(
            path,
            endpoint,
            methods=["POST" if post else "GET"],
            response_class=Response,
            dependencies=[] if any_parameter else [Depends(_check_parameters)],
        )


def make_app(service: Service) -> FastAPI:
    """The FastAPI app that serves a service.

    Raises:
        SettingsError: a token file cannot be used.
    """
    app = App(
        title="kneewatch",
        version=service.version,
        description=ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Newer versions of FastAPI can export telemetry by environment variables: keep it off.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        middleware=[Middleware(Guard, service.settings, Auth.of(service.settings))],
        exception_handlers={Problem: _problem, HTTPException: _unrouted},
    )
    fleet_past = None
    if service.fleet is not None:
        from kneewatch.agent.api.fleet import (
            FleetPast,
            fleet_answers,
        )  # here: few daemons watch one

        docs_url = service.settings.docs_url or OWN_DOCS
        fleet_past = FleetPast(service.fleet.at)
        answers = fleet_answers(service.fleet, fleet_past, service.clock, docs_url)
        app.serve("/api/v1/fleet", answers)
    routes = Routes(service, fleet_past)
    app.serve("/healthz", routes.healthz, any_parameter=True)
    app.serve("/readyz", routes.readyz)
    app.serve("/probe", routes.probe, any_parameter=True)
    app.serve("/probe/{target:path}", routes.probe_target, any_parameter=True)
    app.serve("/metrics", routes.metrics, any_parameter=True)
    app.serve("/api/v1/triage", routes.triage)
    app.serve("/api/v1/triage/{target:path}", routes.triage_target)
    app.serve("/api/v1/size", routes.size, any_parameter=True)
    app.serve("/api/v1/size", routes.size, post=True)
    app.serve("/api/v1/alerts", routes.alerts, post=True)
    app.serve("/api/v1/accept", routes.accept, post=True)
    app.serve("/triage", routes.page, any_parameter=True)
    for path, endpoint in (("/", routes.home), ("/triage/{target:path}", routes.page_target)):
        app.add_api_route(path, endpoint, include_in_schema=False, response_class=Response)
    add_docs(app)
    return app


async def _problem(request: Request, problem: Exception) -> Response:
    if not isinstance(problem, Problem):
        raise problem
    return refused(problem, request.scope)


async def _unrouted(request: Request, error: Exception) -> Response:
    """The response to a request whose path or method no route has."""
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    missing = "no such page: " if status == HTTPStatus.NOT_FOUND else ""
    detail = f"{missing}see /docs for the endpoints"
    return refused(Problem(status, detail, error.headers), request.scope)
