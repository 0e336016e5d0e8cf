"""Bytes that are no requests, and requests bent out of shape, sent through real sockets: the server
answers or hangs up, and goes on."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kneewatch.agent.api.server import Bounds, HttpServer
from tests.agent.api.memory_history import reader
from tests.agent.api.serving import SICK_STATE, WELL_STATE, served, service_of, settings_of
from tests.waiting import PATIENCE_S

ROUNDS = 400
SEEDS = (
    b"GET /api/v1/triage HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n\r\n",
    b"GET /api/v1/triage/r1?at=-1h&since=-2h&format=json HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /triage?target=r1&at=2026-11-21T00:03:00Z&since=3h HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /api/v1/size?model=meta-llama/Llama-3.1-8B&gpu=h100-sxm HTTP/1.1\r\nhost: [::1]\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:9877\r\nauthorization: Basic YTpi\r\n\r\n",
    b"POST /api/v1/alerts HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'content-length: 39\r\n\r\n{"version":"4","status":"firing","a":1}',
    b"POST /api/v1/size HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'transfer-encoding: chunked\r\n\r\n5\r\n{"tp"\r\n4\r\n: 1}\r\n0\r\n\r\n',
)
PIECES = (
    b"\r\n", b"\n", b"\x00", b"\xff", b"%", b"%00", b"%2f..%2f", b"../", b"\x1b[31m", b"HTTP/0.9",
    b"HTTP/2.0", b"content-length: -1\r\n", b"content-length: 99999999999\r\n", b"?", b"#", b" ",
    b"transfer-encoding: chunked\r\n", b"host: evil.example\r\n", b"connection: close\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n", b"expect: 100-continue\r\n", b"A" * 5000,
    b"sec-fetch-site: cross-site\r\n", b"http://169.254.169.254/", b"file:///etc/passwd", b"{",
    b"accept: " + b"*/*," * 300 + b"\r\n", b"x-forwarded-for: ::1\r\n", b"\xe2\x80\xae",
    b"[" * 3000,
)  # fmt: skip


def bent(rng: random.Random) -> bytes:
    """A request with a few things wrong with it."""
    request = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(request) + 1)
        change = rng.randrange(4)
        if change == 0:
            request[place:place] = rng.choice(PIECES)
        elif change == 1:
            del request[place : place + rng.randint(1, 20)]
        elif change == 2 and place < len(request):
            request[place] = rng.randrange(256)
        else:
            request[place:place] = rng.randbytes(rng.randint(1, 30))
    return bytes(request)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """One server for all that is sent."""
    service = service_of(
        SICK_STATE,
        WELL_STATE,
        reader=reader(SICK_STATE, WELL_STATE),
        settings=settings_of(http__requests_per_s=1e6),
    )
    with served(service, Bounds(request_s=1.0)) as running:
        yield running


def sent(server: HttpServer, request: bytes) -> bytes:
    """What comes back, once our side says that it is done."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), 5.0) as connection:
        received = b""
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            raise
        except OSError:
            pass  # the server has hung up by now, which is an answer too
        return received


@pytest.mark.parametrize("seed", range(4))
def test_bent_requests(server: HttpServer, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(seed)
    for _ in range(ROUNDS // 4):
        request = bent(rng)
        answer = sent(server, request)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), request
        assert not answer.startswith(b"HTTP/1.1 5"), request
        for leak in (b"Traceback", b"root:", str(Path.cwd()).encode(), b"site-packages"):
            assert leak not in answer, request
    assert caplog.text == ""
    assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).text == "ok\n"


def test_noise(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(7)
    for size in (1, 2, 10, 100, 1000, 100_000):
        for _ in range(10):
            answer = sent(server, rng.randbytes(size))
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
    assert caplog.text == ""
    assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).text == "ok\n"


@pytest.mark.parametrize(
    "target",
    ["/triage/..%2f..%2f..%2fetc%2fpasswd", "/triage/%2e%2e/%2e%2e/app.py", "/static/../app.py",
     "/triage//etc/passwd", "/docs/../../app.py", "/triage/triage.css%00.html", "//etc/passwd",
     "http://169.254.169.254/latest/", "/api/v1/triage/file:%2f%2f%2fetc%2fpasswd",
     "/triage?target=file:///etc/passwd", "/triage?target=http://169.254.169.254/"],
)  # fmt: skip
def test_no_path_leads_to_a_file_or_to_another_server(server: HttpServer, target: str) -> None:
    request = f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = sent(server, request.encode())
    status = int(answer.split(b" ", 2)[1])
    assert status in (307, 400, 404)
    assert b"root:" not in answer
    assert b"import" not in answer


def test_a_request_smuggled_behind_another_is_not_run(server: HttpServer) -> None:
    """Two lengths for one body: whoever read the other one would see a second request."""
    smuggled = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for lengths in (
        b"content-length: 0\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 0\r\ncontent-length: %d\r\n" % len(smuggled),
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding : chunked\r\n",
    ):
        head = (
            b"POST /api/v1/alerts HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        answer = sent(server, head + lengths + b"\r\n" + smuggled)
        assert b"kneewatch_build_info" not in answer
