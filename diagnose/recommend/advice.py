"""A recommendation: exact flag changes, their predicted effect, and how to verify it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.rules.wire import CauseId, Figure, UnixTime, rounded

Value = str | Figure | bool | None

REPLICAS = "replicas"
"""Name used in a change for the number of replicas behind the load balancer."""


class FlagChange(Struct, frozen=True):
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
    - `container_args`: the same as the `args` of the container in a pod's spec or a chart's values;
      empty if the server's pod is not read.
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
    container_args: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    restart_at_least_s: Figure | None = None
    lost_requests: int | None = None
    lost_prefix_hit_ratio: Figure | None = None


class Advice(Struct, frozen=True, kw_only=True):
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
      of this server's windows lies, or of 90% where it has not run such a batch. The upper end
      alone is given where a change lets no step take longer.
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
    changes: tuple[FlagChange, ...] = ()
    as_of_s: UnixTime | None = None
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


# --- In documents ---------------------------------------------------------------------------------


def in_document(recommendation: Advice) -> Advice:
    return replace(recommendation, cost_usd_per_hour=rounded(recommendation.cost_usd_per_hour))
