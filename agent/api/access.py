"""HTTP endpoint: its listen address, TLS files and tokens, and the check of all `http` settings.
I/O edge.

The server is in a module of its own, because its imports are slow.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import os
import re
import socket
import ssl
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from msgspec import Struct, field

from kneewatch.agent.settings.effective import Settings, gathered, reported_together
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.files import SECRET_MAX_BYTES, Stamp, read_file, stamp_of

log = logging.getLogger(__name__)

WILDCARDS = ("", "*")
ANY = "0.0.0.0"
MOST_PORT = 65535
LISTEN = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


class ListenAddress(Struct, frozen=True):
    """An address to listen on. `host` is the configured name, `ip` the address to which it
    resolved."""

    host: str
    ip: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        """IPv6 or IPv4."""
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def loopback(self) -> bool:
        """Whether the address can be reached only from this machine."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def shown(self) -> str:
        """The host to use in URLs on this machine."""
        ip = ipaddress.ip_address(self.ip)
        if ip.is_unspecified:
            return "[::1]" if ip.version == 6 else "127.0.0.1"
        return f"[{self.ip}]" if ip.version == 6 else self.ip


def stated_address(settings: Settings) -> tuple[str, int]:
    """The host and the port to listen on, as stated.

    Raises:
        SettingsError: the setting is no address.
    """
    listen = str(settings["listen"]).strip()
    match = LISTEN.fullmatch(listen)
    if match is None or int(match["port"]) > MOST_PORT:
        raise SettingsError(
            f"{settings.origin('listen')}: listen = {listen!r} is not HOST:PORT, such as "
            "127.0.0.1:9877 or [::1]:9877"
        )
    return match["six"] or match["host"], int(match["port"])


def address_of(settings: Settings) -> ListenAddress:
    """The address to listen on.

    Raises:
        SettingsError: the setting is no address, or the host cannot be resolved.
    """
    host, port = stated_address(settings)
    if host in WILDCARDS:
        return ListenAddress(host, ANY, port)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        listen, origin = str(settings["listen"]).strip(), settings.origin("listen")
        raise SettingsError(f"{origin}: listen = {listen!r}: {host} cannot be resolved") from exc
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return ListenAddress(host, str(rows[0][4][0]).partition("%")[0], port)


def check_http(settings: Settings) -> None:
    """Check the listen address, its protection, the TLS files and the token files. No socket is
    opened: host names are resolved when the server binds.

    Raises:
        SettingsError: a message for each mistake names the key.
    """
    with reported_together() as mistakes:
        with gathered(mistakes):
            _check_listen(settings)
        with gathered(mistakes):
            ServerTls.of(settings)
        with gathered(mistakes):
            check_tokens(settings)


def _check_listen(settings: Settings) -> None:
    host, port = stated_address(settings)
    ip = ANY if host in WILDCARDS else host
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return  # a name
    check_protected(settings, ListenAddress(host, ip, port))


def check_protected(settings: Settings, address: ListenAddress) -> None:
    """Refuse an address that everybody can use.

    Raises:
        SettingsError: other machines can reach the address without authentication.
    """
    if address.loopback:
        return
    authenticates = settings["http.token_file"] or settings["http.client_ca_file"]
    if not authenticates and not settings["http.behind_proxy"]:
        raise SettingsError(
            f"{settings.origin('listen')}: listen = {settings['listen']!r} is reachable from other "
            "machines: set http.token_file or http.client_ca_file (with TLS), set "
            "http.behind_proxy if a proxy authenticates clients, or listen on 127.0.0.1"
        )


# --- TLS ------------------------------------------------------------------------------------------


CERT, KEY, CLIENT_CA = FILES = ("http.tls_cert_file", "http.tls_key_file", "http.client_ca_file")


class ServerTls(Struct):
    """The server's TLS context. Certificates that are renewed on disk are used for new
    connections."""

    context: ssl.SSLContext
    settings: Settings
    stamps: tuple[Stamp, ...]

    @classmethod
    def of(cls, settings: Settings) -> ServerTls | None:
        """The TLS configuration of the settings; None for plain HTTP.

        Raises:
            SettingsError: a certificate cannot be used, or is missing; each message names the
                setting and the file.
        """
        if not settings[CERT]:
            _check_plain(settings)
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        stamps = _stamps(settings)
        _load(context, settings)
        return cls(context, settings, stamps)

    def refresh(self) -> None:
        """Load the certificate files again if one changed. Files that are unusable, for example
        while they are being replaced, are ignored and tried again later."""
        try:
            stamps = _stamps(self.settings)
            if stamps == self.stamps:
                return
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.settings)
            _load(self.context, self.settings)
        except SettingsError as exc:
            log.warning("cannot reload TLS files, keeping the old ones error=%s", exc)
            return
        self.stamps = stamps
        log.info("TLS files reloaded")


def _check_plain(settings: Settings) -> None:
    """Refuse settings that are part of TLS where there is no certificate."""
    mistakes = [
        f"{settings.origin(key)}: {key} requires {CERT}{why}"
        for key, why in ((CLIENT_CA, ": client certificates are part of TLS"), (KEY, ""))
        if settings[key]
    ]
    if mistakes:
        raise SettingsError(*mistakes)


def _load(context: ssl.SSLContext, settings: Settings) -> None:
    cert, key, client_ca = (settings[name] for name in FILES)
    with reported_together() as mistakes:
        try:
            context.load_cert_chain(cert, key, _no_password)
        except (OSError, ValueError) as exc:
            files = f"{cert} with key {key}" if key else cert
            mistakes.append(_unusable(settings, CERT, files, exc))
        if client_ca:
            try:
                context.load_verify_locations(client_ca)
            except (OSError, ValueError) as exc:
                mistakes.append(_unusable(settings, CLIENT_CA, client_ca, exc))
            context.verify_mode = ssl.CERT_REQUIRED


def _unusable(settings: Settings, key: str, files: str, error: OSError | ValueError) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, ssl.SSLError):  # OpenSSL says little of what is wrong
        why += f"; {_way_out(settings, key)}"
    return f"{settings.origin(key)}: {key} = {files}: {why}"


def _way_out(settings: Settings, key: str) -> str:
    if key == CLIENT_CA:
        return "the file must hold certificates in PEM"
    if settings[KEY]:
        return "the files must hold a certificate and its own key in PEM"
    return f"the file must hold a certificate in PEM, and its key unless {KEY} is set"


def _no_password() -> str:
    """Called by OpenSSL for a key with a password. Raises an error instead of asking, because a
    daemon has no terminal."""
    raise ValueError("the key is encrypted; store it without a password")


def _stamps(settings: Settings) -> tuple[Stamp, ...]:
    stamps: list[Stamp] = []
    with reported_together() as mistakes:
        for key in FILES:
            if not settings[key]:
                continue
            try:
                stamps.append(stamp_of(settings[key]))
            except OSError as exc:
                mistakes.append(_unusable(settings, key, settings[key], exc))
    return tuple(stamps)


# --- Token authentication: read and admin tokens --------------------------------------------------


READ, ADMIN = "read", "admin"
Scopes = frozenset[str]
NOTHING: Scopes = frozenset()
ALL: Scopes = frozenset({READ, ADMIN})

TOKEN_FILES = ("http.token_file", "http.admin_token_file")
CHECK_EVERY_S = 1.0
SHORT_BYTES = 16


class TokenFile(Struct):
    """A file with one token per line. During a rotation it holds the old and the new token, so
    there is no downtime.

    The file is read again when it changes. While it is unreadable, no token is valid.
    """

    key: str
    path: Path
    clock: Callable[[], float] = monotonic
    tokens: tuple[bytes, ...] = ()
    _stamp: Stamp | None = None
    _checked_s: float = field(default=float("-inf"))

    def load(self) -> None:
        """Read the file and use its tokens; what makes them unsafe is logged.

        Raises:
            SettingsError: as `read`.
        """
        status, tokens = self.read()
        if status.st_mode & stat.S_IROTH:
            log.warning("token file is world-readable; chmod o-r %s=%s", self.key, self.path)
        if min(map(len, tokens)) < SHORT_BYTES:
            log.warning("a token is too short and can be guessed %s=%s", self.key, self.path)
        self.tokens = tokens
        self._stamp = stamp_of(status)

    def read(self) -> tuple[os.stat_result, tuple[bytes, ...]]:
        """The file's status and its tokens.

        Raises:
            SettingsError: the file is unreadable or has no token; the message contains no token.
        """
        try:
            status = self.path.stat()
            lines = read_file(self.path, SECRET_MAX_BYTES).removeprefix(BOM_UTF8).splitlines()
        except OSError as exc:
            raise SettingsError(f"{self.key} = {self.path}: {exc.strerror}") from exc
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens:
            raise SettingsError(f"{self.key} = {self.path} contains no token; write one per line")
        return status, tokens

    def holds(self, candidate: bytes) -> bool:
        """Whether `candidate` is one of the tokens, compared in constant time."""
        self._reload_if_changed()
        matches = [hmac.compare_digest(candidate, token) for token in self.tokens]
        return any(matches)

    def _reload_if_changed(self) -> None:
        now_s = self.clock()
        if now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        try:
            if self._stamp != stamp_of(self.path):
                self.load()
                log.info("tokens reloaded %s=%s", self.key, self.path)
        except (OSError, SettingsError) as exc:
            if self.tokens:
                log.error("token file unreadable, no token is valid error=%s", exc)  # noqa: TRY400
            self.tokens, self._stamp = (), None


class Auth(Struct):
    """Determines the scopes of a request.

    Without token files every request gets all scopes; access is then restricted by the listen
    address, client certificates or a proxy. If only a read token file is set, nobody gets the admin
    scope.
    """

    read: TokenFile | None
    admin: TokenFile | None

    @classmethod
    def of(cls, settings: Settings) -> Auth:
        """The authentication for these settings.

        Raises:
            SettingsError: a token file cannot be used.
        """
        files = [_file(settings, key) for key in TOKEN_FILES]
        for file in files:
            if file is not None:
                file.load()
        return cls(*files)

    def scopes(self, authorizations: Sequence[bytes]) -> Scopes:
        """The scopes for a request with these Authorization headers. More than one header counts as
        none."""
        if self.read is None and self.admin is None:
            return ALL
        without_token = NOTHING if self.read else frozenset({READ})
        given = token(authorizations[0]) if len(authorizations) == 1 else None
        if given is None:
            return without_token
        if self.admin is not None and self.admin.holds(given):
            return ALL
        if self.read is not None and self.read.holds(given):
            return frozenset({READ})
        return without_token


def check_tokens(settings: Settings) -> None:
    """Check that the token files can be used.

    Raises:
        SettingsError: a message for each that cannot.
    """
    with reported_together() as mistakes:
        for key in TOKEN_FILES:
            file = _file(settings, key)
            try:
                if file is not None:
                    file.read()
            except SettingsError as error:
                mistakes.append(f"{settings.origin(key)}: {error}")


def _file(settings: Settings, key: str) -> TokenFile | None:
    return TokenFile(key, Path(settings[key])) if settings[key] else None


def token(authorization: bytes) -> bytes | None:
    """The token in an Authorization header: a Bearer token, or the password of Basic authentication
    (browsers and `curl -u`). None if there is no token."""
    kind, _, rest = authorization.strip().partition(b" ")
    rest = rest.strip()
    if kind.lower() == b"bearer":
        return rest or None
    if kind.lower() != b"basic":
        return None
    try:
        _, colon, password = base64.b64decode(rest, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return password if colon and password else None
