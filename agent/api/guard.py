"""HTTP endpoint: checks of the host, rate, token and size of each request before any work, and
security headers of responses. I/O edge."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from time import monotonic

from msgspec import Struct, field
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kneewatch.agent.api.access import ADMIN, READ, Auth, Scopes
from kneewatch.agent.api.responses import Problem, refused
from kneewatch.agent.settings.effective import Settings

HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


def known_hosts(settings: Settings) -> frozenset[str]:
    """Host names that requests may use, in lower case."""
    listening = str(settings["listen"]).strip().rpartition(":")[0].strip("[]")
    names = ["localhost", listening, socket.gethostname(), *(settings["http.hosts"] or ())]
    return frozenset(name.lower().rstrip(".") for name in names if name)


def host_name(header: bytes) -> str | None:
    """The name or address in a Host header, in lower case and without the port. None if it is
    invalid."""
    match = HOST.fullmatch(header.decode("latin-1").strip().lower())
    if match is None:
        return None
    return match["six"] or match["name"].rstrip(".")


def is_address(name: str) -> bool:
    """Whether a host is an IP address. Unlike names, addresses are safe from DNS rebinding."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


# --- Rate limit -----------------------------------------------------------------------------------


MOST_ADDRESSES = 4096
NETWORK_BITS = 64
"""All IPv6 addresses of a /64 network share a bucket, because one client can use all of them."""


class RateBuckets(Struct):
    """A token bucket for each address. A bucket holds the requests of one second and fills at
    `per_s`.

    The table is bounded: the bucket whose last request is oldest is dropped first, because it is
    usually full again.
    """

    per_s: float
    clock: Callable[[], float] = monotonic
    most: int = MOST_ADDRESSES
    _levels: OrderedDict[str, tuple[float, float]] = field(
        default_factory=OrderedDict[str, tuple[float, float]]
    )

    def take(self, address: str) -> float:
        """Take a token. Returns 0, or the seconds until a token is available."""
        now_s, whole = self.clock(), max(1.0, self.per_s)
        name = network(address)
        level, then_s = self._levels.pop(name, (whole, now_s))
        level = min(whole, level + (now_s - then_s) * self.per_s)
        wait_s = 0.0 if level >= 1 else (1 - level) / self.per_s
        self._levels[name] = (level if wait_s else level - 1, now_s)
        while len(self._levels) > self.most:
            self._levels.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        return len(self._levels)


def network(address: str) -> str:
    """The key of an address for the rate limit: the IPv4 address, or the IPv6 /64 network."""
    if ":" not in address:
        return address
    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((ip, NETWORK_BITS), strict=False))


# --- The middleware -------------------------------------------------------------------------------
#
# Plain ASGI, because its cost is added to every request.


log = logging.getLogger(__name__)

HEALTH_PATH = "/healthz"
PROBE = "/probe"
OPEN_PAGES = ("/docs/causes", "/docs/rules", "/docs/glossary", "/docs/reference.css")
OPEN_PATHS = frozenset({HEALTH_PATH, PROBE, "/readyz", "/triage/triage.css", *OPEN_PAGES})
OPEN_FOLDERS = (f"{PROBE}/", "/docs/causes/", "/docs/rules/")
"""Paths that need no token. Health probes of systemd and Kubernetes send none, and the manual is
public because alerts link to it; a page that asks for a token has its stylesheet."""

SAFE_METHODS = ("GET", "HEAD")
SAME = (b"same-origin", b"none")
GRANTED = "granted"
LENGTH_DIGITS = 15
HEADERS_BYTES = 16 * 1024
"""Maximum size of the request line and headers together."""
CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Sequence[tuple[bytes, bytes]] = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": CSP,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
        "vary": "accept, authorization",
    }.items()
)

Headers = Mapping[bytes, list[bytes]]


class Guard:
    """Middleware that checks requests: host, rate, token and size. Every error is answered with a
    problem document."""

    def __init__(self, app: ASGIApp, settings: Settings, access: Auth) -> None:
        self.app, self._hosts, self._access = app, known_hosts(settings), access
        self._buckets = RateBuckets(settings["http.requests_per_s"])
        self._body_bytes: int = settings["http.body_bytes"]
        self._behind_proxy: bool = settings["http.behind_proxy"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        method, has_started = scope["method"], False

        async def send_hardened(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            inner = self._admitted(scope)
            await self.app(inner, self._bounded(receive), send_hardened)
        except Problem as problem:
            if not has_started:
                await refused(problem, scope)(scope, receive, send_hardened)
        except ClientDisconnect:
            log.debug("client disconnected before its request was complete")
        except Exception:
            log.exception("request failed path=%r", scope["path"][:200])
            if has_started:
                raise
            failed = Problem(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see kneewatch's log"
            )
            await refused(failed, scope)(scope, receive, send_hardened)

    def _admitted(self, scope: Scope) -> Scope:
        """Check a request. Returns the ASGI scope for the app, to which the granted access scopes
        are added.

        Raises:
            Problem: the request is refused.
        """
        headers: dict[bytes, list[bytes]] = {}
        size = len(scope["path"]) + len(scope["query_string"])
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
            size += len(name) + len(value)
        if size > HEADERS_BYTES:
            raise Problem(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"URL and headers are larger than {HEADERS_BYTES:,} bytes together",
            )
        path, method = scope["path"], scope["method"]
        self._check_host(headers)
        # A 429 would make Kubernetes restart the server that is probed.
        if path not in (HEALTH_PATH, PROBE) and not path.startswith(f"{PROBE}/"):
            self._check_rate(scope, headers)
        _check_origin(method, headers)
        self._check_length(headers)
        granted = self._access.scopes(headers.get(b"authorization", ()))
        if READ not in granted and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
            raise _unauthorized(headers)
        state = {**scope.get("state", {}), GRANTED: granted}
        # The routes handle GET only: a HEAD is a GET without the body.
        return {**scope, "state": state, "method": "GET" if method == "HEAD" else method}

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.get(b"host", ())
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            raise Problem(HTTPStatus.BAD_REQUEST, "send exactly one valid Host header")
        if name not in self._hosts and not is_address(name):
            raise Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "unknown host name: use the IP address, or add the name to http.hosts",
            )

    def _check_rate(self, scope: Scope, headers: Headers) -> None:
        client = scope.get("client")
        address = client[0] if client else ""
        forwarded = headers.get(b"x-forwarded-for")
        if self._behind_proxy and forwarded:
            # The proxy added the last entry; a client can forge the others.
            address = forwarded[-1].rpartition(b",")[2].strip().decode("latin-1")[:64]
        wait_s = self._buckets.take(address)
        if wait_s:
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many requests from this address (limit: http.requests_per_s)",
                {"retry-after": str(math.ceil(wait_s))},
            )

    def _check_length(self, headers: Headers) -> None:
        for value in headers.get(b"content-length", ()):
            valid = value.isdigit() and len(value) <= LENGTH_DIGITS
            if not valid or int(value) > self._body_bytes:
                raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` with a limit on the size of the body. The received bytes are counted, because
        Content-Length may be wrong."""
        received_bytes = 0

        async def bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> Problem:
        return Problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._body_bytes:,} bytes (http.body_bytes)",
        )


def need_admin(granted: Scopes) -> None:
    """Check that a request has the admin scope.

    Raises:
        Problem: the admin scope was not granted.
    """
    if ADMIN not in granted:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "this needs a token from http.admin_token_file; a read token is not enough",
        )


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse cross-site requests. A browser may still follow a link from another site."""
    sites, safe = headers.get(b"sec-fetch-site", ()), method in SAFE_METHODS
    is_link = safe and headers.get(b"sec-fetch-mode") == [b"navigate"]
    host = headers[b"host"][0].strip().lower()
    origins = () if safe else headers.get(b"origin", ())
    if (any(site not in SAME for site in sites) and not is_link) or any(
        origin.lower().partition(b"://")[2] != host for origin in origins
    ):
        raise Problem(
            HTTPStatus.FORBIDDEN, "cross-site request: pages of other sites may not call kneewatch"
        )


def _unauthorized(headers: Headers) -> Problem:
    browser = any(b"text/html" in value for value in headers.get(b"accept", ()))
    basic = ', Basic realm="kneewatch", charset="UTF-8"' if browser else ""
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        "token missing or wrong: send `Authorization: Bearer TOKEN`, or the token as password of "
        "Basic authentication",
        {"www-authenticate": f'Bearer realm="kneewatch"{basic}'},
    )
