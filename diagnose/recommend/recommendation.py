"""A recommendation: exact flag changes, their predicted effect, and how to verify it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import SPECULATION
from kneewatch.rules.wire import CauseId, Figure, rounded

Value = str | Figure | bool | None

REPLICAS = "replicas"
"""Name used in a change for the number of replicas behind the load balancer."""


class Change(Struct, frozen=True):
    """A flag of `vllm serve` with its values before and after the change.

    - `flag`: the name in the server's vLLM version. A name without dashes is a setting outside
      vLLM, such as `replicas` or `router`.
    - `before`: the value now; null if it is unknown or not given.
    - `after`: the value to set; null if the flag must be removed.
    """

    flag: str
    before: Value = field(default=None, name="from")
    after: Value = field(default=None, name="to")


class ServeCommand(Struct, frozen=True, kw_only=True):
    """The whole command line of vLLM after the change, and what the restart costs.

    - `line`: the command, quoted for a shell.
    - `changed`: its arguments that are new or have another value.
    - `removed`: flags of the present command that it lacks.
    - `unknown`: what the line may lack, and what it does not show.
    - `restart_at_least_s`: seconds that vLLM took at its last start to load the weights and to
      capture CUDA graphs; null if its log is not read.
    - `lost_requests`: running and queued requests that a restart ends unless they are drained.
    - `lost_prefix_hit_ratio`: the share of prompt tokens that the prefix cache serves now; it is
      empty after the restart. Null if unknown.
    """

    line: str
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    restart_at_least_s: Figure | None = None
    lost_requests: int | None = None
    lost_prefix_hit_ratio: Figure | None = None


class Recommendation(Struct, frozen=True, kw_only=True):
    """One recommended change against one cause.

    - `id`: a stable name of the change.
    - `cause`: the id of the cause that the change is for.
    - `summary`: what the change does and why, in one or two sentences.
    - `changes`: the flags to change. Empty for advice to look further.
    - `as_of_s`: the Unix time of the load that `before` and `predicted` are for. While less is
      asked, they stay those of the load that the change is made for. Null if the load is that of
      the document.
    - `before`: values by key, in the unit that ends the key; measured where possible.
    - `predicted`: values after the change at the same load. Values that cannot be computed are
      left out. If `kv_demand_ratio` is above 1, the load still exceeds the KV cache.
      `max_concurrency` counts requests of the present size; `kv_capacity_tokens` excludes the block
      that vLLM keeps. `itl_p99_s` and `ttft_p99_s` have a band, such as
      `itl_p99_low_s` to `itl_p99_high_s`: bounds of vLLM's histogram between which the P99 of 95%
      of this server's windows lies.
    - `suffices`: whether the change alone removes its cause at the present load; null if unknown.
    - `unmet`: latency targets that the predicted P99 misses all the same.
    - `worsens`: latencies that the change makes clearly worse.
    - `basis`: what a predicted speed rests on: factors of the roofline, or windows of this server.
    - `cost_usd_per_hour`: the extra cost in US dollars, negative for a saving; null without a
      price.
    - `unknown`: what could not be computed, and which input is missing.
    - `checks`: what to check before the change.
    - `risk`: what may go wrong.
    - `verify`: which signals should change afterwards, and by when.
    - `guide`: sections of the sizing guide.
    - `command`: the whole command line after the change; null if no flag changes, or if the
      present command line is unknown.
    """

    id: str
    cause: CauseId = ""
    summary: str = ""
    changes: tuple[Change, ...] = ()
    as_of_s: Figure | None = None
    before: Mapping[str, Figure] = field(default_factory=dict[str, float])
    predicted: Mapping[str, Figure] = field(default_factory=dict[str, float])
    basis: Mapping[str, Figure] = field(default_factory=dict[str, float])
    suffices: bool | None = None
    unmet: tuple[str, ...] = ()
    worsens: tuple[str, ...] = ()
    cost_usd_per_hour: Figure | None = None
    unknown: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    risk: str = ""
    verify: tuple[str, ...] = ()
    guide: tuple[str, ...] = ()
    command: ServeCommand | None = None

    def __hash__(self) -> int:
        return hash((self.id, self.cause, self.summary))  # mappings have none


# --- The ledger: the one order of changes, and which of them exclude each other -------------------


BUDGET_UP = "max-num-batched-tokens-up"
RAISED_LIMITS = ("max-num-seqs-up", BUDGET_UP, "max-loras")
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


def is_free(recommendation: Recommendation) -> bool:
    """Whether the change needs no more GPUs; if the cost is unknown, it counts as needing some."""
    return recommendation.cost_usd_per_hour is not None and recommendation.cost_usd_per_hour <= 0


def order(recommendation: Recommendation) -> int:
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


def _hits_are_random(routing: Recommendation) -> bool:
    """Whether the hit ratio fell to about the share that random routing leaves each replica."""
    usual = routing.predicted.get("prefix_hit_ratio")
    if usual is None:
        return False
    share = routing.before["prefix_hit_ratio"] / usual
    return LEAST_CHANCE <= share * routing.before["replicas"] <= NEAR_CHANCE


def subject(recommendation: Recommendation) -> frozenset[str]:
    """What a change is about: of two changes with the same subject only one can be made."""
    if recommendation.id.startswith("spec-"):
        return frozenset({SPECULATION})
    flags = frozenset(change.flag for change in recommendation.changes)
    return flags or frozenset({recommendation.id})


def change_words(change: Change) -> str:
    """A change as words. A flag stands with its new value, to be pasted: "--flag 128 (now
    256)"."""
    if change.after is None or change.flag.startswith("--no-"):
        return f"drop {change.flag}"
    is_flag = change.flag.startswith("--")
    if is_flag and isinstance(change.after, bool):
        return f"add {change.flag if change.after else f'--no-{change.flag[2:]}'}"
    after = _value(change.after)
    if change.before is None:
        return f"{change.flag} {after}"
    before = _value(change.before)
    return f"{change.flag} " + (f"{after} (now {before})" if is_flag else f"{before} -> {after}")


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def changes_words(recommendation: Recommendation) -> str:
    return ", ".join(map(change_words, recommendation.changes))


# --- In documents ---------------------------------------------------------------------------------


def in_document(recommendation: Recommendation) -> Recommendation:
    return replace(recommendation, cost_usd_per_hour=rounded(recommendation.cost_usd_per_hour))
