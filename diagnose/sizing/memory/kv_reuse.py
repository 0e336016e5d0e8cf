"""Moving a KV cache instead of computing it again, and what a resized fleet moves. Pure.

Bandwidths are of one direction: the guide adds both for NVLink (900 GB/s) and PCIe (128 GB/s),
and a KV cache travels one way. Loading weights is in cold_start.py.
Source: guide 5.6, 6.5, 7.3, 7.4 and 7.6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

LINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {
        "nvlink4": 450e9,  # H100: 18 links, 900 GB/s both ways together (guide 5.6)
        "pcie5": 64e9,  # x16 (guide 7.4 and 7.6; 128 in 5.6 is both ways)
        "pcie4": 32e9,  # x16 (guide 5.6 and text 003: 64 both ways)
        "infiniband-ndr": 50e9,  # 400 Gbit/s (guide 5.6)
        "nvme": 7e9,  # one drive, sequential read (guide 7.6)
    }
)
"""Bytes/s of each link, in one direction."""


def remapped_ratio(*, replicas: int, new_replicas: int, consistent: bool) -> float:
    """Share of prefixes that move to another replica when the fleet is resized.

    Modulo keeps a prefix if hash % N = hash % M; consistent hashing moves only what the added
    replicas take over, or what the removed ones had.
    """
    few, many = sorted((replicas, new_replicas))
    if consistent or few == many:
        return (many - few) / many
    # Of one period of both moduli, only the hashes below the smaller one agree.
    return 1 - few / math.lcm(replicas, new_replicas)
