"""Prometheus's answers: decoding, and messages with hints for failed queries. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from msgspec import Raw, Struct, field

from kneewatch.collector.errors import CollectError

POINTS_MOST = 11_000
"""Prometheus refuses to return more points per series than this (web/api/v1)."""

SAMPLES_MOST = 2_000_000
"""Most samples in one piece: about 60 MB of JSON."""


def steps_of(*, from_s: float, to_s: float, step_s: float) -> int:
    """Number of steps of a range, both ends included."""
    return max(0, math.floor((to_s - from_s) / step_s + 1e-9) + 1)


def steps_a_piece(series: int) -> int:
    """The largest number of steps in a piece that keeps the answer within the limits above."""
    return max(1, min(POINTS_MOST, SAMPLES_MOST // max(1, series)))


def pieces(
    *, from_s: float, to_s: float, step_s: float, steps: int
) -> Iterator[tuple[float, float]]:
    """Yields start and end of each piece. Every step of the range is in exactly one piece."""
    for first in range(0, steps_of(from_s=from_s, to_s=to_s, step_s=step_s), steps):
        last = min(first + steps, steps_of(from_s=from_s, to_s=to_s, step_s=step_s)) - 1
        yield from_s + first * step_s, from_s + last * step_s


def halves(from_s: float, to_s: float, step_s: float) -> list[tuple[float, float]]:
    """The two halves of a piece; empty for a piece of one step, which cannot be split."""
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
"""Keys in which servers and gateways put the reason of an error; the most informative first."""


def message_of(document: Document) -> str:
    """The reason that the server gives for an error; empty if it gives none."""
    for key in REASONS:
        reason = document.get(key)
        if isinstance(reason, Mapping):  # Google's and Azure's: {"error": {"message": ...}}
            reason = cast("Document", reason).get("message")
        if isinstance(reason, str) and reason.strip():
            return reason
    return ""


class Sample(Struct, frozen=True):
    """One series' value at the query's time."""

    labels: Mapping[str, str]
    value: float


class Track(Struct, frozen=True):
    """One series' values over a range, oldest first: (unix seconds, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class RawSeries(Struct, gc=False):
    """One series of a matrix, still encoded: its reader decodes labels only when they are new.

    Python's garbage collector would walk through hundreds of thousands of decoded rows.
    """

    metric: Raw
    values: Raw


class _Matrix(Struct):
    result: list[RawSeries]


class MatrixAnswer(Struct):
    """A matrix result with its envelope."""

    status: str
    data: _Matrix
    warnings: list[str] = field(default_factory=list[str])
    is_partial: bool = field(default=False, name="isPartial")

    @property
    def all_warnings(self) -> tuple[str, ...]:
        return warnings_of({"warnings": self.warnings, "isPartial": self.is_partial})


class Answer(Struct, frozen=True):
    """An instant query's samples. `warnings` come from the server: some samples may be missing."""

    samples: Sequence[Sample]
    warnings: tuple[str, ...] = ()


class Piece(Struct, frozen=True):
    """A part of a range query's answer, from `from_s` to `to_s`, both included."""

    from_s: float
    to_s: float
    tracks: Sequence[Track]
    warnings: tuple[str, ...] = ()


def samples_of(result: Json) -> list[Sample]:
    """The samples of a vector result.

    Raises:
        ValueError: the result is of another type.
    """
    try:
        return [Sample(row["metric"], float(row["value"][1])) for row in _rows(result)]
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError("the answer is not a vector of samples") from exc


def tracks_of(result: Json) -> list[Track]:
    """The series of a matrix result.

    Raises:
        ValueError: the result is of another type.
    """
    try:
        return [
            Track(row["metric"], [(float(t_s), float(value)) for t_s, value in row["values"]])
            for row in _rows(result)
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError("the answer is not a matrix of series") from exc


def warnings_of(document: Document) -> tuple[str, ...]:
    """The warnings of a response, for example that a shard is down or a store did not respond."""
    answered: Json = document.get("warnings")
    warnings = [str(warning) for warning in _rows(answered or [])]
    if document.get("isPartial") is True:  # VictoriaMetrics's form of a warning
        warnings.append("the server marks its answer as partial")
    return tuple(warnings)


def _rows(result: Json) -> list[Json]:
    if type(result) is not list:
        raise TypeError
    return result  # pyright: ignore[reportUnknownVariableType]


QUERY_SHOWN = 120
MESSAGE_SHOWN = 300
UNPARSABLE, FORBIDDEN, UNPROCESSABLE = 400, 403, 422
BUSY = frozenset({429, 502, 503, 504})
"""HTTP statuses after which the query is sent again."""

NOT_ITS_JSON = "the answer is JSON, but not Prometheus's"
API_HINT = (
    "give the address in front of /api/v1: http://host:9090 for Prometheus and Thanos, "
    "http://host/prometheus for Mimir, http://host:8481/select/0/prometheus for a VictoriaMetrics "
    "cluster"
)
TENANT_HINT = "name the tenant: --header X-Scope-OrgID=TENANT (Mimir, Cortex, Loki's gateway)"
SIGNED_HINT = "give the address of Amazon's SigV4 proxy: the service accepts signed requests only"
SCOPE_HINT = (
    "limit the query to what the credentials may read, with --selector 'namespace=\"...\"' or "
    "--header X-Scope-OrgID=TENANT, or use others with --bearer-token-file"
)
TOKEN_HINT = (
    "send a token with --bearer-token-file, or a user and password with --header-file "
    "Authorization=FILE"
)
NARROW_HINT = "select fewer series with --selector 'namespace=\"...\"', or raise the server's limit"
SLOW_HINT = "select fewer series with --selector, or raise --fleet-query-timeout"
TLS_HINT = "set --ca-file to the CA that signed it; --client-cert and --client-key identify you"
LATER_HINT = "try again later: the server is starting, overloaded or limits its clients"
CUT_HINT = "check whether the server restarted, or a proxy in between cuts answers"
"""Hints like this one complete the sentence "try: "."""


class BusyError(CollectError):
    """The server is busy; a repeated query may succeed.

    `after_s` is the response's Retry-After in seconds; 0 if the response has none.
    """

    def __init__(self, message: str, *, kind: str, hint: str, after_s: float = 0.0) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.after_s = after_s


def shortened(query: str) -> str:
    """A query, shortened for a message."""
    line = " ".join(query.split())
    return line if len(line) <= QUERY_SHOWN else f"{line[: QUERY_SHOWN - 1]}…"


def refused_error(url: str, problem: str) -> BusyError:
    """The error when the connection failed, or ended before a response."""
    hint = "check host and port, and that Prometheus runs there"
    return BusyError(f"{url}: {problem}", kind="refused", hint=hint)


def incomplete_error(url: str, problem: str) -> BusyError:
    """The error when a response is cut short or is not JSON."""
    return BusyError(f"{url}: the answer is damaged: {problem}", kind="truncated", hint=CUT_HINT)


def slow_error(url: str, timeout_s: float, query: str) -> CollectError:
    """The error when no whole response came in time.

    Such queries are not repeated: that would double the load.
    """
    problem = f"no whole answer within {timeout_s:g} s to {shortened(query)}"
    return CollectError(f"{url}: {problem}", kind="timeout", hint=SLOW_HINT)


def tls_error(url: str, problem: str) -> CollectError:
    """The error when the TLS handshake fails."""
    return CollectError(f"{url}: TLS failed: {problem[:MESSAGE_SHOWN]}", kind="tls", hint=TLS_HINT)


def too_large_error(url: str, limit_bytes: int, query: str) -> CollectError:
    """The error when a response exceeds the limits."""
    problem = f"the answer to {shortened(query)} is larger than {limit_bytes} bytes"
    return CollectError(f"{url}: {problem}", kind="too_large", hint=NARROW_HINT)


def not_prometheus_error(url: str, problem: str) -> CollectError:
    """The error when the server does not speak Prometheus's API."""
    return CollectError(f"{url}: {problem}", kind="not_found", hint=API_HINT)


def bad_status_error(
    url: str, *, status: int, message: str, query: str, after_s: float = 0.0
) -> CollectError:
    """The error for an error status. `message` is the server's own message."""
    reason = " ".join(message.split())[:MESSAGE_SHOWN] or "no reason given"
    words = f"{url}: {status}: {reason}"
    if status in (UNPARSABLE, UNPROCESSABLE):
        words = f"{url}: the server refuses the query {shortened(query)}: {reason}"
        too_much = "too many" in reason or "exceed" in reason
        hint = NARROW_HINT if too_much else "check the selector"
        return CollectError(words, kind="query", hint=hint)
    if status in (401, FORBIDDEN):
        return CollectError(words, kind="auth", hint=_access_hint(status, reason.lower()))
    if status == 404:
        return not_prometheus_error(url, "404: no query API at this address")
    if status in BUSY:
        return BusyError(words, kind="http_status", hint=LATER_HINT, after_s=after_s)
    if 300 <= status < 400:
        words = f"{url}: {status}: a redirect, which is not followed"
        hint = "give the address that it redirects to; a login page needs a token"
        return CollectError(words, kind="redirect", hint=hint)
    return CollectError(words, kind="http_status", hint="read the server's log")


def _access_hint(status: int, reason: str) -> str:
    if "org id" in reason or "tenant" in reason:
        return TENANT_HINT
    if "authentication token" in reason or "signature" in reason:
        return SIGNED_HINT
    return SCOPE_HINT if status == FORBIDDEN else TOKEN_HINT
