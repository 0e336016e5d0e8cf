"""HTTP/1.1 on a connection, with a time limit for everything and a share of the connections for
every address. A client that sends or reads a byte a second, or nothing at all, is let go."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

FLUSH_S = 1.0
"""What a client that was too slow has for reading that it was."""

WHY = b"The request took too long"
TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s" % (len(WHY), WHY)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What connections may take.

    `request_s`: from a connection's beginning, or a request's first byte, to its last byte;
    `response_s`: from there until the client has read the whole response; `connections`: at once,
    from everybody; `share`: of them, for one address.
    """

    request_s: float = 10.0
    response_s: float = 60.0
    connections: int = 512
    share: float = 0.5


@dataclass(slots=True)
class Census:
    """How many connections each address has now."""

    bounds: Bounds
    by_address: Counter[str] = field(default_factory=Counter[str])

    def enter(self, address: str) -> bool:
        """Count a connection; whether there is room for it."""
        self.by_address[address] += 1
        mine = self.by_address[address] <= self.bounds.share * self.bounds.connections
        return mine and self.by_address.total() <= self.bounds.connections

    def leave(self, address: str) -> None:
        """Count a connection that ended."""
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]


class TimedProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        census: Census,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._census = census
        self._deadline: asyncio.TimerHandle | None = None
        self._receiving = self._answering = False
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._census.enter(self._address):
            self._within(self._census.bounds.request_s)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._census.leave(self._address)
        self._done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some of a request, or of several."""
        if not self._receiving and not self._answering:
            self._receiving = True
            self._within(self._census.bounds.request_s)
        super().data_received(data)
        self._look()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has said all it will say, as `nc` does: its answer is still sent."""
        if self._answering and self.scheme == "http":
            self.cycle.keep_alive = False
            return True
        return None

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. It may have come within a request that is being answered, whose
        answer must not follow this one."""
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
        """The response has been handed to the transport; the client may still be reading it."""
        self._receiving = self._answering = False
        if not self.transport.get_write_buffer_size():
            self._done()
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE and not self.transport.is_closing():
            # A request had come before its turn.
            self._receiving = True
            self._within(self._census.bounds.request_s)
            self._look()

    def _look(self) -> None:
        """Once all of a request is here, the time for the response begins."""
        if self._receiving and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._receiving, self._answering = False, True
            self._within(self._census.bounds.response_s)

    def _within(self, seconds: float) -> None:
        self._done()
        self._deadline = self.loop.call_later(seconds, self._late)

    def _done(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        begun = self.conn.our_state is not h11.IDLE
        if not self._receiving or begun or self.transport.is_closing():
            # Nothing was said, or what we say is not being read.
            self.transport.abort()
            return
        self.transport.write(TOO_SLOW)
        self.transport.close()
        self._deadline = self.loop.call_later(FLUSH_S, self.transport.abort)
