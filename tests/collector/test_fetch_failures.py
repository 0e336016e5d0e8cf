"""The fetcher against servers that are not there, are slow, or send something else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http import fetch
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from kneewatch.collector.page_memory import PageMemory
from tests.collector.servers import (
    PAGE,
    QUICK,
    Fetch,
    Serve,
    Server,
    Start,
    always,
    answer,
    chunked,
    failure,
)


def test_a_look_up_for_which_no_thread_can_be_started(
    fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CollectError, match="can't start new thread"):
        fetcher("localhost:1").get()


def test_refused(fetcher: Fetch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        problem = failure(fetcher(f"127.0.0.1:{unused.getsockname()[1]}"))
    assert problem.kind == "refused"
    assert "refused" in str(problem)
    assert "8000" in problem.hint


def test_an_error_that_is_kept_keeps_no_page(start: Start, fetcher: Fetch) -> None:
    error = fetcher(start(always(answer(b"\n" * 1000))).url).scrape(0.0).answer
    assert isinstance(error, CollectError)
    assert "empty" in str(error)
    assert error.__traceback__ is None
    assert error.__context__ is None
    assert error.__cause__ is None


@pytest.mark.parametrize("host", ["no..such.host", f"{'a' * 64}.example"])
def test_unknown_name(fetcher: Fetch, host: str) -> None:
    with pytest.raises(CollectError, match="cannot be resolved") as caught:
        fetcher(f"{host}:8000").get()
    assert caught.value.kind == "dns"
    assert caught.value.hint


def test_slow_name_lookup_does_not_stretch_the_time(
    fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = socket.getaddrinfo

    def stuck(host: str, port: int, *, flags: int = 0, **rest: int) -> object:
        if not flags:
            release.wait()
        return real(host, port, flags=socket.AI_NUMERICHOST, **rest)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    with pytest.raises(CollectError, match="name look-up") as caught:
        fetcher("somewhere:8000", QUICK).get()
    release.set()
    assert caught.value.kind == "timeout"


@contextlib.contextmanager
def deaf() -> Generator[tuple[str, int]]:
    """An address that does not answer: nobody accepts, and the kernel drops what else comes."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()


def test_connecting_takes_too_long(fetcher: Fetch) -> None:
    with deaf() as (host, port):
        problem = failure(fetcher(f"{host}:{port}", QUICK))
    assert problem.kind == "timeout"
    assert "connection" in str(problem)


def test_address_that_does_not_answer_leaves_time_for_the_next(
    start: Start, fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(always(answer()))
    with deaf() as first:

        def two(_host: str, _port: int, *, flags: int = 0, **_rest: int) -> object:
            if flags:
                raise socket.gaierror(socket.EAI_NONAME, "a name")
            how = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [(*how, first), (*how, ("127.0.0.1", server.port))]

        monkeypatch.setattr(socket, "getaddrinfo", two)
        settings = FetchSettings(connect_timeout_s=4.0)
        assert fetcher("two.addresses:8000", settings).get().body == PAGE


def drip(data: bytes) -> Serve:
    def serve(sock: socket.socket, _request: bytes, _number: int) -> bool:
        for byte in data:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
        return False

    return serve


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        pytest.param(always(b""), "nothing came", id="no answer"),
        pytest.param(always(b"HTTP/1.1 200 OK\r\n"), "only 17 bytes", id="half a head"),
        pytest.param(always(answer()[:-5]), "bytes came", id="half a body"),
        pytest.param(always(chunked(PAGE, end=False)), "bytes came", id="no last chunk"),
        pytest.param(drip(answer()), "bytes came", id="a byte at a time"),
        pytest.param(always(b"HTTP/1.1 100 Continue\r\n\r\n"), "only 25", id="to be continued"),
    ],
)
def test_reading_takes_too_long(start: Start, fetcher: Fetch, serve: Serve, said: str) -> None:
    for read_timeout_s in (0.5, 2.0, 8.0, 32.0):  # on a busy machine what came may come later
        started_s = time.monotonic()
        settings = FetchSettings(read_timeout_s=read_timeout_s)
        problem = failure(fetcher(start(serve).url, settings))
        assert problem.kind == "timeout"
        assert "reading" in str(problem)
        assert time.monotonic() - started_s >= read_timeout_s
        if said in str(problem):
            break
    assert said in str(problem)


def test_slow_drip_of_the_body_alone(start: Start, fetcher: Fetch) -> None:
    def serve(sock: socket.socket, request: bytes, number: int) -> bool | None:
        sock.sendall(answer()[: -len(PAGE)])
        return drip(PAGE)(sock, request, number)

    assert failure(fetcher(start(serve).url, QUICK)).kind == "timeout"


@pytest.mark.parametrize(
    ("status", "kind", "hint"),
    [
        ("401 Unauthorized", "auth", "bearer_token_file"),
        ("403 Forbidden", "auth", "bearer_token_file"),
        ("404 Not Found", "not_found", "path"),
        ("500 Internal Server Error", "http_status", "log"),
        ("503 Service Unavailable", "http_status", "later"),
        ("204 No Content", "http_status", ""),
        ("301 Moved", "http_status", ""),
    ],
)
def test_status(start: Start, fetcher: Fetch, status: str, kind: str, hint: str) -> None:
    problem = failure(fetcher(start(always(answer(b"", status=status))).url))
    assert problem.kind == kind
    assert status in str(problem)
    assert hint in problem.hint


UNSIZED = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        pytest.param(
            answer(b"hello\n", "Content-Type: text/html; charset=utf-8"),
            "not_metrics",
            "web page",
            id="html by type",
        ),
        pytest.param(answer(b"\n <!doctype html>"), "not_metrics", "web page", id="html by look"),
        pytest.param(answer(b""), "not_metrics", "empty", id="empty"),
        pytest.param(answer(b" \n"), "not_metrics", "empty", id="blank"),
        pytest.param(answer()[:-9], "truncated", "9 are missing", id="cut"),
        pytest.param(chunked(PAGE, end=False), "truncated", "midway", id="cut after a chunk"),
        pytest.param(chunked(PAGE)[:-30], "truncated", "midway", id="cut in a chunk"),
        pytest.param(UNSIZED + b"a 1\nb", "truncated", "last line", id="cut line"),
        pytest.param(UNSIZED + b"<html>login", "not_metrics", "web page", id="html, no length"),
        pytest.param(UNSIZED, "truncated", "nothing came", id="empty, no length"),
        pytest.param(answer(b"a 1\n" * 30_000), "too_large", "announces", id="too large"),
        pytest.param(chunked(*[b"a 1\n"] * 30_000), "too_large", "as sent", id="large chunks"),
        pytest.param(UNSIZED + b"a 1\n" * 30_000, "too_large", "as sent", id="no length"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "not_metrics", "not HTTP", id="ssh"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x46", "tls", "speaks TLS", id="tls alert"),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n\r\n", "not_metrics", "not HTTP", id="status"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
            "not_metrics",
            "not HTTP",
            id="heads",
        ),
        pytest.param(
            b"HTTP/1.1 200 " + b"x" * 70_000 + b"\r\n\r\n",
            "not_metrics",
            "not HTTP",
            id="long line",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "truncated",
            "midway",
            id="chunk size",
        ),
    ],
)
def test_answer_is_no_page(start: Start, fetcher: Fetch, data: bytes, kind: str, said: str) -> None:
    settings = FetchSettings(body_limit_bytes=100_000)
    problem = failure(fetcher(start(always(data, keep=False)).url, settings))
    assert (problem.kind, said in str(problem)) == (kind, True), str(problem)


@pytest.mark.parametrize("answered", [answer, chunked], ids=["length", "chunks"])
def test_bodies_in_flight_have_a_limit_together(
    start: Start, fetcher: Fetch, monkeypatch: pytest.MonkeyPatch, answered: Callable[..., bytes]
) -> None:
    small, large = b"a 1\n" * 300_000, b"a 1\n" * 1_000_000
    monkeypatch.setattr(fetch, "PAGES", PageMemory(7e6))
    first, second = (fetcher(start(always(answered(large))).url) for _ in range(2))
    page = first.get()
    assert page.body == large
    problem = failure(second)
    assert problem.kind == "too_large"
    assert "no memory for a page that takes" in str(problem)
    assert fetcher(start(always(answered(small))).url).get().body == small
    del page
    assert second.get().body == large, "the memory of the first is free again"


def test_page_of_exactly_the_limit_is_read(start: Start, fetcher: Fetch) -> None:
    for data in (answer(), chunked(PAGE)):
        server = start(always(data))
        page_fetcher = fetcher(server.url, FetchSettings(body_limit_bytes=len(PAGE)))
        assert page_fetcher.get().body == PAGE


KINDS = ("http_status", "not_metrics", "truncated", "too_large", "redirect", "timeout", "tls")


def outcome(url: str) -> str:
    with contextlib.closing(Fetcher(url, QUICK)) as page_fetcher:
        try:
            page_fetcher.get()
        except CollectError as exc:
            return exc.kind
    return "page"


def spliced(data: bytes, at: int, length: int, put: bytes) -> bytes:
    return data[:at] + put + data[at + length :]


def test_whatever_the_server_sends_is_a_page_or_an_error() -> None:
    sent = [b""]

    def serve(sock: socket.socket, _request: bytes, _number: int) -> bool:
        sock.sendall(sent[0])
        return False

    whole = [answer(PAGE[:200], "Content-Encoding: gzip", "Location: /"), chunked(PAGE[:90])]
    server = Server(serve)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.binary(max_size=200)
        | st.builds(
            spliced,
            st.sampled_from(whole),
            st.integers(0, 300),
            st.integers(0, 20),
            st.binary(max_size=6) | st.sampled_from([b"-1", b"\n", b"9" * 30, b"\xff"]),
        )
    )
    def check(data: bytes) -> None:
        sent[0] = data
        assert outcome(server.url) in {"page", *KINDS}

    try:
        check()
    finally:
        server.close()
