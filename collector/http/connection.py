"""Connections that keep to a deadline: name look-up, TCP, TLS. I/O edge."""

from __future__ import annotations

import io
import math
import queue
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

from kneewatch.collector.http import failures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import WriteableBuffer

    from kneewatch.collector.http.address import Address

    AddressInfo = tuple[int, int, int, str, Any]

TICK_S = 0.001
"""The shortest time a socket is given: 0 would make it non-blocking."""


class TimedSocket:
    """As much of a socket as http.client needs, with one deadline for all that is sent and read.

    A socket's own timeout starts again with every byte, so a slow server could stretch it for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.deadline_s = math.inf
        self.received_bytes = 0

    def tighten(self) -> None:
        """Give the next operation what is left of the time. Raises: TimeoutError: nothing is."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is over")
        self.sock.settimeout(None if left_s == math.inf else max(left_s, TICK_S))

    def sendall(self, data: bytes) -> None:
        self.tighten()
        self.sock.sendall(data)

    def makefile(self, _mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self), 65_536)

    def close(self) -> None:
        self.sock.close()

    def is_quiet(self) -> bool:
        """Nothing to read, as it must be between two answers: no end of stream, no stray bytes.

        TLS is always taken as quiet: it may have a session ticket waiting.
        """
        if isinstance(self.sock, ssl.SSLSocket):
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class _TimedReader(io.RawIOBase):
    def __init__(self, timed: TimedSocket) -> None:
        super().__init__()
        self._timed = timed
        # The socket's own file keeps it open when http.client closes it before the body is read.
        self._file = timed.sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        self._timed.tighten()
        count = self._file.readinto(buffer)
        self._timed.received_bytes += count or 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def connect(address: Address, *, timeout_s: float, tls: ssl.SSLContext | None) -> TimedSocket:
    """A connection to the address, name look-up and TLS included, within `timeout_s`.

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

    # The system's resolver cannot be told to hurry: it gets a thread that is left behind.
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
    """What TLS trusts and shows; a CA file takes the place of the system's authorities.

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
