"""The rows of the guide's monitoring tables, each with the rules and causes that cover it, or the
reason why none can. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a guide table. `rules` and `causes` cover it; `gap` says what cannot be observed and
    why."""

    section: str
    subject: str
    rules: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    gap: str = ""


BY_SLO = ("TTFT-P99", "TTFT-P50")

MONITORING = (
    Row("9.3", "GPU memory utilization", ("GPU-MEMORY-LOW", "GPU-MEMORY-HIGH")),
    Row(
        "9.3",
        "GPU compute utilization",
        ("GPU-BUSY-LOW", "GPU-BUSY-FULL", "GPU-SATURATED"),
        gap="needs a GPU source (--gpu-metrics); unknown without",
    ),
    Row(
        "9.3",
        "Adapter cache hit rate",
        ("LORA-WAIT",),
        ("adapter_thrash",),
        gap="vLLM exports no adapter hits or loads; what shows is requests held back for a slot",
    ),
    Row(
        "9.3",
        "Adapter eviction rate",
        ("LORA-CHANGE",),
        ("adapter_thrash",),
        gap="evictions themselves are not exported; changes of the running set stand for them",
    ),
    Row("9.3", "KV cache utilization", ("KV-FULL", "KV-UNUSED"), ("kv_overprovisioned",)),
    Row("9.3", "KV cache eviction rate", ("KV-EVICT",), ("kv_pressure",)),
    Row("9.3", "Fleet utilization", ("FLEET-LOW", "FLEET-HIGH", "IDLE-HOURS"), ("underused",)),
    Row("9.3", "Prefix cache hit rate", ("PREFIX-HIT",), ("prefix_reuse_lost", "prefix_churn")),
    Row("9.3", "TTFT P50 / P99", (*BY_SLO, "TTFT-TAIL"), ("prefill_bound", "past_knee")),
    Row(
        "9.3",
        "ITL / TPOT P50 / P99",
        ("ITL-P99", "ITL-P50", "ITL-STALL"),
        ("prefill_interference", "decode_bound"),
    ),
    Row(
        "9.3",
        "Queue depth",
        ("QUEUE-GROWS", "QUEUE-SHARE"),
        ("queue_saturation", "admission_limit"),
    ),
    Row(
        "9.3",
        "Tokens/GPU-hour",
        gap="a trend without a bound: signal tokens_per_gpu_hour, judged week over week by the "
        "report; needs the number of GPUs",
    ),
    Row("9.3", "Speculative decoding acceptance", ("SPEC-ACCEPT",), ("spec_decode_poor",)),
)

KV_TABLE = (
    Row("7.7", "Cache hit rate", ("PREFIX-HIT",), ("prefix_cache_off", "prefix_reuse_lost")),
    Row("7.7", "Prefix cache reuse ratio", ("PREFIX-SAVED",)),
    Row("7.7", "KV cache utilization", ("KV-FULL", "KV-UNUSED"), ("kv_overprovisioned",)),
    Row("7.7", "Eviction rate", ("KV-EVICT",), ("kv_pressure",)),
    Row(
        "7.7",
        "KV residency time",
        ("KV-RESIDENCY",),
        ("prefix_churn",),
        gap="measured only with --kv-cache-metrics; else estimated from capacity and inflow",
    ),
    Row("7.7", "KV transfer latency", ("XFER-SLOW", "XFER-FAIL"), ("kv_transfer_slow",)),
)
