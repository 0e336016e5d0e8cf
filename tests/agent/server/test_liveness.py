"""A server whose page cannot be read: /health, its process, its control group, its unit."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kneewatch.agent.server import probe as liveness
from kneewatch.agent.server.probe import Liveness
from kneewatch.agent.server.process import read_process
from kneewatch.agent.server.watch import ServerWatch
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.diagnose.causes.availability import unreadable
from kneewatch.diagnose.deployment.server_state import LOOP_S, ServerState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Cause
from tests.agent.daemon.factories import Kept, target, watch
from tests.agent.running import bodies
from tests.agent.server.conftest import Listen
from tests.agent.server.vllm_server import asked, vllm_answers, vllm_server
from tests.collector.servers import PATIENT, Start, answer

PAGES = bodies("kv_pressure_cascade", 40, 41)
REFUSED = CollectError("connection refused", kind="refused")
ERROR_500 = answer(b"", status="500 Internal Server Error")


def cause_at(url: str, error: CollectError) -> Cause:
    stream = TargetStream("tiny", Profile(), Limits())
    stream.server = ServerWatch(url, PATIENT, read=None, liveness=Liveness(url, PATIENT))
    (diagnosis,) = stream.judge(1000.0, error)
    return diagnosis.causes[0]


@pytest.mark.parametrize("kind", ["http_status", "timeout", "not_found"])
def test_a_healthy_server_without_a_page_lacks_metrics(serving: Start, kind: str) -> None:
    server = serving(vllm_server([b""], vllm_answers()))
    cause = cause_at(server.url, CollectError("HTTP status 500", kind=kind))
    assert cause.id == "metrics_missing"
    assert "GET /health returns 200" in [evidence.text for evidence in cause.evidence]
    assert "log" in cause.lever
    assert asked(server) == ["/health"]


def test_a_server_whose_health_fails_too_is_down(serving: Start) -> None:
    server = serving(vllm_server([b""], vllm_answers(_health=ERROR_500)))
    cause = cause_at(server.url, CollectError("HTTP status 500", kind="http_status"))
    assert cause.id == "target_down"
    assert "GET /health fails too" in cause.summary


def test_what_refuses_the_connection_is_not_asked_for_its_health(serving: Start) -> None:
    server = serving(vllm_server([b""], vllm_answers()))
    assert cause_at(server.url, REFUSED).id == "target_down"
    assert asked(server) == []


def followed(port: int) -> Liveness:
    address = f"http://127.0.0.1:{port}/metrics"
    followed = Liveness(address, PATIENT)
    followed.note([read_process(address, 5.0)[0]])
    return followed


def gone(pid: int) -> Callable[[], bool]:
    os.kill(pid, signal.SIGKILL)
    return lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None


def test_a_process_that_runs_and_one_that_ended(listening: Listen) -> None:
    pid, port = listening("vllm", "serve", "org/model")
    server = followed(port)
    state = server.state(REFUSED, time.time())
    assert (state.pid, state.runs, state.listens) == (pid, True, True)
    assert gone(pid)()
    state = server.state(REFUSED, time.time())
    assert (state.pid, state.runs, state.listens) == (pid, False, None)
    assert f"process {pid} has ended" in state.words()


def test_a_server_that_starts_is_scraped_at_the_usual_interval(listening: Listen) -> None:
    with socket.socket() as held:  # bound, so that no other program listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        pid, _ = listening("vllm", "serve", "m", "--port", str(port))
        kept = Kept()
        target_watch = watch(target(f"http://127.0.0.1:{port}", server__probe=True), kept)
        assert [target_watch.cycle() for _ in range(6)] == [None] * 6
        assert gone(pid)()
        after_s = target_watch.cycle()
    assert after_s is not None
    assert after_s > kept.states[0].interval_s
    target_watch.retire()


def test_processes_that_follow_each_other_are_a_loop(listening: Listen) -> None:
    first, port = listening("vllm", "serve", "org/model")
    server = followed(port)
    assert gone(first)()
    second, _ = listening("vllm", "serve", "org/model", "--port", str(port))
    now_s = time.time()
    state = server.state(REFUSED, now_s)
    assert (state.pid, state.runs, state.listens) == (second, True, False)
    assert state.processes == 2
    assert server.state(REFUSED, now_s + LOOP_S + 60).processes == 0


def test_oom_kills_of_the_control_group_count_from_the_first_reading(
    listening: Listen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = listening("vllm", "serve", "org/model")
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 4\n")

    def events_file(_pid: int) -> Path:
        return events

    monkeypatch.setattr(liveness, "_events_file", events_file)
    server = followed(port)
    assert server.state(REFUSED, time.time()).oom_kills is None
    events.write_text("low 0\noom 5\noom_kill 5\n")
    assert server.state(REFUSED, time.time()).oom_kills == 1


def test_a_server_elsewhere_has_no_process_here() -> None:
    state = Liveness("http://192.0.2.1:8000/metrics", PATIENT).state(REFUSED, 5.0)
    assert state == ServerState()


@pytest.mark.parametrize(
    ("state", "words", "lever"),
    [
        (ServerState(pid=7, runs=False, oom_kills=2), "OOM killer ended 2", "memory limit"),
        (
            ServerState(pid=7, runs=True, listens=False),
            "does not listen",
            "is starting, or it hangs",
        ),
        (ServerState(pid=7, runs=True, processes=3), "started 3 times", "fails after each start"),
        (ServerState(pid=7, runs=False), "process 7 has ended", "end of the server's log"),
        (
            ServerState(pid=7, runs=False, exit_words="vllm.service ended with oom-kill"),
            "systemd: vllm.service ended with oom-kill",
            "end of the server's log",
        ),
    ],
)
def test_the_state_is_evidence_and_decides_what_to_do(
    state: ServerState, words: str, lever: str
) -> None:
    cause = unreadable(REFUSED, 3, 5.0, state)
    assert (cause.id, cause.severity.word) == ("target_down", "critical")
    assert words in cause.summary
    assert any(words in evidence.text for evidence in cause.evidence)
    assert lever in cause.lever


@pytest.mark.parametrize(("took_s", "lines"), [(0.1, 0), (2.5, 1)])
def test_a_slow_page_is_reported_with_its_duration(took_s: float, lines: int) -> None:
    monitor = TargetStream("tiny", Profile(), Limits()).monitor
    page = PageParser(Limits()).parse(PAGES[0], content_type="text/plain")
    (diagnosis,) = monitor.page(1000.0, page, fetch_s=took_s)
    assert sum(f"the page took {took_s} s" in line for line in diagnosis.unknown) == lines
