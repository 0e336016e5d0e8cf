"""What the present load asks of the KV cache and of the batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, sqrt

from kneewatch.diagnose.deployment.deployment import Deployment

KV_TARGET_RATIO = 0.9
"""Above it requests are preempted sooner or later: the guide's band ends at 90 % (9.3)."""

KV_AIM_RATIO = 0.8
"""What a new size is computed for: within the guide's 75 to 90 %."""

SPREADS = 3.0
"""Standard deviations above the mean that all requests together stay below, but for one moment in
a thousand."""

Z_95 = 1.645
"""Standard deviations from the mean to the 95th percentile of a normal distribution."""

SHARED_FROM = 0.1
"""Share of prompt tokens that need not be computed from which prefixes are shared."""

LEAST_PER_S = 1e-3
"""A request in a quarter of an hour: fewer are no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the load wants, whether it gets it or not.

    `requests` run or wait for capacity; `held_tokens` is the KV cache that one running request
    holds in the mean, None where nothing tells, and `spread_tokens` their standard deviation: a
    request grows while it runs, and they are not all of a length. `served_per_s` and
    `arrival_per_s` are requests.
    """

    requests: float
    running: float
    waiting: float
    held_tokens: float | None
    served_per_s: float
    arrival_per_s: float
    input_tokens: float | None
    output_tokens: float | None
    saved_ratio: float
    spread_tokens: float = 0.0

    @property
    def tokens(self) -> float | None:
        """KV tokens that all of them together would hold."""
        return None if self.held_tokens is None else self.requests * self.held_tokens

    def peak_tokens(self, requests: float) -> float:
        """KV tokens that so many requests stay below while their phases are independent."""
        return requests * (self.held_tokens or 0.0) + SPREADS * self.spread_tokens * sqrt(requests)

    def most_requests(self, capacity_tokens: float, *, usage_ratio: float) -> int:
        """Requests that stay within that usage in the mean, and within the capacity at their peak.

        The peak, h n + k s sqrt(n) <= c, is a quadratic in sqrt(n).
        """
        held = self.held_tokens or 1.0
        margin = SPREADS * self.spread_tokens
        root = (sqrt(margin**2 + 4 * held * capacity_tokens) - margin) / (2 * held)
        return floor(min(usage_ratio * capacity_tokens / held, root**2))


def demand(values: Mapping[str, float | None], server: Deployment) -> Demand:
    """The demand at one moment.

    A full cache hides what is wanted beyond it, so requests that wait for capacity count as if
    they ran. Arrivals are those served and those by which the queue grows: vLLM shows none before
    its first token.
    """

    def get(key: str) -> float:
        return values.get(key) or 0.0

    running = max(get("running_avg"), get("running"))
    by_capacity = get("waiting_by_capacity")
    deferred = get("waiting_deferred_avg")
    waiting = max(by_capacity, get("waiting_avg") - deferred)
    now = get("running") + by_capacity
    mean = get("running_avg") + max(0.0, get("waiting_avg") - deferred)
    served = values.get("completed_per_s")
    if served is None:
        served = get("arrival_per_s")
    if served < LEAST_PER_S:
        served = 0.0
    return Demand(
        requests=max(now, mean, get("running_max")),
        running=running,
        waiting=waiting,
        held_tokens=_held_tokens(values, server),
        served_per_s=served,
        arrival_per_s=served + max(0.0, get("waiting_slope_per_s")),
        input_tokens=values.get("prompt_tokens_mean") or values.get("prompt_tokens_p50"),
        output_tokens=values.get("output_tokens_mean") or values.get("output_tokens_p50"),
        saved_ratio=min(1.0, max(0.0, get("prefix_saved_ratio"))),
        spread_tokens=_spread_tokens(values),
    )


def _spread_tokens(values: Mapping[str, float | None]) -> float:
    """Standard deviation of what one running request holds, 0 where lengths are not known.

    At a random moment of its life it holds anything between prompt and prompt + output, and
    lengths differ: by how much, their P95 tells.
    """
    output = values.get("output_tokens_mean") or 0.0
    variance = output**2 / 12
    for mean, tail in (
        (values.get("prompt_tokens_mean"), values.get("prompt_tokens_p95")),
        (output / 2, (values.get("output_tokens_p95") or 0.0) / 2),
    ):
        if mean and tail and tail > mean:
            variance += ((tail - mean) / Z_95) ** 2
    return sqrt(variance)


def _held_tokens(values: Mapping[str, float | None], server: Deployment) -> float | None:
    """KV tokens of a running request in the mean: as measured, or by its lengths.

    A request holds its prompt and, over its life, half of its output and half of its last block.
    Lengths see what preemption hides, the gauge what shared prefixes save: the larger counts
    while prefixes are not shared.
    """
    measured, by_length = None, None
    usage, running = values.get("kv_usage_avg_ratio"), values.get("running_avg")
    if usage and running and running >= 1 and server.capacity_tokens:
        measured = usage * server.capacity_tokens / running
    prompt, output = values.get("prompt_tokens_mean"), values.get("output_tokens_mean")
    if prompt is not None and output is not None:
        by_length = prompt + output / 2 + (server.block_tokens or 16) / 2
    if measured is None and by_length is None:
        return None
    shared = measured is not None and (values.get("prefix_saved_ratio") or 0.0) > SHARED_FROM
    held = measured if shared else max(measured or 0.0, by_length or 0.0)
    return max(1.0, held or 0.0)
