"""Tiers: traffic and cost of model routing and cascading, each tier sized on its own. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within
from kneewatch.diagnose.sizing.arithmetic import Step, exact, figure
from kneewatch.diagnose.sizing.replicas.replica_count import (
    SAFETY_DEFAULT,
    FleetSize,
    size_fleet,
    whole,
)

WORTH_FROM_GPUS = 8
"""Routing pays for its complexity once the large model's fleet exceeds this (guide 1.5)."""
TTFT_BUDGET_RATIO = 0.10
"""A router may take this share of the TTFT budget (guide 1.5)."""
ROUTER_HIGH_S = 0.020
"""Latency in seconds that a router adds per request, upper end (guide 1.5: 5-20 ms)."""


@dataclass(frozen=True, slots=True)
class ModelTier:
    """A model tier: its share of requests when routed, and what a million tokens cost there."""

    name: str
    share_ratio: float
    usd_per_million_tokens: float


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What one tier has to be sized for."""

    name: str
    peak_requests_per_s: float


def routed_loads(*, tiers: Sequence[ModelTier], peak_requests_per_s: float) -> tuple[TierLoad, ...]:
    """Peak requests per second of each tier when a router decides up front.

    Raises:
        SizingError: the shares do not add up to 1.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    _check_shares(tiers)
    return tuple(TierLoad(tier.name, peak_requests_per_s * tier.share_ratio) for tier in tiers)


def routed_usd_per_million_tokens(*, tiers: Sequence[ModelTier]) -> float:
    """Blended cost of a million tokens, all tiers producing alike many tokens per request.

    Raises:
        SizingError: the shares do not add up to 1.
    """
    _check_shares(tiers)
    return sum(tier.share_ratio * tier.usd_per_million_tokens for tier in tiers)


def cascaded_loads(
    *, names: Sequence[str], escalation_ratios: Sequence[float], peak_requests_per_s: float
) -> tuple[TierLoad, ...]:
    """Peak requests per second of each tier when all enter the first and some are escalated.

    `escalation_ratios` are what each tier but the last hands on, of what it got.

    Raises:
        SizingError: not one ratio for each tier but the last.
    """
    positive("peak_requests_per_s", peak_requests_per_s)
    _check_escalations(tiers=len(names), ratios=escalation_ratios)
    loads, arriving_per_s = [TierLoad(names[0], peak_requests_per_s)], peak_requests_per_s
    for name, ratio in zip(names[1:], escalation_ratios, strict=True):
        arriving_per_s *= ratio
        loads.append(TierLoad(name, arriving_per_s))
    return tuple(loads)


def cascaded_usd_per_million_tokens(
    *, usd_per_million_tokens: Sequence[float], escalation_ratios: Sequence[float]
) -> float:
    """Cost of a million useful tokens of a cascade: each request pays every tier that it enters.

    Raises:
        SizingError: not one ratio for each tier but the last.
    """
    _check_escalations(tiers=len(usd_per_million_tokens), ratios=escalation_ratios)
    total, reach = usd_per_million_tokens[0], 1.0
    for usd, ratio in zip(usd_per_million_tokens[1:], escalation_ratios, strict=True):
        reach *= ratio
        total += reach * usd
    return total


def break_even_escalation_ratio(*, small_usd: float, large_usd: float) -> float:
    """The escalated share above which a cascade costs more than the large model alone.

    1 - small/large; below 0 the small model is no cheaper and a cascade never pays.
    """
    not_negative("small_usd", small_usd)
    positive("large_usd", large_usd)
    return 1 - small_usd / large_usd


def saving_ratio(*, blended_usd: float, uniform_usd: float) -> float:
    """Share of the cost that tiers save against the large model for everything."""
    not_negative("blended_usd", blended_usd)
    positive("uniform_usd", uniform_usd)
    return 1 - blended_usd / uniform_usd


@dataclass(frozen=True, slots=True)
class RoutingAdvice:
    """Whether tiers are worth it, and each reason for or against."""

    worth_it: bool
    reasons: tuple[str, ...]


def routing_advice(
    *,
    large_model_gpus: int,
    simple_share_ratio: float,
    small_model_acceptable: bool,
    ttft_budget_s: float,
    router_s: float = ROUTER_HIGH_S,
) -> RoutingAdvice:
    """Whether to route, by the guide's table: fleet size, skew, quality and the router's time."""
    not_negative("large_model_gpus", large_model_gpus)
    within("simple_share_ratio", simple_share_ratio, low=0.0, high=1.0)
    positive("ttft_budget_s", ttft_budget_s)
    not_negative("router_s", router_s)
    against: list[str] = []
    if large_model_gpus <= WORTH_FROM_GPUS:
        against.append(f"the large fleet has {large_model_gpus} GPUs, not above {WORTH_FROM_GPUS}")
    if simple_share_ratio == 0:
        against.append("no requests are simple enough for a small model")
    if not small_model_acceptable:
        against.append("the small model's quality is not shown to be acceptable")
    if router_s > TTFT_BUDGET_RATIO * ttft_budget_s:
        against.append(
            f"the router takes {router_s / ttft_budget_s:.0%} of the TTFT budget, "
            f"above {TTFT_BUDGET_RATIO:.0%}"
        )
    if against:
        return RoutingAdvice(worth_it=False, reasons=tuple(against))
    reason = f"{simple_share_ratio:.0%} of requests can leave {large_model_gpus} large-model GPUs"
    return RoutingAdvice(worth_it=True, reasons=(reason,))


def _check_shares(tiers: Sequence[ModelTier]) -> None:
    for tier in tiers:
        within("share_ratio", tier.share_ratio, low=0.0, high=1.0)
        not_negative("usd_per_million_tokens", tier.usd_per_million_tokens)
    total = sum(tier.share_ratio for tier in tiers)
    if abs(total - 1) > 1e-6:
        raise SizingError(f"the tiers' shares add up to {total:g}, not 1", name="tiers")


def _check_escalations(*, tiers: int, ratios: Sequence[float]) -> None:
    if tiers < 1 or len(ratios) != tiers - 1:
        message = (
            f"{len(ratios)} escalation ratios for {tiers} tiers; give one for each but the last"
        )
        raise SizingError(message, name="escalation_ratios")
    for ratio in ratios:
        within("escalation_ratios", ratio, low=0.0, high=1.0)


# --- Fleets of several tiers: each sized on its own, and what a blend of them hides. Pure ---------
#
# Guide 9.5 (hardware tiers), 1.5 (model tiers).


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
