"""The HTTP server: its address, TLS, and uvicorn in a thread of its own. I/O edge."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import uvicorn
from starlette.types import ASGIApp

from kneewatch.agent.api.connections import Bounds, Census, TimedProtocol
from kneewatch.agent.api.guard import HEADERS_BYTES
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError

log = logging.getLogger(__name__)

WILDCARDS = ("", "*")
MOST_PORT = 65535
LISTEN = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on. `host` is as configured, `ip` what it stands for."""

    host: str
    ip: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        """IPv6 or IPv4."""
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def shown(self) -> str:
        """The host for a URL that this machine can open."""
        ip = ipaddress.ip_address(self.ip)
        if ip.is_unspecified:
            return "[::1]" if ip.version == 6 else "127.0.0.1"
        return f"[{self.ip}]" if ip.version == 6 else self.ip


def address_of(settings: Settings) -> Address:
    """The address to listen on.

    Raises:
        SettingsError: it is none, or its host cannot be resolved.
    """
    told, origin = str(settings["listen"]).strip(), settings.origin("listen")
    found = LISTEN.fullmatch(told)
    if found is None or int(found["port"]) > MOST_PORT:
        raise SettingsError(
            f"{origin}: listen = {told!r} is no HOST:PORT; write 127.0.0.1:9877 or [::1]:9877"
        )
    host, port = found["six"] or found["host"], int(found["port"])
    if host in WILDCARDS:
        return Address(host, "0.0.0.0", port)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise SettingsError(f"{origin}: listen = {told!r}: {host} cannot be resolved") from exc
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return Address(host, str(rows[0][4][0]).partition("%")[0], port)


def check_protected(settings: Settings, address: Address) -> None:
    """Say what is unsafe, in the log; refuse what is open to everybody.

    Raises:
        SettingsError: others could reach the address and nothing asks who they are.
    """
    if settings["http.client_ca_file"] and not settings["http.tls_cert_file"]:
        raise SettingsError(
            f"{settings.origin('http.client_ca_file')}: http.client_ca_file needs "
            "http.tls_cert_file: client certificates are part of TLS"
        )
    if settings["http.tls_key_file"] and not settings["http.tls_cert_file"]:
        raise SettingsError(
            f"{settings.origin('http.tls_key_file')}: http.tls_key_file needs http.tls_cert_file"
        )
    if address.loopback:
        return
    asked = settings["http.token_file"] or settings["http.client_ca_file"]
    if not asked and not settings["http.behind_proxy"]:
        raise SettingsError(
            f"{settings.origin('listen')}: listen = {settings['listen']!r} can be reached by "
            "others: set http.token_file or http.client_ca_file (with TLS), say with "
            "http.behind_proxy that a proxy checks who asks, or listen on 127.0.0.1"
        )
    if settings["http.token_file"] and not settings["http.tls_cert_file"]:
        log.warning("tokens travel unencrypted; set http.tls_cert_file listen=%s", address.host)


# --- The server's side of TLS. I/O edge: it reads certificates ------------------------------------


FILES = ("http.tls_cert_file", "http.tls_key_file", "http.client_ca_file")

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class ServerTls:
    """The context that connections are made with; certificates that were renewed on disk are taken
    up for new connections."""

    context: ssl.SSLContext
    settings: Settings
    stamp: Stamp

    @classmethod
    def of(cls, settings: Settings) -> ServerTls | None:
        """What the settings ask for; None for plain HTTP.

        Raises:
            SettingsError: a certificate cannot be used; the message names the setting and the file.
        """
        if not settings["http.tls_cert_file"]:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        stamp = _stamp(settings)
        _load(context, settings)
        return cls(context, settings, stamp)

    def refresh(self) -> None:
        """Read the files again where one has changed. Files that cannot be used, as while they are
        being replaced, change nothing and are tried again."""
        try:
            stamp = _stamp(self.settings)
            if stamp == self.stamp:
                return
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.settings)
            _load(self.context, self.settings)
        except SettingsError as exc:
            log.warning("TLS files are kept as they were error=%s", exc)
            return
        self.stamp = stamp
        log.info("TLS files were read again")


def _load(context: ssl.SSLContext, settings: Settings) -> None:
    key = "http.tls_cert_file"
    try:
        context.load_cert_chain(settings[key], settings["http.tls_key_file"], _no_password)
        if settings["http.client_ca_file"]:
            key = "http.client_ca_file"
            context.load_verify_locations(settings[key])
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as exc:
        files = settings[key]
        if key == "http.tls_cert_file" and settings["http.tls_key_file"]:
            files = f"{files} with key {settings['http.tls_key_file']}"
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise SettingsError(f"{settings.origin(key)}: {key} = {files}: {why}") from exc


def _no_password() -> str:
    """OpenSSL would otherwise ask the terminal, and a daemon has none."""
    raise ValueError("the key has a password; store it without one")


def _stamp(settings: Settings) -> Stamp:
    """What changes when a file does."""
    found: list[tuple[int, int, int]] = []
    for key in FILES:
        if not settings[key]:
            continue
        try:
            stat = Path(settings[key]).stat()
        except OSError as exc:
            raise SettingsError(
                f"{settings.origin(key)}: {key} = {settings[key]}: {exc.strerror}"
            ) from exc
        found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


# --- The HTTP server beside the daemon: uvicorn in a thread with a loop of its own. I/O edge ------


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
