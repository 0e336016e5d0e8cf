"""Where the endpoint listens, and whether it may: anybody who can reach an open address could read
all that kneewatch knows. I/O edge: it resolves the listening host's name."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from dataclasses import dataclass

from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError

log = logging.getLogger(__name__)

WILDCARDS = ("", "*")
MOST_PORT = 65535
LISTEN = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on. `host` is as configured, `ip` what it stands for."""

    host: str
    ip: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        """IPv6 or IPv4."""
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def shown(self) -> str:
        """The host for a URL that this machine can open."""
        ip = ipaddress.ip_address(self.ip)
        if ip.is_unspecified:
            return "[::1]" if ip.version == 6 else "127.0.0.1"
        return f"[{self.ip}]" if ip.version == 6 else self.ip


def address_of(settings: Settings) -> Address:
    """The address to listen on.

    Raises:
        SettingsError: it is none, or its host cannot be resolved.
    """
    told, origin = str(settings["listen"]).strip(), settings.origin("listen")
    found = LISTEN.fullmatch(told)
    if found is None or int(found["port"]) > MOST_PORT:
        raise SettingsError(
            f"{origin}: listen = {told!r} is no HOST:PORT; write 127.0.0.1:9877 or [::1]:9877"
        )
    host, port = found["six"] or found["host"], int(found["port"])
    if host in WILDCARDS:
        return Address(host, "0.0.0.0", port)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise SettingsError(f"{origin}: listen = {told!r}: {host} cannot be resolved") from exc
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return Address(host, str(rows[0][4][0]).partition("%")[0], port)


def check_protected(settings: Settings, address: Address) -> None:
    """Say what is unsafe, in the log; refuse what is open to everybody.

    Raises:
        SettingsError: others could reach the address and nothing asks who they are.
    """
    if settings["http.client_ca_file"] and not settings["http.tls_cert_file"]:
        raise SettingsError(
            f"{settings.origin('http.client_ca_file')}: http.client_ca_file needs "
            "http.tls_cert_file: client certificates are part of TLS"
        )
    if settings["http.tls_key_file"] and not settings["http.tls_cert_file"]:
        raise SettingsError(
            f"{settings.origin('http.tls_key_file')}: http.tls_key_file needs http.tls_cert_file"
        )
    if address.loopback:
        return
    asked = settings["http.token_file"] or settings["http.client_ca_file"]
    if not asked and not settings["http.behind_proxy"]:
        raise SettingsError(
            f"{settings.origin('listen')}: listen = {settings['listen']!r} can be reached by "
            "others: set http.token_file or http.client_ca_file (with TLS), say with "
            "http.behind_proxy that a proxy checks who asks, or listen on 127.0.0.1"
        )
    if settings["http.token_file"] and not settings["http.tls_cert_file"]:
        log.warning("tokens travel unencrypted; set http.tls_cert_file listen=%s", address.host)
