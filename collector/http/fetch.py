"""HTTP GETs of a metrics page over a kept connection. I/O edge."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from kneewatch.collector.errors import CollectError, ExpositionError
from kneewatch.collector.exposition import decompress
from kneewatch.collector.http.address import (
    Address,
    FetchSettings,
    metrics_url,
    parse_target,
    redirected,
)
from kneewatch.collector.http.connection import (
    TimedSocket,
    TlsAccess,
    bad_status,
    connect,
    failure,
    no_answer,
    not_metrics,
    request_headers,
    too_large,
    truncated,
)
from kneewatch.collector.page_memory import PAGES

if TYPE_CHECKING:
    import socket

__all__ = ["FetchSettings", "Fetched", "Fetcher", "KeptConnection", "Scrape", "metrics_url"]

REDIRECTS_MAX = 3
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
NO_MEMORY_HINT = "check the targets with large pages; raise the memory limit if they are needed"
HTML_TYPES = ("text/html", "application/xhtml")


class Fetched(Struct, frozen=True, weakref=True):
    """A page as served, decompressed. `duration_s` is the time from the call to the last byte."""

    body: bytes
    content_type: str
    status: int
    duration_s: float


class Scrape(Struct, frozen=True):
    """One GET of a page: `t_s`, the unix time at which it began, and the page as served or the
    error."""

    t_s: float
    answer: Fetched | CollectError


DEFAULT_SETTINGS = FetchSettings()


PLAIN_HEAD = re.compile(
    rb"HTTP/1\.1 200 [^\r\n]{0,200}+\r\n((?:[!-9;-~]{1,100}+:[^\r\n]{0,2000}+\r\n){1,50}+)\r\n"
)
NOT_PLAIN = frozenset({"transfer-encoding", "content-encoding", "connection"})
"""http.client reads responses that have one of these headers."""

RECEIVE_BYTES = 64 * 1024
PIECE_BYTES = 1024 * 1024
"""Bytes of a body whose memory is counted together, before they are read; a body of fewer bytes is
not counted."""


class PlainAnswer(Struct):
    """A response with status 200 and a Content-Length, with the interface that `Fetcher` needs.

    Nearly every page is sent this way. http.client parses headers as mail headers, which takes
    longer than the rest of a scrape.
    """

    headers: Mapping[str, str]
    length: int
    """Bytes of the body that are still unread."""
    timed: TimedSocket
    begun: bytes
    """The part of the body that was received together with the headers."""
    status: int = http.client.OK
    reason: str = "OK"
    chunked: bool = False
    will_close: bool = False

    @classmethod
    def of(cls, data: bytes, timed: TimedSocket) -> PlainAnswer | None:
        """The response whose first bytes are `data`; None if http.client must read this
        response."""
        head = PLAIN_HEAD.match(data)
        if head is None:
            return None
        lines = head[1].decode("latin-1").split("\r\n")[:-1]
        pairs = [
            (name.lower(), text.strip())
            for name, _, text in (line.partition(":") for line in lines)
        ]
        headers = dict(pairs)
        length = headers.get("content-length", "")
        one_each = len(headers) == len(pairs) and NOT_PLAIN.isdisjoint(headers)
        if not one_each or not (length.isascii() and length.isdigit() and len(length) < 16):
            return None
        begun = data[head.end() :]
        if len(begun) > int(length):
            return None
        return cls(headers, int(length), timed, begun)

    def read(self, most_bytes: int) -> bytes:
        """The next bytes of the body, at most `most_bytes` or those received with the headers;
        shorter if the body or the connection ends."""
        parts, left = [self.begun], min(self.length, most_bytes) - len(self.begun)
        self.begun = b""
        while left > 0 and (data := self.timed.recv(min(left, RECEIVE_BYTES))):
            parts.append(data)
            left -= len(data)
        body = b"".join(parts)
        self.length -= len(body)
        return body

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


Answer = PlainAnswer | http.client.HTTPResponse


class KeptConnection:
    """A connection to one server that is kept between requests. Not thread-safe.

    Besides the errors named, `ask` and `body` raise OSError, ValueError (of http.client's number
    parsing) and http.client.HTTPException.
    """

    def __init__(self, address: Address, settings: FetchSettings) -> None:
        self._address, self._settings = address, settings
        self._tls = TlsAccess(address, settings)
        self._timed: TimedSocket | None = None
        self._response: Answer | None = None

    @property
    def received_bytes(self) -> int:
        """Bytes received of the newest response."""
        return self._timed.received_bytes if self._timed else 0

    def ask(
        self,
        request: Callable[[], bytes],
        deadline_s: Callable[[], float],
        opening: Callable[[], None],
    ) -> Answer:
        """The response to a request, with its body unread.

        `opening` is called before a connection is opened, and `request` and `deadline_s` (on the
        monotonic clock) when it is open. A request is sent again if the server had closed the kept
        connection.

        Raises:
            CollectError: no connection could be made.
        """
        kept = self._timed
        if kept is not None:
            if kept.is_quiet():
                try:
                    return self._ask(kept, request(), deadline_s())
                except ConnectionError:
                    # The server closed the kept connection before the request: nothing was served.
                    if kept.received_bytes:
                        raise
            self.close()
        opening()
        self._timed = connect(
            self._address,
            timeout_s=self._settings.connect_timeout_s,
            tls=self._tls.context(),
        )
        return self._ask(self._timed, request(), deadline_s())

    def _ask(self, timed: TimedSocket, request: bytes, deadline_s: float) -> Answer:
        timed.deadline_s, timed.received_bytes = deadline_s, 0
        timed.sendall(request)
        data = timed.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection without an answer")
        self._response = PlainAnswer.of(data, timed)
        if self._response is None:
            timed.unread = data
            response = http.client.HTTPResponse(cast("socket.socket", timed))
            self._response = response
            response.begin()
        return self._response

    def body(self, response: Answer, take: Callable[[int], None] = lambda _size: None) -> bytes:
        """The whole body, decompressed. `take` is called before memory is taken for a large one.

        Raises:
            CollectError: it is too large, cut short or damaged.
        """
        limit_bytes = self._settings.body_limit_bytes
        if (response.length or 0) > limit_bytes:
            raise too_large(self._address, limit_bytes, "as the server announces")
        body = _read(response, limit_bytes + 1, take)
        if response.will_close:
            self.close()
        if len(body) > limit_bytes:
            raise too_large(self._address, limit_bytes, "as sent")
        if response.length:
            raise truncated(
                self._address, f"{len(body)} bytes came and {response.length} are missing"
            )
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            body = self._unpacked(body, encoding)
            if len(body) > PIECE_BYTES:
                take(len(body))
        return body

    def _unpacked(self, packed: bytes, encoding: str) -> bytes:
        limit_bytes = self._settings.body_limit_bytes
        try:
            return decompress(packed, encoding, limit_bytes)
        except ExpositionError as exc:
            if exc.kind == "too_large":
                raise too_large(self._address, limit_bytes, "when decompressed") from exc
            if exc.kind == "truncated":
                raise truncated(self._address, "the compressed page is incomplete") from exc
            raise not_metrics(self._address, f"the compressed page is damaged: {exc}") from exc

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._response is not None:
            self._response.close()
        if self._timed is not None:
            self._timed.close()
        self._timed = self._response = None


def _read(response: Answer, most_bytes: int, take: Callable[[int], None]) -> bytes:
    body = response.read(min(PIECE_BYTES, most_bytes))
    if len(body) < PIECE_BYTES:
        return body
    parts, left = [body], most_bytes - len(body)
    take(len(body))
    while left > 0:
        take(PIECE_BYTES)
        part = response.read(min(PIECE_BYTES, left))
        parts.append(part)
        left -= len(part)
        if len(part) < PIECE_BYTES:
            break
    return b"".join(parts)


def request_bytes(
    method: str, path: str, address: Address, headers: Mapping[str, str], body: bytes = b""
) -> bytes:
    """The bytes of a request."""
    authority = address.authority
    host = authority if authority.isascii() else authority.encode("idna").decode()
    sent = {"Host": host, **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Fetcher:
    """Fetches one page of one server; keeps the connection between scrapes. Not thread-safe.

    `any_answer`: accept any response body, not only a metrics page. `post`: a JSON document to send
    by POST instead of GET; redirects are then not followed.
    """

    def __init__(
        self,
        url: str,
        settings: FetchSettings = DEFAULT_SETTINGS,
        *,
        any_answer: bool = False,
        post: bytes | None = None,
    ) -> None:
        self._post = post
        self._address, self._any_answer = parse_target(url), any_answer
        self._settings = settings
        self._connection = KeptConnection(self._address, settings)
        self._headers: dict[str, str] = {}
        self._path = self._address.path
        self._request: bytes | None = None
        """The bytes of the request for this path on this connection; None before they are built."""
        self._deadline_s: float | None = None
        self._taken_bytes = 0
        """Memory that was taken for the body that is being read."""

    @property
    def url(self) -> str:
        """The page's URL without credentials."""
        return self._address.url

    def get(self) -> Fetched:
        """The current page, fetched by one GET.

        Raises:
            CollectError: there is no page, or the response is not a metrics page.
        """
        started_s = time.perf_counter()
        self._deadline_s = None
        whole = False
        try:
            response = self._follow()
            body = self._connection.body(response, self._take)
            content_type = response.headers.get("content-type", "")
            if not self._any_answer:
                self._check(response, body, content_type)
            whole = True
        except (http.client.HTTPException, OSError, ValueError) as exc:
            # http.client lets the ValueErrors of its number parsing through.
            raise no_answer(
                self._address,
                exc,
                received_bytes=self._connection.received_bytes,
                timeout_s=self._settings.read_timeout_s,
            ) from exc
        finally:
            taken, self._taken_bytes = self._taken_bytes, 0
            if not whole:
                PAGES.give_back(taken)
                self.close()
        fetched = Fetched(body, content_type, response.status, time.perf_counter() - started_s)
        if taken:
            PAGES.give_back_after(fetched, taken)
        return fetched

    def scrape(self, t_s: float) -> Scrape:
        """Fetch the page once. Returns the page or the error; `t_s` is the current unix time."""
        try:
            return Scrape(t_s, self.get())
        except CollectError as error:
            return Scrape(t_s, error.detached())

    def close(self) -> None:
        """Close the connection; the next `get` opens another."""
        self._connection.close()
        self._path, self._request = self._address.path, None

    def _follow(self) -> Answer:
        # The target of a redirect is kept as long as the connection, so that later scrapes need one
        # GET.
        for _hop in range(REDIRECTS_MAX + 1):
            response = self._connection.ask(self._built, self._deadline, self._read_headers)
            if response.status == http.client.OK:
                return response
            location = response.headers.get("location")
            followed = response.status in REDIRECT_STATUSES and self._post is None
            if not followed or location is None:
                raise bad_status(
                    self._address,
                    status=response.status,
                    reason=response.reason,
                    token_sent="Authorization" in self._headers,
                )
            path = redirected(self._address, location).path
            self._connection.body(response, self._take)
            self._path, self._request = path, None
        raise CollectError(
            f"{self.url}: more than {REDIRECTS_MAX} redirects, the last one to {self._path}",
            kind="redirect",
            hint="check the rules of the server's proxy: it redirects in a circle",
        )

    def _take(self, size: int) -> None:
        try:
            PAGES.take(size, before=self._taken_bytes)
        except ExpositionError as exc:
            raise failure(self._address, exc.kind, str(exc), NO_MEMORY_HINT) from exc
        self._taken_bytes += size

    def _deadline(self) -> float:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._settings.read_timeout_s
        return self._deadline_s

    def _read_headers(self) -> None:
        self._headers, self._request = request_headers(self._address, self._settings), None

    def _built(self) -> bytes:
        if self._request is None:
            headers = {"Accept-Encoding": "identity", **self._headers}
            body = self._post or b""
            if self._post is not None:
                headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
            method = "GET" if self._post is None else "POST"
            self._request = request_bytes(method, self._path, self._address, headers, body)
        return self._request

    def _check(self, response: Answer, body: bytes, content_type: str) -> None:
        if content_type.lower().startswith(HTML_TYPES) or body[:256].lstrip()[:1] == b"<":
            raise not_metrics(self._address, "this is a web page, not metrics")
        if response.length is None and not response.chunked and not body.endswith(b"\n"):
            # The page ends with the connection: only its last line shows whether it is whole.
            reason = "the last line has no line break" if body else "nothing came after the headers"
            raise truncated(self._address, reason)
        if not body or body.isspace():
            raise not_metrics(self._address, "the page is empty")
