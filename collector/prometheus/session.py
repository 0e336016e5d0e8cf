"""An HTTP session for prometheus-api-client with timeouts and kneewatch's errors. I/O edge.

The client itself has no default timeout, lets errors of requests through, drops warnings and puts
long queries into the URL.
"""

from __future__ import annotations

import ssl
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import orjson
import requests
import urllib3
from requests.adapters import HTTPAdapter

from kneewatch.collector.http.connection import request_headers
from kneewatch.collector.http.errors import words_of
from kneewatch.collector.prometheus.responses import (
    NOT_ITS_JSON,
    UNPROCESSABLE,
    Document,
    bad_status_error,
    incomplete_error,
    not_prometheus_error,
    refused_error,
    said_of,
    slow_error,
    tls_error,
    too_large_error,
    warnings_of,
)

if TYPE_CHECKING:
    from kneewatch.collector.http.address import Address
    from kneewatch.collector.http.connection import FetchSettings

CHUNK_BYTES = 1 << 16
RETRY_AFTER_MOST_S = 5.0


class Answered(requests.Response):
    """A response with a fully read and parsed body."""

    document: Document

    def json(self, **_kwargs: Any) -> Any:  # noqa: ANN401 - requests' own signature
        """The parsed body."""
        return self.document


class TimedSession(requests.Session):
    """Sends queries as forms, follows no redirects and ignores environment variables.

    `warnings` are those of this thread's newest response.
    """

    def __init__(
        self, address: Address, settings: FetchSettings, *, timeout_s: float, at_once: int
    ) -> None:
        super().__init__()
        self.trust_env = False  # a .netrc would replace the token, a proxy would see it
        self._address, self._settings, self._timeout_s = address, settings, timeout_s
        self._told = threading.local()
        self.verify = settings.ca_file or ssl.get_default_verify_paths().cafile or True
        if settings.insecure_skip_verify:
            self.verify = False
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        if settings.client_cert_file and settings.client_key_file:
            self.cert = (settings.client_cert_file, settings.client_key_file)
        elif settings.client_cert_file:
            self.cert = settings.client_cert_file
        self._adapter = HTTPAdapter(pool_maxsize=at_once, max_retries=0)

    def mount_own(self, url: str) -> None:
        """Replace the client's adapter, which retries, by one that does not."""
        self.mount(url, self._adapter)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of this thread's newest response."""
        return cast("tuple[str, ...]", getattr(self._told, "warnings", ()))

    def request(
        self,
        method: str | bytes,
        url: str | bytes,
        *_args: Any,  # noqa: ANN401 - requests' own signature
        **kwargs: Any,  # noqa: ANN401
    ) -> requests.Response:
        """The whole, parsed response.

        Raises:
            BusyError: a repeated query may succeed.
            CollectError: it failed.
        """
        shown, form = str(url), dict(kwargs.pop("params", None) or {})
        query = str(form.get("query", ""))
        deadline_s = time.monotonic() + self._timeout_s
        kwargs |= {
            "data": form,
            "headers": request_headers(self._address, self._settings),
            "timeout": (self._settings.connect_timeout_s, self._timeout_s),
            "allow_redirects": False,
            "stream": True,
        }
        try:
            response = super().request(str(method), url, **kwargs)
            with response:
                body = self._body(response, shown, query, deadline_s)
                return self._answered(response, shown, query, body)
        except requests.exceptions.ConnectTimeout as exc:
            raise refused_error(shown, "no connection within the timeout") from exc
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as exc:
            raise slow_error(shown, self._timeout_s, query) from exc
        except (requests.exceptions.SSLError, ssl.SSLError) as exc:
            raise tls_error(shown, _words(exc)) from exc
        except requests.exceptions.ConnectionError as exc:
            raise refused_error(shown, _words(exc)) from exc
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as exc:
            raise incomplete_error(shown, _words(exc)) from exc
        except OSError as exc:  # requests' own word for a certificate file that is not there
            raise tls_error(shown, _words(exc)) from exc

    def _body(
        self, response: requests.Response, url: str, query: str, deadline_s: float
    ) -> bytearray:
        body, limit_bytes = bytearray(), self._settings.body_limit_bytes
        raw = cast("urllib3.HTTPResponse", response.raw)
        while chunk := raw.read1(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > limit_bytes:
                raise too_large_error(url, limit_bytes, query)
            if time.monotonic() > deadline_s:
                raise slow_error(url, self._timeout_s, query)
        return body

    def _answered(
        self, response: requests.Response, url: str, query: str, body: bytearray
    ) -> Answered:
        status = response.status_code
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
            return self._kept(answer)
        if answer.get("errorType") == "timeout":
            raise slow_error(url, self._timeout_s, query)
        raise bad_status_error(
            url,
            status=status if status != HTTPStatus.OK else UNPROCESSABLE,
            said=said_of(answer),
            query=query,
            after_s=_retry_after_s(response),
        )

    def _kept(self, document: Document) -> Answered:
        self._told.warnings = warnings_of(document)
        answered = Answered()
        answered.status_code = HTTPStatus.OK
        answered.document = document
        return answered


def _retry_after_s(response: requests.Response) -> float:
    said = response.headers.get("Retry-After", "")
    return min(float(said), RETRY_AFTER_MOST_S) if said.isdecimal() else 0.0


def _words(exc: BaseException) -> str:
    """The innermost reason: requests and urllib3 wrap it in exceptions of their own."""
    inner: BaseException = exc
    for _ in range(8):
        reason = getattr(inner, "reason", None)
        below = reason if isinstance(reason, BaseException) else inner.__context__
        if below is None:
            break
        inner = below
    return words_of(inner)
