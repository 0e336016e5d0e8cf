"""Where a page is, and the settings for reading it: a target as the user writes it becomes a URL;
timeouts, limits, credentials, TLS. Pure, and without heavy imports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kneewatch.collector.errors import CollectError

PORTS = {"http": 80, "https": 443}
METRICS_PATH = "/metrics"

URL_HINT = "write host:port or a URL, such as http://host:8000/metrics"
PATH_SAFE = "/%:@!$&'()*+,;=~-._"
HOST = re.compile(r"[^\s/?#@\\%:\[\]]+|[0-9a-f.:]+(%[\w.-]+)?")
_SECRET = re.compile(
    r"([?&;][^=&;]*(?:key|token|secret|passw|pwd|credential|auth|bearer|jwt|session|sig)[^=&;]*=)"
    r"[^&;]*",
    re.IGNORECASE,
)
"""A parameter of a query that holds a secret by its name."""

API = re.compile(r"/v1(/|/models|/(chat/)?completions)?")
"""Paths of the OpenAI API, which people copy from a client's base URL."""

UNWANTED = re.compile(r"[\x00-\x20\x7f\\]")


class Address(Struct, frozen=True):
    """One page on one server; `path` includes the query. Its repr hides the credentials."""

    scheme: str
    host: str
    port: int
    path: str
    user: str | None = None
    password: str = ""

    def __repr__(self) -> str:
        return f"Address({self.url!r})"

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port. Tokens are sent to the origin that they are configured for, and no
        other."""
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """The page's URL without credentials, for messages. Secrets in the query are hidden."""
        return _SECRET.sub(r"\1***", self.request_url)

    @property
    def request_url(self) -> str:
        """The page's URL without user and password, for requests."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port, as in a URL and in the Host header; the scheme's default port is left
        out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def full_url(self) -> str:
        """The page's URL with its credentials, if it has any."""
        if self.user is None:
            return self.request_url
        secret = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return f"{self.scheme}://{secret}@{self.authority}{self.path}"


def metrics_url(target: str) -> str:
    """The URL to scrape for a target, with the target's credentials.

    The path is /metrics if the target has none.

    Raises:
        CollectError: the target cannot be an HTTP(S) URL.
    """
    return _page(target).full_url()


def shown_url(target: str) -> str:
    """The URL to scrape for a target without credentials, for logs."""
    return _page(target).url


def _page(target: str) -> Address:
    address = parse_target(target)
    if API.fullmatch(address.path):
        raise _bad(target, f"drop {address.path}: the metrics are at the server's {METRICS_PATH}")
    return address


def with_scheme(target: str) -> str:
    """The target as a URL: host:8000 gets its scheme, a port the host as well."""
    text = target.strip()
    if "://" in text:
        return text
    return f"http://localhost:{text}" if text.isdecimal() else f"http://{text}"


def parse_target(target: str) -> Address:
    """The address of a target as the user writes it: host:8000, an HTTP(S) URL, or a port of this
    machine.

    Raises:
        CollectError: the target cannot be an HTTP(S) URL.
    """
    text, url = target.strip(), with_scheme(target)
    if not text or UNWANTED.search(text):
        raise _bad(target, "it has a space or a control character" if text else "it is empty")
    parts, port = _split(target, url)
    host = parts.hostname
    if parts.scheme not in PORTS:
        raise _bad(target, "the scheme must be http or https")
    if not host or not HOST.fullmatch(host) or parts.netloc.endswith(":"):
        raise _bad(target, "the host is missing" if not host else "the host or port is malformed")
    if port == 0:
        raise _bad(target, "no server listens on port 0")
    path = quote(parts.path, safe=PATH_SAFE) if parts.path not in ("", "/") else METRICS_PATH
    query = f"?{quote(parts.query, safe=PATH_SAFE + '?')}" if parts.query else ""
    return Address(
        scheme=parts.scheme,
        host=host,
        port=port or PORTS[parts.scheme],
        path=path + query,
        user=None if parts.username is None else unquote(parts.username),
        password=unquote(parts.password or ""),
    )


def redirected(address: Address, location: str) -> Address:
    """The address that a redirect leads to; it must have the same origin.

    Raises:
        CollectError: the redirect leads to another origin, which must not get the credentials.
    """
    try:
        target = parse_target(urljoin(address.request_url, location.strip()))
    except (CollectError, ValueError) as exc:
        raise CollectError(
            f"{address.url} redirects to an invalid URL: {_without_secret(location)}",
            kind="redirect",
            hint="give the address of the server itself, not of a proxy",
        ) from exc
    if target.origin != address.origin:
        raise CollectError(
            f"{address.url} redirects to another server, which is not followed: {target.url}",
            kind="redirect",
            hint=f"use {target.url} if that is the right page",
        )
    return target


def _split(target: str, url: str) -> tuple[SplitResult, int | None]:
    # The words of urllib's errors can quote the whole authority, and with it a password:
    # they are neither shown nor chained.
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _bad(target, "the host is malformed") from None
    if "@" in parts.path + parts.query + parts.fragment:
        # An unquoted / ? or # in a password ends the host early; the rest must not be shown.
        raise _bad(target, "write / ? # and @ in a password as %2F %3F %23 and %40")
    try:
        return parts, parts.port
    except ValueError:
        why = "the port is not a number from 1 to 65535"
        if parts.netloc.rpartition("@")[2].count(":") > 1 and "[" not in parts.netloc:
            why = "an IPv6 address must be in brackets, as in [::1]:8000"
        raise _bad(target, why) from None


def _bad(target: str, why: str) -> CollectError:
    return CollectError(
        f"not a target: {_without_secret(target)!r}: {why}", kind="url", hint=URL_HINT
    )


def _without_secret(text: str) -> str:
    scheme, mark, rest = text.strip().partition("://")
    if not mark:
        scheme, rest = "", scheme
    elif not scheme.isalpha():  # a piece of a password, perhaps
        scheme, mark = "", ""
    return _SECRET.sub(r"\1***", f"{scheme}{mark}{rest.rpartition('@')[2]}")[:200]


# --- Settings for reading pages ------------------------------------------------------------------


MIB = 1024 * 1024


class FetchSettings(Struct, frozen=True):
    """How to read a page. Its repr hides the headers' values.

    `read_timeout_s` is for the whole response. `body_limit_bytes` applies both before and after
    decompression. A header's value is literal text, or the name of a file or environment variable
    that contains the value.
    """

    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0
    body_limit_bytes: int = 64 * MIB
    gzip: bool = False
    """Request gzip. Off by default: decompressing 50 kB costs 0.1 ms, compressing costs the server
    1-2 ms."""
    bearer_token_file: str | None = None
    bearer_token_env: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    header_files: Mapping[str, str] = field(default_factory=dict[str, str])
    header_envs: Mapping[str, str] = field(default_factory=dict[str, str])
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    insecure_skip_verify: bool = False

    def __repr__(self) -> str:
        shown = asdict(self) | {"headers": list(self.headers)}
        return f"FetchSettings({shown})"

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
