"""Paged KV blocks: what live requests hold, and what is cached in the order it will be evicted.

Blocks are counted by the chain they belong to, not one by one. vLLM frees a request's blocks from
its last one on (0.32, kv_cache_manager), so a chain loses its tail first and what is left of it is
still a prefix: the counts are the whole truth.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct


class Chain(Struct, eq=False):
    """Blocks that hold one run of tokens from its start. `refs`: live requests that use it.

    `filling`: a request computes what is missing of it now.
    """

    blocks: float = 0.0
    refs: int = 0
    filling: bool = False


class Blocks:
    """A pool. One block is reserved by vLLM (the null block), so `count - 1` can be used."""

    def __init__(self, count: int, size_tokens: int) -> None:
        self.size_tokens = size_tokens
        self.usable = count - 1
        self._unused = float(count - 1)
        self._cached: OrderedDict[int, Chain] = OrderedDict()
        self._evictable = 0.0
        self.evicted = 0.0
        """Cached blocks that were given to something else, since the start."""

    @property
    def free(self) -> float:
        """Blocks that no live request holds; cached ones among them."""
        return self._unused + self._evictable

    @property
    def evictable(self) -> float:
        """Cached blocks that no live request holds."""
        return self._evictable

    @property
    def usage_ratio(self) -> float:
        """vLLM's kv_cache_usage_perc: the share that live requests hold."""
        return min(1.0, max(0.0, 1 - self.free / self.usable))

    def take(self, blocks: float) -> bool:
        """Give blocks to a live request, evicting what was used longest ago; False: too few."""
        if blocks > self.free:
            return False
        self._unused -= blocks
        while self._unused < 0 and self._cached:
            key, chain = next(iter(self._cached.items()))
            part = min(chain.blocks, -self._unused)
            chain.blocks -= part
            self._evictable -= part
            self._unused += part
            self.evicted += part
            if chain.blocks <= 0:
                del self._cached[key]
        return True

    def hold(self, chain: Chain) -> None:
        """A live request uses the chain."""
        if chain.refs == 0 and self._cached.pop(id(chain), None) is not None:
            self._evictable -= chain.blocks
        chain.refs += 1

    def release(self, chain: Chain) -> None:
        """A live request uses the chain no more; its blocks stay until they are needed."""
        chain.refs -= 1
        if chain.refs == 0 and chain.blocks > 0:
            self._cached[id(chain)] = chain
            self._evictable += chain.blocks

    def drop(self, blocks: float) -> None:
        """Blocks that nothing will look for again: they are reused in their turn."""
        self.release(Chain(blocks, refs=1))

    def give_back(self, blocks: float) -> None:
        """Blocks that hold nothing (caching is off)."""
        self._unused += blocks
