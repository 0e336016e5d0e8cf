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


def unrouted_hit_ratio(*, routed_hit_ratio: float, replicas: int) -> float:
    """Hit ratio with round-robin routing if each prefix is on one replica only: 1/N of `hit_ratio`.

    The guide's rule for prefixes too rare, or caches too small, to be on every replica.

    Source: guide 7.3.
    """
    within("routed_hit_ratio", routed_hit_ratio, low=0.0, high=1.0)
    positive("replicas", replicas)
    return routed_hit_ratio / replicas


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
