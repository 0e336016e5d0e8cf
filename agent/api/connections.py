"""HTTP/1.1 connections with time limits, and a limit of connections per address.

The limits protect against clients that send or read very slowly, or never."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

FLUSH_S = 1.0
"""How long a client that timed out may take to read the 408 response."""

TOO_SLOW_TEXT = b"The request took too long"
TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s"
    % (len(TOO_SLOW_TEXT), TOO_SLOW_TEXT)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of connections.

    `request_s`: from the start of a connection, or a request's first byte, to its last byte;
    `response_s`: from there until the client has read the response; `connections`: in total at a
    time; `share`: the share of them that one address may have.
    """

    request_s: float = 10.0
    response_s: float = 60.0
    connections: int = 512
    share: float = 0.5


@dataclass(slots=True)
class ConnectionCounts:
    """The number of open connections per address."""

    bounds: Bounds
    by_address: Counter[str] = field(default_factory=Counter[str])

    def enter(self, address: str) -> bool:
        """Count a new connection. Returns whether it is within the limits."""
        self.by_address[address] += 1
        mine = self.by_address[address] <= self.bounds.share * self.bounds.connections
        return mine and self.by_address.total() <= self.bounds.connections

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
        """Start the deadline of the first request, or abort where there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._counts.enter(self._address):
            self._set_deadline(self._counts.bounds.request_s)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts."""
        self._counts.leave(self._address)
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request, or of several."""
        self.server_state.default_headers = _date_header(int(time.time()))
        if not self._receiving and not self._answering:
            self._receiving = True
            self._set_deadline(self._counts.bounds.request_s)
        super().data_received(data)
        self._check_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client closed its sending side, as `nc` does: the response is still sent."""
        if self._answering and self.scheme == "http":
            self.cycle.keep_alive = False
            return True
        return None

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP. A response that is in progress must not follow this one."""
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
        """The response is in the transport's buffer; the client may still be reading it."""
        self._receiving = self._answering = False
        if not self.transport.get_write_buffer_size():
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
