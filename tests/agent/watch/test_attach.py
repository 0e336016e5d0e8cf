"""A running daemon on the screen: its triage document, its errors, and what is shown to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.watch.feeds import (
    Feed,
    FeedThreads,
    Playback,
    access,
    daemon_feed,
    read_triage,
)
from kneewatch.agent.watch.state import ScreenState
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.verdict_json import DocumentError
from tests.agent.api.serving import SICK_STATE, WELL_NAME, served, service_of, state_of
from tests.agent.api.serving import settings_of as daemon_settings
from tests.agent.watch.screens import settings_of
from tests.collector.servers import Start, always, answer
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, UNREADABLE
from tests.reports.documents import document
from tests.waiting import until

TOKEN = "a-token-that-only-a-daemon-sees"
JSON = "Content-Type: application/json"


def triage(*documents: Any, **more: Any) -> bytes:  # noqa: ANN401
    """A daemon's answer."""
    answer = {"schema": "kneewatch.triage/1", "t": NOW_S + 1, "targets": list(documents), **more}
    return orjson.dumps(answer)


def watched(feed: Feed, done: Callable[[ScreenState], bool]) -> ScreenState:
    """The wall of a daemon, once it shows something."""
    wall = ScreenState()
    work = FeedThreads([feed], wall, Playback())
    work.start()
    until(lambda: done(wall))
    work.stop()
    assert work.bug is None
    return wall


def noted(wall: ScreenState) -> bool:
    return bool(wall.daemon_notes())


def test_read() -> None:
    answer = read_triage(
        triage(
            document(SICK),
            document(replace(HEALTHY, target="r1")),
            watching=[{"target": "r1", "late": True}, {"target": "x", "late": False}],
            pending=["new"],
        )
    )
    assert answer.t_s == NOW_S + 1
    assert answer.verdicts() == ([SICK, replace(HEALTHY, target="r1")], "")
    assert (answer.late, answer.pending) == (frozenset({"r1"}), ["new"])


def test_one_bad_diagnosis_does_not_hide_the_others() -> None:
    answer = read_triage(triage({"schema": "x"}, document(SICK), None))
    verdicts, problem = answer.verdicts()
    assert verdicts == [SICK]
    assert "not a kneewatch.diagnosis/1 document" in problem


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b"[]", b"null", b"{}", b"\xff", b'{"schema": "kneewatch.triage/1", "t": 1}',
     b'{"schema": "kneewatch.triage/1", "t": true, "targets": []}',
     b'{"schema": "kneewatch.triage/2", "t": 1, "targets": []}'],
)  # fmt: skip
def test_what_is_no_triage_document(body: bytes) -> None:
    with pytest.raises(DocumentError, match="daemon"):
        read_triage(body)


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**63 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["t", "targets", "watching", "pending", "late"]), inner),
).map(lambda answer: orjson.dumps({"schema": "kneewatch.triage/1", **answer}
                                if isinstance(answer, dict) else answer)))  # fmt: skip
def test_any_answer_is_read_or_refused(body: bytes) -> None:
    try:
        read_triage(body).verdicts()
    except DocumentError:
        return


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://h:9877", "http://h:9877/api/v1/triage"),
        ("h:9877/", "http://h:9877/api/v1/triage"),
        ("http://h:9877/triage", "http://h:9877/api/v1/triage"),
        ("http://h:9877/api/v1/triage?at=1", "http://h:9877/api/v1/triage"),
        ("https://h/kneewatch/", "https://h/kneewatch/api/v1/triage"),
        ("https://h/kneewatch/metrics", "https://h/kneewatch/api/v1/triage"),
        ("http://user:pw@h:1", "http://h:1/api/v1/triage"),
    ],
)
def test_the_address_of_the_endpoint(url: str, asked: str) -> None:
    feed = daemon_feed(url, settings_of(), None)
    assert feed.name == asked


def test_an_address_that_cannot_be_one() -> None:
    with pytest.raises(CollectError, match="not a target"):
        daemon_feed("ftp://h", settings_of(), None)


def with_file(tmp_path: Path, text: str, **flags: Any) -> Settings:  # noqa: ANN401
    """Settings of a file, the environment and flags."""
    file = tmp_path / "kneewatch.toml"
    file.write_text(text)
    stated = {name.replace("__", "."): answer for name, answer in flags.items()}
    return load(file=file, environ={"KNEEWATCH_FETCH_HEADERS": "X-Key=s"}, flags=stated)


def test_what_is_meant_for_the_servers_is_not_shown_to_the_daemon(tmp_path: Path) -> None:
    text = 'fetch.bearer_token_file = "vllm-token"\nfetch.ca_file = "ca.pem"\n'
    settings = access(with_file(tmp_path, text), None)
    assert (settings.bearer_token_file, settings.headers) == (None, {"Accept": "application/json"})
    assert settings.ca_file == "ca.pem"
    flags = with_file(tmp_path, text, fetch__headers={"X-Proxy": "p"})
    assert access(flags, None).headers == {"X-Proxy": "p", "Accept": "application/json"}
    flags = with_file(tmp_path, text, fetch__bearer_token_file="mine")
    assert access(flags, None).bearer_token_file == "mine"
    assert access(flags, Path("daemon-token")).bearer_token_file == "daemon-token"


def test_recorded_documents(serving: Start) -> None:
    daemon = serving(always(answer(triage(document(UNREADABLE)), JSON)))
    feed = daemon_feed(daemon.url, settings_of(interval_s=0.1), None)
    wall = watched(feed, lambda wall: len(daemon.requests) > 3 and len(wall.rows()) > 0)
    assert [(row.health, row.diagnosis) for row in wall.rows()] == [("critical", UNREADABLE)]
    request = daemon.requests[-1].decode()
    assert request.startswith("GET /api/v1/triage HTTP/1.1\r\n")
    assert "Accept: application/json\r\n" in request
    assert "Authorization" not in request
    assert daemon.connections == 1


def test_the_token_is_sent(serving: Start, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    daemon = serving(always(answer(triage(document(SICK)), JSON)))
    feed = daemon_feed(daemon.url, settings_of(), tmp_path / "token")
    watched(feed, lambda wall: any(row.diagnosis for row in wall.rows()))
    assert f"Authorization: Bearer {TOKEN}\r\n" in daemon.requests[0].decode()


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (answer(b"no", status="401 Unauthorized"), ("401", "--token-file FILE")),
        (answer(b"no", status="404 Not Found"), ("404", "a kneewatch daemon")),
        (answer(b"no", status="500 Internal Server Error"), ("500",)),
        (answer(b"<html>", "Content-Type: text/html"), ("a kneewatch daemon",)),
        (answer(b"vllm:num_requests_running 3\n"), ("not JSON", "a kneewatch daemon")),
        (answer(b"{}"), ("not a kneewatch.triage/1 document",)),
        (answer(triage()), ("watches no target",)),
    ],
)
def test_its_errors_are_shown(serving: Start, answered: bytes, words: tuple[str, ...]) -> None:
    daemon = serving(always(answered))
    wall = watched(daemon_feed(daemon.url, settings_of(), None), noted)
    (note,) = wall.daemon_notes()
    assert all(word in note for word in words), note
    assert not any(row.health == "ok" for row in wall.rows())


def test_nobody_listens() -> None:
    wall = watched(daemon_feed("http://127.0.0.1:1", settings_of(), None), noted)
    (note,) = wall.daemon_notes()
    assert "connection refused" in note
    assert "kneewatch run" in note
    assert "vLLM" not in note


def test_the_real_endpoint(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    late = state_of(WELL_NAME, HEALTHY, t_s=NOW_S - 3600)
    service = service_of(
        SICK_STATE,
        late,
        state_of("fresh", HEALTHY),
        names=["new"],
        settings=daemon_settings(http__token_file=str(token)),
    )
    with served(service) as server:
        wall = watched(daemon_feed(server.url, settings_of(), None), noted)
        assert "--token-file" in wall.daemon_notes()[0]
        feed = daemon_feed(f"{server.url}/triage", settings_of(), token)
        wall = watched(feed, lambda wall: any(row.diagnosis for row in wall.rows()))
    shown = {row.name: (row.health, row.stale) for row in wall.rows()}
    assert shown == {
        "http://gpu-7:8000": ("critical", False),
        "new": ("unknown", False),
        WELL_NAME: ("unknown", True),
        "fresh": ("ok", False),
    }
