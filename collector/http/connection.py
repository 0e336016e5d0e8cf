"""HTTP connections: deadlines, TLS, tokens and request headers. I/O edge."""

from __future__ import annotations

import base64
import io
import math
import os
import queue
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http import errors as failures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import WriteableBuffer

    from kneewatch.collector.http.address import Address

    AddressInfo = tuple[int, int, int, str, Any]

TICK_S = 0.001
"""Minimum socket timeout: 0 would make the socket non-blocking."""


class TimedSocket:
    """The part of a socket that http.client needs, with one deadline for everything sent and read.

    A socket's own timeout restarts with every byte, so a slow server could extend it for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.deadline_s = math.inf
        self.received_bytes = 0
        self.unread = b""
        """Data that was received already: the next file of this socket begins with it."""

    def tighten(self) -> None:
        """Set the socket's timeout to the time left.

        Raises:
            TimeoutError: no time is left.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self.sock.settimeout(None if left_s == math.inf else max(left_s, TICK_S))

    def sendall(self, data: bytes) -> None:
        self.tighten()
        self.sock.sendall(data)

    def recv(self, most_bytes: int) -> bytes:
        self.tighten()
        data = self.sock.recv(most_bytes)
        self.received_bytes += len(data)
        return data

    def makefile(self, _mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self), 65_536)

    def close(self) -> None:
        self.sock.close()

    def is_quiet(self) -> bool:
        """Whether nothing is readable, as expected between two answers: no end of stream, no stray
        bytes.

        TLS always counts as quiet: a session ticket may be waiting.
        """
        if isinstance(self.sock, ssl.SSLSocket):
            return True
        return not self._poll.poll(0)


class _TimedReader(io.RawIOBase):
    def __init__(self, timed: TimedSocket) -> None:
        super().__init__()
        self._timed = timed
        # The socket's own file keeps it open when http.client closes it before the body is read.
        self._file = timed.sock.makefile("rb", buffering=0)
        self._unread, timed.unread = timed.unread, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        if self._unread:
            view = memoryview(buffer)
            data, self._unread = self._unread[: len(view)], self._unread[len(view) :]
            view[: len(data)] = data
            return len(data)
        self._timed.tighten()
        count = self._file.readinto(buffer)
        self._timed.received_bytes += count or 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def connect(address: Address, *, timeout_s: float, tls: ssl.SSLContext | None) -> TimedSocket:
    """A connection to the address within `timeout_s`, including name resolution and TLS.

    Raises:
        CollectError: there is none.
    """
    deadline_s = time.monotonic() + timeout_s
    sock = _connect_tcp(address, _look_up(address, timeout_s), deadline_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return TimedSocket(sock)
    try:
        sock.settimeout(max(deadline_s - time.monotonic(), TICK_S))
        return TimedSocket(tls.wrap_socket(sock, server_hostname=address.host))
    except TimeoutError as exc:
        raise failures.slow(address, "the TLS handshake", timeout_s) from exc
    except (OSError, ValueError) as exc:
        raise failures.tls(address, exc) from exc
    finally:
        sock.close()  # what TLS took over is another object; this one is empty by then


def _connect_tcp(
    address: Address, infos: Sequence[AddressInfo], deadline_s: float
) -> socket.socket:
    problem: OSError = TimeoutError("no time left")
    for tried, (family, kind, protocol, _name, where) in enumerate(infos):
        # An address that does not answer must leave time for those after it.
        share_s = (deadline_s - time.monotonic()) / (len(infos) - tried)
        if share_s <= 0:
            break
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max(share_s, TICK_S))
            sock.connect(where)
        except OSError as exc:
            problem = exc
            if sock is not None:
                sock.close()
        else:
            return sock
    raise failures.not_connected(address, problem) from problem


def _look_up(address: Address, timeout_s: float) -> Sequence[AddressInfo]:
    def ask(flags: int) -> Sequence[AddressInfo]:
        return socket.getaddrinfo(
            address.host,
            address.port,
            type=socket.SOCK_STREAM,
            proto=socket.IPPROTO_TCP,
            flags=flags,
        )

    try:
        return ask(socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass  # a name
    answers: queue.SimpleQueue[Sequence[AddressInfo] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(ask(0))
        except (OSError, UnicodeError) as exc:
            answers.put(exc)

    # The system's resolver has no timeout: it runs in a thread that is left behind.
    threading.Thread(target=look_up, name="kneewatch-dns", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty as exc:
        raise failures.slow(address, "the name look-up", timeout_s) from exc
    if isinstance(answer, Exception):
        raise failures.unknown_name(address, answer) from answer
    return answer


def tls_context(
    *, ca_file: str | None, cert_file: str | None, key_file: str | None, skip_verify: bool
) -> ssl.SSLContext:
    """The TLS context: trusted authorities and client certificate. A CA file replaces the system's
    authorities.

    Raises:
        OSError: a file cannot be read, or is no certificate or key (ssl.SSLError is an OSError).
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    if cert_file is not None:
        # Without a password given, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    if skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# --- What a scrape shows a server, and which server it trusts: headers, tokens, TLS. I/O edge -----


MIB = 1024 * 1024

# OpenMetrics is accepted by */* and not named: prometheus_client (vLLM's /metrics) ignores q-values
# and serves OpenMetrics to whoever names it.
ACCEPT = "text/plain;version=0.0.4,*/*;q=0.1"
FIELD_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
FIELD_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]+")


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How to read a page.

    `read_timeout_s` is for the whole answer; `body_limit_bytes` applies before and after
    decompression. A header's value is text, or the name of a file or environment variable that
    holds it.
    """

    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0
    body_limit_bytes: int = 64 * MIB
    gzip: bool = False
    """Request gzip. Off by default: decompressing 50 kB costs 0.1 ms, compressing costs the server
    1-2 ms."""
    bearer_token_file: str | None = None
    bearer_token_env: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    header_files: Mapping[str, str] = field(default_factory=dict[str, str])
    header_envs: Mapping[str, str] = field(default_factory=dict[str, str])
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    insecure_skip_verify: bool = False

    def without_secrets(self) -> FetchSettings:
        """These settings without tokens and headers, for another server."""
        return replace(
            self,
            bearer_token_file=None,
            bearer_token_env=None,
            headers={},
            header_files={},
            header_envs={},
        )


def request_headers(address: Address, settings: FetchSettings) -> dict[str, str]:
    """The headers of a request; tokens and header values are read anew each time.

    A bearer token wins over the address's credentials, and both win over a plain header.

    Raises:
        CollectError: a value cannot be read, or cannot be a header.
    """
    headers = {"Accept": ACCEPT, "User-Agent": "kneewatch"}
    if settings.gzip:
        headers["Accept-Encoding"] = "gzip"
    given = dict(settings.headers)
    given |= {name: _from_file(path) for name, path in settings.header_files.items()}
    given |= {name: _from_environment(name_) for name, name_ in settings.header_envs.items()}
    if settings.bearer_token_file is not None:
        given["Authorization"] = f"Bearer {_from_file(settings.bearer_token_file)}"
    elif settings.bearer_token_env is not None:
        given["Authorization"] = f"Bearer {_from_environment(settings.bearer_token_env)}"
    elif address.user is not None:
        pair = f"{address.user}:{address.password}".encode()
        given["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    for name, value in given.items():
        headers[_field_name(name)] = _field_value(name, value)
    return headers


class TlsAccess:
    """The TLS context of an address; recreated when one of its files has changed."""

    def __init__(self, address: Address, settings: FetchSettings) -> None:
        self._wanted = address.scheme == "https"
        self._settings = settings
        self._made_of: tuple[tuple[int, int, int], ...] = ()
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """The context to connect with; None for plain HTTP.

        Raises:
            CollectError: a certificate or key cannot be used.
        """
        if not self._wanted:
            return None
        settings = self._settings
        files = [settings.ca_file, settings.client_cert_file, settings.client_key_file]
        named = ", ".join(path for path in files if path is not None)
        if settings.client_key_file is not None and settings.client_cert_file is None:
            raise CollectError(
                "client_key_file is set, client_cert_file is not",
                kind="tls",
                hint="set both: the key belongs to the certificate",
            )
        try:
            made_of = tuple(_stamp(path) for path in files if path is not None)
            if self._context is None or made_of != self._made_of:
                self._context = tls_context(
                    ca_file=settings.ca_file,
                    cert_file=settings.client_cert_file,
                    key_file=settings.client_key_file,
                    skip_verify=settings.insecure_skip_verify,
                )
                self._made_of = made_of
        except (OSError, ValueError) as exc:
            raise failures.unreadable_file("TLS file", named, exc, kind="tls") from exc
        return self._context


def _stamp(path: str) -> tuple[int, int, int]:
    stat = Path(path).stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _from_file(path: str) -> str:
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as exc:
        raise failures.unreadable_file("token file", path, exc, kind="auth") from exc
    if not value:
        raise CollectError(
            f"the token file {path} is empty", kind="auth", hint="write the token to it"
        )
    return value


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise CollectError(
            f"the environment variable {variable} is empty or not set",
            kind="auth",
            hint="set it, or change the setting that names it",
        )
    return value


def _field_name(name: str) -> str:
    if not FIELD_NAME.fullmatch(name):
        raise CollectError(
            f"{name!r} is not a valid header name", kind="auth", hint="check the setting headers"
        )
    return name


def _field_value(name: str, value: str) -> str:
    # The value may be a secret and is not shown.
    if not FIELD_VALUE.fullmatch(value):
        raise CollectError(
            f"the value of header {name} is empty or has a character that headers cannot have",
            kind="auth",
            hint="check that this is the right file: a token is one line of ASCII",
        )
    return value
