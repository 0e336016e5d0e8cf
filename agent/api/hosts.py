"""Which host names requests may be for: any other is a page elsewhere whose name was pointed at
this address (DNS rebinding). I/O edge: it asks for this machine's name."""

from __future__ import annotations

import ipaddress
import re
import socket

from kneewatch.agent.settings import Settings

HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


def known_hosts(settings: Settings) -> frozenset[str]:
    """Names that requests may be for, in lower case; addresses are never names of others."""
    listening = str(settings["listen"]).strip().rpartition(":")[0].strip("[]")
    names = ["localhost", listening, socket.gethostname(), *(settings["http.hosts"] or ())]
    return frozenset(name.lower().rstrip(".") for name in names if name)


def host_name(header: bytes) -> str | None:
    """The name or address in a Host header, in lower case and without its port; None where there is
    none that could be."""
    found = HOST.fullmatch(header.decode("latin-1").strip().lower())
    if found is None:
        return None
    return found["six"] or found["name"].rstrip(".")


def is_address(name: str) -> bool:
    """Whether a host is an IP address, which no other machine's name can be pointed at."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
