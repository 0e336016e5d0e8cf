"""One who is told: where, of what, and how secrets are come by. I/O edge.

An address to post to, a password and a header's value are secrets: they are in no message, no
`repr` and no answer, and where a file or the environment holds them they are read anew each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from kneewatch.collector.base import CollectError, SettingsError
from kneewatch.collector.http.access import FetchSettings
from kneewatch.collector.http.address import Address, parse_target
from kneewatch.rules.model import Severity


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file or environment variable that has it."""

    text: str | None = field(default=None, repr=False)
    file: str | None = None
    env: str | None = None

    def read(self) -> str:
        """The secret as it is now.

        Raises:
            SettingsError: it cannot be read or is empty; the message names the place.
        """
        if self.text is not None:
            place, found = "the setting", self.text
        elif self.file is not None:
            place, found = f"the file {self.file}", _contents(self.file)
        else:
            place = f"the environment variable {self.env}"
            found = os.environ.get(self.env or "", "")
        if not found.strip():
            raise SettingsError(f"{place} is empty or not set")
        return found.strip()


@dataclass(frozen=True, slots=True)
class Web:
    """Where to post. `access` is what a request shows and which server it trusts."""

    url: Secret
    access: FetchSettings

    def address(self) -> Address:
        """The address as it is now; its path may be a secret.

        Raises:
            SettingsError: it cannot be read, or is no HTTP(S) URL; the URL is not in the message.
        """
        url = self.url.read()
        if "://" not in url:
            raise SettingsError("url must begin with https:// or http://; it is not shown here")
        try:
            address = parse_target(url)
        except CollectError:
            # Its message has the URL, and so has the chain.
            raise SettingsError("url must be an HTTP(S) URL; it is not shown here") from None
        parts = urlsplit(url)
        if parts.path in ("", "/"):  # a scrape would mean the metrics page
            address = replace(address, path="/" + (f"?{parts.query}" if parts.query else ""))
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """Which server to hand mail to, and whom it is for. `security` is starttls, tls or none."""

    host: str
    port: int
    security: str
    user: str | None
    password: Secret | None
    sender: str
    recipients: tuple[str, ...]
    ca_file: str | None
    insecure_skip_verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """One who is told, and what of. `origin` is where it was configured.

    `own`: what kneewatch finds itself; `alerts`: what Alertmanager posts. `hold_s` is how long a
    trouble must stay gone before its end is told; `repeat_s` is None for telling once.
    """

    name: str
    kind: str
    way: Web | Mail
    severity: Severity
    targets: tuple[str, ...]
    labels: Mapping[str, str]
    own: bool
    alerts: bool
    group_wait_s: float
    hold_s: float
    repeat_s: float | None
    give_up_s: float
    timeout_s: float
    triage_url: str
    origin: str

    def wants(self, target: str, labels: Mapping[str, str]) -> bool:
        """Whether a target is one that this receiver is told of."""
        named = not self.targets or any(_fits(target, pattern) for pattern in self.targets)
        return named and all(
            _fits(labels.get(name, ""), pattern) for name, pattern in self.labels.items()
        )

    def check(self) -> None:
        """Read its secrets once, so that a wrong setting is told at the start.

        Raises:
            SettingsError: one cannot be used.
        """
        try:
            if isinstance(self.way, Web):
                self.way.address()
            elif self.way.password is not None:
                self.way.password.read()
        except SettingsError as exc:
            raise SettingsError(f"{self.origin}: {exc}") from exc


def _contents(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"the file {file}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError:
        # The error quotes what could not be decoded, a piece of the secret.
        raise SettingsError(f"the file {file} is not UTF-8 text") from None


def _fits(text: str, pattern: str) -> bool:
    # A name such as http://[::1]:8000 is no pattern of its own.
    return text == pattern or fnmatchcase(text, pattern)
