"""Which recommendation comes first: what suffices, and of that what is free. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from kneewatch.diagnose.causes import BY_ID
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import After, predicted
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.recommend.scene import Scene

QUEUE_LIMIT = "queue-limit"
"""It refuses users: last, and never alone."""

BUDGET = "max-num-batched-tokens"
FEWER_SEATS = "max-num-seqs-down"


def suffices(made: Recommendation, scene: Scene) -> bool | None:
    """Whether the change alone ends its cause at the present load; None: nothing tells."""
    key, told = BY_ID[made.cause].enough, made.predicted
    if not key:
        return None
    if key == "waiting" and "load_ratio" in told:
        return told["load_ratio"] <= 1
    if made.id == FEWER_SEATS:
        # It moves the shortage into the queue: enough only where that wait is promised to nobody.
        target_s = scene.facts.targets.ttft_p99_s
        return target_s is not None and told.get("queue_wait_s", target_s) < target_s
    return told.get(key) == 0


def is_free(made: Recommendation) -> bool:
    """Whether it needs no more GPUs; what has no known price does."""
    return made.cost_usd_per_hour is not None and made.cost_usd_per_hour <= 0


def ordered(found: Sequence[Recommendation], scene: Scene) -> list[Recommendation]:
    """One cause's recommendations: those that suffice and are free, that suffice, then the rest.

    Where none suffices, two that do together come first. Within a rank the order stays.
    """
    made = list(found)
    known = made and made[0].cause == "kv_pressure"
    if known and not any(suffices(one, scene) for one in made):
        made[:0] = _together(made, scene)
    made.sort(key=lambda one: _rank(one, scene))
    return [] if made and made[0].id == QUEUE_LIMIT else made


def _rank(made: Recommendation, scene: Scene) -> int:
    if made.id == QUEUE_LIMIT:
        return 5
    if made.id == BUDGET and not scene.server.launch_known:
        # It may be refused at start by flags that are not known.
        return 4
    if suffices(made, scene):
        return 0 if is_free(made) else 1
    return 3


def _together(made: Sequence[Recommendation], scene: Scene) -> list[Recommendation]:
    """The first two changes that suffice together, free ones first; none where none do."""
    grow = [one for one in made if one.id == REPLICAS or _growth(one) > 1]
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return []
    for one, two in sorted(combinations(grow, 2), key=lambda pair: not all(map(is_free, pair))):
        flags = [change.flag for change in (*one.changes, *two.changes)]
        if len(set(flags)) < len(flags) or "--tensor-parallel-size" in flags:
            continue
        now, total = _replicas(two if two.id == REPLICAS else one)
        after = After(
            capacity_tokens=capacity * _growth(one) * _growth(two),
            share_ratio=now / total,
            replicas=round(total) if total > now else None,
        )
        both = _joined(one, two, predicted(scene, after))
        if suffices(both, scene):
            return [both]
    return []


def _growth(made: Recommendation) -> float:
    return 1.0 if made.id == REPLICAS else made.predicted.get("kv_capacity_ratio", 1.0)


def _replicas(made: Recommendation) -> tuple[float, float]:
    if made.id != REPLICAS:
        return 1.0, 1.0
    (change,) = made.changes
    return float(change.before or 1), float(change.after or 1)


def _joined(one: Recommendation, two: Recommendation, told: dict[str, float]) -> Recommendation:
    costs = (one.cost_usd_per_hour, two.cost_usd_per_hour)
    known = [cost for cost in costs if cost is not None]
    left = told.get("kv_demand_ratio", KV_TARGET_RATIO)
    return replace(
        one,
        id=f"{one.id}+{two.id}",
        changes=(*one.changes, *two.changes),
        summary=f"Neither is enough alone; together the load takes {100 * left:.0f} % of the KV "
        "cache.",
        predicted={key: float(f"{value:.6g}") for key, value in told.items()},
        cost_usd_per_hour=sum(known) if len(known) == len(costs) else None,
        checks=(*one.checks, *two.checks),
        risk=f"{one.risk} {two.risk}".strip(),
        unknown=tuple(dict.fromkeys((*one.unknown, *two.unknown))),
        guide=tuple(dict.fromkeys((*one.guide, *two.guide))),
    )
