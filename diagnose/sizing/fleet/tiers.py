"""Fleets of several tiers: each sized on its own, and what a blend of them hides. Pure.

Guide 9.5 (hardware tiers), 1.5 (model tiers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.sizing.fleet.fleet import SAFETY_DEFAULT, FleetSize, size_fleet, whole
from kneewatch.diagnose.sizing.inputs import SizingError, within
from kneewatch.diagnose.sizing.steps import Step, exact, figure

TRAP_RATIO = 0.40
"""Fleet utilization below which the guide speaks of the utilization trap (9.3)."""

CEILING_RATIO = 0.90
"""Fleet utilization above which there is no room for spikes (9.3)."""

SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier's traffic and what one of its instances carries at its own targets."""

    name: str
    share_ratio: float
    usable_requests_per_s: float
    tensor_parallel: int = 1
    safety: float = SAFETY_DEFAULT


@dataclass(frozen=True, slots=True)
class TieredFleet:
    """The fleet of each tier by name, and all GPUs together."""

    tiers: tuple[tuple[str, FleetSize], ...]
    gpus: int
    steps: tuple[Step, ...]


def size_tiers(*, peak_requests_per_s: float, tiers: Sequence[Tier]) -> TieredFleet:
    """One fleet per tier for its share of the peak.

    Shares add up to 1 where a router sends each request to one tier. In a cascade every request
    enters the first tier (share 1) and some go on: shares then add up to more.

    Raises:
        SizingError: no tier, a share outside 0..1, or shares that leave traffic unserved.
    Source: guide 9.5 (each tier is a fleet of its own), 1.5 (routing and cascading).
    """
    if not tiers:
        raise SizingError("no tier to size", name="tiers")
    for tier in tiers:
        within(f"share_ratio of {tier.name}", tier.share_ratio, low=0, high=1)
    total = math.fsum(tier.share_ratio for tier in tiers)
    if total < 1 - SHARE_TOLERANCE:
        raise SizingError(
            f"the tiers' shares add up to {total:g}: {1 - total:.1%} of the traffic has no tier",
            name="tiers",
        )
    fleets = tuple(
        (
            tier.name,
            size_fleet(
                peak_requests_per_s=float(exact(peak_requests_per_s) * exact(tier.share_ratio)),
                usable_requests_per_s=tier.usable_requests_per_s,
                tensor_parallel=tier.tensor_parallel,
                safety=tier.safety,
            ),
        )
        for tier in tiers
        if tier.share_ratio > 0
    )
    gpus = sum(fleet.gpus for _, fleet in fleets)
    step = Step(
        title="GPUs of all tiers",
        formula="sum of each tier's GPUs",
        values=" + ".join(f"{fleet.gpus} ({name})" for name, fleet in fleets),
        result=f"{gpus}",
        source="guide 9.5",
    )
    return TieredFleet(fleets, gpus, (*(s for _, fleet in fleets for s in fleet.steps), step))


@dataclass(frozen=True, slots=True)
class Blend:
    """Utilization over all GPUs, and the tiers that it hides: idle ones and full ones."""

    utilization_ratio: float
    trapped: tuple[str, ...]
    full: tuple[str, ...]
    steps: tuple[Step, ...]


def blended_utilization(tiers: Sequence[tuple[str, int, float]]) -> Blend:
    """Average utilization of (name, GPUs, utilization 0..1) tiers, and which lie outside 40-90 %.

    Raises:
        SizingError: no tier, a count that is not whole, or a utilization outside 0..1.
    Source: guide 9.5 (a healthy blend of an idle and a full tier), 9.3 (the limits).
    """
    if not tiers:
        raise SizingError("no tier to blend", name="tiers")
    for name, gpus, ratio in tiers:
        whole(f"gpus of {name}", gpus)
        within(f"utilization of {name}", ratio, low=0, high=1)
    count = sum(gpus for _, gpus, _ in tiers)
    blend = math.fsum(gpus * ratio for _, gpus, ratio in tiers) / count
    step = Step(
        title="Blended utilization",
        formula="sum(GPUs x utilization) / GPUs",
        values="("
        + " + ".join(f"{gpus} x {ratio:.0%}" for _, gpus, ratio in tiers)
        + f") / {count}",
        result=f"{blend:.1%}",
        source="guide 9.5",
    )
    return Blend(
        blend,
        tuple(name for name, _, ratio in tiers if ratio < TRAP_RATIO),
        tuple(name for name, _, ratio in tiers if ratio > CEILING_RATIO),
        (step,),
    )


@dataclass(frozen=True, slots=True)
class MixedPool:
    """Round robin over unequal instances: the slow ones' share, and which of their percentiles
    is the pool's P99 (None: they get under 1 % and do not set it)."""

    slow_share_ratio: float
    slow_percentile: float | None
    steps: tuple[Step, ...]


def round_robin_tail(*, slow_instances: int, fast_instances: int) -> MixedPool:
    """What a slow tier does to the P99 of a pool that is not routed by tier.

    With a share s of the requests, and slower than every request of the fast tier, the slow tier's
    percentile 100 x (1 - 0.01 / s) is the P99 of all.

    Raises:
        SizingError: a count is not a whole number of 1 or more.
    Source: guide 9.5.
    """
    slow = whole("slow_instances", slow_instances)
    fast = whole("fast_instances", fast_instances)
    share = slow / (slow + fast)
    percentile = None if share <= 0.01 else 100 * (1 - 0.01 / share)
    step = Step(
        title="Traffic of the slow tier",
        formula="slow instances / all instances",
        values=f"{slow} / {slow + fast}",
        result=f"{share:.1%}"
        + ("" if percentile is None else f", its P{figure(percentile)} is the pool's P99"),
        source="guide 9.5",
    )
    return MixedPool(share, percentile, (step,))
