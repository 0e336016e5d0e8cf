"""Replicas and GPUs for a load, replicas to keep warm, and cold starts. Pure."""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Sheet, exact
from kneewatch.rules.formatting import duration, figure, plural, stated_duration

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

    Guide 8.3 applies the margin to GPUs instead, which need not make up a whole replica.
    """

    instances: int
    deployed_instances: int
    gpus: int
    gpus_rounded_once: int
    headroom_ratio: float


def size_fleet(
    sheet: Sheet,
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
    peak, usable, margin = map(exact, (peak_requests_per_s, usable_requests_per_s, safety))
    instances = sheet.line(
        "Replicas for the peak",
        "ceil({peak RPS} / {usable RPS})",
        (peak, usable),
        source="guide 8.3 step 3",
    )
    deployed = sheet.line(
        "Replicas with safety",
        "ceil({replicas} x {safety})",
        (instances, margin),
        source="guide 9.1 step 11",
    )
    by_gpus = figure(float(instances * gpus_each * margin))
    gpus = sheet.line(
        "GPUs",
        "{replicas with safety} x {GPUs per replica}",
        (deployed, gpus_each),
        result=f"{{}} ({by_gpus} before rounding to whole replicas)",
        source="guide 8.3 step 3, 9.1 step 11",
    )
    return FleetSize(
        instances=int(instances),
        deployed_instances=int(deployed),
        gpus=int(gpus),
        gpus_rounded_once=math.ceil(peak / usable * margin) * gpus_each,
        headroom_ratio=float(int(deployed) * usable / peak - 1),
    )


def prefill_decode_ratio(
    sheet: Sheet,
    *,
    peak_requests_per_s: float,
    input_tokens: float,
    output_tokens: float,
    prefill_tokens_per_s_per_gpu: float,
    decode_tokens_per_s_per_gpu: float,
) -> float:
    """The ratio of prefill GPUs to decode GPUs, from the rate of one GPU in each phase alone.

    The peak cancels out of the ratio. Source: guide 6.5.
    """
    peak, prompts, answers = map(exact, (peak_requests_per_s, input_tokens, output_tokens))
    prefill, decode = exact(prefill_tokens_per_s_per_gpu), exact(decode_tokens_per_s_per_gpu)
    return sheet.line(
        "P:D ratio",
        "({RPS} x {input} / {prefill tokens/s per GPU}) / "
        "({RPS} x {output} / {decode tokens/s per GPU})",
        (peak, prompts, prefill, answers, decode),
        result=lambda ratio: f"{figure(ratio)} ({ratio_text(ratio)})",
        source="guide 6.5",
    )


def ratio_text(ratio: float) -> str:
    """A ratio written as 1:2.3."""
    return f"{figure(ratio)}:1" if ratio >= 1 else f"1:{figure(1 / ratio)}"


# --- Admission limits: queue depth and input length (guide 9.4) -----------------------------------


BREAKER_LOW_RATIO, BREAKER_HIGH_RATIO = 0.8, 0.9
"""Shares of the greatest safe queue depth: reject requests before the target is missed (guide
9.4)."""

INPUT_LIMIT_LOW, INPUT_LIMIT_HIGH = 2.0, 3.0
"""The input limit as a multiple of the P95 input (guide 9.4)."""


def circuit_breaker(
    sheet: Sheet,
    *,
    ttft_target_s: float,
    arrivals_per_s: float,
    served_per_s: float,
    quiet_ttft_s: float = 0.0,
    of: str = "TTFT target",
) -> tuple[int, int]:
    """Queue depths (low and high) from which on further requests should be rejected.

    The greatest safe depth is the allowed wait x the rate at which the queue moves: the arrivals,
    or `served_per_s` if the fleet serves less. With a longer queue, waiting alone exceeds the TTFT
    target.

    The guide uses the arrivals and the whole target. Here `quiet_ttft_s`, prefill without a queue,
    is subtracted from the target first. `of` is the target in words.

    Raises:
        SizingError: prefill alone exceeds the target.

    Source: guide 9.4; Little 1961.
    """
    if quiet_ttft_s >= ttft_target_s:
        raise SizingError(
            f"prefill alone takes {duration(quiet_ttft_s)}, and the TTFT target is "
            f"{stated_duration(ttft_target_s)}: no queue is short enough",
            name="quiet_ttft_s",
        )
    depth = sheet.line(
        "Greatest safe queue depth",
        f"({{{of}:s}} - {{TTFT without a queue:s}}) x {{requests/s served:/s}}",
        (exact(ttft_target_s), exact(quiet_ttft_s), exact(min(arrivals_per_s, served_per_s))),
        result="{} requests",
        source="guide 9.4",
    )
    low, high = (
        int(
            sheet.line(
                f"Reject requests (HTTP 429) from, at {when}",
                "floor({share of the depth} x {depth})",
                (exact(share), exact(depth)),
                result="{} queued requests",
                source="guide 9.4",
            )
        )
        for when, share in (("the earliest", BREAKER_LOW_RATIO), ("the latest", BREAKER_HIGH_RATIO))
    )
    return low, high


def input_limit(
    sheet: Sheet,
    *,
    p95_input_tokens: float,
    p99_input_tokens: float,
    max_model_len: float = math.inf,
) -> int:
    """`max_input_tokens` for the gateway: twice the P95 input, but at least the P99.

    At most the model's length. Source: guide 9.4, which gives 2 to 3 times P95; the higher limit is
    in the arithmetic.
    """
    limit, _ = (
        sheet.line(
            f"{name} limit",
            "min(max(ceil({times} x {P95 input}), ceil({P99 input})), {the model's length})",
            (times, p95_input_tokens, p99_input_tokens, max_model_len),
            result="{} tokens",
            source="guide 9.4",
        )
        for name, times in (("Input", INPUT_LIMIT_LOW), ("Highest input", INPUT_LIMIT_HIGH))
    )
    return int(limit)


# --- Cold starts, and what must be warm meanwhile (guide 2.1, 9.2, 9.5) ---------------------------


START_HIGH_S = 300.0
"""Longest usual cold start in seconds, from ordering to the first request (guide 9.2: 2-5
minutes)."""
_BURST_RATIO = 2.0
"""Requests in a burst divided by the usual rate (guide 8.2: 2-3 times)."""
_STANDBY = 1
"""Replicas to spare (guide 9.2: one always available)."""


STORAGE_PATHS: Final = packaged_tables("diagnose.sizing", "storage_paths.toml")
"""Storages that weights are loaded from."""


def cold_start(
    sheet: Sheet,
    *,
    weights_bytes: float,
    path: str,
    provision_s: float = 0.0,
    initialise_s: float = 0.0,
) -> float:
    """The longest seconds from ordering a replica to its first request, for this storage path.

    `provision_s`: time to get the machine and the container. `initialise_s`: the engine's time
    after loading (compile, graphs, warm-up). Both are measured. `weights_bytes` are those of the
    whole replica, because its GPUs share the path.

    Source: guide 2.1 (times by path), 9.5 (measure per hardware tier).
    """
    row = STORAGE_PATHS[path]
    ends = dict.fromkeys((row["high_bytes_per_s"], row["low_bytes_per_s"]))
    slowest_s = 0.0
    for rate, word in zip(ends, ("", " at its lowest rate"), strict=False):
        slowest_s = sheet.line(
            f"Cold start from {path}{word}",
            "{provisioning: s} + {weights:GB} / {bandwidth:GB/s} + {initialization: s}",
            (provision_s, weights_bytes, rate, initialise_s),
            result="{:s}",
            source=row["source"],
        )
    return slowest_s


def warm_minimum(
    sheet: Sheet,
    *,
    lowest_requests_per_s: float,
    usable_requests_per_s: float,
) -> int:
    """Fewest replicas to keep warm: enough for a burst at the quietest hour, and one to spare.

    A burst arrives faster than a replica can start, so its replicas must already be running.

    Source: guide 9.2 (one replica always available), 8.2 (bursts of 2-3 times).
    """
    instances = sheet.line(
        "Warm minimum",
        "max(ceil({lowest RPS} x {burst} / {usable}), ceil({lowest RPS} / {usable}) + {standby})",
        (exact(lowest_requests_per_s), exact(_BURST_RATIO), exact(usable_requests_per_s), _STANDBY),
        result=lambda count: plural(int(count), "replica"),
        source="guide 9.2, 8.2",
    )
    return int(instances)


def scale_up_ratio(
    sheet: Sheet,
    *,
    cold_start_s: float,
    growth_per_s_per_s: float,
    usable_requests_per_s: float,
    instances: int,
) -> float:
    """Share of the fleet's capacity at which to order a replica, so that it serves in time.

    While a replica starts, load grows by `growth_per_s_per_s` requests/s every second. A result of
    0 means that load grows faster than this fleet can follow; replicas must then be scheduled
    ahead.

    Source: guide 9.2 (reactive scaling arrives after the spike), 9.5 (lead time per tier).
    """
    return sheet.line(
        "Order the next replica at",
        "max(1 - {cold start:s} x {growth:requests/s²} / {capacity:requests/s}, 0)",
        (cold_start_s, growth_per_s_per_s, instances * usable_requests_per_s),
        result="{:%} of capacity",
        source="guide 9.2",
    )
