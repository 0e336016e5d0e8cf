"""Prometheus's answers: decoding, and messages with hints for failed queries. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from kneewatch.collector.errors import CollectError

POINTS_MOST = 11_000
"""Prometheus refuses more points per series than this (web/api/v1)."""

SAMPLES_MOST = 2_000_000
"""Most samples in one piece: about 60 MB of JSON."""


def steps_of(*, from_s: float, to_s: float, step_s: float) -> int:
    """Number of steps of a range, both ends included."""
    return max(0, math.floor((to_s - from_s) / step_s + 1e-9) + 1)


def steps_a_piece(series: int) -> int:
    """Most steps per piece for this number of series."""
    return max(1, min(POINTS_MOST, SAMPLES_MOST // max(1, series)))


def pieces(
    *, from_s: float, to_s: float, step_s: float, steps: int
) -> Iterator[tuple[float, float]]:
    """Start and end of each piece: every step of the range is in exactly one."""
    for first in range(0, steps_of(from_s=from_s, to_s=to_s, step_s=step_s), steps):
        last = min(first + steps, steps_of(from_s=from_s, to_s=to_s, step_s=step_s)) - 1
        yield from_s + first * step_s, from_s + last * step_s


def halves(from_s: float, to_s: float, step_s: float) -> list[tuple[float, float]]:
    """The two halves of a piece; empty for a single step."""
    steps = steps_of(from_s=from_s, to_s=to_s, step_s=step_s)
    if steps < 2:
        return []
    middle_s = from_s + (steps // 2) * step_s
    return [(from_s, middle_s - step_s), (middle_s, to_s)]


# --- What a Prometheus answers to a query ---------------------------------------------------------


Json: TypeAlias = Any
"""Parsed JSON from a server: any type."""

Document = Mapping[str, Json]


REASONS = ("error", "message", "Message", "error_description", "detail", "title")
"""Keys under which servers and the gateways before them say why they refuse, the best first."""


def said_of(document: Document) -> str:
    """Why a server refuses, in its own words; empty where it does not say."""
    for key in REASONS:
        reason = document.get(key)
        if isinstance(reason, Mapping):  # Google's and Azure's: {"error": {"message": ...}}
            reason = cast("Document", reason).get("message")
        if isinstance(reason, str) and reason.strip():
            return reason
    return ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value at the query's time."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Track:
    """One series' values over a range, oldest first: (unix seconds, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An instant query's samples. `warnings` are the server's: some samples may be missing."""

    samples: Sequence[Sample]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range query's answer, from `from_s` to `to_s`, both included."""

    from_s: float
    to_s: float
    tracks: Sequence[Track]
    warnings: tuple[str, ...] = ()


def samples_of(result: Json) -> list[Sample]:
    """The samples of a vector result.

    Raises:
        ValueError: it is none.
    """
    try:
        return [Sample(row["metric"], float(row["value"][1])) for row in _rows(result)]
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError("the answer is no vector of samples") from exc


def tracks_of(result: Json) -> list[Track]:
    """The series of a matrix result.

    Raises:
        ValueError: it is none.
    """
    try:
        return [
            Track(row["metric"], [(float(t_s), float(value)) for t_s, value in row["values"]])
            for row in _rows(result)
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError("the answer is no matrix of series") from exc


def warnings_of(document: Document) -> tuple[str, ...]:
    """The warnings of a response: a shard that is down, a store that did not answer."""
    said: Json = document.get("warnings")
    warnings = [str(warning) for warning in _rows(said or [])]
    if document.get("isPartial") is True:  # VictoriaMetrics' own word for it
        warnings.append("the server marks its answer as partial")
    return tuple(warnings)


def _rows(result: Json) -> list[Json]:
    if type(result) is not list:
        raise TypeError
    return result  # pyright: ignore[reportUnknownVariableType]


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


def refused_error(url: str, said: str) -> BusyError:
    """The error when there is no connection, or it ended before an answer."""
    return BusyError(
        f"{url}: {said}", kind="refused", hint="does Prometheus run there? check host and port"
    )


def incomplete_error(url: str, said: str) -> BusyError:
    """The error when an answer is cut short or is not JSON."""
    return BusyError(
        f"{url}: the answer is damaged: {said}",
        kind="truncated",
        hint="did the server restart? a proxy between may also cut answers",
    )


def slow_error(url: str, timeout_s: float, query: str) -> CollectError:
    """The error when no whole answer came in time. Not repeated: that would double the load."""
    return CollectError(
        f"{url}: no whole answer within {timeout_s:g} s to {shortened(query)}",
        kind="timeout",
        hint="the server is overloaded or the fleet is large: --selector, or raise "
        "--fleet-query-timeout",
    )


def tls_error(url: str, said: str) -> CollectError:
    """The error when the TLS handshake fails."""
    return CollectError(
        f"{url}: TLS failed: {said[:SAID_SHOWN]}",
        kind="tls",
        hint="--ca-file names the authority to trust, --client-cert and --client-key who we are",
    )


def too_large_error(url: str, limit_bytes: int, query: str) -> CollectError:
    """The error when an answer exceeds the limits."""
    return CollectError(
        f"{url}: the answer to {shortened(query)} is larger than {limit_bytes} bytes",
        kind="too_large",
        hint=NARROW_HINT,
    )


def not_prometheus_error(url: str, said: str) -> CollectError:
    """The error when the server does not speak Prometheus's API."""
    return CollectError(f"{url}: {said}", kind="not_found", hint=API_HINT)


def bad_status_error(
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
        return not_prometheus_error(url, "404: there is no query API")
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
