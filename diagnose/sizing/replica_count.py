"""Replicas and GPUs for a load, replicas to keep warm, and cold starts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Step, exact, gigabytes, seconds
from kneewatch.rules.formatting import duration, figure, percent, plural

SAFETY_DEFAULT = 1.3
"""The factor in the guide's worked example (figure 8.2).

Guide 8.3: 1.2 for stable traffic; 1.5 for new deployments, highly variable inputs or severe SLO
violations.
"""


class FleetSize(Struct, frozen=True):
    """A fleet for a peak.

    - `instances`: replicas for the peak without margin.
    - `deployed_instances`: replicas with the margin, rounded up (guide 9.1 step 11).
    - `gpus`: the GPUs of the deployed replicas.
    - `gpus_rounded_once`: the fewest GPUs that still serve peak x safety, because the margin is
      applied before any rounding.
    - `headroom_ratio`: the deployed capacity above the peak.
    - `spare_instances`: replicas that may fail at the peak without missing the targets.

    Guide 8.3 applies the margin to GPUs instead, which need not make up a whole replica.
    """

    instances: int
    deployed_instances: int
    gpus: int
    gpus_rounded_once: int
    headroom_ratio: float
    spare_instances: int
    steps: tuple[Step, ...]


def size_fleet(
    *,
    peak_requests_per_s: float,
    usable_requests_per_s: float,
    gpus_each: int = 1,
    safety: float = SAFETY_DEFAULT,
) -> FleetSize:
    """The fleet that serves the peak with a margin, given one replica's usable requests/s.

    A replica has `gpus_each` GPUs. `safety` is a factor: 1.3 adds 30%.

    Source: guide 8.3 step 3 and figure 8.2; 9.1 step 11.
    """
    needed = exact(peak_requests_per_s) / exact(usable_requests_per_s)
    instances = math.ceil(needed)
    deployed = math.ceil(instances * exact(safety))
    capacity = deployed * exact(usable_requests_per_s)
    by_gpus = float(instances * gpus_each * exact(safety))
    return FleetSize(
        instances=instances,
        deployed_instances=deployed,
        gpus=deployed * gpus_each,
        gpus_rounded_once=math.ceil(needed * exact(safety)) * gpus_each,
        headroom_ratio=float(capacity / exact(peak_requests_per_s) - 1),
        spare_instances=deployed - instances,
        steps=(
            Step(
                title="Replicas for the peak",
                formula="ceil(peak RPS / usable RPS)",
                values=f"ceil({figure(peak_requests_per_s)} / {figure(usable_requests_per_s)}) "
                f"= ceil({figure(float(needed))})",
                result=f"{instances}",
                source="guide 8.3 step 3",
            ),
            Step(
                title="Replicas with safety",
                formula="ceil(replicas x safety)",
                values=f"ceil({instances} x {figure(safety)})",
                result=f"{deployed}",
                source="guide 9.1 step 11",
            ),
            Step(
                title="GPUs",
                formula="replicas with safety x GPUs per replica",
                values=f"{deployed} x {gpus_each}",
                result=f"{deployed * gpus_each} ({figure(by_gpus)} before rounding to whole "
                "replicas)",
                source="guide 8.3 step 3, 9.1 step 11",
            ),
        ),
    )


class PrefillDecodeRatio(Struct, frozen=True):
    """GPUs of the two pools of a disaggregated fleet.

    `ratio` is prefill divided by decode; `text` is the same, written as 1:2.3.
    """

    ratio: float
    prefill_gpus_exact: float
    decode_gpus_exact: float
    text: str
    step: Step


def prefill_decode_ratio(
    *,
    peak_requests_per_s: float,
    input_tokens: float,
    output_tokens: float,
    prefill_tokens_per_s_per_gpu: float,
    decode_tokens_per_s_per_gpu: float,
) -> PrefillDecodeRatio:
    """The ratio of prefill GPUs to decode GPUs, from the rate of one GPU in each phase alone.

    The peak cancels out of the ratio and affects only the sizes of the pools. Source: guide 6.5.
    """

    def gpus(tokens: float, rate: float) -> Fraction:
        return exact(peak_requests_per_s) * exact(tokens) / exact(rate)

    prefill = gpus(input_tokens, prefill_tokens_per_s_per_gpu)
    decode = gpus(output_tokens, decode_tokens_per_s_per_gpu)
    ratio, peak = float(prefill / decode), figure(peak_requests_per_s)
    text = f"{figure(ratio)}:1" if ratio >= 1 else f"1:{figure(1 / ratio)}"
    step = Step(
        title="P:D ratio",
        formula="(RPS x input / prefill tokens/s) / (RPS x output / decode tokens/s), per GPU",
        values=f"({peak} x {figure(input_tokens)} / {figure(prefill_tokens_per_s_per_gpu)}) / "
        f"({peak} x {figure(output_tokens)} / {figure(decode_tokens_per_s_per_gpu)})",
        result=text,
        source="guide 6.5",
    )
    return PrefillDecodeRatio(ratio, float(prefill), float(decode), text, step)


# --- Admission limits: queue depth and input length (guide 9.4) -----------------------------------


BREAKER_LOW_RATIO, BREAKER_HIGH_RATIO = 0.8, 0.9
"""Shares of the greatest safe queue depth: reject requests before the target is missed (guide
9.4)."""

INPUT_LIMIT_LOW, INPUT_LIMIT_HIGH = 2.0, 3.0
"""The input limit as a multiple of the P95 input (guide 9.4)."""


def circuit_breaker(
    *, ttft_target_s: float, arrivals_per_s: float, served_per_s: float, quiet_ttft_s: float = 0.0
) -> tuple[int, int, tuple[Step, ...]]:
    """Queue depths (low and high) from which on further requests should be rejected.

    The greatest safe depth is the allowed wait x the rate at which the queue moves: the arrivals,
    or `served_per_s` if the fleet serves less. With a longer queue, waiting alone exceeds the TTFT
    target.

    The guide uses the arrivals and the whole target. Here `quiet_ttft_s`, prefill without a queue,
    is subtracted from the target first.

    Raises:
        SizingError: prefill alone exceeds the target.

    Source: guide 9.4; Little 1961.
    """
    if quiet_ttft_s >= ttft_target_s:
        raise SizingError(
            f"prefill alone takes {duration(quiet_ttft_s)}, and the TTFT target is "
            f"{duration(ttft_target_s)}: no queue is short enough",
            name="quiet_ttft_s",
        )
    rate = min(arrivals_per_s, served_per_s)
    depth = (exact(ttft_target_s) - exact(quiet_ttft_s)) * exact(rate)
    low, high = (
        math.floor(depth * exact(share)) for share in (BREAKER_LOW_RATIO, BREAKER_HIGH_RATIO)
    )
    steps = (
        Step(
            title="Greatest safe queue depth",
            formula="(TTFT target - TTFT without a queue) x requests/s served",
            values=f"({figure(ttft_target_s)} - {figure(quiet_ttft_s)}) s x {figure(rate)} /s",
            result=f"{figure(float(depth))} requests",
            source="guide 9.4",
        ),
        Step(
            title="Reject requests (HTTP 429) from",
            formula="80-90% of the depth",
            values=f"0.8 to 0.9 x {figure(float(depth))}",
            result=f"{low} to {high} queued requests",
            source="guide 9.4",
        ),
    )
    return low, high, steps


def input_limit(
    *, p95_input_tokens: float, p99_input_tokens: float, max_model_len: float = math.inf
) -> tuple[int, Step]:
    """`max_input_tokens` for the gateway: twice the P95 input, but at least the P99.

    At most the model's length. Source: guide 9.4, which gives 2 to 3 times P95; the higher limit is
    in the arithmetic.
    """
    least = max(math.ceil(INPUT_LIMIT_LOW * p95_input_tokens), math.ceil(p99_input_tokens))
    low = min(max_model_len, least)
    high = min(max_model_len, max(math.ceil(INPUT_LIMIT_HIGH * p95_input_tokens), low))
    return int(low), Step(
        title="Input limit",
        formula="2 to 3 x P95 input, at least P99, at most the model's length",
        values=f"2 to 3 x {figure(p95_input_tokens)}, P99 {figure(p99_input_tokens)}",
        result=f"{figure(low)} to {figure(high)} tokens",
        source="guide 9.4",
    )


# --- Cold starts, and what must be warm meanwhile (guide 2.1, 9.2, 9.5) ---------------------------


START_HIGH_S = 300.0
"""Longest usual cold start in seconds, from ordering to the first request (guide 9.2: 2-5
minutes)."""
_BURST_RATIO = 2.0
"""Requests in a burst divided by the usual rate (guide 8.2: 2-3 times)."""


class StoragePath(Struct, frozen=True):
    """A storage that weights are loaded from, with its lowest and highest bytes/s."""

    name: str
    low_bytes_per_s: float
    high_bytes_per_s: float
    source: str


STORAGE_PATHS: Mapping[str, StoragePath] = {
    path.name: path
    for path in (
        StoragePath("local-nvme", 12.5e9, 12.5e9, "guide 2.1 and 5.6"),
        StoragePath("nvme-drive", 7.0e9, 7.0e9, "guide 7.6: one enterprise drive, sequential"),
        StoragePath("nvme-loader", 70e9 / 60, 70e9 / 30, "guide 9.2: 70 GB in 30-60 s"),
        StoragePath("network-10gbe", 1.1e9, 1.1e9, "guide 2.1"),
        # From the times in the guide's row: its rate column, 0.5-1.0 GB/s, gives half as long.
        StoragePath("object-storage", 70e9 / 300, 70e9 / 120, "guide 2.1: 70 GB in 2-5 min"),
    )
}


def cold_start(
    *, weights_bytes: float, path: StoragePath, provision_s: float = 0.0, initialise_s: float = 0.0
) -> tuple[float, Step]:
    """The longest seconds from ordering a replica to its first request, for this storage path.

    `provision_s`: time to get the machine and the container. `initialise_s`: the engine's time
    after loading (compile, graphs, warm-up). Both are measured. `weights_bytes` are those of the
    whole replica, because its GPUs share the path.

    Source: guide 2.1 (times by path), 9.5 (measure per hardware tier).
    """
    around = provision_s + initialise_s
    fastest = weights_bytes / path.high_bytes_per_s + around
    slowest = weights_bytes / path.low_bytes_per_s + around
    rates = sorted({path.low_bytes_per_s / 1e9, path.high_bytes_per_s / 1e9}, reverse=True)
    return slowest, Step(
        title=f"Cold start from {path.name}",
        formula="provisioning + weights / bandwidth + initialization",
        values=f"{figure(provision_s)} s + {gigabytes(weights_bytes)} / "
        f"{' to '.join(figure(rate) for rate in rates)} GB/s + {figure(initialise_s)} s",
        result=seconds(fastest) + ("" if len(rates) == 1 else f" to {seconds(slowest)}"),
        source=path.source,
    )


def warm_minimum(
    *, lowest_requests_per_s: float, usable_requests_per_s: float, burst_ratio: float = _BURST_RATIO
) -> tuple[int, Step]:
    """Fewest replicas to keep warm: enough for a burst at the quietest hour, and one to spare.

    A burst arrives faster than a replica can start, so its replicas must already be running.

    Source: guide 9.2 (one replica always available), 8.2 (bursts of 2-3 times).
    """
    lowest, usable = exact(lowest_requests_per_s), exact(usable_requests_per_s)
    base = math.ceil(lowest / usable)
    instances = max(math.ceil(lowest * exact(burst_ratio) / usable), base + 1)
    return instances, Step(
        title="Warm minimum",
        formula="max(ceil(lowest RPS x burst / usable), ceil(lowest RPS / usable) + standby)",
        values=f"max(ceil({figure(lowest_requests_per_s)} x {figure(burst_ratio)} / "
        f"{figure(usable_requests_per_s)}), {base} + 1)",
        result=plural(instances, "replica"),
        source="guide 9.2, 8.2",
    )


def scale_up_ratio(
    *,
    cold_start_s: float,
    growth_per_s_per_s: float,
    usable_requests_per_s: float,
    instances: int,
) -> tuple[float, tuple[Step, ...]]:
    """Share of the fleet's capacity at which to order a replica, so that it serves in time.

    While a replica starts, load grows by `growth_per_s_per_s` requests/s every second. A result of
    0 means that load grows faster than this fleet can follow; replicas must then be scheduled
    ahead.

    Source: guide 9.2 (reactive scaling arrives after the spike), 9.5 (lead time per tier).
    """
    capacity = instances * usable_requests_per_s
    order_at = max(0.0, 1 - cold_start_s * growth_per_s_per_s / capacity)
    lead = seconds(cold_start_s)
    return order_at, (
        Step(
            "Lead time of a replica",
            "reaction + cold start",
            f"0 + {lead}",
            lead,
            "guide 9.2, 9.5",
        ),
        Step(
            title="Order the next replica at",
            formula="1 - lead time x growth / capacity",
            values=f"1 - {lead} x {figure(growth_per_s_per_s)} requests/s² / "
            f"{figure(capacity)} requests/s",
            result=f"{percent(order_at)} of capacity",
            source="guide 9.2",
        ),
    )


def remapped_ratio(*, replicas: int, new_replicas: int, consistent: bool) -> float:
    """Share of prefixes that move to another replica when the number of replicas changes.

    With modulo, a prefix stays if hash % N = hash % M. With consistent hashing, only the prefixes
    of the added or removed replicas move.
    """
    few, many = sorted((replicas, new_replicas))
    if consistent or few == many:
        return (many - few) / many
    # Of one period of both moduli, only the hashes below the smaller one agree.
    return 1 - few / math.lcm(replicas, new_replicas)
