"""A real HTTP server that takes what is posted and answers as a test says."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec import Struct, field

from tests.waiting import PATIENCE_S


class Posted(Struct, frozen=True):
    """One request, and when it came on the monotonic clock."""

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float


class Reply(Struct, frozen=True):
    """An answer. `hang`: none comes until the server closes. Status 0: the connection is closed."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    hang: bool = False
    body: bytes = b"ok"


class Taker:
    """Answers the nth post with the nth reply; the last one stays."""

    def __init__(self, *replies: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.posts: list[Posted] = []
        self.replies = list(replies) or [Reply()]
        self.closing = threading.Event()
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/services/T0/B0/SECRETPATH"

    def take(self, posted: Posted) -> Reply:
        with self._changed:
            self.posts.append(posted)
            self._changed.notify_all()
            return self.replies[min(len(self.posts), len(self.replies)) - 1]

    def wait(self, count: int, within_s: float = PATIENCE_S) -> list[Posted]:
        """The posts, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.posts) >= count, within_s), self.posts
            return list(self.posts)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


Taking = Callable[..., Taker]


def _handler(taker: Taker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            reply = taker.take(
                Posted(self.path, dict(self.headers.items()), json.loads(data), time.monotonic())
            )
            if reply.hang:
                taker.closing.wait()
            if reply.hang or not reply.status:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
