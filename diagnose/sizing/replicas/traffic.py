"""Traffic to size for: workload archetypes, online or batch, sessions, and model routing. Pure.

Source: guide 1.1, 1.2, 1.4, 1.5, 3.5 and 9.1 (step 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError


@dataclass(frozen=True, slots=True)
class Archetype:
    """A kind of workload: its bottleneck, the latency to watch, and the GPU resource to buy."""

    id: str
    bottleneck: str
    slo: str
    hardware: str


ARCHETYPES = (
    Archetype("chat", "prefill at low concurrency", "TTFT under load", "compute"),
    Archetype("rag", "prefill compute", "TTFT", "compute"),
    Archetype("code", "memory bandwidth in decode", "ITL and decode throughput", "bandwidth"),
    Archetype("agentic", "KV cache held over a session, both phases", "session time", "memory"),
)
"""The guide's four archetypes (1.2; hardware: 3.5 and 9.1, step 2)."""


def archetype(name: str) -> Archetype:
    """The archetype called `name`.

    Raises:
        SizingError: an unknown name; the choices are listed.
    """
    by_name = {candidate.id: candidate for candidate in ARCHETYPES}
    if name not in by_name:
        message = f"archetype is {name!r}; choose one of {', '.join(by_name)}"
        raise SizingError(message, name="archetype", choices=tuple(by_name))
    return by_name[name]


@dataclass(frozen=True, slots=True)
class Target:
    """The goal of a fleet, and where on the latency curve it runs."""

    optimize: str
    operating_point: str


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "online": Target("TTFT", "a load below the knee"),
        "batch": Target("tokens per GPU-hour", "the highest sustainable concurrency"),
    }
)
"""Online streaming and offline batch are different optimisations (guide 1.4)."""


def session_prefill_tokens(
    *, calls: int, first_prompt_tokens: int, added_tokens: int, output_tokens: int
) -> tuple[int, int]:
    """Prompt tokens computed in `calls` dependent calls, without and with prefix caching.

    Each prompt contains all that came before it. Without prefix caching the prefill grows with the
    square of the calls; with it each call computes only what was added.
    Source: guide 1.2 (agentic: the session is the unit of sizing); text 001, 4.9.
    """
    grown = added_tokens + output_tokens
    computed_tokens = calls * first_prompt_tokens + grown * calls * (calls - 1) // 2
    return computed_tokens, first_prompt_tokens + (calls - 1) * added_tokens


# --- Routing to a small and a large model (guide 1.5) ---------------------------------------------


WORTH_FROM_GPUS = 8
"""Routing pays for its complexity once the large model's fleet exceeds this (guide 1.5)."""
TTFT_BUDGET_RATIO = 0.10
"""A router may take this share of the TTFT budget (guide 1.5)."""
ROUTER_HIGH_S = 0.020
"""Latency in seconds that a router adds per request, upper end (guide 1.5: 5-20 ms)."""


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
    against: list[str] = []
    if large_model_gpus <= WORTH_FROM_GPUS:
        against.append(
            f"the fleet without tiers has {large_model_gpus} GPUs; routing pays above "
            f"{WORTH_FROM_GPUS}"
        )
    if simple_share_ratio == 0:
        against.append("no share of requests is known to be simple enough for a small model")
    if not small_model_acceptable:
        against.append("the small model's answer quality is not confirmed (small_model_acceptable)")
    if router_s > TTFT_BUDGET_RATIO * ttft_budget_s:
        against.append(
            f"the router takes {router_s / ttft_budget_s:.0%} of the TTFT budget, "
            f"above {TTFT_BUDGET_RATIO:.0%}"
        )
    if against:
        return RoutingAdvice(worth_it=False, reasons=tuple(against))
    reason = (
        f"{simple_share_ratio:.0%} of requests can move off the {large_model_gpus} GPUs of "
        "the large model"
    )
    return RoutingAdvice(worth_it=True, reasons=(reason,))
