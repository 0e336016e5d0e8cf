"""How fast an address may ask: a bucket of tokens for each, in a table that does not grow."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

MOST_ADDRESSES = 4096
NETWORK_BITS = 64
"""One customer's IPv6 addresses: they share a bucket, or nobody would ever be out of tokens."""


@dataclass(slots=True)
class Buckets:
    """A bucket holds a second's worth of requests and fills at `per_s`.

    The address unheard of for longest is forgotten first; it would have a full bucket by then, or
    there are more addresses than any limit for each of them could help against.
    """

    per_s: float
    clock: Callable[[], float] = monotonic
    most: int = MOST_ADDRESSES
    _levels: OrderedDict[str, tuple[float, float]] = field(
        default_factory=OrderedDict[str, tuple[float, float]]
    )

    def take(self, address: str) -> float:
        """Take a token; seconds until there is one where there was none, else 0."""
        now_s, whole = self.clock(), max(1.0, self.per_s)
        name = network(address)
        level, then_s = self._levels.pop(name, (whole, now_s))
        level = min(whole, level + (now_s - then_s) * self.per_s)
        wait_s = 0.0 if level >= 1 else (1 - level) / self.per_s
        self._levels[name] = (level if wait_s else level - 1, now_s)
        while len(self._levels) > self.most:
            self._levels.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        return len(self._levels)


def network(address: str) -> str:
    """What counts as one address: all of it for IPv4, its first half for IPv6."""
    if ":" not in address:
        return address
    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((ip, NETWORK_BITS), strict=False))
