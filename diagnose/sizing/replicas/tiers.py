"""Tiers: traffic and cost of model routing and cascading, each tier sized on its own. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within
from kneewatch.diagnose.sizing.arithmetic import Step
from kneewatch.diagnose.sizing.replicas.replica_count import whole

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
