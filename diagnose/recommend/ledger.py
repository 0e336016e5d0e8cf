"""The ledger: the one order of changes, and which of them exclude each other. Pure."""

from __future__ import annotations

from kneewatch.collector.engines.engine_kind import SPECULATION
from kneewatch.diagnose.recommend.advice import Advice

SEATS_UP, BUDGET_UP = "max-num-seqs-up", "max-num-batched-tokens-up"
RAISED_LIMITS = (SEATS_UP, BUDGET_UP, "max-loras")
"""Limits of the launch that bind: hardware behind one of them would be as little used."""

BINDING = ("kv-blocks", "kv-memory-bytes")
"""A flag that fixes the cache is raised before hardware is added, even where it is not enough."""

QUANTIZED = ("fp8-weights", "int8-weights", "awq-weights")

PREFIX_ROUTING = "prefix-routing"
LEAST_CHANCE, NEAR_CHANCE = 0.75, 1.5
"""Hits count as random routing's if they are between these multiples of random routing's share."""

BACKLOG = "Requests that already queue fill the larger cache too, until they are served."
"""A remark on a change after which the predicted `backlog_requests` still wait."""

BUDGET = "max-num-batched-tokens"
QUEUE_LIMIT, FEWER_REPLICAS = "queue-limit", "fewer-replicas"
"""The first rejects user requests; the second is for quiet times."""


def is_free(recommendation: Advice) -> bool:
    """Whether the change needs no more GPUs; if the cost is unknown, it counts as needing some."""
    return recommendation.cost_usd_per_hour is not None and recommendation.cost_usd_per_hour <= 0


def order(recommendation: Advice) -> int:
    """The place of a change in the ledger, from 0 on.

    A limit that binds and what is free and sufficient, then flags that fix the cache, what is
    sufficient at a price, what is free, and the rest.
    """
    name, free = recommendation.id, is_free(recommendation)
    if name in (QUEUE_LIMIT, FEWER_REPLICAS):
        return 5
    # The guide quantizes before it adds hardware (8.5), where weights are known to be 16-bit.
    is_16_bit = name in QUANTIZED and bool(recommendation.predicted)
    if name == BUDGET_UP and recommendation.suffices is False:
        return 3  # compute binds, not the limit
    if name == PREFIX_ROUTING and _hits_are_random(recommendation):
        return 0  # a larger cache would hold every prefix on every replica
    if name in RAISED_LIMITS or is_16_bit or (recommendation.suffices and free):
        return 0
    if name in BINDING:
        return 1
    if name == BUDGET and recommendation.suffices is None:
        return 4  # vLLM may refuse to start with it: the launch is unknown
    return 2 if recommendation.suffices else 3 if free else 4


def _hits_are_random(routing: Advice) -> bool:
    """Whether the hit ratio fell to about the share that random routing leaves each replica."""
    usual = routing.predicted.get("prefix_hit_ratio")
    if usual is None:
        return False
    share = routing.before["prefix_hit_ratio"] / usual
    return LEAST_CHANCE <= share * routing.before["replicas"] <= NEAR_CHANCE


def subject(recommendation: Advice) -> frozenset[str]:
    """What a change is about: of two changes with the same subject only one can be made."""
    if recommendation.id.startswith("spec-"):
        return frozenset({SPECULATION})
    flags = frozenset(change.flag for change in recommendation.changes)
    return flags or frozenset({recommendation.id})
