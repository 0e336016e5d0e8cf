"""Messages handed to a mail server: one session, one deadline. I/O edge."""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
import time
from email.message import EmailMessage
from typing import cast

from kneewatch.agent.notify.receiver import Mail
from kneewatch.agent.notify.sending import SendError
from kneewatch.collector.base import CollectError, SettingsError
from kneewatch.collector.http.address import Address
from kneewatch.collector.http.connection import TimedSocket, connect
from kneewatch.reports.words import cut

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
