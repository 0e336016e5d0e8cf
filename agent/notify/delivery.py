"""Delivers one message by HTTP POST or SMTP: a single attempt with one deadline. I/O edge."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import smtplib
import socket
import ssl
import time
from collections.abc import Mapping
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import cast

from msgspec import to_builtins
from msgspec.structs import replace

from kneewatch.agent.notify.message import FORMATS, REQUESTS, Message, email
from kneewatch.agent.notify.receivers import PAGERS, Mail, Receiver, Web
from kneewatch.collector.errors import CollectError, KneewatchError, SettingsError
from kneewatch.collector.http.address import Address
from kneewatch.collector.http.connection import TimedSocket, TlsAccess, connect, request_headers
from kneewatch.reports.lines import cut, printable
from kneewatch.rules.formatting import stated_duration


class SendError(KneewatchError):
    """A message could not be delivered.

    `after_s` are the seconds that the receiver asks to wait before a retry; None if it does not
    ask. `final`: it refuses this message, so a retry is useless. `hint` says what to check. The
    text contains no secret and can be logged.
    """

    def __init__(
        self, message: str, *, final: bool = False, after_s: float | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.final, self.after_s, self.hint = final, after_s, hint


def send(
    receiver: Receiver,
    message: Message,
    *,
    timeout_s: float,
    now_s: float,
    attachment: Path | None = None,
) -> None:
    """Send a message in the format of the receiver. `attachment` is a page, which only mails can
    carry.

    Raises:
        SendError: the receiver did not accept the message.
    """
    endpoint = receiver.endpoint
    if isinstance(endpoint, Web):
        requests = _requests(receiver.kind, message, endpoint)
        for web, body in requests:
            post(web, body, timeout_s=timeout_s / len(requests), now_s=now_s)
        return
    mail = email(message, sender=endpoint.sender, recipients=endpoint.recipients)
    if attachment is not None:
        page, name = attachment.read_bytes(), attachment.name
        mail.add_attachment(page, maintype="text", subtype="html", filename=name)
    deliver(endpoint, mail, timeout_s=timeout_s)


def _requests(kind: str, message: Message, endpoint: Web) -> list[tuple[Web, object]]:
    """The requests for a message: where to, and the body. A pager gets one for each incident that
    is opened or closed.

    Raises:
        SendError: the pager's key cannot be read.
    """
    if kind in FORMATS:
        return [(endpoint, FORMATS[kind](message))]
    key, access = "", endpoint.access
    if endpoint.key is not None:
        try:
            key = endpoint.key.read()
        except SettingsError as exc:
            raise SendError(str(exc)) from exc
        if scheme := PAGERS[kind][1]:
            headers = {**access.headers, "Authorization": f"{scheme}{key}"}
            access = replace(access, headers=headers)
    return [
        (replace(endpoint, access=access, path=path), body)
        for path, body in REQUESTS[kind](message, key)
    ]


NO_CONNECTION = (
    "check host and port, that the receiver runs, and firewalls between; timeout_s sets the limit"
)


# --- SMTP -----------------------------------------------------------------------------------------


REPLY_MAX = 120


def deliver(mail: Mail, message: EmailMessage, *, timeout_s: float) -> None:
    """Send a mail. If the server refuses one recipient, the others still get the mail.

    Raises:
        SendError: the server did not accept the mail.
    """
    where = f"{mail.host}:{mail.port}"
    try:
        _deliver(mail, message, timeout_s)
    except CollectError as exc:
        text = str(exc).partition("://")[2] or str(exc)
        shown = f"{text} ({exc.hint})" if exc.kind == "tls" else text
        raise SendError(shown, hint=NO_CONNECTION) from exc
    except smtplib.SMTPRecipientsRefused as exc:
        codes = [code for code, _ in exc.recipients.values()]
        text = f"{where} refused all recipients (SMTP {', '.join(map(str, codes))})"
        raise SendError(text, hint="check the addresses in `to`") from exc
    except smtplib.SMTPResponseException as exc:
        reply = exc.smtp_error
        words = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
        text = (
            f"{where} answered {exc.smtp_code} {cut(' '.join(words.split()), REPLY_MAX)}".rstrip()
        )
        is_login = isinstance(exc, smtplib.SMTPAuthenticationError)
        hint = "check user and password" if is_login else "check `from` and what the server allows"
        final = isinstance(exc, smtplib.SMTPDataError) and exc.smtp_code >= 500
        raise SendError(text, final=final, hint=hint) from exc
    except TimeoutError as exc:
        text = f"{where}: timed out after {stated_duration(timeout_s)}"
        raise SendError(text, hint=NO_CONNECTION) from exc
    except (smtplib.SMTPException, SettingsError, OSError, ValueError) as exc:
        raise SendError(f"{where}: {cut(str(exc), REPLY_MAX)}") from exc


def _deliver(mail: Mail, message: EmailMessage, timeout_s: float) -> None:
    session = _Session(mail, timeout_s)
    try:
        if mail.security == "starttls":
            session.starttls(context=cast("ssl.SSLContext", _TimedTls(_tls(mail))))
        if mail.user is not None and mail.password is not None:
            session.login(mail.user, mail.password.read())
        session.send_message(message, mail.sender, list(mail.recipients))
        with contextlib.suppress(smtplib.SMTPException, OSError):
            session.quit()  # the mail is already accepted: errors do not matter
    finally:
        session.close()


class _Session(smtplib.SMTP):
    """An SMTP session with one deadline for DNS, TLS and all replies. A socket's own timeout is not
    enough, because every byte restarts it."""

    def __init__(self, mail: Mail, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._tls = _tls(mail) if mail.security == "tls" else None
        # Pass a local name: smtplib's default looks up the full name, which can be slow.
        super().__init__(mail.host, mail.port, socket.gethostname(), timeout_s)

    def connect(
        self, host: str = "", port: int = 0, source_address: object = None
    ) -> tuple[int, bytes]:
        """Connect and read the greeting. The constructor of smtplib's class calls this."""
        address = Address("https" if self._tls else "http", host, port, "")
        timed = connect(address, timeout_s=self._deadline_s - time.monotonic(), tls=self._tls)
        timed.deadline_s = self._deadline_s
        self.sock = cast("socket.socket", timed)
        self.file = None
        return self.getreply()


class _TimedTls:
    """A wrapper of a TLS context for STARTTLS on a socket with a deadline."""

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


# --- HTTP -----------------------------------------------------------------------------------------


REFUSED = frozenset({400, 411, 413, 414, 415, 422})
"""HTTP statuses that refuse the message itself. All others may end with the receiver's trouble: a
rotated token, a proxy's page during maintenance, a route that is not there yet."""

HINTS = {
    400: "check `kind`, as the address takes another format, or the pager's key",
    401: "check the token or the headers",
    403: "check the token or the headers",
    404: "check the whole address, path included: a deleted webhook answers so, too",
}
"""What to check, by HTTP status."""

DENIED = (
    "check the whole address and the token; if the receiver always answers so: any_answer = true"
)

ANSWER_MAX_BYTES = 4096
ERROR_CODE = re.compile(r"[a-z_]{1,40}")
SHOWN_HINTS = ("tls", "dns", "auth")
"""Kinds of connection errors whose hint is shown. The hints of other kinds are about scraping."""


def post(
    web: Web,
    body: object,
    *,
    timeout_s: float,
    now_s: float,
) -> None:
    """Post a JSON document. Follows no redirects and uses no proxy. A response with a success
    status counts as a failure if it is an HTML page or its JSON says that it failed, unless any
    answer will do.

    Raises:
        SendError: the receiver did not accept the document.
    """
    deadline_s = time.monotonic() + timeout_s
    data = json.dumps(to_builtins(body), ensure_ascii=True, allow_nan=False).encode()
    try:
        address = web.address()
        # Errors and logs show the address; a webhook's path and query may be secret.
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
        hint = f" ({exc.hint})" if exc.kind in SHOWN_HINTS else ""
        raise SendError(f"{exc}{hint}", hint="" if hint else NO_CONNECTION) from exc
    timed.deadline_s = deadline_s
    status, retry_after, answer = _request(timed, address, headers, data, timeout_s=timeout_s)
    denial = "" if web.any_answer else denied(answer)
    if 200 <= status < 300 and not denial:
        return
    text = f"{shown.url} answered {status} {http.client.responses.get(status, '')}".rstrip()
    hint = HINTS.get(status, "wait and try again: the receiver is busy or failing")
    if 200 <= status < 300:
        text, hint = f"{text} with {denial}", DENIED
    if 300 <= status < 400:
        text += "; redirects are not followed: configure the final URL"
    # To a pager, 400 may mean a key that is being replaced.
    final = status in REFUSED and not (status == http.HTTPStatus.BAD_REQUEST and web.key)
    wait_s = after_s(retry_after, now_s)
    raise SendError(printable(text), final=final, after_s=wait_s, hint=hint)


def _request(
    timed: TimedSocket,
    address: Address,
    headers: Mapping[str, str],
    data: bytes,
    *,
    timeout_s: float,
) -> tuple[int, str | None, bytes]:
    """Send a request. Returns the status, the Retry-After header and the beginning of the body of
    the response."""
    connection = http.client.HTTPConnection(address.host, address.port)
    connection.default_port = 443 if address.scheme == "https" else 80
    connection.auto_open = 0
    connection.sock = cast("socket.socket", timed)
    try:
        connection.request("POST", address.path, body=data, headers=dict(headers))
        with connection.getresponse() as response:
            body = response.read(ANSWER_MAX_BYTES)
            return response.status, response.headers.get("retry-after"), body
    except TimeoutError:
        raise SendError(
            f"no answer within {stated_duration(timeout_s)}", hint=NO_CONNECTION
        ) from None
    except (http.client.HTTPException, OSError, ValueError) as exc:
        # The messages of http.client's errors can quote the path.
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else type(exc).__name__
        raise SendError(f"incomplete response: {reason}") from None
    finally:
        connection.close()
        timed.close()


def denied(body: bytes) -> str:
    """Why a response with a success status is a failure, by the beginning of its body; empty if it
    is none."""
    if body.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, such as a login"
    try:
        document: object = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    answer = cast("dict[str, object]", document) if isinstance(document, dict) else {}
    if answer.get("ok") is not False and answer.get("success") is not False:
        return ""
    error = str(answer.get("error", ""))  # any other text may quote a secret
    return f"an error: {error}" if ERROR_CODE.fullmatch(error) else "an error"


def after_s(retry_after: str | None, now_s: float) -> float | None:
    """Seconds to wait, from a Retry-After header with seconds or a date. None if the header cannot
    be parsed."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        at_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, at_s - now_s) if math.isfinite(at_s) else None
