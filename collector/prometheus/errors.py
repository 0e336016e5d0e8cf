"""Messages and hints for failed queries. Pure."""

from __future__ import annotations

from kneewatch.collector.errors import CollectError

QUERY_SHOWN = 120
SAID_SHOWN = 300
UNPARSABLE, FORBIDDEN, UNPROCESSABLE = 400, 403, 422
BUSY = frozenset({429, 502, 503, 504})
"""Statuses after which a query is repeated."""

API_HINT = (
    "the address is the one before /api/v1: http://host:9090 for Prometheus and Thanos, "
    "http://host/prometheus for Mimir, http://host:8481/select/0/prometheus for a VictoriaMetrics "
    "cluster"
)
TENANT_HINT = "name the tenant: --header X-Scope-OrgID=TENANT (Mimir, Cortex, Loki's gateway)"
SIGNED_HINT = (
    "Amazon's service accepts signed requests only: put its SigV4 proxy before it and give the "
    "proxy's address"
)
SCOPE_HINT = (
    "the credentials may not read this: they may be for one namespace or tenant only; name it with "
    "--selector 'namespace=\"...\"' or --header X-Scope-OrgID=TENANT, or use others with "
    "--bearer-token-file"
)
NARROW_HINT = "ask for less: --selector 'namespace=\"...\"', or raise the server's limit"


class BusyError(CollectError):
    """The server may answer a repeated query; `after_s` is its Retry-After, 0 without one."""

    def __init__(self, message: str, *, kind: str, hint: str, after_s: float = 0.0) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.after_s = after_s


def shortened(query: str) -> str:
    """A query, shortened for a message."""
    line = " ".join(query.split())
    return line if len(line) <= QUERY_SHOWN else f"{line[: QUERY_SHOWN - 1]}…"


def refused(url: str, said: str) -> BusyError:
    """The error when there is no connection, or it ended before an answer."""
    return BusyError(
        f"{url}: {said}", kind="refused", hint="does Prometheus run there? check host and port"
    )


def half(url: str, said: str) -> BusyError:
    """The error when an answer is cut short or is not JSON."""
    return BusyError(
        f"{url}: the answer is damaged: {said}",
        kind="truncated",
        hint="did the server restart? a proxy between may also cut answers",
    )


def slow(url: str, timeout_s: float, query: str) -> CollectError:
    """The error when no whole answer came in time. Not repeated: that would double the load."""
    return CollectError(
        f"{url}: no whole answer within {timeout_s:g} s to {shortened(query)}",
        kind="timeout",
        hint="the server is overloaded or the fleet is large: --selector, or raise "
        "--fleet-query-timeout",
    )


def tls(url: str, said: str) -> CollectError:
    """The error when the TLS handshake fails."""
    return CollectError(
        f"{url}: TLS failed: {said[:SAID_SHOWN]}",
        kind="tls",
        hint="--ca-file names the authority to trust, --client-cert and --client-key who we are",
    )


def too_large(url: str, limit_bytes: int, query: str) -> CollectError:
    """The error when an answer exceeds the limits."""
    return CollectError(
        f"{url}: the answer to {shortened(query)} is larger than {limit_bytes} bytes",
        kind="too_large",
        hint=NARROW_HINT,
    )


def not_prometheus(url: str, said: str) -> CollectError:
    """The error when the server does not speak Prometheus's API."""
    return CollectError(f"{url}: {said}", kind="not_found", hint=API_HINT)


def bad_status(
    url: str, *, status: int, said: str, query: str, after_s: float = 0.0
) -> CollectError:
    """The error for an error response. `said` is the server's own message."""
    reason = " ".join(said.split())[:SAID_SHOWN] or "no reason given"
    if status in (UNPARSABLE, UNPROCESSABLE):
        return CollectError(
            f"{url}: the server refuses the query {shortened(query)}: {reason}",
            kind="query",
            hint=NARROW_HINT if "too many" in reason or "exceed" in reason else "see the selector",
        )
    if status in (401, 403):
        hint = "a token: --bearer-token-file; user and password: --header-file Authorization=FILE"
        words = reason.lower()
        if "org id" in words or "tenant" in words:
            hint = TENANT_HINT
        elif "authentication token" in words or "signature" in words:
            hint = SIGNED_HINT
        elif status == FORBIDDEN:
            hint = SCOPE_HINT
        return CollectError(f"{url}: {status}: {reason}", kind="auth", hint=hint)
    if status == 404:
        return not_prometheus(url, "404: there is no query API")
    if status in BUSY:
        return BusyError(
            f"{url}: {status}: {reason}",
            kind="http_status",
            hint="the server is starting, overloaded or limits its clients; try again later",
            after_s=after_s,
        )
    if 300 <= status < 400:
        return CollectError(
            f"{url}: {status}: it redirects, which is not followed",
            kind="redirect",
            hint="give the address that it leads to; a login page wants a token",
        )
    return CollectError(
        f"{url}: {status}: {reason}", kind="http_status", hint="see the server's log"
    )
