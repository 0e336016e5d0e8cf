"""A service made by hand, and its app behind a real socket or in the process."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from msgspec.structs import replace

from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.server import Bounds, HttpServer
from kneewatch.agent.api.service import Service
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.target_state import Board, TargetState
from kneewatch.agent.targets import TargetSpec
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import SourceState
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK

HERE = "http://127.0.0.1"
SICK_NAME, WELL_NAME = "http://gpu-7:8000", "r1"
PAGE = SourceState("page", NOW_S, success=True, duration_s=0.002)


def settings_of(**flags: Any) -> Settings:  # noqa: ANN401 - a setting has its own kind
    """Settings on a free port of loopback; dots of keys are written as two underscores."""
    stated = {name.replace("__", "."): value for name, value in flags.items()}
    return load(file=None, environ={}, flags={"listen": "127.0.0.1:0", **stated})


def state_of(name: str, *diagnoses: Verdict, t_s: float = NOW_S, **more: Any) -> TargetState:  # noqa: ANN401
    """A target's newest state; the diagnoses get its name."""
    defaults: dict[str, Any] = {
        "url": "http://gpu-7:8000/metrics",
        "labels": {"tier": "chat"},
        "cycle_s": 0.004,
        "interval_s": 5.0,
        "cycles": 12,
        "failures": 1,
        "failing": 0,
        "sources": (PAGE,),
    }
    named = tuple(replace(diagnosis, target=name) for diagnosis in diagnoses)
    return TargetState(name=name, t_s=t_s, diagnoses=named, **(defaults | more))


SICK_STATE, WELL_STATE = state_of(SICK_NAME, SICK), state_of(WELL_NAME, HEALTHY)


def spec_of(name: str, settings: Settings, labels: Mapping[str, str] | None = None) -> TargetSpec:
    """A target as configured."""
    return TargetSpec(name, "http://gpu-7:8000", labels or {}, settings, None, "a test")


def service_of(
    *states: TargetState,
    names: Sequence[str] = (),
    settings: Settings | None = None,
    **more: Any,  # noqa: ANN401
) -> Service:
    """A service at NOW_S with these targets; `names` are configured and have had no cycle."""
    settings = settings or settings_of()
    board = Board()
    for state in states:
        board.put(state)
    specs = [spec_of(name, settings) for name in (*(state.name for state in states), *names)]
    given: dict[str, Any] = {"clock": lambda: NOW_S, "version": "0.1.0", "started_s": NOW_S - 60}
    return Service(board=board, settings=settings, targets=lambda: specs, **(given | more))


class Asker:
    """A client of an app, without a socket between."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url=HERE)
        self._runner = runner

    def get(self, path: str, **headers: str) -> httpx.Response:
        """A GET; underscores of headers are dashes."""
        return self.ask("GET", path, headers)

    def post(self, path: str, document: object, **headers: str) -> httpx.Response:
        """A POST of a JSON document."""
        return self.ask("POST", path, headers, json=document)

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        **more: Any,  # noqa: ANN401
    ) -> httpx.Response:
        """Any request."""
        named = [(name.replace("_", "-"), value) for name, value in (headers or {}).items()]
        named = more.pop("raw_headers", named)
        return self._runner.run(self._client.request(method, path, headers=named, **more))


@contextmanager
def asking(service: Service) -> Generator[Asker]:
    """A client of the service's app in this process."""
    with asyncio.Runner() as runner:
        yield Asker(make_app(service), runner)


@contextmanager
def served(service: Service, bounds: Bounds | None = None) -> Generator[HttpServer]:
    """The app behind a real socket."""
    server = HttpServer(make_app(service), service.settings, bounds)
    server.bind()
    server.start()
    try:
        yield server
    finally:
        assert server.stop(5.0)
