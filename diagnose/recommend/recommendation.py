"""A change to a live server: exact flags, what it would do, and how to see that it did. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Value = str | float | bool | None

REPLICAS = "replicas"
"""What stands in a change for the number of copies behind the load balancer."""

_PLAIN = (
    "preemption_per_s", "prefix_hit_ratio", "computed_prompt_tokens_per_s", "prefill_mean_s",
    "prefill_p99_s", "itl_stall_per_s", "itl_stall_time_ratio", "itl_p99_s", "kv_transfer_mean_s",
    "output_tokens_p99", "spec_acceptance_ratio", "kv_usage_max_ratio",
)  # fmt: skip
MEASURED: Mapping[str, str] = {
    "kv_usage_ratio": "kv_usage_avg_ratio",
    "ttft_s": "ttft_mean_s",
    "itl_s": "itl_mean_s",
    "waiting_deferred": "waiting_deferred_avg",
    **{key: key for key in _PLAIN},
}
"""What of `before` is measured, and the signal that says what it is now."""


@dataclass(frozen=True, slots=True)
class Change:
    """A flag of `vllm serve` from one value to another; None before: not known, or not given.

    None after: the flag is to be left out. A name without dashes is no flag of vLLM but of what
    runs it (`replicas`, a gateway's limit).
    """

    flag: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One lever against one cause.

    `before` and `predicted` hold finite numbers by key, in the unit that ends the key; what cannot
    be computed is left out. A `kv_demand_ratio` above 1 says that the load still needs more.
    `cost_usd_per_hour` is what it costs more (negative: less), None where no price is known.
    `unknown` says which numbers could not be computed, and what would have to be stated for them.
    `checks` come before the change, `verify` says which signals move where within which time.
    """

    id: str
    cause: str
    changes: tuple[Change, ...]
    summary: str
    predicted: Mapping[str, float]
    cost_usd_per_hour: float | None
    checks: tuple[str, ...]
    risk: str
    verify: tuple[str, ...]
    guide: tuple[str, ...]
    before: Mapping[str, float] = field(default_factory=dict[str, float])
    unknown: tuple[str, ...] = ()


def presently(made: Recommendation, values: Mapping[str, float | None]) -> Recommendation:
    """The recommendation with what is measured now in `before`, by these signals.

    A change is told unchanged while its load is about the same; the diagnosis that it stands in
    moves with every scrape, and one document has one truth about now.
    """
    now = {
        key: float(f"{value:.6g}")
        for key in made.before
        if key in MEASURED and (value := values.get(MEASURED[key])) is not None
    }
    return replace(made, before={**made.before, **now}) if now else made
