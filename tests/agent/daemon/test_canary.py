"""Canary requests: off by default, of one token, never to a server at rest; what failures mean."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kneewatch.agent.daemon.scraping import Canary, canary_fetch
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.server_state import CanaryState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from tests.agent.daemon.factories import Kept, settings, target, watch
from tests.agent.running import bodies
from tests.agent.server.vllm_server import MISSING, document, path_of
from tests.collector.servers import Server, Start, answer
from tests.waiting import until

ANSWER = document({"choices": [{"text": "b"}]})
PAGES = bodies("kv_pressure_cascade", 0, 20)
IDLE, BUSY = PAGES[0], bodies("kv_pressure_cascade", 40, 60)
FAILED = CanaryState(None, 2, 1001.0, "timeout after 30 s")


class Sent:
    """A canary to a server that answers by path."""

    def __init__(
        self,
        start: Start,
        answers: dict[str, bytes | None],
        spawn: Callable[[Callable[[], None]], None] = lambda run: run(),
    ) -> None:
        self.bodies: list[bytes] = []

        def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
            head, _, body = request.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            while length is not None and len(body) < int(length[1]):
                body += sock.recv(4096)
            self.bodies += [body] if body else []
            data = answers.get(path_of(request), MISSING)
            if data is None:
                return False
            sock.sendall(data)
            return True

        self.server: Server = start(serve)
        stated = settings(canary__interval_s=30.0, canary__timeout_s=0.2)
        self.canary = Canary(self.server.url, stated, wall=lambda: 1000.0, spawn=spawn)

    def poll(self, t_s: float) -> CanaryState:
        self.canary.poll(t_s, "tiny")
        return self.canary.state

    @property
    def posts(self) -> list[bytes]:
        return [request for request in self.server.requests if request.startswith(b"POST")]


def test_it_is_off_by_default_and_has_no_credentials_but_its_own() -> None:
    other = settings(canary__interval_s=60.0, fetch__bearer_token_file="/secret")
    assert canary_fetch(other).bearer_token_file is None
    own = canary_fetch(settings(canary__interval_s=60.0, canary__bearer_token_file="/own"))
    assert (own.bearer_token_file, own.read_timeout_s) == ("/own", 30.0)


def test_it_asks_for_one_token_at_the_interval(serving: Start) -> None:
    sent = Sent(serving, {"/v1/completions": ANSWER})
    for t_s in (1000.0, 1005.0, 1029.0, 1030.0):
        state = sent.poll(t_s)
    assert state.latency_s is not None
    assert len(sent.posts) == 2
    assert json.loads(sent.bodies[0]) == {"model": "tiny", "prompt": "a", "max_tokens": 1}


def test_on_silence_it_asks_while_traffic_is_cut_off_and_forgets_once_it_flows(
    serving: Start,
) -> None:
    stated = settings(canary__on_silence=True, canary__timeout_s=0.2)
    failed = answer(b"", status="500 Internal Server Error")
    sent = Sent(serving, {"/v1/completions": failed})
    canary = Canary(sent.server.url, stated, spawn=lambda run: run())
    canary.poll(1000.0, "tiny")
    assert canary.state == CanaryState()
    for t_s in (1005.0, 1010.0):
        canary.poll(t_s, "tiny", silent=True)
    assert canary.state.failures == 2
    canary.poll(1015.0, "tiny")
    assert canary.state == CanaryState()


def test_it_does_not_ask_on_silence_unless_that_is_set(serving: Start) -> None:
    sent = Sent(serving, {"/v1/completions": ANSWER})
    for t_s in (1000.0, 1005.0):
        sent.canary.poll(t_s, "tiny", silent=True)
    assert len(sent.posts) == 1


@pytest.mark.parametrize("path", ["/is_sleeping", "/is_paused"])
def test_a_server_at_rest_is_left_alone(serving: Start, path: str) -> None:
    at_rest = document({path[1:]: True})
    sent = Sent(serving, {"/v1/completions": ANSWER, path: at_rest})
    said = f"{{'{path[1:]}': True}}"
    assert sent.poll(1000.0) == CanaryState(refused=f"not sent: GET {path}: {said}")
    assert sent.posts == []


@pytest.mark.parametrize(
    "response",
    [
        answer(b"", status="500 Internal Server Error"),
        answer(b"", status="403 Forbidden"),
        document([True]),
        document({"is_sleeping": [False]}),
        document({"is_sleeping": "no"}),
        document({}),
        None,
    ],
)
def test_where_it_is_unknown_whether_a_server_rests_none_is_sent(
    serving: Start, response: bytes | None
) -> None:
    sent = Sent(serving, {"/v1/completions": ANSWER, "/is_sleeping": response})
    state = sent.poll(1000.0)
    assert state.refused.startswith("not sent: GET /is_sleeping: ")
    assert (sent.posts, state.failures) == ([], 0)


def test_a_server_that_says_it_is_awake_is_asked(serving: Start) -> None:
    awake = {path: document({path[1:]: False}) for path in ("/is_sleeping", "/is_paused")}
    sent = Sent(serving, {"/v1/completions": ANSWER, **awake})
    assert sent.poll(1000.0).refused == ""
    assert len(sent.posts) == 1


ASLEEP = re.sub(rb'(sleep_state="awake"}) 1.0', rb"\1 0.0", IDLE)


def test_only_a_page_that_was_just_read_and_is_awake_lets_it_be_sent(serving: Start) -> None:
    answers: dict[str, bytes | None] = {"/v1/completions": ANSWER}
    sent = Sent(serving, answers)
    kept, times_s = Kept(), itertools.count(1000.0, 10.0)
    watched = watch(
        target(sent.server.url, canary__interval_s=1.0), kept, wall=lambda: next(times_s)
    )
    posts: list[int] = []
    words: list[list[str]] = []
    for page in (IDLE, b"no page", b"no page", ASLEEP, ASLEEP, IDLE, IDLE):
        answers["/metrics"] = answer(page)
        watched.cycle()
        until(lambda: all(thread.name != "canary" for thread in threading.enumerate()))
        posts.append(len(sent.posts))
        (engine,) = kept.cycles[-1].engines
        words.append([line for line in engine.diagnosis.unknown if line.startswith("canary: ")])
    watched.retire()
    assert posts == [1, 1, 1, 1, 1, 2, 3]
    assert words[2] == ["canary: not sent: the engine's metrics were not read"]
    assert words[4] == ["canary: not sent: the server is asleep"]
    assert words[6] == []


@pytest.mark.parametrize(
    ("response", "failures", "refused"),
    [
        (answer(b"", status="500 Internal Server Error"), 2, False),
        (answer(b"", status="503 Service Unavailable"), 0, True),
        (answer(b"", status="429 Too Many Requests"), 0, True),
        (answer(b"", status="401 Unauthorized"), 0, True),
        (answer(b"", "Location: http://127.0.0.1:9/", status="307 Temporary Redirect"), 0, True),
        (MISSING, 0, True),
    ],
)
def test_what_counts_as_a_failure(
    serving: Start, response: bytes, failures: int, *, refused: bool
) -> None:
    sent = Sent(serving, {"/v1/completions": response})
    sent.poll(1000.0)
    state = sent.poll(1030.0)
    assert (state.failures, bool(state.refused)) == (failures, refused)
    assert len(sent.posts) == 2, "no redirect is followed"


def test_a_server_that_does_not_answer_fails_until_it_does(serving: Start) -> None:
    answers: dict[str, bytes | None] = {"/v1/completions": b""}
    sent = Sent(serving, answers)
    sent.poll(1000.0)
    state = sent.poll(1030.0)
    assert (state.failures, state.since_s) == (2, 1000.0)
    answers["/v1/completions"] = ANSWER
    assert sent.poll(1060.0).failures == 0


def test_where_no_thread_can_be_started_the_next_request_is_sent(serving: Start) -> None:
    refused = False

    def refuse_once(run: Callable[[], None]) -> None:
        nonlocal refused
        if not refused:
            refused = True
            raise RuntimeError("can't start new thread")
        run()

    sent = Sent(serving, {}, refuse_once)
    assert "can't start new thread" in str(sent.poll(1000.0).refused)
    sent.poll(1030.0)
    assert sent.server.requests


def test_one_request_at_a_time(serving: Start) -> None:
    waiting: list[Callable[[], None]] = []
    sent = Sent(serving, {"/v1/completions": ANSWER}, waiting.append)
    for t_s in (1000.0, 1030.0, 1060.0):
        sent.poll(t_s)
    assert len(waiting) == 1


def judged(state: CanaryState, *pages: bytes) -> Verdict:
    stream = TargetStream("tiny", Profile(), Limits())
    times_s: Iterator[float] = itertools.count(1000.0, 2.0)
    diagnosis: list[Verdict] = []
    for page in pages:
        diagnosis = stream.take(next(times_s), page, "text/plain")
        stream.monitor.set_canary(state)
    return diagnosis[0]


def test_an_idle_engine_that_answers_no_canary_is_stalled() -> None:
    (cause,) = judged(FAILED, IDLE, IDLE, IDLE).causes
    assert (cause.id, cause.severity.word) == ("engine_stalled", "critical")
    assert "2 canary requests in a row had no answer: timeout after 30 s" in cause.summary
    once = CanaryState(None, 1, 1001.0, "timeout")
    assert list(judged(once, IDLE, IDLE, IDLE).causes) == []


def test_an_engine_that_generates_tokens_is_slow_and_not_stalled() -> None:
    causes = judged(FAILED, *BUSY[:6]).causes
    assert "engine_stalled" not in [cause.id for cause in causes]


def test_latency_is_a_signal_and_a_refusal_is_told() -> None:
    assert judged(CanaryState(0.25), IDLE, IDLE).values["canary_s"] == 0.25
    refused = judged(CanaryState(refused="404 Not Found"), IDLE, IDLE)
    assert refused.values["canary_s"] is None
    assert "canary: 404 Not Found" in refused.unknown
