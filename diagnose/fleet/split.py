"""How a disaggregated tier is split into prefill and decode, and how its work is. Guide 6.5. Pure.

A prefill replica computes prompts while a request is on it: that share of its time is its work. A
decode replica's is the part of its KV cache, or of its ITL target, that its requests take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.fleet.scene import scene_of, server_of
from kneewatch.diagnose.fleet.verdict import Tier
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.deployment import Stated
from kneewatch.diagnose.sizing.fleet.token_replicas import prefill_decode_ratio

UNEVEN = 1.5
"""One pool is so many times as full as the other before replicas are moved: less is noise."""

LEAST_BUSY = 0.2
"""Below it neither pool has work enough to tell a ratio."""


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas and work, in replicas' worth, of the two sides of a tier.

    `needed` is the work's ratio of prefill to decode as the guide writes it, `1:2.3`;
    `prefill_needed` how many of the present replicas would prefill by it.
    """

    pool: str
    tier: str
    prefill: int
    decode: int
    prefill_work: float
    decode_work: float
    needed: str
    prefill_needed: int

    @property
    def used(self) -> tuple[float, float]:
        """The share of each side that is taken."""
        return self.prefill_work / self.prefill, self.decode_work / self.decode

    @property
    def uneven(self) -> bool:
        """Whether another split would suit the work better, beyond doubt."""
        least, most = sorted(self.used)
        other = self.prefill_needed != self.prefill
        return other and most >= LEAST_BUSY and most >= UNEVEN * least


def splits_of(tiers: Sequence[Tier], stated: Stated, targets: Targets) -> list[Split]:
    """The split of each tier whose replicas' roles are known, and of whose work enough is."""
    return [
        found
        for prefill in tiers
        for decode in tiers
        if (prefill.role, decode.role) == ("prefill", "decode")
        and (prefill.pool, prefill.tier) == (decode.pool, decode.tier)
        and (found := _split(prefill, decode, stated, targets)) is not None
    ]


def _split(prefill: Tier, decode: Tier, stated: Stated, targets: Targets) -> Split | None:
    taken_each = [min(1.0, one) for e in prefill.engines if (one := e.in_flight) is not None]
    # A replica of several engines is taken as they are in the mean.
    busy = sum(taken_each) * prefill.replicas / len(prefill.engines)
    taken = _decode_work(decode, stated, targets)
    arrivals = _total(prefill, "arrival_per_s")
    computed = _total(prefill, "computed_prompt_tokens_per_s")
    written = _total(decode, "generation_tokens_per_s")
    if taken is None or not (arrivals > 0 and computed > 0 and written > 0 and busy > 0):
        return None
    ratio = prefill_decode_ratio(
        peak_requests_per_s=arrivals,
        input_tokens=computed / arrivals,
        output_tokens=written / arrivals,
        prefill_tokens_per_s_per_gpu=computed / busy,
        decode_tokens_per_s_per_gpu=written / taken,
    )
    total = prefill.replicas + decode.replicas
    return Split(
        prefill.pool,
        prefill.tier,
        prefill.replicas,
        decode.replicas,
        busy,
        taken,
        ratio.text,
        min(max(round(total * ratio.ratio / (1 + ratio.ratio)), 1), total - 1),
    )


def _decode_work(decode: Tier, stated: Stated, targets: Targets) -> float | None:
    """Replicas' worth of decode work; None where it is not known."""
    scene = scene_of(decode, server_of(decode, stated), targets, "", peak=None)
    held, capacity = scene.demand.held_tokens, scene.server.capacity_tokens
    if held is None or not capacity:
        return None
    requests = scene.demand.running + scene.demand.waiting
    filled = requests * held / (KV_TARGET_RATIO * capacity)
    if targets.itl_p99_s:
        filled = max(filled, scene.get("itl_p99_s") / targets.itl_p99_s)
    return filled * decode.replicas


def _total(tier: Tier, signal: str) -> float:
    return sum(engine.get(signal) or 0.0 for engine in tier.engines)
