"""Moving a KV cache instead of computing it again: P/D transfer, offload, swap. Pure.

Bandwidths are of one direction: the guide adds both for NVLink (900 GB/s) and PCIe (128 GB/s),
and a KV cache travels one way. Loading weights is in cold_start.py.
Source: guide 5.6, 6.5, 7.4 and 7.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kneewatch.diagnose.sizing.inputs import SizingError, not_negative, positive

LINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {
        "nvlink4": 450e9,  # H100: 18 links, 900 GB/s both ways together (guide 5.6)
        "pcie5": 64e9,  # x16 (guide 7.4 and 7.6; 128 in 5.6 is both ways)
        "pcie4": 32e9,  # x16 (guide 5.6 and text 003: 64 both ways)
        "infiniband-ndr": 50e9,  # 400 Gbit/s (guide 5.6)
        "nvme": 7e9,  # one drive, sequential read (guide 7.6)
    }
)
"""Bytes per second that a link moves one way."""


def link_bytes_per_s(link: str) -> float:
    """Bytes per second that `link` moves one way.

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
    """Seconds that `moved_bytes` take over `links` links side by side, and a fixed latency.

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
    """Context length above which moving a KV cache beats computing it again.

    fixed_s / (compute - transfer); None where moving is slower per token, so never. Both sides are
    linear in the length, so only the fixed cost of a transfer makes short contexts cheaper to
    compute.
    Source: guide 7.4 (swap or recompute) and 6.5 (ship or prefill locally).
    """
    not_negative("transfer_s_per_token", transfer_s_per_token)
    positive("compute_s_per_token", compute_s_per_token)
    not_negative("fixed_s", fixed_s)
    gained_s = compute_s_per_token - transfer_s_per_token
    return fixed_s / gained_s if gained_s > 0 else None


def disaggregation_gain_s(*, stall_s: float, transfer_s: float) -> float:
    """Seconds that a request's decode batch gains: the stall avoided less the transfer paid.

    Negative: chunked prefill on a colocated server is the better choice.
    Source: guide 6.5.
    """
    not_negative("stall_s", stall_s)
    not_negative("transfer_s", transfer_s)
    return stall_s - transfer_s


def contexts_held(
    *, hbm_free_bytes: float, tier_free_bytes: float, context_bytes: float
) -> tuple[int, int]:
    """Contexts held in HBM alone, and in HBM with an offload tier below it.

    A context that is worked on must be in HBM: where not one fits, the tier does not help.
    Source: guide 7.6.
    """
    not_negative("hbm_free_bytes", hbm_free_bytes)
    not_negative("tier_free_bytes", tier_free_bytes)
    positive("context_bytes", context_bytes)
    hot = int(hbm_free_bytes // context_bytes)
    return (hot, hot + int(tier_free_bytes // context_bytes)) if hot else (0, 0)
