"""What to change across replicas: numbers, routing, the split of prefill and decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.routing import reuse_possible
from kneewatch.diagnose.fleet.scene import scene_of, server_of
from kneewatch.diagnose.fleet.sizing import TierSize
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.deployment import Stated
from kneewatch.diagnose.recommend.levers_reuse import sticky_routing
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS
from kneewatch.diagnose.sizing.fleet.token_replicas import prefill_decode_ratio

UNEVEN = 1.5
"""One pool is so many times as full as the other before replicas are moved: less is noise."""

LEAST_BUSY = 0.2
"""Below it neither pool has work enough to tell a ratio."""


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """A recommendation, and the pool and tier that it is for."""

    made: Recommendation
    pool: str
    tier: str


def advice_of(
    tiers: Sequence[Tier],
    sizes: Sequence[TierSize],
    causes: Sequence[FleetCause],
    stated: Stated,
    targets: Targets,
) -> list[FleetAdvice]:
    """Every change that the fleet's evidence carries: what presses first, what saves last."""
    found = [
        FleetAdvice(one.advice, one.tier.pool, one.tier.tier)
        for one in sizes
        if one.advice is not None
    ]
    more = [one for one in found if one.made.id != "fewer-replicas"]
    routing = [
        told
        for tier in tiers
        if any(_dilutes(one, tier) for one in causes)
        and (told := _routing(tier, stated, targets)) is not None
    ]
    split = [
        told
        for prefill in tiers
        for decode in tiers
        if (prefill.role, decode.role) == ("prefill", "decode")
        and (prefill.pool, prefill.tier) == (decode.pool, decode.tier)
        and (told := _split(prefill, decode, stated, targets)) is not None
    ]
    return [*more, *routing, *split, *(one for one in found if one not in more)]


def _dilutes(one: FleetCause, tier: Tier) -> bool:
    return (one.cause.id, one.pool, one.tier) == ("routing_dilution", tier.pool, tier.tier)


def _routing(tier: Tier, stated: Stated, targets: Targets) -> FleetAdvice | None:
    """Requests of one prefix to one replica, with the hits that repeats would give."""
    scene = scene_of(tier, server_of(tier, stated), targets, "routing_dilution", peak=None)
    made, possible = sticky_routing(scene), middle(map(reuse_possible, tier.engines))
    hits = scene.facts.values.get("prefix_hit_ratio")
    if made is None or possible is None or hits is None or not hits < possible:
        return None
    computed = scene.get("computed_prompt_tokens_per_s")
    left = (1 - possible) / (1 - hits)
    told = replace(
        made,
        before={**made.before, "computed_prompt_tokens_per_s": computed},
        predicted={"prefix_hit_ratio": possible, "computed_prompt_tokens_per_s": computed * left},
        verify=(
            f"prefix_hit_ratio rises from {hits:.2f} towards {possible:.2f} on every replica "
            f"{SETTLE_WORDS}, running stays alike",
        ),
    )
    return FleetAdvice(told, tier.pool, tier.tier)


def _split(prefill: Tier, decode: Tier, stated: Stated, targets: Targets) -> FleetAdvice | None:
    """The same replicas, split by the work that was measured: guide 6.5.

    A prefill replica computes prompts while a request is on it: that share of its time is its work.
    A decode replica's is the part of its KV cache, or of its ITL target, that its requests take.
    """
    busy = sum(min(1.0, one) for e in prefill.engines if (one := e.in_flight) is not None)
    taken = _decode_work(decode, stated, targets)
    arrivals = _total(prefill, "arrival_per_s")
    computed = _total(prefill, "computed_prompt_tokens_per_s")
    written = _total(decode, "generation_tokens_per_s")
    if taken is None or not (arrivals > 0 and computed > 0 and written > 0 and busy > 0):
        return None
    now, total = prefill.replicas, prefill.replicas + decode.replicas
    filled = busy / now, taken / decode.replicas
    if max(filled) < LEAST_BUSY or max(filled) < UNEVEN * min(filled):
        return None
    ratio = prefill_decode_ratio(
        peak_requests_per_s=arrivals,
        input_tokens=computed / arrivals,
        output_tokens=written / arrivals,
        prefill_tokens_per_s_per_gpu=computed / busy,
        decode_tokens_per_s_per_gpu=written / taken,
    )
    to = min(max(round(total * ratio.ratio / (1 + ratio.ratio)), 1), total - 1)
    if to == now:
        return None
    made = Recommendation(
        id="pd-ratio",
        cause="",
        changes=(
            Change("prefill replicas", now, to),
            Change("decode replicas", decode.replicas, total - to),
        ),
        summary=f"Prefill replicas are {filled[0]:.0%} taken, decode replicas {filled[1]:.0%}: the "
        f"work is {ratio.text}, the replicas are {now}:{decode.replicas}.",
        before={"prefill_used_ratio": filled[0], "decode_used_ratio": filled[1]},
        predicted={"prefill_used_ratio": busy / to, "decode_used_ratio": taken / (total - to)},
        cost_usd_per_hour=0.0,
        checks=("that this hour's mix of prompts and answers is the usual one",),
        risk="A replica that changes sides starts with an empty cache.",
        verify=(f"queue_mean_s falls on the fuller side {SETTLE_WORDS}, ITL keeps its target",),
        guide=("6.5",),
    )
    return FleetAdvice(made, prefill.pool, prefill.tier)


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
    return sum(_known(engine, signal) for engine in tier.engines)


def _known(engine: Engine, signal: str) -> float:
    return engine.get(signal) or 0.0
