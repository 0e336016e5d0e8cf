"""Real servers on 127.0.0.1 that answer as a test says, and fetchers to ask them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import FetchSettings
from kneewatch.collector.http.fetch import Fetcher
from tests.waiting import PATIENCE_S

PAGE = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n" * 400
PATIENT = FetchSettings(connect_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S)
QUICK = FetchSettings(connect_timeout_s=0.3, read_timeout_s=0.5)
Serve = Callable[[socket.socket, bytes, int], bool | None]
"""Answers the nth request (from 0) on a socket; False closes the connection."""


class Server:
    """Listens on 127.0.0.1 and answers each request by `serve`, one thread a connection."""

    def __init__(self, serve: Serve, tls: ssl.SSLContext | None = None) -> None:
        self._serve, self._tls = serve, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.requests: list[bytes] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/metrics"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._talk, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _talk(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._open.append(sock)
            with sock:
                self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        while True:
            request = b""
            while b"\r\n\r\n" not in request:
                data = sock.recv(65_536)
                if not data:
                    return
                request += data
            self.requests.append(request)
            if self._serve(sock, request, len(self.requests) - 1) is False:
                return

    def close(self) -> None:
        sockets = [self._listener, *self._open]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        # Not before: a thread about to read would read from whoever gets the descriptor next.
        for sock in sockets:
            sock.close()


Start = Callable[..., Server]
Fetch = Callable[..., Fetcher]


def answer(body: bytes = PAGE, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: text/plain; version=0.0.4")
    return "\r\n".join([*lines, "", ""]).encode() + body


def always(data: bytes, *, keep: bool = True) -> Serve:
    def serve(sock: socket.socket, _request: bytes, _number: int) -> bool:
        sock.sendall(data)
        return keep

    return serve


def chunked(*chunks: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + (b"0\r\n\r\n" if end else b"")


def failure(fetcher: Fetcher) -> CollectError:
    with pytest.raises(CollectError) as caught:
        fetcher.get()
    assert caught.value.hint, "every failure says what to try"
    assert "127.0.0.1" in str(caught.value), "every failure says where"
    return caught.value
