"""A fleet's past moments: one is asked for at a time, kept for a while, and never waited for too
long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from threading import Event

import pytest

from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.fleet import CACHE_S, FleetPast
from kneewatch.agent.api.responses import Problem
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.collector.errors import CollectError
from tests.agent.api.serving import Asker, service_of, settings_of
from tests.diagnose.fleet.example_fleets import fleet, verdict
from tests.recordings import NO_TARGETS
from tests.waiting import PATIENCE_S

FOUND = FleetMoment.of(verdict(*fleet(3)), {}, NO_TARGETS, 30.0)


class System:
    """A metrics system that answers once it may, and notes what it was asked."""

    def __init__(self, error: CollectError | None = None) -> None:
        self.asked: list[float] = []
        self.may, self.error, self.now_s = Event(), error, 0.0
        self.may.set()

    def ask(self, at_s: float) -> FleetMoment:
        self.asked.append(at_s)
        assert self.may.wait(PATIENCE_S)
        if self.error:
            raise self.error
        return FOUND

    def past(self) -> FleetPast:
        return FleetPast(self.ask, monotonic=lambda: self.now_s)


def refused(problem: pytest.ExceptionInfo[Problem]) -> HTTPStatus:
    return problem.value.status


def test_an_answer_is_kept_for_a_while() -> None:
    system = System()

    async def play() -> None:
        past = system.past()
        assert await past.at(1000.2) is FOUND
        assert await past.at(1000.9) is FOUND, "to the second"
        assert system.asked == [1000.0]
        system.now_s = CACHE_S + 1
        await past.at(1000.0)
        await past.at(2000.0)
        assert system.asked == [1000.0, 1000.0, 2000.0]

    asyncio.run(play())


def test_one_is_asked_for_at_a_time() -> None:
    system = System()

    async def play() -> None:
        past = system.past()
        system.may.clear()
        first, same = (asyncio.create_task(past.at(1000.0)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="another moment") as problem:
            await past.at(2000.0)
        assert refused(problem) == HTTPStatus.SERVICE_UNAVAILABLE
        assert problem.value.headers["Retry-After"]
        system.may.set()
        assert await first is await same is FOUND
        assert await past.at(2000.0) is FOUND
        assert system.asked == [1000.0, 2000.0]

    asyncio.run(play())


def test_nobody_waits_too_long_and_what_comes_late_is_told() -> None:
    system = System()

    async def play() -> None:
        past = system.past()
        system.may.clear()
        with pytest.raises(Problem, match=r"within 50 ms") as problem:
            await past.at(1000.0, answer_s=0.05)
        assert refused(problem) == HTTPStatus.GATEWAY_TIMEOUT
        system.may.set()
        diagnosis = None
        while diagnosis is None:
            with suppress(Problem):  # the answer is a thread's
                diagnosis = await past.at(1000.0)
        assert diagnosis is FOUND
        assert system.asked == [1000.0]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("kind", "status"),
    [("no_vllm", HTTPStatus.NOT_FOUND), ("timeout", HTTPStatus.SERVICE_UNAVAILABLE)],
)
def test_an_error_is_told_and_not_kept(kind: str, status: HTTPStatus) -> None:
    system = System(CollectError("the disk is full", kind=kind))

    async def play() -> None:
        past = system.past()
        with pytest.raises(Problem, match="the disk is full") as problem:
            await past.at(1000.0)
        assert refused(problem) == status
        system.error = None
        assert await past.at(1000.0) is FOUND

    asyncio.run(play())


Ask = Callable[[str], tuple[int, str]]


@pytest.fixture
def ask() -> Ask:
    """Asks a daemon that watches a fleet which is down, and nothing else."""
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    app = make_app(service_of(fleet=watch))

    def got(path: str) -> tuple[int, str]:
        with asyncio.Runner() as runner:
            answer = Asker(app, runner).get(path)
        return answer.status_code, answer.headers.get("location") or answer.json()["detail"]

    return got


STRETCH = "kneewatch report --prometheus"


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/v1/triage?at=-2h&format=json", 307, "../../api/v1/fleet?at=-2h&format=json"),
        ("/api/v1/triage?since=-2h", 307, "../../api/v1/fleet?since=-2h"),
        ("/api/v1/fleet?since=-2h", 422, STRETCH),
        ("/api/v1/fleet?at=03:07&since=-2h", 422, STRETCH),
        ("/api/v1/fleet?at=yesterday", 422, "at is not a time"),
    ],
)
def test_where_a_past_moment_is_told(path: str, status: int, text: str, ask: Ask) -> None:
    seen, words = ask(path)
    assert seen == status
    assert text in words


def test_beside_targets_of_its_own_triage_is_theirs() -> None:
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    with asyncio.Runner() as runner:
        asker = Asker(make_app(service_of(names=["r1"], fleet=watch)), runner)
        assert "history" in asker.get("/api/v1/triage?at=-2h").json()["detail"]
