"""The HTTP server: uvicorn in its own thread, and time limits for connections. I/O edge."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache, partial
from time import monotonic
from typing import Any, cast

import h11
import uvicorn
from msgspec import Struct, field
from msgspec.structs import replace
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from kneewatch.agent.api.access import ListenAddress, ServerTls, address_of, check_protected
from kneewatch.agent.api.guard import HEADERS_BYTES
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError

FLUSH_S = 1.0
"""Seconds that a client may take to read the 408 response after its request timed out."""

TOO_SLOW_TEXT = b"The request took too long"
TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s"
    % (len(TOO_SLOW_TEXT), TOO_SLOW_TEXT)
)


class Bounds(Struct, frozen=True):
    """Limits of connections.

    `request_s`: seconds from the start of a connection, or from a request's first byte, to the
    request's last byte. `response_s`: seconds from there until the client has read the response.
    `connections`: maximum number at a time. `share`: share of `connections` that one address may
    have. `unread_bytes`: the most that all responses together may have that is not yet read.
    """

    request_s: float = 10.0
    response_s: float = 60.0
    connections: int = 512
    share: float = 0.5
    unread_bytes: int = 32 << 20


class ConnectionCounts(Struct):
    """The number of open connections per address. `waiting` are those without a whole request yet,
    oldest first, with a function that ends each; `unread` those that had not read a response."""

    bounds: Bounds
    by_address: Counter[str] = field(default_factory=Counter[str])
    waiting: dict[object, Callable[[], None]] = field(
        default_factory=dict[object, "Callable[[], None]"]
    )
    unread: dict[object, asyncio.Transport] = field(default_factory=dict[object, asyncio.Transport])

    def leave_unread(self, connection: object, transport: asyncio.Transport) -> None:
        """Note a connection with a response that the client has not read. Ends those with most to
        read while all together have too much."""
        self.unread[connection] = transport
        sizes = {each: to.get_write_buffer_size() for each, to in self.unread.items()}
        self.unread = {each: to for each, to in self.unread.items() if sizes[each]}
        while len(self.unread) > 1 and sum(sizes.values()) > self.bounds.unread_bytes:
            largest = max(self.unread, key=lambda each: sizes[each])
            sizes.pop(largest)
            self.unread.pop(largest).abort()

    def enter(self, address: str) -> bool:
        """Count a new connection. Returns whether it is within the limits.

        At the limit on all connections, the oldest one that waits for a request is ended to make
        room: connections that send nothing must not keep a probe out.
        """
        self.by_address[address] += 1
        bounds, total = self.bounds, self.by_address.total()
        mine = self.by_address[address] <= bounds.share * bounds.connections
        if not mine and bounds.share < 1.0:
            return False
        if total > bounds.connections and self.waiting:
            self.waiting.pop(next(iter(self.waiting)))()
            return True
        return total <= bounds.connections

    def leave(self, address: str) -> None:
        """Remove a closed connection."""
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]


@lru_cache(maxsize=1)
def _date_header(t_s: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(t_s, usegmt=True).encode())]


class TimedProtocol(H11Protocol):
    """A connection with deadlines for requests and responses."""

    def __init__(
        self,
        counts: ConnectionCounts,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._counts = counts
        self._deadline: asyncio.TimerHandle | None = None
        self._receiving = self._answering = False
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request. If there are too many connections, abort
        instead."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._counts.enter(self._address):
            self._counts.waiting[self] = transport.abort
            self._set_deadline(self._counts.bounds.request_s)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts."""
        self._counts.leave(self._address)
        self._counts.waiting.pop(self, None)
        self._counts.unread.pop(self, None)
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes: a part of a request, or several requests."""
        self.server_state.default_headers = _date_header(int(time.time()))
        if not self._receiving and not self._answering:
            self._receiving = True
            self._set_deadline(self._counts.bounds.request_s)
        super().data_received(data)
        self._check_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle a client that closed its sending side, as `nc` does: the response is still
        sent."""
        if self._answering and self.scheme == "http":
            self.cycle.keep_alive = False
            return True
        return None

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with status 400. If another response has already started, abort the
        connection: the client would read the 400 as part of that response."""
        # None until the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Handle a complete response. If some of it is still in the transport's buffer, the
        response deadline keeps running until the client has read it."""
        self._receiving = self._answering = False
        if not self.transport.is_closing():
            self._counts.waiting[self] = self.transport.abort
        if self.transport.get_write_buffer_size():
            self._counts.leave_unread(self, self.transport)
        else:
            self._clear_deadline()
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE and not self.transport.is_closing():
            # The next request has already arrived (pipelining).
            self._receiving = True
            self._set_deadline(self._counts.bounds.request_s)
            self._check_complete()

    def _check_complete(self) -> None:
        """Start the response deadline once the request is complete."""
        if self._receiving and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._receiving, self._answering = False, True
            self._counts.waiting.pop(self, None)
            self._set_deadline(self._counts.bounds.response_s)

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._timed_out)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _timed_out(self) -> None:
        begun = self.conn.our_state is not h11.IDLE
        if not self._receiving or begun or self.transport.is_closing():
            # The client sent nothing, or does not read the response.
            self.transport.abort()
            return
        self.transport.write(TOO_SLOW)
        self.transport.close()
        self._deadline = self.loop.call_later(FLUSH_S, self.transport.abort)


# --- The HTTP server: uvicorn in its own thread. I/O edge -----------------------------------------


log = logging.getLogger(__name__)

IN_USE = "; kneewatch may be running already; --listen 127.0.0.1:0 picks a free port"
KEEP_ALIVE_S = 15
HANDSHAKE_S = 10.0
GRACE_S = 1
"""Seconds that running responses get to finish after `stop`."""

LOGGED_S = 60.0
START_S = 10.0
TLS_REFRESH_S = 10.0
"""Seconds between two checks whether certificates have changed."""


class HttpServer:
    """An HTTP server for an app. Call `bind`, `start` and `stop` in this order."""

    def __init__(self, app: ASGIApp, settings: Settings, bounds: Bounds | None = None) -> None:
        self._app, self._settings = app, settings
        self._bounds = bounds or Bounds()
        self._address: ListenAddress | None = None
        self._socket: socket.socket | None = None
        self._tls: ServerTls | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def bind(self) -> None:
        """Bind the listen address. Requests are served after `start`.

        Raises:
            SettingsError: the address is wrong, in use or unprotected, or TLS files are unusable.
        """
        settings = self._settings
        address = address_of(settings)
        check_protected(settings, address)  # again: a name may stand for any address
        self._tls = ServerTls.of(settings)
        if settings["http.token_file"] and self._tls is None and not address.loopback:
            log.warning(
                "tokens are sent unencrypted; set http.tls_cert_file listen=%s", address.host
            )
        # IPPROTO_TCP makes asyncio disable Nagle's algorithm, which delays by 40 ms.
        listening = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address.ip, address.port))
        except OSError as exc:
            listening.close()
            raise SettingsError(
                f"{settings.origin('listen')}: listen = {settings['listen']!r}: "
                f"{exc.strerror or exc}{IN_USE if exc.errno == errno.EADDRINUSE else ''}"
            ) from exc
        self._socket = listening
        self._address = ListenAddress(address.host, address.ip, listening.getsockname()[1])

    @property
    def url(self) -> str:
        """The base URL on this machine, without a trailing slash."""
        if self._address is None:
            raise RuntimeError("bind first")
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{self._address.shown}:{self._address.port}"

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Serve requests in a thread.

        Raises:
            RuntimeError: the server did not start.
        """
        if self._socket is None or self._address is None:
            raise RuntimeError("bind first")
        lone = self._address.loopback or self._settings["http.behind_proxy"]
        # Scrapes and the history need descriptors too.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self._bounds.connections
        if files != resource.RLIM_INFINITY:
            most = max(1, min(most, files // 4))
        bounds = replace(self._bounds, connections=most)
        if lone:
            bounds = replace(bounds, share=1.0)
        counts = ConnectionCounts(bounds)
        self._server = _Server(_config(self._app, bounds), counts, self._socket, self._tls)
        self._thread = threading.Thread(target=self._server.run, name="http", daemon=True)
        self._thread.start()
        deadline_s = monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or monotonic() > deadline_s:
                raise RuntimeError("the HTTP server did not start; see the log")
            self._server.up.wait(0.05)
        log.info("listening url=%s", self.url)

    def stop(self, timeout_s: float) -> bool:
        """Accept no more requests and end running ones. Returns False if that takes longer than
        `timeout_s` seconds."""
        server, thread = self._server, self._thread
        if server is not None and thread is not None:
            server.end()
            thread.join(timeout_s)
        if self._socket is not None and not self.alive:  # else its thread still needs it
            self._socket.close()
        return not self.alive


class _Server(uvicorn.Server):
    """uvicorn's server on an open socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        counts: ConnectionCounts,
        listening: socket.socket,
        tls: ServerTls | None,
    ) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self._counts, self._listening, self._tls = counts, listening, tls
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Replaces uvicorn's method, which has no setting for the handshake
        timeout."""
        del sockets
        loop = self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        protocol = partial(
            TimedProtocol,
            self._counts,
            config=self.config,
            server_state=self.server_state,
            app_state={},
            loop=loop,
        )
        loop.set_exception_handler(_log_seldom())
        server = await loop.create_server(
            protocol,
            sock=self._listening,
            # asyncio accepts as many connections at once, and without file descriptors it fails and
            # logs as often.
            backlog=1,
            ssl=self._tls.context if self._tls else None,
            ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
        )
        self._listening.listen(self.config.backlog)
        self.servers = [server]
        self.started = True
        self.up.set()

    def end(self) -> None:
        """Stop the server. Thread-safe."""
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)

    async def main_loop(self) -> None:
        """Serve until `end` is called. Replaces uvicorn's loop, which wakes ten times per second to
        renew the Date header and to check whether to stop."""
        while self._tls is not None and not self.should_exit:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TLS_REFRESH_S)
            self._tls.refresh()
        await self._ended.wait()


def _log_seldom() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler that logs the event loop's errors, such as a lack of file descriptors, at most once
    a minute: clients must not fill the disk."""
    logged_s = -math.inf

    def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_s
        if monotonic() - logged_s > LOGGED_S:
            logged_s = monotonic()
            what, error = context.get("message"), context.get("exception")
            log.error("http: connection failed what=%s error=%s", what, error)

    return handle


def _config(app: ASGIApp, bounds: Bounds) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # Do not log client errors: clients could fill the disk.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=2 * bounds.connections,  # `ConnectionCounts` has the limit
        backlog=128,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=HEADERS_BYTES,
    )
