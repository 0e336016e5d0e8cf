"""HTTP connections: deadlines, TLS, tokens, request headers and error messages. I/O edge."""

from __future__ import annotations

import base64
import http.client
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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kneewatch.collector.errors import CollectError
from kneewatch.collector.files import SECRET_MAX_BYTES, read_text, stamp_of
from kneewatch.collector.http.address import PORTS, Address, FetchSettings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

AddressInfo: TypeAlias = tuple[int, int, int, str, Any]

NAME_HINT = "use a name that the certificate lists"
CA_HINT = "set ca_file to that CA's certificate"
# OpenSSL's verification codes (x509_vfy.h): what is wrong, what to try.
TLS_CODES = {
    9: ("its certificate is not valid yet", "check both machines' clocks"),
    10: ("its certificate has expired", "renew it on the server, or check this machine's clock"),
    18: ("its certificate is self-signed", "set ca_file to that certificate"),
    19: ("its chain ends in an unknown self-signed CA", CA_HINT),
    20: ("its certificate is signed by an unknown CA", CA_HINT),
    62: ("its certificate is for another host name", NAME_HINT),
    64: ("its certificate does not list this IP address", NAME_HINT),
}
TLS_NOT_SPOKEN = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
}
CLIENT_HINT = "set client_cert_file and client_key_file if the server requires a client certificate"
PORT_HINT = (
    "check that vLLM runs and listens on this address, then `curl` its /metrics; vLLM's default "
    "port is 8000"
)


def failure(address: Address, kind: str, problem: str, hint: str) -> CollectError:
    """An error of this kind about an address."""
    return CollectError(f"{address.url}: {problem}", kind=kind, hint=hint)


def not_connected(address: Address, exc: OSError) -> CollectError:
    """The error when no TCP connection could be made."""
    if isinstance(exc, TimeoutError):
        hint = "check that the host is up and that no firewall drops the packets"
        return failure(address, "timeout", "no connection within the timeout", hint)
    hint = PORT_HINT
    if address.port == PORTS[address.scheme]:
        hint = f"add the port to the address (without one it is {address.port}); {PORT_HINT}"
    refused = isinstance(exc, ConnectionRefusedError)
    return failure(address, "refused", "connection refused" if refused else words_of(exc), hint)


def unknown_name(address: Address, exc: Exception) -> CollectError:
    why = "not a valid name" if isinstance(exc, UnicodeError) else words_of(exc)
    problem = f"the host name {address.host!r} cannot be resolved: {why}"
    return failure(address, "dns", problem, "check the spelling, or use the IP address")


def slow(address: Address, what: str, timeout_s: float) -> CollectError:
    hint = "check the load of the server and the network, or raise fetch.connect_timeout_s"
    return failure(address, "timeout", f"{what} took longer than {timeout_s:g} s", hint)


def tls_failed(address: Address, exc: Exception) -> CollectError:
    """The error when the TLS handshake fails or the server refuses the client certificate."""
    problem = f"the TLS handshake failed: {words_of(exc)}"
    hint = "use http:// if this port does not serve HTTPS"
    if isinstance(exc, ssl.SSLCertVerificationError):
        problem = f"its certificate is not accepted: {exc.verify_message}"
        problem, hint = TLS_CODES.get(exc.verify_code, (problem, "check ca_file"))
    elif isinstance(exc, ssl.SSLError) and exc.reason in TLS_NOT_SPOKEN:
        problem, hint = "this port does not speak TLS", "use http:// instead of https://"
    elif isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        problem = f"the server ended TLS: {(exc.reason or '').lower().replace('_', ' ')}"
        hint = CLIENT_HINT
    return failure(address, "tls", problem, hint)


def unreadable_file(what: str, path: str, exc: Exception, *, kind: str) -> CollectError:
    """The error when a configured file (a token, a certificate) cannot be used."""
    hint = "check the setting and the file's permissions"
    return CollectError(f"{what} {path}: {words_of(exc)}", kind=kind, hint=hint)


def no_answer(
    address: Address, exc: Exception, *, received_bytes: int, timeout_s: float
) -> CollectError:
    """The error when the connection ended before a whole response arrived."""
    if isinstance(exc, TimeoutError):
        got = f"only {received_bytes} bytes" if received_bytes else "nothing"
        problem = f"timed out reading: {got} came within {timeout_s:g} s"
        hint = "check whether the server is stuck; raise fetch.read_timeout_s if it is only slow"
        return failure(address, "timeout", problem, hint)
    if isinstance(exc, OSError) and not received_bytes:
        return _closed(address, exc)
    if isinstance(exc, ssl.SSLError):
        return tls_failed(address, exc)
    if isinstance(exc, (OSError, http.client.IncompleteRead)):
        return truncated(address, f"the connection ended after {received_bytes} bytes")
    if "\x15\x03" in str(exc):  # a TLS alert where a status line was due
        return failure(address, "tls", "this port speaks TLS", "use https:// instead")
    problem = f"the answer is not HTTP ({type(exc).__name__})"
    hint = "check host and port: another program listens there"
    return failure(address, "not_metrics", problem, hint)


def _closed(address: Address, exc: OSError) -> CollectError:
    problem = "the server closed the connection without an answer"
    hint = "check whether it is starting or shutting down"
    if address.scheme == "http":
        return failure(address, "truncated", problem, f"{hint}; use https:// if it serves HTTPS")
    if isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError):
        return tls_failed(address, exc)
    # A server may also close the connection because the client has no certificate: its TLS alert
    # can be lost.
    return failure(address, "tls", problem, f"{hint}; {CLIENT_HINT}")


def truncated(address: Address, problem: str) -> CollectError:
    """The error when a response is cut short."""
    hint = "check whether the server restarted, or a proxy in between cuts pages"
    return failure(address, "truncated", f"the page stops midway: {problem}", hint)


def too_large(address: Address, limit_bytes: int, when: str) -> CollectError:
    problem = f"the page is larger than {limit_bytes} bytes {when}"
    hint = "check that this is a metrics page; raise limits.body_bytes if it is"
    return failure(address, "too_large", problem, hint)


PAGES = "the page of vLLM or SGLang is /metrics, that of TensorRT-LLM /prometheus/metrics"


def bad_status(address: Address, *, status: int, reason: str, token_sent: bool) -> CollectError:
    """The error for a status other than 200."""
    kind, hint = "http_status", "read the server's log"
    if status in (401, 403):
        kind, hint = "auth", "set bearer_token_file or bearer_token_env: the page requires a token"
        if token_sent:
            hint = "check that the token is current and is for this server: it was not accepted"
    elif status == 404:
        kind, hint = "not_found", f"check the path: {PAGES}"
    elif status in (429, 503):
        hint = "try again later: the server is starting, overloaded or limits its clients"
    problem = f"{address.url}: the server answered {status} {reason[:80]}".rstrip()
    return CollectError(problem, kind=kind, hint=hint, status=status)


def not_metrics(address: Address, problem: str) -> CollectError:
    """The error when the page cannot be a metrics page."""
    hint = f"check the port and the path: {PAGES} on its API port"
    return failure(address, "not_metrics", problem, hint)


def words_of(exc: BaseException) -> str:
    """An exception's message; its type's name if the message is empty."""
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return str(exc) or type(exc).__name__


# --- Connections and their deadlines --------------------------------------------------------------


TICK_S = 0.001
"""Minimum socket timeout: 0 would make the socket non-blocking."""


class TimedSocket:
    """The socket methods that http.client needs, with one deadline for all sending and receiving.

    A plain socket's timeout restarts with every byte, so a slow server could extend it forever.
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
        """Whether the socket has nothing to read, as expected between two responses.

        End of stream and stray bytes count as something to read. A TLS socket always counts as
        quiet, because a session ticket may be waiting.
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
    """An open connection to the address.

    `timeout_s` includes name resolution and the TLS handshake.

    Raises:
        CollectError: no connection could be made.
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
        raise slow(address, "the TLS handshake", timeout_s) from exc
    except (OSError, ValueError) as exc:
        raise tls_failed(address, exc) from exc
    finally:
        sock.close()  # wrap_socket moved the connection to a new object: this one is empty


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
    raise not_connected(address, problem) from problem


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
        pass  # not an IP address but a host name
    answers: queue.SimpleQueue[Sequence[AddressInfo] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(ask(0))
        except (OSError, UnicodeError) as exc:
            answers.put(exc)

    # The system's resolver has no timeout: it runs in a thread that is left behind.
    try:
        threading.Thread(target=look_up, name="kneewatch-dns", daemon=True).start()
        answer = answers.get(timeout=timeout_s)
    except queue.Empty as exc:
        raise slow(address, "the name look-up", timeout_s) from exc
    except RuntimeError as exc:  # no more threads can be started
        raise unknown_name(address, exc) from exc
    if isinstance(answer, Exception):
        raise unknown_name(address, answer) from answer
    return answer


def tls_context(
    *, ca_file: str | None, cert_file: str | None, key_file: str | None, skip_verify: bool
) -> ssl.SSLContext:
    """A TLS context with the trusted authorities and the client certificate.

    A configured CA file replaces the system's authorities.

    Raises:
        OSError: a file cannot be read, or is not a certificate or key (ssl.SSLError is an OSError).
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


# OpenMetrics is accepted by */* and not named: prometheus_client (vLLM's /metrics) ignores q-values
# and serves OpenMetrics to every client that names it.
ACCEPT = "text/plain;version=0.0.4,*/*;q=0.1"
FIELD_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
FIELD_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]+")


def request_headers(address: Address, settings: FetchSettings) -> dict[str, str]:
    """The headers of a request. Tokens and header values are read again for each request.

    A bearer token overrides the address's credentials, and both override a configured Authorization
    header.

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
    """The TLS context for an address; created again when one of its files has changed."""

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
            made_of = tuple(stamp_of(path) for path in files if path is not None)
            if self._context is None or made_of != self._made_of:
                self._context = tls_context(
                    ca_file=settings.ca_file,
                    cert_file=settings.client_cert_file,
                    key_file=settings.client_key_file,
                    skip_verify=settings.insecure_skip_verify,
                )
                self._made_of = made_of
        except (OSError, ValueError) as exc:
            raise unreadable_file("TLS file", named, exc, kind="tls") from exc
        return self._context


def _from_file(path: str) -> str:
    try:
        value = read_text(path, SECRET_MAX_BYTES).strip()
    except (OSError, ValueError) as exc:
        raise unreadable_file("token file", path, exc, kind="auth") from exc
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
