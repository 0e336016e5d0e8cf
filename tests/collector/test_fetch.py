"""The fetcher against real servers: pages, connections, redirects, credentials."""

from __future__ import annotations

import base64
import gzip
import re
import socket
import struct
import threading
import time
import zlib
from pathlib import Path

import pytest

from kneewatch.collector.errors import CHARS_MAX, CollectError
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.http.connection import TimedSocket
from kneewatch.collector.http.fetch import PlainAnswer
from tests.collector.servers import PAGE, Fetch, Server, Start, always, answer, chunked, failure
from tests.waiting import PATIENCE_S, until


def test_page_comes_with_what_was_said_about_it(start: Start, fetcher: Fetch) -> None:
    server = start(always(answer()))
    got = fetcher(server.url).get()
    assert (got.body, got.status) == (PAGE, 200)
    assert got.content_type == "text/plain; version=0.0.4"
    assert 0 < got.duration_s < PATIENCE_S
    request = server.requests[0]
    assert request.startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"Accept: text/plain;version=0.0.4" in request
    assert b"Accept-Encoding: identity" in request
    assert f"Host: 127.0.0.1:{server.port}\r\n".encode() in request


def test_connection_is_kept(start: Start, fetcher: Fetch) -> None:
    server = start(always(answer()))
    page_fetcher = fetcher(server.url)
    for _ in range(5):
        assert page_fetcher.get().body == PAGE
    assert (server.connections, len(server.requests)) == (1, 5)


def test_connection_closed_between_scrapes_is_replaced(start: Start, fetcher: Fetch) -> None:
    server = start(always(answer(), keep=False))
    page_fetcher = fetcher(server.url)
    for _ in range(3):
        assert page_fetcher.get().body == PAGE
        time.sleep(0.02)
    assert (server.connections, len(server.requests)) == (3, 3)


@pytest.mark.parametrize("head", ["HTTP/1.0 200 OK", "HTTP/1.1 200 OK\r\nConnection: close"])
def test_server_may_announce_that_it_closes(start: Start, fetcher: Fetch, head: str) -> None:
    server = start(always(f"{head}\r\n\r\n".encode() + PAGE, keep=False))
    page_fetcher = fetcher(server.url)
    assert page_fetcher.get().body == PAGE
    assert page_fetcher.get().body == PAGE


def test_kept_connection_closed_as_we_ask_is_retried_once(start: Start, fetcher: Fetch) -> None:
    def serve(sock: socket.socket, _request: bytes, number: int) -> bool:
        if number != 1:
            sock.sendall(answer())
        return number != 1

    server = start(serve)
    page_fetcher = fetcher(server.url)
    assert page_fetcher.get().body == PAGE
    assert page_fetcher.get().body == PAGE
    assert (server.connections, len(server.requests)) == (2, 3)


def unread_bytes(sock: socket.socket) -> int:
    """How many bytes of what was sent on a connection of IPv4 the other side has not read."""
    ends = [f":{end[1]:04X}" for end in (sock.getpeername(), sock.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [fields[1][-5:], fields[2][-5:]] == ends:
            return int(fields[4].partition(":")[2], 16)
    return 0


@pytest.mark.parametrize("reset", [False, True])
def test_answer_that_began_is_not_asked_for_again(
    start: Start, fetcher: Fetch, reset: bool
) -> None:
    def serve(sock: socket.socket, _request: bytes, number: int) -> bool:
        sock.sendall(answer() if number == 0 else b"HTTP/1.1 200 OK\r\nContent-")
        if number and reset:
            until(lambda: not unread_bytes(sock))  # a reset discards the rest
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return number == 0

    server = start(serve)
    page_fetcher = fetcher(server.url)
    page_fetcher.get()
    assert failure(page_fetcher).kind == "truncated"
    assert len(server.requests) == 2


def test_new_connection_is_not_retried(start: Start, fetcher: Fetch) -> None:
    server = start(always(b"", keep=False))
    problem = failure(fetcher(server.url))
    assert problem.kind == "truncated"
    assert "without an answer" in str(problem)
    assert len(server.requests) == 1


def test_stray_answer_is_not_the_next_page(start: Start, fetcher: Fetch) -> None:
    read, strayed = threading.Semaphore(0), threading.Semaphore(0)

    def serve(sock: socket.socket, _request: bytes, number: int) -> None:
        sock.sendall(answer(b"page %d\n" % number))
        read.acquire()
        sock.sendall(answer(b"stray\n"))
        strayed.release()

    page_fetcher = fetcher(start(serve).url)
    for number in range(3):
        assert page_fetcher.get().body == b"page %d\n" % number
        read.release()
        strayed.acquire()


def test_it_goes_on_after_a_failure(start: Start, fetcher: Fetch) -> None:
    def serve(sock: socket.socket, _request: bytes, number: int) -> None:
        sock.sendall(answer() if number % 2 else answer(status="500 Oh"))

    page_fetcher = fetcher(start(serve).url)
    for _ in range(2):
        assert failure(page_fetcher).kind == "http_status"
        assert page_fetcher.get().body == PAGE


def test_chunks_are_joined(start: Start, fetcher: Fetch) -> None:
    server = start(always(chunked(PAGE[:100], PAGE[100:101], PAGE[101:])))
    page_fetcher = fetcher(server.url)
    assert page_fetcher.get().body == PAGE
    assert page_fetcher.get().body == PAGE
    assert server.connections == 1


def test_proxies_of_the_environment_are_ignored(
    start: Start, fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetcher(start(always(answer())).url).get().body == PAGE


def test_gzip_is_asked_for_when_set(start: Start, fetcher: Fetch) -> None:
    server = start(always(answer(gzip.compress(PAGE), "Content-Encoding: gzip")))
    assert fetcher(server.url, FetchSettings(gzip=True)).get().body == PAGE
    assert b"Accept-Encoding: gzip\r\n" in server.requests[0]


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (gzip.compress(PAGE, mtime=0), "gzip"),
        (gzip.compress(PAGE, mtime=0), "X-GZIP"),
        (zlib.compress(PAGE), "deflate"),
        (gzip.compress(PAGE[:100]) + gzip.compress(PAGE[100:]), "gzip"),
    ],
)
def test_compressed_page_is_unpacked_unasked(
    start: Start, fetcher: Fetch, packed: bytes, encoding: str
) -> None:
    server = start(always(answer(packed, f"Content-Encoding: {encoding}")))
    assert fetcher(server.url).get().body == PAGE


@pytest.mark.parametrize(
    ("packed", "encoding", "kind"),
    [
        pytest.param(gzip.compress(PAGE)[:-20], "gzip", "truncated", id="cut"),
        pytest.param(PAGE, "gzip", "not_metrics", id="not gzip"),
        pytest.param(PAGE, "br", "not_metrics", id="unknown"),
        pytest.param(gzip.compress(bytes(5_000_000)), "gzip", "too_large", id="bomb"),
    ],
)
def test_compression_fails(
    start: Start, fetcher: Fetch, packed: bytes, encoding: str, kind: str
) -> None:
    server = start(always(answer(packed, f"Content-Encoding: {encoding}")))
    assert failure(fetcher(server.url, FetchSettings(body_limit_bytes=100_000))).kind == kind


def redirect(location: str, status: str = "307 Temporary Redirect") -> bytes:
    return answer(b"moved", f"Location: {location}", status=status)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_redirect_is_followed_and_kept(start: Start, fetcher: Fetch, status: str) -> None:
    def serve(sock: socket.socket, request: bytes, _number: int) -> None:
        at_new_place = request.startswith(b"GET /metrics/ ")
        sock.sendall(answer() if at_new_place else redirect("/metrics/", status))

    server = start(serve)
    page_fetcher = fetcher(server.url)
    for _ in range(3):
        assert page_fetcher.get().body == PAGE
    assert (server.connections, len(server.requests)) == (1, 4)


def test_redirect_survives_a_closed_connection(start: Start, fetcher: Fetch) -> None:
    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        at_new_place = request.startswith(b"GET /new ")
        sock.sendall(answer() if at_new_place else redirect("/new"))
        return False

    page_fetcher = fetcher(start(serve).url)
    assert page_fetcher.get().body == PAGE
    assert page_fetcher.get().body == PAGE


def test_redirect_that_ends_the_connection(start: Start, fetcher: Fetch) -> None:
    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        moved = b"HTTP/1.1 302 Found\r\nLocation: /new\r\n\r\n<html>moved</html>"
        sock.sendall(answer() if request.startswith(b"GET /new ") else moved)
        return False

    assert fetcher(start(serve).url).get().body == PAGE


def test_redirects_in_a_circle(start: Start, fetcher: Fetch) -> None:
    server = start(always(redirect("/metrics")))
    problem = failure(fetcher(server.url))
    assert problem.kind == "redirect"
    assert "more than 3" in str(problem)
    assert len(server.requests) == 4


def test_an_error_that_quotes_an_answer_has_a_limit(start: Start, fetcher: Fetch) -> None:
    problem = failure(fetcher(start(always(redirect("/" + 50_000 * "a"))).url))
    assert "more than 3" in str(problem)
    assert len(str(problem)) == CHARS_MAX


@pytest.mark.parametrize(
    "location",
    [
        "http://localhost:{port}/metrics",
        "http://127.0.0.1:{other}/metrics",
        "https://127.0.0.1:{port}/metrics",
        "//127.0.0.1:{other}/metrics",
        "http://user:SECRET@127.0.0.1:{other}/x",
        "http://user:SECRET@[/",
        "http://user:SECRET@host:port/",
        "gopher://127.0.0.1/",
    ],
)
def test_redirect_elsewhere_is_refused(start: Start, fetcher: Fetch, location: str) -> None:
    other = start(always(answer()))
    port = [0]

    def serve(sock: socket.socket, _request: bytes, _number: int) -> None:
        sock.sendall(redirect(location.format(port=port[0], other=other.port)))

    server = start(serve)
    port[0] = server.port
    problem = failure(
        fetcher(server.url, FetchSettings(headers={"Authorization": "Bearer SECRET"}))
    )
    assert problem.kind == "redirect"
    assert "SECRET" not in f"{problem} {problem.hint}"
    if "{other}" in location:
        assert str(other.port) in str(problem), "it says where it pointed"
    assert other.connections == 0
    assert len(server.requests) == 1


def sent_header(server: Server, name: str, number: int = -1) -> str | None:
    match = re.search(rf"(?im)^{name}: (.*)\r$", server.requests[number].decode("latin-1"))
    return match[1] if match else None


def test_bearer_token_of_a_file_is_read_at_each_connection(
    start: Start, fetcher: Fetch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")

    def serve(sock: socket.socket, request: bytes, _number: int) -> None:
        good = f"Bearer {token.read_text().strip()}\r\n".encode() in request
        sock.sendall(answer() if good else answer(b"", status="401 Unauthorized"))

    server = start(serve)
    page_fetcher = fetcher(server.url, FetchSettings(bearer_token_file=str(token)))
    page_fetcher.get()
    token.write_text("second\n")
    problem = failure(page_fetcher)
    assert problem.kind == "auth"
    assert "not accepted" in problem.hint
    assert page_fetcher.get().body == PAGE
    assert sent_header(server, "Authorization") == "Bearer second"


def test_header_values_come_from_text_files_and_environment(
    start: Start, fetcher: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("of-a-file\n")
    monkeypatch.setenv("KNEEWATCH_TEST_KEY", "of-the-environment")
    monkeypatch.setenv("KNEEWATCH_TEST_TOKEN", "token")
    server = start(always(answer()))
    settings = FetchSettings(
        bearer_token_env="KNEEWATCH_TEST_TOKEN",
        headers={"X-Text": "plain", "Host": "front.example"},
        header_files={"X-File": str(tmp_path / "key")},
        header_envs={"X-Env": "KNEEWATCH_TEST_KEY"},
    )
    fetcher(server.url, settings).get()
    assert sent_header(server, "Authorization") == "Bearer token"
    assert sent_header(server, "X-Text") == "plain"
    assert sent_header(server, "X-File") == "of-a-file"
    assert sent_header(server, "X-Env") == "of-the-environment"
    assert sent_header(server, "Host") == "front.example"


def test_credentials_of_the_url_become_basic_auth(start: Start, fetcher: Fetch) -> None:
    server = start(always(answer(b"", status="403 Forbidden")))
    page_fetcher = fetcher(f"http://user:p%40ss:é@127.0.0.1:{server.port}/metrics")
    problem = failure(page_fetcher)
    sent = sent_header(server, "Authorization")
    assert sent is not None
    assert base64.b64decode(sent.removeprefix("Basic ")).decode() == "user:p@ss:é"
    assert "ss" not in f"{problem}{page_fetcher.url}".replace("http_status", "")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FetchSettings(bearer_token_file="{tmp}/missing"), id="no file"),
        pytest.param(FetchSettings(bearer_token_file="{tmp}"), id="a directory"),
        pytest.param(FetchSettings(bearer_token_file="{tmp}/empty"), id="empty file"),
        pytest.param(FetchSettings(bearer_token_file="{tmp}/binary"), id="binary file"),
        pytest.param(FetchSettings(bearer_token_file="{tmp}/lines"), id="two lines"),
        pytest.param(FetchSettings(bearer_token_env="KNEEWATCH_NOT_SET"), id="no variable"),
        pytest.param(FetchSettings(headers={"X": "a\r\nSECRET: b"}), id="a header in a header"),
        pytest.param(FetchSettings(headers={"X": "SECRET→"}), id="not latin-1"),
        pytest.param(FetchSettings(headers={"X y": "b"}), id="not a name"),
    ],
)
def test_unusable_credentials(
    start: Start, fetcher: Fetch, tmp_path: Path, settings: FetchSettings
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00SECRET")
    (tmp_path / "lines").write_text("SECRET\nSECRET\n")
    if settings.bearer_token_file is not None:
        settings = FetchSettings(bearer_token_file=settings.bearer_token_file.format(tmp=tmp_path))
    server = start(always(answer()))
    with pytest.raises(CollectError) as caught:
        fetcher(server.url, settings).get()
    assert caught.value.kind == "auth"
    assert caught.value.hint
    assert "SECRET" not in f"{caught.value}{settings!r}"
    assert server.connections == 0


HEAD = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(HEAD, id="half a head"),
        pytest.param(HEAD.replace("200", "204") + "\r\na 1\n", id="another status"),
        pytest.param(HEAD.replace("1.1", "1.0") + "\r\na 10\n", id="HTTP 1.0"),
        pytest.param(HEAD + "Connection: close\r\n\r\na 10\n", id="it closes"),
        pytest.param(HEAD + "Content-Encoding: gzip\r\n\r\na 10\n", id="compressed"),
        pytest.param(HEAD + "Transfer-Encoding: chunked\r\n\r\na 10\n", id="chunks"),
        pytest.param(HEAD + "content-length: 4\r\n\r\na 10\n", id="two lengths"),
        pytest.param(HEAD.replace("5", "-5") + "\r\na 10\n", id="no length"),
        pytest.param(HEAD + " folded\r\n\r\na 10\n", id="a folded header"),
        pytest.param(HEAD + "\r\na 10\nHTTP/1.1", id="more than the page"),
    ],
)
def test_answer_out_of_the_ordinary_is_left_to_http_client(data: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert PlainAnswer.of(data.encode(), TimedSocket(ours)) is None


def test_plain_answer_is_read_to_its_length() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"0\nnext")
        plain = PlainAnswer.of(f"{HEAD}X-A:b \r\n\r\na 1".encode(), TimedSocket(ours))
        assert plain is not None
        assert plain.headers == {"content-length": "5", "x-a": "b"}
        assert (plain.read(100), plain.length) == (b"a 10\n", 0)
        assert ours.recv(9) == b"next"


def test_plain_answer_that_ends_early_says_what_is_missing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        plain = PlainAnswer.of(f"{HEAD}\r\na".encode(), TimedSocket(ours))
        theirs.close()
        assert plain is not None
        assert (plain.read(100), plain.length) == (b"a", 4)
