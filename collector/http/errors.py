"""Messages for failed scrapes: exceptions and responses to `CollectError`. Pure.

Hints complete "try: ".
"""

from __future__ import annotations

import http.client
import ssl

from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import PORTS, Address

NAME_HINT = "use a name that the certificate lists"
CA_HINT = "set ca_file to that CA's certificate"
# OpenSSL's verification codes (x509_vfy.h): what is wrong, what to try.
TLS_CODES = {
    9: ("its certificate is not valid yet", "check both machines' clocks"),
    10: ("its certificate has expired", "renew it on the server, or check this machine's clock"),
    18: ("its certificate is self-signed", "set ca_file to that certificate"),
    19: ("its chain ends in an unknown self-signed CA", CA_HINT),
    20: ("its certificate is signed by an unknown CA", CA_HINT),
    62: ("its certificate is for another host name", NAME_HINT),
    64: ("its certificate does not list this IP address", NAME_HINT),
}
TLS_NOT_SPOKEN = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
}
CLIENT_HINT = "set client_cert_file and client_key_file if the server requires a client certificate"
PORT_HINT = (
    "check that vLLM runs and listens on this address, then `curl` its /metrics; vLLM's default "
    "port is 8000"
)


def failure(address: Address, kind: str, said: str, hint: str) -> CollectError:
    """The error of one kind about an address."""
    return CollectError(f"{address.url}: {said}", kind=kind, hint=hint)


def not_connected(address: Address, exc: OSError) -> CollectError:
    """The error when no TCP connection could be made."""
    if isinstance(exc, TimeoutError):
        hint = "check that the host is up and that no firewall drops the packets"
        return failure(address, "timeout", "no connection within the timeout", hint)
    hint = PORT_HINT
    if address.port == PORTS[address.scheme]:
        hint = f"add the port to the address (without one it is {address.port}); {PORT_HINT}"
    refused = isinstance(exc, ConnectionRefusedError)
    return failure(address, "refused", "connection refused" if refused else words_of(exc), hint)


def unknown_name(address: Address, exc: Exception) -> CollectError:
    """The error when the host name does not resolve."""
    why = "not a valid name" if isinstance(exc, UnicodeError) else words_of(exc)
    said = f"the host name {address.host!r} cannot be resolved: {why}"
    return failure(address, "dns", said, "check the spelling, or use the IP address")


def slow(address: Address, what: str, timeout_s: float) -> CollectError:
    """The error when connecting took longer than the timeout."""
    hint = "check the load of the server and the network, or raise fetch.connect_timeout_s"
    return failure(address, "timeout", f"{what} took longer than {timeout_s:g} s", hint)


def tls(address: Address, exc: Exception) -> CollectError:
    """The error when the TLS handshake fails or the server refuses the client certificate."""
    said = f"the TLS handshake failed: {words_of(exc)}"
    hint = "use http:// if this port does not serve HTTPS"
    if isinstance(exc, ssl.SSLCertVerificationError):
        said = f"its certificate is not accepted: {exc.verify_message}"
        said, hint = TLS_CODES.get(exc.verify_code, (said, "check ca_file"))
    elif isinstance(exc, ssl.SSLError) and exc.reason in TLS_NOT_SPOKEN:
        said, hint = "this port does not speak TLS", "use http:// instead of https://"
    elif isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
        said = f"the server ended TLS: {(exc.reason or '').lower().replace('_', ' ')}"
        hint = CLIENT_HINT
    return failure(address, "tls", said, hint)


def unreadable_file(what: str, path: str, exc: Exception, *, kind: str) -> CollectError:
    """The error when a file of the settings (a token, a certificate) cannot be used."""
    hint = "check the setting and the file's permissions"
    return CollectError(f"{what} {path}: {words_of(exc)}", kind=kind, hint=hint)


def no_answer(
    address: Address, exc: Exception, *, received_bytes: int, timeout_s: float
) -> CollectError:
    """The error when the connection ended before a whole answer arrived."""
    if isinstance(exc, TimeoutError):
        got = f"only {received_bytes} bytes" if received_bytes else "nothing"
        said = f"timed out reading: {got} came within {timeout_s:g} s"
        hint = "check whether the server is stuck; raise fetch.read_timeout_s if it is only slow"
        return failure(address, "timeout", said, hint)
    if isinstance(exc, OSError) and not received_bytes:
        return _closed(address, exc)
    if isinstance(exc, ssl.SSLError):
        return tls(address, exc)
    if isinstance(exc, (OSError, http.client.IncompleteRead)):
        return truncated(address, f"the connection ended after {received_bytes} bytes")
    if "\x15\x03" in str(exc):  # a TLS alert where a status line was due
        return failure(address, "tls", "this port speaks TLS", "use https:// instead")
    said = f"the answer is not HTTP ({type(exc).__name__})"
    hint = "check host and port: another program listens there"
    return failure(address, "not_metrics", said, hint)


def _closed(address: Address, exc: OSError) -> CollectError:
    said = "the server closed the connection without an answer"
    hint = "check whether it is starting or shutting down"
    if address.scheme == "http":
        return failure(address, "truncated", said, f"{hint}; use https:// if it serves HTTPS")
    if isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError):
        return tls(address, exc)
    # A client without a certificate is refused so too: the alert may be lost with the connection.
    return failure(address, "tls", said, f"{hint}; {CLIENT_HINT}")


def truncated(address: Address, said: str) -> CollectError:
    """The error when an answer is cut short."""
    hint = "check whether the server restarted, or a proxy in between cuts pages"
    return failure(address, "truncated", f"the page stops midway: {said}", hint)


def too_large(address: Address, limit_bytes: int, when: str) -> CollectError:
    """The error when the page is larger than any metrics page should be."""
    said = f"the page is larger than {limit_bytes} bytes {when}"
    hint = "check that this is a metrics page; raise limits.body_bytes if it is"
    return failure(address, "too_large", said, hint)


def bad_status(address: Address, *, status: int, reason: str, token_sent: bool) -> CollectError:
    """The error for a status other than 200."""
    kind, hint = "http_status", "read the server's log"
    if status in (401, 403):
        kind, hint = "auth", "set bearer_token_file or bearer_token_env: the page requires a token"
        if token_sent:
            hint = "check that the token is current and is for this server: it was not accepted"
    elif status == 404:
        kind, hint = "not_found", "check the path: vLLM's page is /metrics"
    elif status in (429, 503):
        hint = "try again later: the server is starting, overloaded or limits its clients"
    said = f"{address.url}: the server answered {status} {reason[:80]}".rstrip()
    return CollectError(said, kind=kind, hint=hint, status=status)


def not_metrics(address: Address, said: str) -> CollectError:
    """The error when the page cannot be a metrics page."""
    hint = "check the port and the path; vLLM's page is /metrics on its API port"
    return failure(address, "not_metrics", said, hint)


def words_of(exc: BaseException) -> str:
    """An exception's own words; its type where it has none."""
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return str(exc) or type(exc).__name__
