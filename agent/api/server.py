"""The HTTP server beside the daemon: uvicorn in a thread with a loop of its own. I/O edge."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from functools import partial
from time import monotonic

import uvicorn
from starlette.types import ASGIApp

from kneewatch.agent.api.guard import HEADERS_BYTES
from kneewatch.agent.api.listen import Address, address_of, check_protected
from kneewatch.agent.api.protocol import Bounds, Census, TimedProtocol
from kneewatch.agent.api.tls import ServerTls
from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15
HANDSHAKE_S = 10.0
GRACE_S = 1
"""How long responses may go on after stop() was asked for."""

START_S = 10.0
TLS_TICKS = 100
"""The server ticks ten times a second: certificates are looked at every 10 s."""


class HttpServer:
    """Serves an app: `bind`, `start`, `stop`."""

    def __init__(self, app: ASGIApp, settings: Settings, bounds: Bounds | None = None) -> None:
        self._app, self._settings = app, settings
        self._bounds = bounds or Bounds()
        self._address: Address | None = None
        self._socket: socket.socket | None = None
        self._tls: ServerTls | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def bind(self) -> None:
        """Take the address; nothing is answered yet.

        Raises:
            SettingsError: the address is wrong, taken, or open to everybody, or TLS cannot be had.
        """
        address = address_of(self._settings)
        check_protected(self._settings, address)
        self._tls = ServerTls.of(self._settings)
        # asyncio turns Nagle's delay of 40 ms off where it sees that this is TCP.
        listening = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address.ip, address.port))
        except OSError as exc:
            listening.close()
            raise SettingsError(
                f"{self._settings.origin('listen')}: listen = {self._settings['listen']!r}: "
                f"{exc.strerror or exc}; is kneewatch running already?"
            ) from exc
        self._socket = listening
        self._address = Address(address.host, address.ip, listening.getsockname()[1])

    @property
    def url(self) -> str:
        """The address for a browser on this machine, without a slash at the end."""
        if self._address is None:
            raise RuntimeError("bind first")
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{self._address.shown}:{self._address.port}"

    @property
    def alive(self) -> bool:
        """Whether it was started and still answers."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Answer from now on, in a thread.

        Raises:
            RuntimeError: the server did not come up.
        """
        if self._socket is None or self._address is None:
            raise RuntimeError("bind first")
        lone = self._address.loopback or self._settings["http.behind_proxy"]
        bounds = self._bounds
        census = Census(Bounds(bounds.request_s, bounds.response_s, bounds.connections, 1.0)
                        if lone else bounds)  # fmt: skip
        self._server = _Server(_config(self._app, bounds), census, self._socket, self._tls)
        self._thread = threading.Thread(target=self._server.run, name="http", daemon=True)
        self._thread.start()
        deadline_s = monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or monotonic() > deadline_s:
                raise RuntimeError("the HTTP server did not start; the log says why")
            self._server.up.wait(0.05)
        log.info("listening url=%s", self.url)

    def stop(self, timeout_s: float) -> bool:
        """Take no more requests and end those that run. Returns whether that was done in time."""
        server, thread = self._server, self._thread
        if server is not None and thread is not None:
            server.should_exit = True
            thread.join(timeout_s)
        if self._socket is not None:
            self._socket.close()
        return not self.alive


class _Server(uvicorn.Server):
    """uvicorn's server on a socket of ours."""

    def __init__(
        self,
        config: uvicorn.Config,
        census: Census,
        listening: socket.socket,
        tls: ServerTls | None,
    ) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self._census, self._listening, self._tls = census, listening, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own startup has no time limit for handshakes that suits us."""
        del sockets
        loop = asyncio.get_running_loop()
        protocol = partial(
            TimedProtocol,
            self._census,
            config=self.config,
            server_state=self.server_state,
            app_state={},
            loop=loop,
        )
        server = await loop.create_server(
            protocol,
            sock=self._listening,
            backlog=self.config.backlog,
            ssl=self._tls.context if self._tls else None,
            ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
        )
        self.servers = [server]
        self.started = True
        self.up.set()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; certificates are renewed here."""
        if self._tls is not None and counter and counter % TLS_TICKS == 0:
            self._tls.refresh()
        return await super().on_tick(counter)


def _config(app: ASGIApp, bounds: Bounds) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # What clients do wrong is no news for the log; they could fill a disk with it.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=bounds.connections,
        backlog=128,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=HEADERS_BYTES,
    )
