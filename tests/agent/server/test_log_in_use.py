"""A server's log in the program: followed by every scrape, its failures are causes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent.server import watch
from kneewatch.agent.server.log import CHUNK_BYTES, LogFollower
from kneewatch.agent.server.watch import ENDED, ServerWatch
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.http.address import FetchSettings
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Server, Verdict
from tests.agent.daemon.running import Daemon
from tests.agent.running import Main, bodies
from tests.agent.server.test_facts_in_use import TYPE, of_a_new_process
from tests.diagnose.deployment import logs
from tests.waiting import until

PAGES = bodies("kv_pressure_cascade", 40, 60)
REFUSED = CollectError("connection refused", kind="refused")
SERVING = (
    logs.V0_19.replace("686,320", "5,120")
    .replace("fp8_e4m3", "auto")
    .replace("0.8,", "0.92,")
    .replace("0.19.1", "0.32.0")
)
DIED = logs.ENGINE_DIED.removeprefix(logs.V0_19)
UNUSED = "http://127.0.0.1:9"
PROMPT = "tell me about EngineDeadError: secret-prompt"


class Followed:
    """A stream that follows a log, and nothing else but its pages."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._stream = TargetStream("tiny", Profile(), Limits())
        self._stream.server = ServerWatch(
            "http://127.0.0.1:1", FetchSettings(), read=None, log=LogFollower(str(log))
        )
        self._times_s: Iterator[float] = itertools.count(1000.0, 5.0)

    def page(self, body: bytes) -> Verdict:
        return self._stream.take(next(self._times_s), body, TYPE)[0]

    def refused(self) -> Verdict:
        return self._stream.judge(next(self._times_s), REFUSED)[0]

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)


def fact(server: Server, name: str) -> object:
    """The value of a fact; None if it is unknown."""
    return next((each.value for each in server.facts if each.name == name), None)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "vllm.log")


def ids(diagnosis: Verdict) -> list[str]:
    return [cause.id for cause in diagnosis.causes]


def test_a_start_that_failed_is_the_cause_of_a_target_that_is_down(followed: Followed) -> None:
    followed.write(logs.KV_TOO_SMALL)
    diagnosis = followed.refused()
    (cause,) = diagnosis.causes
    assert (cause.id, cause.explains) == ("startup_failed", ("target_down",))
    assert "ValueError: To serve at least one request" in cause.evidence[0].text
    assert diagnosis.health == "critical"
    assert diagnosis.recommendations[0].changes[0].after == 32512


def test_a_server_that_starts_again_has_not_failed(followed: Followed) -> None:
    followed.write(logs.KV_TOO_SMALL)
    assert ids(followed.refused()) == ["startup_failed"]
    followed.write(logs.V0_19.partition("(Worker_TP0")[0])
    assert ids(followed.refused()) == ["target_down"]
    followed.write(logs.V0_19.partition("(Worker_TP0")[2])
    assert ids(followed.page(PAGES[0])) == []


@pytest.mark.parametrize("end", ["page", "refused"])
def test_an_engine_that_dies_is_a_cause_while_its_page_still_answers_and_afterwards(
    followed: Followed, end: str
) -> None:
    followed.write(SERVING)
    for page in PAGES[:3]:
        followed.page(page)
    followed.write(DIED)
    diagnosis = followed.page(PAGES[3])
    assert ids(diagnosis)[0] == "engine_died"
    assert "CUDA out of memory" in diagnosis.causes[0].evidence[0].text
    diagnosis = followed.page(PAGES[3]) if end == "page" else followed.refused()
    assert ids(diagnosis)[0] == "engine_died"


def test_an_engine_that_generates_tokens_or_was_replaced_is_not_dead(followed: Followed) -> None:
    followed.write(SERVING)
    followed.page(PAGES[0])
    followed.write(DIED)
    assert "engine_died" in ids(followed.page(PAGES[1]))
    assert "engine_died" not in ids(followed.page(PAGES[2]))
    followed.write(SERVING + DIED)
    assert "engine_died" in ids(followed.page(PAGES[2]))
    assert "engine_died" not in ids(followed.page(of_a_new_process(PAGES[2])))


@pytest.mark.parametrize("text", [logs.KV_TOO_SMALL, logs.ENGINE_DIED])
def test_a_failure_from_before_the_first_page_is_only_a_note(followed: Followed, text: str) -> None:
    followed.write(text)
    followed.page(PAGES[0])
    diagnosis = followed.page(PAGES[0])
    assert ids(diagnosis) == []
    assert diagnosis.server is not None
    assert diagnosis.server.notes == (ENDED,)
    assert fact(diagnosis.server, "weights_gib") is None


def test_the_facts_of_the_log_are_of_the_log(followed: Followed) -> None:
    followed.write(SERVING)
    followed.page(PAGES[0])
    server = followed.page(PAGES[1]).server
    assert server is not None
    facts = {fact.name: (fact.value, fact.source) for fact in server.facts}
    assert facts["weights_gib"] == (12.66, "log")
    assert facts["vllm_version"] == ("0.32.0", "log")
    assert facts["kv_cache_size_tokens"] == (5120, "page")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SERVING.replace("5,120", "5,152"), "kv_cache_size_tokens 5152, the page has"),
        (SERVING.replace("'kv_cache_dtype': 'auto'", "'block_size': 64"), None),
    ],
)
def test_a_log_that_contradicts_the_page_is_of_another_start(
    followed: Followed, text: str, problem: str | None
) -> None:
    followed.write(text)
    followed.page(PAGES[0])
    server = followed.page(PAGES[1]).server
    assert server is not None
    assert (fact(server, "weights_gib") is None) == (problem is not None)
    assert problem is None or any(problem in note for note in server.notes)


def test_a_restart_without_a_new_start_in_the_log_drops_its_facts(followed: Followed) -> None:
    followed.write(SERVING)
    followed.page(PAGES[0])
    followed.page(PAGES[1])
    followed.page(of_a_new_process(PAGES[1]))
    server = followed.page(of_a_new_process(PAGES[1])).server
    assert server is not None
    assert fact(server, "weights_gib") is None
    assert any("has no newer start" in note for note in server.notes)
    followed.write(SERVING.replace("12.66", "13.5"))
    followed.page(of_a_new_process(PAGES[1]))
    server = followed.page(of_a_new_process(PAGES[1])).server
    assert server is not None
    assert fact(server, "weights_gib") == 13.5


def test_a_scrape_reads_a_bounded_part_of_a_log(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "READ_BYTES", CHUNK_BYTES)
    followed.write(logs.ENGINE_DIED + "x" * CHUNK_BYTES + "\n" + SERVING + DIED)
    followed.page(PAGES[0])
    diagnosis = followed.page(PAGES[0])
    assert ids(diagnosis) == [], "what was in the log when it was read first is past"
    assert diagnosis.server is not None
    assert diagnosis.server.notes == (ENDED,)


def test_a_log_that_is_gone_is_a_note(followed: Followed) -> None:
    followed.page(PAGES[0])
    server = followed.page(PAGES[1]).server
    assert server is not None
    assert any("No such file" in note for note in server.notes)


def test_the_daemon_reports_the_line_and_no_prompt(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"{SERVING}{PROMPT}\n{logs.KV_TOO_SMALL}")
    with Daemon(tmp_path, "--log", log, "--interval", "0.2s", UNUSED) as daemon:
        until(daemon.diagnoses)
        page = daemon.get("/triage") + daemon.get("/api/v1/triage?format=json")
        daemon.end()
    written = b"".join(path.read_bytes() for path in tmp_path.glob("kneewatch.db*"))
    assert page.count("To serve at least one request") >= 2
    assert b"startup_failed" in written
    assert "secret" not in page + daemon.log
    assert b"secret" not in written


def test_two_targets_cannot_share_a_log(main: Main) -> None:
    done = main("run", "--log", "vllm.log", UNUSED, "http://127.0.0.1:10")
    assert (done.status, "have the same server_log 'vllm.log'" in done.err) == (2, True)
