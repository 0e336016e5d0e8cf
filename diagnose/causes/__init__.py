"""Every cause that one target's page can show, and which causes explain which. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kneewatch.diagnose.case import Cause, Facts
from kneewatch.diagnose.causes import (
    features,
    gpu_clocks,
    gpu_faults,
    latency,
    left_profile,
    memory,
    observer,
    parallelism,
    prefix,
    transfer,
    workload,
)

CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    gpu_faults.gpu_fault,
    gpu_clocks.gpu_throttled,
    observer.engine_stalled,
    memory.kv_pressure,
    memory.queue_saturation,
    memory.admission_limit,
    prefix.prefix_cache_off,
    prefix.prefix_reuse_lost,
    prefix.prefix_churn,
    features.adapter_thrash,
    transfer.kv_transfer_slow,
    features.spec_decode_poor,
    latency.prefill_interference,
    latency.slo_conflict,
    latency.prefill_bound,
    latency.decode_bound,
    latency.past_knee,
    workload.runaway_generation,
    left_profile.workload_drift,
    workload.underused,
    workload.kv_overprovisioned,
    parallelism.tp_overhead,
    observer.engine_restarted,
)

EXAMINE = {cause.__name__: cause for cause in CAUSES}
"""The examination of each cause, by its id."""

SLOW_PROMPTS = ("prefill_interference", "prefill_bound", "slo_conflict", "past_knee")
QUEUES = ("queue_saturation", "admission_limit", "past_knee", "prefill_bound")

SLOW_GPU = (*dict.fromkeys((*QUEUES, *SLOW_PROMPTS)), "kv_pressure", "decode_bound")

EXPLAINS: dict[str, tuple[str, ...]] = {
    "gpu_fault": (*SLOW_GPU, "engine_stalled", "kv_transfer_slow", "gpu_throttled"),
    "gpu_throttled": SLOW_GPU,
    "engine_stalled": (*QUEUES, "kv_pressure", "adapter_thrash", "kv_transfer_slow"),
    "kv_pressure": (*QUEUES, *SLOW_PROMPTS, "decode_bound", "prefix_churn"),
    "prefix_cache_off": (*SLOW_PROMPTS, "queue_saturation", "admission_limit"),
    "prefix_reuse_lost": (*SLOW_PROMPTS, "queue_saturation", "admission_limit"),
    "prefix_churn": (*SLOW_PROMPTS, "queue_saturation", "admission_limit"),
    "adapter_thrash": (*QUEUES,),
    "kv_transfer_slow": (*QUEUES,),
    "prefill_interference": ("past_knee",),
    "queue_saturation": ("past_knee", "prefill_bound", "slo_conflict"),
    "admission_limit": ("past_knee", "prefill_bound", "slo_conflict"),
    "spec_decode_poor": ("decode_bound",),
    "slo_conflict": ("prefill_bound", "decode_bound", "past_knee"),
    "runaway_generation": ("underused", "workload_drift"),
}
"""What follows from a cause is told with it, not beside it."""

QUEUE_RULES = ("QUEUE-GROWS", "QUEUE-SHARE", "TTFT-TAIL", "BREAKER")

TELLS: dict[str, tuple[str, ...]] = {
    "engine_stalled": QUEUE_RULES,
    "kv_pressure": ("KV-EVICT", "KV-FULL", "ITL-STALL", *QUEUE_RULES),
    "queue_saturation": QUEUE_RULES,
    "admission_limit": QUEUE_RULES,
    "adapter_thrash": ("LORA-WAIT", "LORA-CHANGE", *QUEUE_RULES),
    "kv_transfer_slow": ("XFER-SLOW", "XFER-FAIL", *QUEUE_RULES),
    "prefix_cache_off": ("ITL-STALL", "TTFT-TAIL"),
    "prefix_reuse_lost": ("PREFIX-HIT", "PREFIX-SAVED", "ITL-STALL", "TTFT-TAIL"),
    "prefix_churn": ("PREFIX-HIT", "PREFIX-SAVED", "KV-RESIDENCY", "ITL-STALL", "TTFT-TAIL"),
    "prefill_interference": ("ITL-STALL",),
    "spec_decode_poor": ("SPEC-ACCEPT",),
    "runaway_generation": ("OUTPUT-CAP",),
}
"""Rules whose findings a cause tells already: they are not listed beside it for a person."""

UNDISTURBING = frozenset(
    {
        *("underused", "kv_overprovisioned", "workload_drift", "tp_overhead"),
        *("engine_restarted", "gpu_fault"),
    }
)
"""What does not make a scrape unfit for the quiet baseline: notes, and a GPU's errors, which may
stand for weeks. What they harm is a cause of its own."""


def conclude(facts: Facts) -> list[Cause]:
    """Every cause that its evidence carries, in no order."""
    return [cause for examine in CAUSES if (cause := examine(facts)) is not None]


def ranked(causes: Sequence[Cause]) -> list[Cause]:
    """Causes worst and surest first; explained ones are folded into what explains them.

    A cause explains another only when it is at least as severe: a note does not hide a page. One
    that stands apart explains nothing.
    """
    order = sorted(causes, key=lambda cause: (-cause.severity, -cause.confidence))
    present = {cause.id: cause for cause in order}
    explained: set[str] = set()
    told: list[Cause] = []
    for cause in order:
        within = tuple(
            other
            for other in EXPLAINS.get(cause.id, ())
            if other in present
            and not cause.apart
            and other not in explained
            and cause.id not in explained
            and present[other].severity <= cause.severity
        )
        explained.update(within)
        told.append(replace(cause, explains=within) if within else cause)
    return [cause for cause in told if cause.id not in explained]
