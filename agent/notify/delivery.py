"""Delivers a message by HTTP POST or SMTP: one attempt, one deadline. I/O edge."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import smtplib
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import replace
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from typing import Any, cast

from kneewatch.agent.notify.receivers import Mail, Web
from kneewatch.collector.errors import CollectError, KneewatchError, SettingsError
from kneewatch.collector.http.address import Address
from kneewatch.collector.http.connection import TimedSocket, TlsAccess, connect, request_headers
from kneewatch.reports.formatting import cut, printable


class SendError(KneewatchError):
    """A message could not be handed over. `after_s` is how long the receiver asks to wait; None
    where it does not say. With `final` there is no use in trying again.

    The message is fit for a log: no secret is in it.
    """

    def __init__(self, message: str, *, final: bool = False, after_s: float | None = None) -> None:
        super().__init__(message)
        self.final, self.after_s = final, after_s


# --- Messages handed to a mail server: one session, one deadline. I/O edge ------------------------


SAID_MOST = 120


def deliver(mail: Mail, message: EmailMessage, *, timeout_s: float) -> None:
    """Hand a message to the mail server. Recipients that it refuses do not keep it from the
    others.

    Raises:
        SendError: the server did not take it.
    """
    where = f"{mail.host}:{mail.port}"
    try:
        _deliver(mail, message, timeout_s)
    except CollectError as exc:
        said = str(exc).partition("://")[2] or str(exc)
        raise SendError(f"{said} ({exc.hint})" if exc.kind == "tls" else said) from exc
    except smtplib.SMTPNotSupportedError as exc:
        raise SendError(f"{where}: {cut(str(exc), SAID_MOST)}", final=True) from exc
    except smtplib.SMTPRecipientsRefused as exc:
        codes = [code for code, _ in exc.recipients.values()]
        said = f"{where} refused every recipient ({', '.join(map(str, codes))})"
        raise SendError(said, final=all(code >= 500 for code in codes)) from exc
    except smtplib.SMTPResponseException as exc:
        words = _words(exc.smtp_error)
        said = f"{where} answered {exc.smtp_code} {words}".rstrip()
        raise SendError(said, final=exc.smtp_code >= 500) from exc
    except TimeoutError as exc:
        raise SendError(f"{where}: not done within {timeout_s:g} s") from exc
    except (smtplib.SMTPException, SettingsError, OSError, ValueError) as exc:
        raise SendError(f"{where}: {cut(str(exc), SAID_MOST)}") from exc


def _deliver(mail: Mail, message: EmailMessage, timeout_s: float) -> None:
    session = _Session(mail, timeout_s)
    try:
        if mail.security == "starttls":
            session.starttls(context=cast("ssl.SSLContext", _TimedTls(_tls(mail))))
        if mail.user is not None and mail.password is not None:
            session.login(mail.user, mail.password.read())
        session.send_message(message, mail.sender, list(mail.recipients))
        with contextlib.suppress(smtplib.SMTPException, OSError):
            session.quit()  # it is delivered, whatever the server says to this
    finally:
        session.close()


class _Session(smtplib.SMTP):
    """A session with one deadline for the name look-up, TLS and all that is said: a socket's own
    timeout starts again with every byte."""

    def __init__(self, mail: Mail, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._tls = _tls(mail) if mail.security == "tls" else None
        # The name is stated: to find the machine's own full one can take a slow name server.
        super().__init__(mail.host, mail.port, socket.gethostname(), timeout_s)

    def connect(
        self, host: str = "", port: int = 0, source_address: object = None
    ) -> tuple[int, bytes]:
        """Called by the constructor, which judges the greeting."""
        address = Address("https" if self._tls else "http", host, port, "")
        timed = connect(address, timeout_s=self._deadline_s - time.monotonic(), tls=self._tls)
        timed.deadline_s = self._deadline_s
        self.sock = cast("socket.socket", timed)
        self.file = None
        return self.getreply()


class _TimedTls:
    """As much of a TLS context as STARTTLS needs, for a socket that has a deadline."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap_socket(self, timed: TimedSocket, server_hostname: str) -> TimedSocket:
        timed.tighten()
        wrapped = TimedSocket(
            self._context.wrap_socket(timed.sock, server_hostname=server_hostname)
        )
        wrapped.deadline_s = timed.deadline_s
        return wrapped


def _tls(mail: Mail) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=mail.ca_file)
    if mail.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _words(error: bytes | str) -> str:
    text = error.decode("utf-8", "replace") if isinstance(error, bytes) else error
    return cut(" ".join(text.split()), SAID_MOST)


# --- Messages posted as JSON: one request, one deadline, no redirects, no proxies. I/O edge -------


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
