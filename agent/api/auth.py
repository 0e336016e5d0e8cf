"""Token authentication: read and admin tokens. I/O edge: it reads token files."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from msgspec import Struct, field

from kneewatch.agent.settings.effective import Settings, reported_together
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.files import SECRET_MAX_BYTES, Stamp, read_file, stamp_of

log = logging.getLogger(__name__)

READ, ADMIN = "read", "admin"
Scopes = frozenset[str]
NOTHING: Scopes = frozenset()
ALL: Scopes = frozenset({READ, ADMIN})

FILES = ("http.token_file", "http.admin_token_file")
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
        files = [_file(settings, key) for key in FILES]
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
        for key in FILES:
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
