"""Nothing that a request carries makes kneewatch open a file, look up a name, connect to anything
or run a program: the interpreter itself is asked what was done."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from kneewatch.agent.api.sizing import BY_NAME, FILE_FLAGS
from tests.agent.api.memory_history import reader
from tests.agent.api.serving import SICK_NAME, SICK_STATE, WELL_STATE, Asker, asking, service_of

WATCHED = ("open", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "os.listdir",
           "os.scandir", "glob.glob", "subprocess.Popen", "os.system", "os.exec",
           "urllib.Request")  # fmt: skip
URLS = ("http://169.254.169.254/latest/", "file:///etc/passwd", "//evil.example/x", "gopher://x")

_heard: list[tuple[str, str]] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _heard is not None and event in WATCHED:
        _heard.append((event, repr(arguments)))


sys.addaudithook(_hook)  # It cannot be taken away again, but it can be told not to listen.


@contextmanager
def listening() -> Generator[list[tuple[str, str]]]:
    """What the interpreter does meanwhile."""
    global _heard
    heard: list[tuple[str, str]] = []
    _heard = heard
    try:
        yield heard
    finally:
        _heard = None


@pytest.fixture(scope="module")
def client() -> Generator[Asker]:
    """A client that has asked for everything once: what is read at first use has been read."""
    service = service_of(SICK_STATE, WELL_STATE, reader=reader(SICK_STATE, WELL_STATE))
    with asking(service) as asker:
        for path in ("/docs", "/openapi.json", "/docs/reference.css", "/triage", "/metrics",
                     "/triage/triage.css", "/triage/triage.js", f"/triage?target={SICK_NAME}",
                     "/api/v1/triage?at=-1m&since=-1h",
                     "/api/v1/triage?at=-1m&format=markdown"):  # fmt: skip
            assert asker.get(path).status_code == 200
        asked_everywhere(asker, "x")
        yield asker


def alert(text: str) -> dict[str, Any]:
    """An alert that says the same everywhere."""
    return {
        "version": "4",
        "status": "firing",
        "externalURL": text,
        "receiver": text,
        "alerts": [
            {
                "status": "firing",
                "labels": {"alertname": text, "instance": text, "pod": text, "target": text},
                "annotations": {"runbook_url": text, "summary": text},
                "startsAt": "2026-11-21T00:05:00Z",
                "generatorURL": text,
                "fingerprint": text,
            }
        ],
    }


def asked_everywhere(client: Asker, text: str) -> None:
    """The text in every place that a request has."""
    for name in (*BY_NAME, *FILE_FLAGS):
        given = {"model": "meta-llama/Llama-3.1-8B-Instruct", name: text}
        client.get(f"/api/v1/size?{urlencode(given)}")
        client.post("/api/v1/size", given)
    for name in ("at", "since", "format", "target", "zone", "next", "url", "file"):
        for path in ("/triage", "/api/v1/triage", f"/api/v1/triage/{SICK_NAME}"):
            client.get(f"{path}?{urlencode({name: text})}")
    for path in ("/triage/", "/api/v1/triage/", "/docs/", "/"):
        client.get(path + quote(text, safe=""))
        client.get(path + quote(text))
    for name in ("referer", "origin", "x-forwarded-for", "x-forwarded-host", "forwarded", "cookie",
                 "authorization", "host", "accept", "content-type", "traceparent",
                 "baggage"):  # fmt: skip
        client.ask("GET", "/api/v1/triage", {name: text})
        client.ask("POST", "/api/v1/alerts", {name: text}, json=alert(text))
    client.post("/api/v1/alerts", alert(text))


def test_the_interpreter_tells(tmp_path: Path) -> None:
    with listening() as heard:
        (tmp_path / "x").write_text("x")
    assert [event for event, _ in heard] == ["open"]


@pytest.mark.parametrize("url", URLS)
def test_no_address_of_a_request_is_looked_up_or_connected_to(client: Asker, url: str) -> None:
    with listening() as heard:
        asked_everywhere(client, url)
    assert heard == []


def test_no_file_of_a_request_is_opened(client: Asker, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    for path in (str(file), str(tmp_path), f"{tmp_path}/../{tmp_path.name}/config.json"):
        with listening() as heard:
            asked_everywhere(client, path)
        assert heard == []
