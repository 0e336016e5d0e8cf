"""The KV pool of each engine of a fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.collector.names.pools import BLOCKS, own_blocks
from kneewatch.diagnose.fleet.shape import Key, Labels, Member


def own_pools(configs: Mapping[Key, Labels], members: Sequence[Member]) -> dict[Key, Labels]:
    """The labels of cache_config_info with each engine's own blocks, where a replica shows the sum
    over all of its engines."""
    beside: dict[tuple[str, str, str], list[Key]] = {}
    for member in members:
        if member.key in configs:
            at = member.pool, member.replica, member.model
            beside.setdefault(at, []).append(member.key)
    found = dict(configs)
    for keys in beside.values():
        blocks = own_blocks([configs[key] for key in keys])
        if blocks is not None:
            found |= {key: {**configs[key], BLOCKS: blocks} for key in keys}
    return found
