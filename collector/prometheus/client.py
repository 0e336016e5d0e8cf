"""A client for Prometheus's query API with rate and concurrency limits. I/O edge."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypeVar, cast
from urllib.parse import quote_plus

import msgspec
import orjson
import requests
from msgspec import Struct, field
from prometheus_api_client.prometheus_connect import PrometheusConnect

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import METRICS_PATH, Address, FetchSettings, parse_target
from kneewatch.collector.http.connection import request_headers, words_of
from kneewatch.collector.http.fetch import Answer as HttpAnswer
from kneewatch.collector.http.fetch import KeptConnection, request_bytes
from kneewatch.collector.packaged import decoder
from kneewatch.collector.prometheus.responses import (
    NARROW_HINT,
    NOT_ITS_JSON,
    UNPROCESSABLE,
    Answer,
    BusyError,
    Document,
    MatrixAnswer,
    Piece,
    RawSeries,
    bad_status_error,
    halves,
    incomplete_error,
    message_of,
    not_prometheus_error,
    pieces,
    refused_error,
    samples_of,
    slow_error,
    steps_a_piece,
    tls_error,
    too_large_error,
    tracks_of,
    warnings_of,
)

# --- An HTTP session for prometheus-api-client ----------------------------------------------------
#
# The client itself has no default timeout, lets errors of requests through, drops warnings and puts
# long queries into the URL.

_encoded = lru_cache(maxsize=128)(quote_plus)
"""A field of a form. Queries have thousands of characters and are sent again at each cycle."""

_read_matrix = decoder(MatrixAnswer).decode
RETRY_AFTER_MOST_S = 5.0


class Answered(requests.Response):
    """A response with a fully read and parsed body."""

    document: Document | MatrixAnswer

    def json(self, **_kwargs: Any) -> Any:  # noqa: ANN401 - requests' own signature
        """The parsed body."""
        return self.document


class TimedSession(requests.Session):
    """Sends queries as forms over kept connections; follows no redirects and ignores environment
    variables. Thread-safe."""

    def __init__(self, address: Address, settings: FetchSettings, *, timeout_s: float) -> None:
        super().__init__()
        self._address, self._settings, self._timeout_s = address, settings, timeout_s
        self._told = threading.local()
        self._idle = deque[KeptConnection]()
        files = settings.ca_file, settings.client_cert_file, settings.client_key_file
        self._files = [path for path in files if path is not None]
        self._origin = f"{address.scheme}://{address.authority}"

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the newest response that this thread received."""
        return cast("tuple[str, ...]", getattr(self._told, "warnings", ()))

    def request(
        self,
        method: str | bytes,
        url: str | bytes,
        *_args: Any,  # noqa: ANN401 - requests' own signature
        **kwargs: Any,  # noqa: ANN401
    ) -> requests.Response:
        """The parsed response, read to its end.

        Raises:
            BusyError: the server is busy; a repeated query may succeed.
            CollectError: the query failed.
        """
        shown, form = str(url), dict(kwargs.get("params") or {})
        query = str(form.get("query", ""))
        for path in self._files:
            if not os.access(path, os.R_OK):
                raise tls_error(shown, f"cannot read {path}")
        fields = [f"{name}={_encoded(str(value))}" for name, value in form.items()]
        request = self._request(shown, "&".join(fields).encode())
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = KeptConnection(self._address, self._settings)
        whole = False
        try:
            response = self._asked(connection, shown, query, request)
            body = self._body(connection, response, shown, query)
            whole = True
        finally:
            if not whole:
                connection.close()
            self._idle.append(connection)
        return self._answered(response, shown, query, body, matrix=bool(kwargs.get("matrix")))

    def _request(self, url: str, form: bytes) -> bytes:
        headers = {
            **request_headers(self._address, self._settings),
            # Compressing an answer costs the server as much as making it.
            "Accept-Encoding": "gzip" if self._settings.gzip else "identity",
            "Content-Type": "application/x-www-form-urlencoded",
            "Content-Length": str(len(form)),
        }
        path = url.removeprefix(self._origin)
        return request_bytes("POST", path, self._address, headers, form)

    def _asked(
        self, connection: KeptConnection, url: str, query: str, request: bytes
    ) -> HttpAnswer:
        try:
            return connection.ask(lambda: request, self._deadline_s, lambda: None)
        except TimeoutError as exc:
            raise slow_error(url, self._timeout_s, query) from exc
        except ssl.SSLError as exc:
            raise tls_error(url, words_of(exc)) from exc
        except (OSError, ValueError, HTTPException) as exc:
            raise refused_error(url, words_of(exc)) from exc
        except CollectError as exc:
            problem = str(exc).removeprefix(f"{self._address.url}: ")
            raise (tls_error if exc.kind == "tls" else refused_error)(url, problem) from exc

    def _deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s

    def _body(
        self, connection: KeptConnection, response: HttpAnswer, url: str, query: str
    ) -> bytes:
        try:
            return connection.body(response)
        except TimeoutError as exc:
            raise slow_error(url, self._timeout_s, query) from exc
        except (OSError, ValueError, HTTPException) as exc:
            raise incomplete_error(url, words_of(exc)) from exc
        except CollectError as exc:
            if exc.kind == "too_large":
                raise too_large_error(url, self._settings.body_limit_bytes, query) from exc
            raise incomplete_error(url, str(exc).removeprefix(f"{self._address.url}: ")) from exc

    def matrix(self, url: str, form: Mapping[str, str]) -> Sequence[RawSeries]:
        """The series of a matrix answer, with their labels still encoded.

        Raises:
            BusyError: the server is busy; a repeated query may succeed.
            CollectError: the query failed, or the answer is no matrix.
        """
        answered = cast("Answered", self.request("POST", url, params=form, matrix=True))
        if not isinstance(answered.document, MatrixAnswer):
            raise not_prometheus_error(url, "the answer is not a matrix of series")
        return answered.document.data.result

    def _answered(
        self,
        response: HttpAnswer,
        url: str,
        query: str,
        body: bytes,
        *,
        matrix: bool,
    ) -> Answered:
        status = response.status
        if matrix and status == HTTPStatus.OK:
            # Typed decoding of 100,000 series takes a tenth of the time and memory.
            with suppress(msgspec.DecodeError):
                decoded = _read_matrix(body)
                if decoded.status == "success":
                    return self._success(decoded, decoded.all_warnings)
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as exc:
            if status == HTTPStatus.OK:
                if body.lstrip().startswith(b"<"):
                    raise not_prometheus_error(url, "this is a web page, not a query API") from exc
                raise incomplete_error(url, f"{len(body)} bytes that are not whole JSON") from exc
            document = {"error": body.decode("utf-8", "replace")}
        if not isinstance(document, dict):
            raise not_prometheus_error(url, NOT_ITS_JSON)
        answer = cast("Document", document)
        if status == HTTPStatus.OK and answer.get("status") == "success":
            return self._success(answer, warnings_of(answer))
        if answer.get("errorType") == "timeout":
            raise slow_error(url, self._timeout_s, query)
        raise bad_status_error(
            url,
            status=status if status != HTTPStatus.OK else UNPROCESSABLE,
            message=message_of(answer),
            query=query,
            after_s=_retry_after_s(response),
        )

    def _success(self, document: Document | MatrixAnswer, warnings: tuple[str, ...]) -> Answered:
        self._told.warnings = warnings
        answered = Answered()
        answered.status_code, answered.document = HTTPStatus.OK, document
        return answered


def _retry_after_s(response: HttpAnswer) -> float:
    retry_after = response.headers.get("Retry-After", "")
    return min(float(retry_after), RETRY_AFTER_MOST_S) if retry_after.isdecimal() else 0.0


# --- Rate and concurrency limits ------------------------------------------------------------------


class QueryPace:
    """A rate limiter that also counts all queries. After a pause, one second's worth of queries may
    start at once."""

    def __init__(
        self,
        *,
        at_once: int,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.at_once = at_once
        self._per_s, self._clock, self._sleep = per_s, clock, sleep
        self._seats = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._due_s = float("-inf")
        self.asked = 0

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wait until the next query may start."""
        with self._seats:
            wait_s = self._reserve()
            if wait_s > 0:
                self._sleep(wait_s)
            yield

    def _reserve(self) -> float:
        """Reserve a start time for the next query. Returns the seconds until then."""
        with self._lock:
            now_s = self._clock()
            self.asked += 1
            # A query takes 1/per_s seconds of the budget; unused budget is kept for up to one
            # second.
            self._due_s = max(self._due_s, now_s - 1.0) + 1 / self._per_s
            return max(0.0, self._due_s - now_s)


# --- Queries --------------------------------------------------------------------------------------
#
# Prometheus, Thanos, Mimir and VictoriaMetrics answer alike; the labels API, which not all have,
# is not used.


SPLIT_ON = frozenset({"query", "too_large", "timeout"})
"""Kinds of errors after which a range is queried again in smaller pieces."""

API_ENDINGS = ("/api/v1/query_range", "/api/v1/query", "/api/v1", "/graph", "/query")

Got = TypeVar("Got")


class SourceSettings(Struct, frozen=True):
    """How to query a metrics system.

    `at_once` and `per_s` limit the load on the server. `tries` is the number of attempts per query,
    including the first. `pause_s` is the wait before the second attempt; it doubles with each
    further attempt.
    """

    fetch: FetchSettings = field(default_factory=FetchSettings)
    query_timeout_s: float = 30.0
    at_once: int = 4
    per_s: float = 20.0
    tries: int = 4
    pause_s: float = 0.3


class Clock(Struct, frozen=True):
    """The server's clock compared with the local clock.

    `skew_s`: seconds that the server's clock is ahead. `within_s`: the largest error of `skew_s`.
    """

    server_s: float
    skew_s: float
    within_s: float


class PrometheusSource:
    """Instant and range queries. Thread-safe."""

    def __init__(
        self,
        url: str,
        settings: SourceSettings,
        *,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        pace: QueryPace | None = None,
    ) -> None:
        """Sources that are given the same `pace` share its limits. Sends no query.

        Raises:
            CollectError: `url` is not a valid URL.
        """
        address = parse_target(url)
        self.url = _base(address)
        self._query_url = f"{self.url}/api/v1/query"
        self._settings, self._wall, self._sleep = settings, wall, sleep
        self.pace = pace or QueryPace(at_once=settings.at_once, per_s=settings.per_s)
        self.pool = ThreadPoolExecutor(settings.at_once, "kneewatch-query")
        """The threads that send queries at once. What they run must not wait for one another."""
        self._counting = threading.Lock()
        self.asked = 0
        self.retried = 0
        self._session = TimedSession(address, settings.fetch, timeout_s=settings.query_timeout_s)
        client: Any = PrometheusConnect
        self._client: Any = client(
            url=self.url,
            session=self._session,
            timeout=settings.query_timeout_s,
            method="POST",
        )

    def close(self) -> None:
        """Close the connections, and end the threads when their queries have ended."""
        self.pool.shutdown(wait=False)
        self._session.close()

    def __enter__(self) -> PrometheusSource:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def instant(self, query: str, at_s: float | None = None) -> Answer:
        """The samples of a query at a time; None means the server's current time.

        Raises:
            CollectError: the query failed.
        """
        params = {} if at_s is None else {"time": f"{at_s:.3f}"}
        result, warnings = self._asked(lambda: self._client.custom_query(query, params=params))
        return Answer(self._read(samples_of, result), warnings)

    def instants(
        self, queries: Mapping[str, str], at_s: float | None = None
    ) -> dict[str, Answer | CollectError]:
        """The answer to each query, by key; for a failed query, its error."""

        def answer(query: str) -> Answer | CollectError:
            try:
                return self.instant(query, at_s)
            except CollectError as exc:
                return exc

        return dict(zip(queries, self.pool.map(answer, queries.values()), strict=True))

    def range(
        self, query: str, *, from_s: float, to_s: float, step_s: float, series: int = 1
    ) -> Iterator[Piece]:
        """Yields a range query's answer in pieces, oldest first.

        `series` is the expected number of series. A piece that the server cannot answer is split in
        half, repeatedly if needed.

        Raises:
            CollectError: the query failed.
        """
        parts = pieces(from_s=from_s, to_s=to_s, step_s=step_s, steps=steps_a_piece(series))
        for first_s, last_s in parts:
            yield from self._piece(query, first_s, last_s, step_s)

    def samples(self, selector: str, at_s: float) -> Piece:
        """The raw samples of a range selector such as `up[5m]`, evaluated at a time.

        Raises:
            CollectError: the query failed.
        """
        params = {"time": f"{at_s:.3f}"}
        result, warnings = self._asked(lambda: self._client.custom_query(selector, params=params))
        return Piece(at_s, at_s, self._read(tracks_of, result), warnings)

    def series(self, selector: str, at_s: float) -> tuple[Sequence[RawSeries], tuple[str, ...]]:
        """The raw samples of a range selector with their labels still encoded, and the server's
        warnings: for answers with very many series.

        Raises:
            CollectError: the query failed.
        """
        form = {"query": selector, "time": f"{at_s:.3f}"}
        result, warnings = self._asked(lambda: self._session.matrix(self._query_url, form))
        return cast("Sequence[RawSeries]", result), warnings

    def now(self, query: str = "") -> tuple[Clock, Answer]:
        """The server's clock compared with the local clock, and the samples of a query at its
        present time.

        Raises:
            CollectError: the query failed.
        """
        before_s = self._wall()
        answer = self.instant(f"({query}) or vector(time())" if query else "vector(time())")
        after_s = self._wall()
        times = [sample for sample in answer.samples if not sample.labels]
        if not times:
            raise not_prometheus_error(self.url, "the answer to time() is empty")
        server_s, middle_s = times[0].value, (before_s + after_s) / 2
        clock = Clock(server_s, server_s - middle_s, (after_s - before_s) / 2 + 0.001)
        return clock, Answer(
            [sample for sample in answer.samples if sample.labels], answer.warnings
        )

    def _piece(self, query: str, from_s: float, to_s: float, step_s: float) -> Iterator[Piece]:
        try:
            yield self._ranged(query, from_s, to_s, step_s)
        except CollectError as exc:
            parts = halves(from_s, to_s, step_s) if exc.kind in SPLIT_ON else []
            if not parts or (exc.kind == "query" and exc.hint != NARROW_HINT):
                raise
        else:
            return
        for first_s, last_s in parts:
            yield from self._piece(query, first_s, last_s, step_s)

    def _ranged(self, query: str, from_s: float, to_s: float, step_s: float) -> Piece:
        # The client rounds times to whole seconds; `params` are applied after that and win.
        exact = {"start": f"{from_s:.3f}", "end": f"{to_s:.3f}"}
        first, last = (datetime.fromtimestamp(t_s, tz=UTC) for t_s in (from_s, to_s))
        result, warnings = self._asked(
            lambda: self._client.custom_query_range(
                query, start_time=first, end_time=last, step=f"{step_s:.3f}", params=exact
            )
        )
        return Piece(from_s, to_s, self._read(tracks_of, result), warnings)

    def _asked(self, ask: Callable[[], object]) -> tuple[object, tuple[str, ...]]:
        """The result and warnings of a query; sends the query again while the server is busy."""
        pause_s = self._settings.pause_s
        for left in reversed(range(self._settings.tries)):
            with self._counting:
                self.asked += 1
            try:
                with self.pace.turn():
                    return ask(), self._session.warnings
            except BusyError as exc:
                if not left:
                    raise
                after_s = exc.after_s
            except (KeyError, TypeError) as exc:  # the client does not check the answer's form
                raise not_prometheus_error(self.url, NOT_ITS_JSON) from exc
            self.retried += 1
            self._sleep(max(pause_s, after_s))
            pause_s *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    def _read(self, read: Callable[[object], Got], result: object) -> Got:
        try:
            return read(result)
        except ValueError as exc:
            raise not_prometheus_error(self.url, str(exc)) from exc


def _base(address: Address) -> str:
    """The part of the URL before the query API's paths, without credentials."""
    path = address.path.partition("?")[0].rstrip("/")
    for ending in (METRICS_PATH, *API_ENDINGS):
        path = path.removesuffix(ending)
    whole = address.request_url
    return whole.removesuffix(address.path) + path
