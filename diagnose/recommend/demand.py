"""How much KV cache and batch the present load needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, inf, sqrt

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.causes.kv_and_queue import GROWS_FROM_PER_S
from kneewatch.diagnose.deployment.deployment import Deployment

KV_TARGET_RATIO = 0.9
"""Highest KV usage that does not lead to preemptions: the guide's band ends at 90% (9.3)."""

KV_AIM_RATIO = 0.8
"""KV usage that recommended sizes aim at, within the guide's 75 to 90%."""

SPREADS = 3.0
"""Standard deviations above the mean; the sum of all requests exceeds this 0.1% of the time."""

Z_95 = 1.645
"""Standard deviations from the mean to the 95th percentile of a normal distribution."""

SHARED_FROM = 0.1
"""From this share of cached prompt tokens on, prompts count as sharing prefixes."""

LEAST_PER_S = 1e-3
"""About one request in 15 minutes; lower rates count as 0."""


class Demand(Struct, frozen=True, kw_only=True):
    """What the load needs, whether it is served or not.

    - `requests`: the most requests that run or wait for capacity; sizes are for these.
    - `mean_requests`: their mean over the window; mean latencies are for these.
    - `held_tokens`: mean KV cache of a running request in tokens; None if unknown.
    - `spread_tokens`: its standard deviation: requests grow while they run, and lengths differ.
    - `served_per_s`, `arrival_per_s`: requests/s.
    """

    requests: float
    mean_requests: float
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
        """KV tokens of all requests together; None if unknown."""
        return None if self.held_tokens is None else self.requests * self.held_tokens

    def peak_tokens(self, requests: float) -> float:
        """KV tokens that this many independent requests rarely exceed."""
        return requests * (self.held_tokens or 0.0) + SPREADS * self.spread_tokens * sqrt(requests)

    def most_requests(self, capacity_tokens: float, *, usage_ratio: float) -> int:
        """The most requests whose mean stays within `usage_ratio` and whose peak fits.

        The condition for the peak, h n + k s sqrt(n) <= c, is a quadratic in sqrt(n).
        """
        held = self.held_tokens or 1.0
        margin = SPREADS * self.spread_tokens
        root = (sqrt(margin**2 + 4 * held * capacity_tokens) - margin) / (2 * held)
        return floor(min(usage_ratio * capacity_tokens / held, root**2))


def demand(values: Mapping[str, float | None], server: Deployment) -> Demand:
    """The present demand, from the signals of one engine.

    A full cache hides further demand, so requests that wait for capacity count as running.

    vLLM counts a request only at its first token, so the arrival rate is the served rate plus the
    growth of the queue. If the HTTP server accepts requests at a higher rate, that rate is used,
    because clients that give up leave the queue.
    """

    def get(key: str) -> float:
        return values.get(key) or 0.0

    running = max(get("running_avg"), get("running"))
    by_capacity = get("waiting_by_capacity")
    deferred = get("waiting_deferred_avg")
    waiting = max(by_capacity, get("waiting_avg") - deferred)
    now = get("running") + by_capacity
    mean = get("running_avg") + max(0.0, get("waiting_avg") - deferred)
    # Requests between the client and the engine are in none of the engine's gauges. With
    # preemption many requests end, and so arrive, at once. So estimate them by Little's law from
    # the tokens/s, which are even.
    length_tokens = get("output_tokens_mean") or inf
    by_little = get("generation_tokens_per_s") / length_tokens * get("e2e_mean_s")
    # A burst of long answers, or clients that hang up: requests begin, and few of them finish.
    served = max(get("completed_per_s"), get("arrival_per_s"))
    accepted, grows = get("accepted_per_s"), get("waiting_slope_per_s")
    if served < LEAST_PER_S:
        served = 0.0
    requests = max(now, mean, get("running_max"))
    return Demand(
        requests=requests,
        mean_requests=min(requests, max(mean, by_little) or now),
        running=running,
        waiting=waiting,
        held_tokens=_held_tokens(values, server),
        served_per_s=served,
        arrival_per_s=max(served + (grows if grows > GROWS_FROM_PER_S else 0.0), accepted),
        input_tokens=values.get("prompt_tokens_mean") or values.get("prompt_tokens_p50"),
        output_tokens=values.get("output_tokens_mean") or values.get("output_tokens_p50"),
        saved_ratio=min(1.0, max(0.0, get("prefix_saved_ratio"))),
        spread_tokens=_spread_tokens(values),
    )


def ahead(now: Demand, values: Mapping[str, float | None]) -> Demand:
    """The demand that the KV forecast expects within minutes: the present load, grown along its
    trend."""
    peak, expected = values.get("kv_peak_demand_ratio"), values.get("kv_demand_ahead_ratio")
    if not peak or expected is None or expected <= peak:
        return now
    times = expected / peak
    return replace(
        now,
        requests=times * now.requests,
        mean_requests=times * now.mean_requests,
        running=times * now.running,
        served_per_s=times * now.served_per_s,
        arrival_per_s=times * now.arrival_per_s,
    )


def _spread_tokens(values: Mapping[str, float | None]) -> float:
    """Standard deviation of the KV tokens of a running request; 0 if lengths are unknown.

    At a random moment, a request holds between its prompt and its prompt plus output. The spread of
    lengths is computed from their P95.
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
    """Mean KV tokens of a running request, measured or computed from lengths; None if unknown.

    By its lengths, a request holds its prompt, half of its output and half of a block on average.
    Only this figure includes tokens that preemption has freed. Only the measured figure includes
    the savings of shared prefixes. The larger one is used, unless prefixes are shared.
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
