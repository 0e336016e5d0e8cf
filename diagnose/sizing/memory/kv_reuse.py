"""Reusing KV instead of recomputing it: prefix caching, offloading and transfer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within

RESERVE_HIGH_RATIO = 0.30
"""Share of the KV budget to leave to stored prefixes (guide 7.2: 20 to 30 %)."""


def computed_tokens(
    *, prompt_tokens: float, prefix_tokens: float, hit_ratio: float, block_tokens: int = 1
) -> float:
    """Mean prompt tokens that a request computes if a share `hit_ratio` of prefixes is cached.

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
    """Number of distinct prefixes that fit into a reserve (guide 7.2, solved for the number)."""
    not_negative("reserve_bytes", reserve_bytes)
    positive("prefix_tokens", prefix_tokens)
    positive("kv_bytes_per_token", kv_bytes_per_token)
    return int(reserve_bytes // (prefix_tokens * kv_bytes_per_token))


def shared_bytes_saved(
    *, prefix_tokens: int, concurrency: int, kv_bytes_per_token: float, block_tokens: int = 16
) -> float:
    """Bytes of KV cache saved because concurrent requests share a prefix.

    Source: guide 7.1 (blocks of identical prefixes are shared).
    """
    positive("block_tokens", block_tokens)
    not_negative("prefix_tokens", prefix_tokens)
    positive("concurrency", concurrency)
    whole_tokens = prefix_tokens // block_tokens * block_tokens
    return (concurrency - 1) * whole_tokens * kv_bytes_per_token


def unrouted_hit_ratio(*, routed_hit_ratio: float, replicas: int) -> float:
    """Hit ratio with round-robin routing if each prefix is on one replica only: 1/N of `hit_ratio`.

    The guide's rule for prefixes too rare, or caches too small, to be on every replica; for
    frequent prefixes see `warm_hit_ratio`.

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
    """Share of prefixes that move to another replica when the fleet is resized.

    Modulo keeps a prefix if hash % N = hash % M; consistent hashing moves only what the added
    replicas take over, or what the removed ones had.

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

    The replica also gets its even share of the rest; traffic above `load_cap_ratio` overflows to
    others.

    Source: guide 7.3.
    """
    within("prefix_share_ratio", prefix_share_ratio, low=0.0, high=1.0)
    positive("replicas", replicas)
    within("load_cap_ratio", load_cap_ratio, low=1 / replicas, high=1.0)
    return min(load_cap_ratio, prefix_share_ratio + (1 - prefix_share_ratio) / replicas)


# --- Moving a KV cache instead of computing it again: P/D transfer, offload, swap. Pure -----------
#
# Bandwidths are of one direction: the guide adds both for NVLink (900 GB/s) and PCIe (128 GB/s),
# and a KV cache travels one way. Loading weights is in cold_start.py. Source: guide 5.6, 6.5, 7.4
# and 7.6.


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


def link_bytes_per_s(link: str) -> float:
    """Bytes/s of `link` in one direction.

    Raises:
        SizingError: an unknown link; the choices are listed.
    """
    try:
        return LINK_BYTES_PER_S[link]
    except KeyError:
        choices = tuple(LINK_BYTES_PER_S)
        message = f"link is {link!r}; choose one of {', '.join(choices)}"
        raise SizingError(message, name="link", choices=choices) from None


def transfer_s(
    *, moved_bytes: float, bandwidth_bytes_per_s: float, links: int = 1, latency_s: float = 0.0
) -> float:
    """Seconds to move `moved_bytes` over `links` parallel links, plus a fixed latency.

    With tensor parallelism each GPU moves its own share: `links` is the TP degree.

    Source: guide 6.5 (P/D), 7.4 (swap), 7.6 (offload).
    """
    not_negative("moved_bytes", moved_bytes)
    positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    positive("links", links)
    not_negative("latency_s", latency_s)
    return latency_s + moved_bytes / (bandwidth_bytes_per_s * links)


def break_even_tokens(
    *, transfer_s_per_token: float, compute_s_per_token: float, fixed_s: float = 0.0
) -> float | None:
    """Context length above which moving a KV cache is faster than recomputing it.

    fixed_s / (compute - transfer); None if moving is slower per token, so never faster. Both are
    linear in the length, so only the fixed cost of a transfer makes short contexts cheaper to
    recompute.

    Source: guide 7.4 (swap or recompute) and 6.5 (ship or prefill locally).
    """
    not_negative("transfer_s_per_token", transfer_s_per_token)
    positive("compute_s_per_token", compute_s_per_token)
    not_negative("fixed_s", fixed_s)
    gained_s = compute_s_per_token - transfer_s_per_token
    return fixed_s / gained_s if gained_s > 0 else None


def disaggregation_gain_s(*, stall_s: float, transfer_s: float) -> float:
    """Seconds that a request's decode batch gains: the avoided stall minus the transfer.

    If negative, chunked prefill on a colocated server is better.

    Source: guide 6.5.
    """
    not_negative("stall_s", stall_s)
    not_negative("transfer_s", transfer_s)
    return stall_s - transfer_s


def contexts_held(
    *, hbm_free_bytes: float, tier_free_bytes: float, context_bytes: float
) -> tuple[int, int]:
    """Contexts that fit in HBM alone, and in HBM with an offload tier below it.

    An active context must be in HBM: if not even one fits, the tier does not help.

    Source: guide 7.6.
    """
    not_negative("hbm_free_bytes", hbm_free_bytes)
    not_negative("tier_free_bytes", tier_free_bytes)
    positive("context_bytes", context_bytes)
    hot = int(hbm_free_bytes // context_bytes)
    return (hot, hot + int(tier_free_bytes // context_bytes)) if hot else (0, 0)
