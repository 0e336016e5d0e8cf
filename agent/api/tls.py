"""The server's side of TLS. I/O edge: it reads certificates."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError

log = logging.getLogger(__name__)

FILES = ("http.tls_cert_file", "http.tls_key_file", "http.client_ca_file")

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class ServerTls:
    """The context that connections are made with; certificates that were renewed on disk are taken
    up for new connections."""

    context: ssl.SSLContext
    settings: Settings
    stamp: Stamp

    @classmethod
    def of(cls, settings: Settings) -> ServerTls | None:
        """What the settings ask for; None for plain HTTP.

        Raises:
            SettingsError: a certificate cannot be used; the message names the setting and the file.
        """
        if not settings["http.tls_cert_file"]:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        stamp = _stamp(settings)
        _load(context, settings)
        return cls(context, settings, stamp)

    def refresh(self) -> None:
        """Read the files again where one has changed. Files that cannot be used, as while they are
        being replaced, change nothing and are tried again."""
        try:
            stamp = _stamp(self.settings)
            if stamp == self.stamp:
                return
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.settings)
            _load(self.context, self.settings)
        except SettingsError as exc:
            log.warning("TLS files are kept as they were error=%s", exc)
            return
        self.stamp = stamp
        log.info("TLS files were read again")


def _load(context: ssl.SSLContext, settings: Settings) -> None:
    key = "http.tls_cert_file"
    try:
        context.load_cert_chain(settings[key], settings["http.tls_key_file"], _no_password)
        if settings["http.client_ca_file"]:
            key = "http.client_ca_file"
            context.load_verify_locations(settings[key])
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as exc:
        files = settings[key]
        if key == "http.tls_cert_file" and settings["http.tls_key_file"]:
            files = f"{files} with key {settings['http.tls_key_file']}"
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise SettingsError(f"{settings.origin(key)}: {key} = {files}: {why}") from exc


def _no_password() -> str:
    """OpenSSL would otherwise ask the terminal, and a daemon has none."""
    raise ValueError("the key has a password; store it without one")


def _stamp(settings: Settings) -> Stamp:
    """What changes when a file does."""
    found: list[tuple[int, int, int]] = []
    for key in FILES:
        if not settings[key]:
            continue
        try:
            stat = Path(settings[key]).stat()
        except OSError as exc:
            raise SettingsError(
                f"{settings.origin(key)}: {key} = {settings[key]}: {exc.strerror}"
            ) from exc
        found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)
