"""The server on real sockets: who may listen where, slow clients, large requests, the end."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from msgspec.structs import replace

from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.guard import HEADERS_BYTES
from kneewatch.agent.api.server import Bounds, HttpServer
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError
from tests.agent.api.serving import WELL_STATE, served, service_of, settings_of
from tests.agent.api.test_access import READER, token_file
from tests.waiting import PATIENCE_S, until

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
QUICK = Bounds(request_s=0.4, response_s=0.6)
ENDLESS = Bounds(request_s=3600, response_s=3600)


@contextmanager
def connected(server: HttpServer, timeout_s: float = PATIENCE_S) -> Generator[socket.socket]:
    """A connection."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout_s) as connection:
        yield connection


def healthy(connection: socket.socket) -> bool:
    """Whether the next answer is that the process is well."""
    received = b""
    while not received.endswith(b"ok\n"):
        part = connection.recv(65536)
        if not part:
            return False
        received += part
    return b"200 OK" in received


def other_end(connection: socket.socket) -> socket.socket | None:
    """The server's socket of a connection; None once the server has closed it."""
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(fd.stat().st_mode):
                continue
            end = socket.socket(fileno=os.dup(int(fd.name)))
        except OSError:
            continue
        with suppress(OSError):
            if end.getpeername() == connection.getsockname():
                return end
        end.close()
    return None


def is_served(connection: socket.socket) -> bool:
    """Whether the server has accepted a connection and not closed it."""
    end = other_end(connection)
    if end is not None:
        end.close()
    return end is not None


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it sent nothing."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def answers(server: HttpServer) -> bool:
    """Whether a new connection is answered; within quick bounds a busy machine may be too slow."""
    try:
        return httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        return False


def until_closed(connection: socket.socket) -> bytes:
    """All that is sent before the other side closes."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_each_answer_has_the_date_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(service_of()) as server, connected(server) as connection:
        for t_s, date in ((0.5, b"Thu, 01 Jan 1970 00:00:00"), (9.0, b"Thu, 01 Jan 1970 00:00:09")):
            clock = SimpleNamespace(time=lambda t_s=t_s: t_s)
            monkeypatch.setattr("kneewatch.agent.api.server.time", clock)
            connection.sendall(GET + b"\r\n")
            received = b""
            while not received.endswith(b"ok\n"):
                received += connection.recv(65536)
            assert received.count(b"date: " + date + b" GMT\r\n") == 1


def test_an_answer_is_not_held_back() -> None:
    """Nagle's algorithm and delayed acknowledgements would add 40 ms to each."""
    with served(service_of(WELL_STATE)) as server, connected(server) as kept:
        kept.sendall(GET + b"\r\n")
        assert healthy(kept)
        end = other_end(kept)
        assert end is not None
        with end:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_answers_and_ends() -> None:
    server = HttpServer(make_app(service_of(WELL_STATE)), settings_of())
    server.bind()
    server.start()
    assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).text == "ok\n"
    assert server.alive
    assert server.stop(PATIENCE_S)
    assert not server.alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S)


def test_open_and_half_sent_requests_do_not_hold_up_the_end() -> None:
    server = HttpServer(make_app(service_of(WELL_STATE)), settings_of(), ENDLESS)
    server.bind()
    server.start()
    with connected(server) as idle, connected(server) as half, connected(server) as kept:
        half.sendall(GET)
        kept.sendall(GET + b"\r\n")
        assert healthy(kept)
        assert server.stop(PATIENCE_S)
        assert idle.recv(1) == b""


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0", "*:0"])
def test_an_open_address_without_protection_is_refused(listen: str) -> None:
    settings = settings_of(listen=listen)
    with pytest.raises(SettingsError, match=r"flag --listen: .* set http\.token_file or"):
        HttpServer(make_app(service_of(settings=settings)), settings).bind()


def test_an_open_address_with_a_token_or_a_proxy_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = token_file(tmp_path / "t", READER)
    for settings in (
        settings_of(listen="0.0.0.0:0", http__token_file=str(file)),
        settings_of(listen="0.0.0.0:0", http__behind_proxy=True),
    ):
        with served(service_of(WELL_STATE, settings=settings)) as server:
            assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200
    assert caplog.text.count("tokens are sent unencrypted") == 1


def test_a_host_that_cannot_be_resolved_and_a_port_that_is_taken_are_told() -> None:
    settings = settings_of(listen="no-such-host.invalid:0")
    with pytest.raises(SettingsError, match="cannot be resolved"):
        HttpServer(make_app(service_of(settings=settings)), settings).bind()
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = settings_of(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(SettingsError, match="may be running already"):
            HttpServer(make_app(service_of(settings=settings)), settings).bind()


def test_a_name_for_loopback_is_loopback() -> None:
    with served(service_of(WELL_STATE, settings=settings_of(listen="localhost:0"))) as server:
        assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200


def test_ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with served(service_of(WELL_STATE, settings=settings_of(listen="[::1]:0"))) as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HT", id="half a line"),
        pytest.param(GET, id="headers without an end"),
        pytest.param(
            GET.replace(b"GET /healthz", b"POST /api/v1/alerts")
            + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{",
            id="a body that does not come",
        ),
    ],
)
def test_a_client_that_says_too_little_is_let_go(sent: bytes) -> None:
    with served(service_of(WELL_STATE), QUICK) as server:
        before_s = time.monotonic()
        with connected(server) as slow:
            slow.sendall(sent)
            answer = until_closed(slow)
        assert time.monotonic() - before_s >= QUICK.request_s
        assert answer.startswith(b"HTTP/1.1 408 ") or answer == b""
        until(lambda: answers(server))


def test_a_byte_at_a_time_is_too_slow_however_steady() -> None:
    with served(service_of(WELL_STATE), QUICK) as server, connected(server) as slow:
        answer = b""
        with pytest.raises(OSError):  # noqa: PT012, PT011 - whichever write meets the closed end
            for byte in (GET + b"x: " + b"y" * 1000).decode():
                slow.sendall(byte.encode())
                time.sleep(0.02)
                slow.setblocking(False)
                with suppress(BlockingIOError):
                    answer += slow.recv(4096)
                slow.setblocking(True)
        slow.setblocking(True)
        answer += until_closed(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")


def are_answered(requests: int, *, request_s: float) -> bool:
    """Whether requests on one connection, two in `request_s`, are answered, and half of one is
    refused for its time. False also where this process is too slow for that."""
    bounds = Bounds(request_s=request_s)
    with served(service_of(WELL_STATE), bounds) as server, connected(server) as kept:
        with suppress(OSError):
            for _ in range(requests):
                kept.sendall(GET + b"\r\n")
                if not healthy(kept):
                    return False
                time.sleep(request_s / 2)
            kept.sendall(GET)
            return until_closed(kept).startswith(b"HTTP/1.1 408 ")
        return False


def test_a_second_request_on_a_connection_has_its_own_time() -> None:
    assert any(are_answered(3, request_s=request_s) for request_s in (1.0, 4.0, 16.0, 32.0))


def test_requests_that_come_together_are_all_answered() -> None:
    with served(service_of(WELL_STATE)) as server, connected(server) as eager:
        eager.sendall((GET + b"\r\n") * 5 + GET + b"connection: close\r\n\r\n")
        assert until_closed(eager).count(b"200 OK") == 6


def test_a_client_that_has_said_all_is_answered_and_left() -> None:
    with served(service_of(WELL_STATE)) as server, connected(server) as done:
        done.sendall(GET.replace(b"/healthz", b"/triage") + b"\r\n")
        done.shutdown(socket.SHUT_WR)
        assert until_closed(done).endswith(b"</html>")


LARGE_BYTES = 20_000_000


@contextmanager
def serving_large(bounds: Bounds) -> Generator[tuple[HttpServer, list[None]]]:
    """A server whose responses are larger than what socket buffers hold, and an item for each."""
    sent: list[None] = []

    async def large(scope: object, receive: object, send: object) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        body = {"type": "http.response.body", "body": b"x" * LARGE_BYTES, "more_body": False}
        await send(body)  # type: ignore[operator]
        sent.append(None)

    server = HttpServer(large, settings_of(), bounds)
    server.bind()
    server.start()
    try:
        yield server, sent
    finally:
        assert server.stop(PATIENCE_S)


def test_a_client_that_does_not_read_is_let_go() -> None:
    with serving_large(QUICK) as (server, _), connected(server) as deaf:
        deaf.sendall(GET + b"\r\n")
        until(lambda: is_served(deaf))
        until(lambda: not is_served(deaf))
        assert len(until_closed(deaf)) < LARGE_BYTES


def test_responses_that_nobody_reads_are_bounded_together() -> None:
    bounds = replace(ENDLESS, unread_bytes=3 * LARGE_BYTES)
    with serving_large(bounds) as (server, sent), ExitStack() as stack:
        deaf = [stack.enter_context(connected(server)) for _ in range(8)]
        for connection in deaf:
            connection.sendall(GET + b"\r\n")
        until(lambda: len(sent) == len(deaf))
        until(lambda: sum(map(is_served, deaf)) <= 5)
        with connected(server) as reading:
            reading.sendall(GET + b"connection: close\r\n\r\n")
            assert len(until_closed(reading)) > LARGE_BYTES


def test_a_server_that_ends_late_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer computes for longer than the server may take to stop."""
    begun, may_end, errors = threading.Event(), threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    async def computing(scope: object, receive: object, send: object) -> None:
        del scope, receive, send
        begun.set()
        assert may_end.wait(PATIENCE_S)

    server = HttpServer(computing, settings_of())
    server.bind()
    server.start()
    with connected(server) as asking:
        asking.sendall(GET + b"\r\n")
        assert begun.wait(PATIENCE_S)
        assert not server.stop(0.0)
        may_end.set()
        assert server.stop(PATIENCE_S)
    assert errors == []


def test_headers_that_are_too_large_are_refused() -> None:
    with served(service_of(WELL_STATE)) as server, connected(server) as large:
        large.sendall(GET + b"connection: close\r\nx: " + b"y" * HEADERS_BYTES + b"\r\n\r\n")
        assert until_closed(large).startswith(b"HTTP/1.1 431 ")
    with served(service_of(WELL_STATE)) as server, connected(server) as endless:
        with pytest.raises(OSError):  # noqa: PT012, PT011 - whichever write meets the closed end
            for _ in range(1000):
                endless.sendall(b"GET /" + b"y" * HEADERS_BYTES)
                time.sleep(0.01)
        endless.close()
        assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200


def test_a_body_over_the_limit_is_answered_before_it_is_sent() -> None:
    settings = settings_of(http__body_bytes=1000)
    with served(service_of(WELL_STATE, settings=settings)) as server, connected(server) as large:
        large.sendall(
            b"POST /api/v1/alerts HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 5000000\r\n\r\n"
        )
        assert large.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_over_the_limit_that_is_sent_anyway_is_answered() -> None:
    settings = settings_of(http__body_bytes=1000)
    with served(service_of(WELL_STATE, settings=settings)) as server:
        kind = {"content-type": "application/json"}
        refused = httpx.post(
            f"{server.url}/api/v1/alerts",
            content=b" " * 3_000_000,
            headers=kind,
            timeout=PATIENCE_S,
        )
        assert refused.status_code == 413


def test_no_more_connections_than_allowed_are_kept() -> None:
    bounds = Bounds(request_s=3600, connections=8)
    with served(service_of(WELL_STATE), bounds) as server:
        opened = [socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0))
                  for _ in range(20)]  # fmt: skip
        try:
            until(lambda: sum(map(is_closed, opened)) >= 12)
            assert sum(map(is_closed, opened)) == 12
        finally:
            for connection in opened:
                connection.close()
        until(lambda: answers(server))


def test_connections_that_send_nothing_keep_no_probe_out() -> None:
    bounds = Bounds(request_s=3600, connections=8)
    with served(service_of(WELL_STATE), bounds) as server:
        place = ("127.0.0.1", urlsplit(server.url).port or 0)
        opened = [socket.create_connection(place) for _ in range(20)]
        try:
            for _ in range(10):
                assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200
        finally:
            for connection in opened:
                connection.close()


def test_idle_connections_leave_descriptors_for_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ulimit -n 64` a quarter is for clients, however many connect."""

    def few(_kind: int) -> tuple[int, int]:
        return 64, 64

    monkeypatch.setattr("kneewatch.agent.api.server.resource.getrlimit", few)
    with served(service_of(WELL_STATE), Bounds(request_s=3600)) as server:
        place = ("127.0.0.1", urlsplit(server.url).port or 0)
        opened = [socket.create_connection(place) for _ in range(40)]
        try:
            assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200
            until(lambda: sum(map(is_served, opened)) <= 16)
        finally:
            for connection in opened:
                connection.close()


def test_one_address_gets_its_share_of_an_open_server(tmp_path: Path) -> None:
    file = token_file(tmp_path / "t", READER)
    settings: Settings = settings_of(listen="0.0.0.0:0", http__token_file=str(file))
    with served(service_of(WELL_STATE, settings=settings), Bounds(connections=8)) as server:
        place = ("127.0.0.1", urlsplit(server.url).port or 0)
        opened = [socket.create_connection(place, PATIENCE_S) for _ in range(5)]
        try:
            assert until_closed(opened[4]) == b""
            opened[0].sendall(GET + b"\r\n")
            assert healthy(opened[0])
        finally:
            for connection in opened:
                connection.close()


def test_many_at_once_are_all_answered() -> None:
    with served(service_of(WELL_STATE)) as server:
        statuses: list[int] = []

        def ask() -> None:
            with httpx.Client(timeout=PATIENCE_S) as client:
                statuses.extend(
                    client.get(f"{server.url}/api/v1/triage").status_code for _ in range(5)
                )

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 40
