"""What to change across replicas: numbers, routing, the split of prefill and decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.fleet.routing import reuse_possible
from kneewatch.diagnose.fleet.scene import scene_of, server_of
from kneewatch.diagnose.fleet.sizing import TierSize
from kneewatch.diagnose.fleet.split import Split
from kneewatch.diagnose.fleet.spread import middle
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier
from kneewatch.diagnose.recommend.deployment import Stated
from kneewatch.diagnose.recommend.levers_reuse import sticky_routing
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS


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
    splits: Sequence[Split],
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
    split = [told for one in splits if (told := _resplit(one)) is not None]
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


def _resplit(split: Split) -> FleetAdvice | None:
    """The same replicas, split by the work that was measured: guide 6.5."""
    if not split.uneven:
        return None
    now, to, total = split.prefill, split.prefill_needed, split.prefill + split.decode
    used, after = split.used, (split.prefill_work / to, split.decode_work / (total - to))
    made = Recommendation(
        id="pd-ratio",
        cause="",
        changes=(
            Change("prefill replicas", now, to),
            Change("decode replicas", split.decode, total - to),
        ),
        summary=f"Prefill replicas are {used[0]:.0%} taken, decode replicas {used[1]:.0%}: the "
        f"work is {split.needed}, the replicas are {now}:{split.decode}.",
        before={"prefill_used_ratio": used[0], "decode_used_ratio": used[1]},
        predicted={"prefill_used_ratio": after[0], "decode_used_ratio": after[1]},
        cost_usd_per_hour=0.0,
        checks=("that this hour's mix of prompts and answers is the usual one",),
        risk="A replica that changes sides starts with an empty cache.",
        verify=(f"queue_mean_s falls on the fuller side {SETTLE_WORDS}, ITL keeps its target",),
        guide=("6.5",),
    )
    return FleetAdvice(made, split.pool, split.tier)
