"""Messages posted as JSON: one request, one deadline, no redirects, no proxies. I/O edge."""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, cast

from kneewatch.agent.notify.receiver import Web
from kneewatch.agent.notify.sending import SendError
from kneewatch.collector.base import CollectError, SettingsError
from kneewatch.collector.http.access import TlsAccess, request_headers
from kneewatch.collector.http.address import Address
from kneewatch.collector.http.connection import TimedSocket, connect
from kneewatch.reports.words import printable

LATER = frozenset({408, 425, 429})
"""Refusals that ask to try again, beside all of 5xx."""

ANSWER_MOST_BYTES = 4096
HINTED = ("tls", "dns", "auth")
"""Failures whose hint fits here as well: the others speak of scraping."""


def post(web: Web, body: Mapping[str, Any], *, timeout_s: float, now_s: float) -> None:
    """Post a JSON document; returned is nothing, for nothing in an answer is of use.

    Raises:
        SendError: it was not taken.
    """
    deadline_s = time.monotonic() + timeout_s
    data = json.dumps(body, ensure_ascii=True, allow_nan=False).encode()
    try:
        address = web.address()
        # Errors and logs show an address's URL, and this one's path and query may be a secret.
        shown = replace(address, path="")
        headers = {
            **request_headers(address, web.access),
            "Accept": "*/*",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        timed = connect(shown, timeout_s=timeout_s, tls=TlsAccess(shown, web.access).context())
    except SettingsError as exc:
        raise SendError(str(exc)) from exc
    except CollectError as exc:
        hint = f" ({exc.hint})" if exc.kind in HINTED else ""
        raise SendError(f"{exc}{hint}") from exc
    timed.deadline_s = deadline_s
    _judge(shown, *_ask(timed, address, headers, data, timeout_s=timeout_s), now_s=now_s)


def _ask(
    timed: TimedSocket,
    address: Address,
    headers: Mapping[str, str],
    data: bytes,
    *,
    timeout_s: float,
) -> tuple[int, str | None]:
    """The status and the Retry-After of the answer."""
    connection = http.client.HTTPConnection(address.host, address.port)
    connection.default_port = 443 if address.scheme == "https" else 80
    connection.auto_open = 0
    connection.sock = cast("socket.socket", timed)
    try:
        connection.request("POST", address.path, body=data, headers=dict(headers))
        with connection.getresponse() as response:
            response.read(ANSWER_MOST_BYTES)
            return response.status, response.headers.get("retry-after")
    except TimeoutError:
        raise SendError(f"no answer within {timeout_s:g} s") from None
    except (http.client.HTTPException, OSError, ValueError) as exc:
        # The words of http.client's errors can quote the path.
        said = exc.strerror if isinstance(exc, OSError) and exc.strerror else type(exc).__name__
        raise SendError(f"no whole answer: {said}") from None
    finally:
        connection.close()
        timed.close()


def _judge(shown: Address, status: int, retry_after: str | None, *, now_s: float) -> None:
    if 200 <= status < 300:
        return
    said = f"{shown.url} answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in LATER or status >= 500:
        raise SendError(said, after_s=after_s(retry_after, now_s))
    if 300 <= status < 400:
        said += "; redirects are not followed, set the address it leads to"
    raise SendError(printable(said), final=True)


def after_s(retry_after: str | None, now_s: float) -> float | None:
    """How long a Retry-After header asks to wait: seconds, or until a date; None where it asks
    nothing that can be read."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        at_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, at_s - now_s) if math.isfinite(at_s) else None
