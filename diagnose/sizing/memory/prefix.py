"""Prefix caching: what a hit saves, what the cache takes, what routing does to hits. Pure.

Source: guide 7.2 and 7.3.
"""

from __future__ import annotations

import math

from kneewatch.diagnose.sizing.inputs import not_negative, positive, within

RESERVE_LOW_RATIO, RESERVE_HIGH_RATIO = 0.20, 0.30
"""Share of the KV budget to leave to stored prefixes, beyond active requests (guide 7.2)."""


def computed_tokens(
    *, prompt_tokens: float, prefix_tokens: float, hit_ratio: float, block_tokens: int = 1
) -> float:
    """Prompt tokens that a request computes on average, where `hit_ratio` of prefixes are cached.

    Only whole blocks are reused; pass vLLM's block size for its arithmetic.
    Source: guide 7.2.
    """
    positive("prompt_tokens", prompt_tokens)
    within("prefix_tokens", prefix_tokens, low=0.0, high=prompt_tokens)
    within("hit_ratio", hit_ratio, low=0.0, high=1.0)
    positive("block_tokens", block_tokens)
    return prompt_tokens - hit_ratio * (prefix_tokens // block_tokens) * block_tokens


def reserve_bytes(*, kv_budget_bytes: float, ratio: float = RESERVE_HIGH_RATIO) -> float:
    """Bytes of the KV budget to keep for stored prefixes (guide 7.2)."""
    positive("kv_budget_bytes", kv_budget_bytes)
    within("ratio", ratio, low=0.0, high=1.0)
    return kv_budget_bytes * ratio


def prefixes_held(*, reserve_bytes: float, prefix_tokens: float, kv_bytes_per_token: float) -> int:
    """Distinct prefixes that a reserve holds at once (guide 7.2, solved for the number)."""
    not_negative("reserve_bytes", reserve_bytes)
    positive("prefix_tokens", prefix_tokens)
    positive("kv_bytes_per_token", kv_bytes_per_token)
    return int(reserve_bytes // (prefix_tokens * kv_bytes_per_token))


def shared_bytes_saved(
    *, prefix_tokens: int, concurrency: int, kv_bytes_per_token: float, block_tokens: int = 16
) -> float:
    """Bytes of KV cache that concurrent requests do not hold twice because they share a prefix.

    Source: guide 7.1 (blocks of identical prefixes are shared).
    """
    positive("block_tokens", block_tokens)
    not_negative("prefix_tokens", prefix_tokens)
    positive("concurrency", concurrency)
    whole_tokens = prefix_tokens // block_tokens * block_tokens
    return (concurrency - 1) * whole_tokens * kv_bytes_per_token


def unrouted_hit_ratio(*, routed_hit_ratio: float, replicas: int) -> float:
    """Hit ratio behind round-robin where a prefix lives on one replica only: 1/N of it.

    The guide's rule for prefixes that come too seldom, or caches too small, to be on every replica;
    `warm_hit_ratio` says what becomes of a prefix that is seen often.
    Source: guide 7.3.
    """
    within("routed_hit_ratio", routed_hit_ratio, low=0.0, high=1.0)
    positive("replicas", replicas)
    return routed_hit_ratio / replicas


def warm_hit_ratio(*, requests: int, replicas: int) -> float:
    """Hit ratio of one prefix over `requests`, round-robin, no eviction: each replica misses once.

    With prefix routing `replicas` is 1. Rises to 1: dilution costs one miss per replica and the
    memory of N copies, not the hits themselves.
    """
    positive("requests", requests)
    positive("replicas", replicas)
    return (requests - min(requests, replicas)) / requests


def remapped_ratio(*, replicas: int, new_replicas: int, consistent: bool) -> float:
    """Share of prefixes that change their replica when the fleet is resized.

    Modulo keeps a prefix where hash % N = hash % M; consistent hashing moves only what the added
    replicas take, or what the removed ones held.
    Source: guide 7.3.
    """
    positive("replicas", replicas)
    positive("new_replicas", new_replicas)
    few, many = sorted((replicas, new_replicas))
    if consistent or few == many:
        return (many - few) / many
    # of one period of both moduli, only the hashes below the smaller one agree
    return 1 - few / math.lcm(replicas, new_replicas)


def hot_replica_ratio(
    *, prefix_share_ratio: float, replicas: int, load_cap_ratio: float = 1.0
) -> float:
    """Share of all traffic on the replica that owns the most popular prefix.

    Beside the prefix it gets its even part of the rest; `load_cap_ratio` overflows what is more.
    Source: guide 7.3.
    """
    within("prefix_share_ratio", prefix_share_ratio, low=0.0, high=1.0)
    positive("replicas", replicas)
    within("load_cap_ratio", load_cap_ratio, low=1 / replicas, high=1.0)
    return min(load_cap_ratio, prefix_share_ratio + (1 - prefix_share_ratio) / replicas)
