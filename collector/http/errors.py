"""Messages for failed scrapes: exceptions and responses to `CollectError`. Pure."""

from __future__ import annotations

import http.client
import ssl

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import PORTS, Address

# OpenSSL's verification codes (x509_vfy.h): what is wrong, what to try.
TLS_CODES = {
    9: ("its certificate is not valid yet", "check both machines' clocks"),
    10: ("its certificate has expired", "renew it on the server (or check this machine's clock)"),
    18: ("its certificate is self-signed", "give that certificate as the CA file (ca_file)"),
    19: ("its chain ends in an unknown self-signed CA", "give that CA as the CA file (ca_file)"),
    20: ("its certificate is signed by an unknown CA", "give that CA as the CA file (ca_file)"),
    62: ("its certificate is for another host name", "use a name that the certificate lists"),
    64: ("its certificate does not list this IP address", "use a name that the certificate lists"),
}
TLS_NOT_SPOKEN = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
}
CLIENT_HINT = "does it want a client certificate (client_cert_file, client_key_file)?"
PORT_HINT = "is the server running, and listening on this address? vLLM's default port is 8000"


def not_connected(address: Address, exc: OSError) -> CollectError:
    """The error when no TCP connection could be made."""
    if isinstance(exc, TimeoutError):
        return CollectError(
            f"{address.url}: no connection in time",
            kind="timeout",
            hint="is the host up, and does a firewall drop the packets?",
        )
    said = "connection refused" if isinstance(exc, ConnectionRefusedError) else _words(exc)
    hint = PORT_HINT
    if address.port == PORTS[address.scheme]:
        hint = f"this is port {address.port} (no other is in the address); {PORT_HINT}"
    return CollectError(f"{address.url}: {said}", kind="refused", hint=hint)


def unknown_name(address: Address, exc: Exception) -> CollectError:
    """The error when the host name does not resolve."""
    said = "it is no valid name" if isinstance(exc, UnicodeError) else _words(exc)
    return CollectError(
        f"{address.url}: the host name {address.host!r} cannot be resolved: {said}",
        kind="dns",
        hint="check the spelling, or use the IP address",
    )


def slow(address: Address, what: str, timeout_s: float) -> CollectError:
    """The error when connecting took longer than the timeout."""
    return CollectError(
        f"{address.url}: {what} was not done within {timeout_s:g} s",
        kind="timeout",
        hint="is the server overloaded or the network slow? raise fetch.connect_timeout_s if so",
    )


def tls(address: Address, exc: Exception) -> CollectError:
    """The error when the TLS handshake fails or the server refuses the client certificate."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        said, hint = TLS_CODES.get(
            exc.verify_code,
            (
                f"its certificate is not accepted: {exc.verify_message}",
                "check the CA file (ca_file)",
            ),
        )
    elif isinstance(exc, ssl.SSLError) and exc.reason in TLS_NOT_SPOKEN:
        said, hint = "this port does not speak TLS", "use http:// instead of https://"
    elif isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        said = f"the server ended TLS: {(exc.reason or '').lower().replace('_', ' ')}"
        hint = CLIENT_HINT
    else:
        said = f"the TLS handshake failed: {_words(exc)}"
        hint = "does this port speak HTTPS? try http:// if not"
    return CollectError(f"{address.url}: {said}", kind="tls", hint=hint)


def unreadable_file(what: str, path: str, exc: Exception, *, kind: str) -> CollectError:
    """The error when a file of the settings (a token, a certificate) cannot be used."""
    return CollectError(
        f"{what} {path}: {_words(exc)}", kind=kind, hint="check the setting and the file's rights"
    )


def no_answer(
    address: Address, exc: Exception, *, received_bytes: int, timeout_s: float
) -> CollectError:
    """The error when the connection ended before a whole answer arrived."""
    if isinstance(exc, TimeoutError):
        got = f"only {received_bytes} bytes" if received_bytes else "nothing"
        return CollectError(
            f"{address.url}: timed out reading: {got} came within {timeout_s:g} s",
            kind="timeout",
            hint="the server is busy or stuck; raise fetch.read_timeout_s if it is only slow",
        )
    if isinstance(exc, OSError) and not received_bytes:
        return _closed(address, exc)
    if isinstance(exc, ssl.SSLError):
        return tls(address, exc)
    if isinstance(exc, (OSError, http.client.IncompleteRead)):
        return truncated(address, f"the connection ended after {received_bytes} bytes")
    if "\x15\x03" in str(exc):  # a TLS alert where a status line was due
        return CollectError(
            f"{address.url}: this port speaks TLS", kind="tls", hint="use https:// instead"
        )
    return CollectError(
        f"{address.url}: the answer is not HTTP ({type(exc).__name__})",
        kind="not_metrics",
        hint="another program listens there; check host and port",
    )


def _closed(address: Address, exc: OSError) -> CollectError:
    said = "the server closed the connection without an answer"
    hint = "is it starting or shutting down?"
    if address.scheme == "http":
        return CollectError(
            f"{address.url}: {said}",
            kind="truncated",
            hint=f"{hint} if it speaks HTTPS, use https://",
        )
    if isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError):
        return tls(address, exc)
    # A client without a certificate is refused so too: the alert may be lost with the connection.
    return CollectError(f"{address.url}: {said}", kind="tls", hint=f"{hint} {CLIENT_HINT}")


def truncated(address: Address, said: str) -> CollectError:
    """The error when an answer is cut short."""
    return CollectError(
        f"{address.url}: the page stops midway: {said}",
        kind="truncated",
        hint="did the server restart? a proxy between may also cut pages",
    )


def too_large(address: Address, limit_bytes: int, when: str) -> CollectError:
    """The error when the page is larger than any metrics page should be."""
    return CollectError(
        f"{address.url}: the page is larger than {limit_bytes} bytes {when}",
        kind="too_large",
        hint="is this a metrics page? raise limits.body_bytes if it is",
    )


def bad_status(address: Address, *, status: int, reason: str, token_sent: bool) -> CollectError:
    """The error for a status other than 200."""
    kind, hint = "http_status", "look at the server's log"
    if status in (401, 403):
        kind, hint = "auth", "the page wants a token: set bearer_token_file or bearer_token_env"
        if token_sent:
            hint = "what was sent was not accepted: is the token current, and for this server?"
    elif status == 404:
        kind, hint = "not_found", "is the path right? vLLM's page is /metrics"
    elif status in (429, 503):
        hint = "the server is starting, overloaded or limits its clients; try again later"
    said = f"{status} {reason[:80]}".rstrip()
    words = f"{address.url}: the server answered {said}"
    return CollectError(words, kind=kind, hint=hint, status=status)


def not_metrics(address: Address, said: str) -> CollectError:
    """The error when the page cannot be a metrics page."""
    return CollectError(
        f"{address.url}: {said}",
        kind="not_metrics",
        hint="check the port and the path; vLLM's page is /metrics on its API port",
    )


def _words(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return str(exc) or type(exc).__name__
