"""The rows of the guide's tables, each with the rules and causes that cover it, or the reason why
none can. Pure.

`rules/README.md` is generated from this; a test checks that every id exists.
"""

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

DECISIONS = (
    Row(
        "7.4",
        "Diverse traffic: LRU until frequent prefixes are recomputed",
        ("PREFIX-HIT",),
        ("prefix_churn",),
    ),
    Row(
        "7.4",
        "Few prompts dominate: frequency-based eviction",
        ("KV-RESIDENCY",),
        ("prefix_churn",),
        gap="vLLM does not say which prefixes it evicts; its policy is LRU",
    ),
    Row(
        "7.4",
        "Multi-turn: protect active sessions",
        gap="sessions are not visible in a server's metrics; needs the gateway's",
    ),
    Row("7.4", "Eviction above 10 % of active requests a second", ("KV-EVICT",), ("kv_pressure",)),
    Row(
        "7.4",
        "Disaggregated P/D: an active session sent back to prefill",
        ("XFER-FAIL",),
        ("kv_transfer_slow",),
        gap="a re-prefill is not counted by itself",
    ),
    Row(
        "7.4",
        "Long context: token-level eviction",
        gap="a matter of output quality; vLLM has no such policy to observe",
    ),
    Row(
        "7.4",
        "Token-level eviction with speculation",
        gap="a compatibility rule; vLLM has no such policy to observe",
    ),
)

SYMPTOM_LIST = (
    Row("8.5", "S1 TTFT too high at low concurrency", BY_SLO, ("prefill_bound",)),
    Row("8.5", "S2 ITL spikes under mixed load", ("ITL-STALL",), ("prefill_interference",)),
    Row("8.5", "S3 throughput plateau too low", ("QUEUE-GROWS",), ("queue_saturation",)),
    Row("8.5", "S4 TTFT and ITL cannot both be met", ("TTFT-P99", "ITL-P99"), ("slo_conflict",)),
    Row(
        "8.5",
        "S5 RPS/GPU degrading as TP scales",
        causes=("tp_overhead",),
        gap="needs several TP degrees side by side: a fleet, or sweeps "
        "(benchmark.by_tensor_parallel)",
    ),
    Row(
        "8.5",
        "S6 ITL high at low concurrency with low GPU compute",
        ("ITL-P50",),
        ("decode_bound",),
        gap="needs a GPU source (--gpu-metrics)",
    ),
    Row("8.5", "S7 TTFT spikes on some tenants", ("LORA-WAIT",), ("adapter_thrash",)),
    Row("8.5", "S8 P99 spikes at the peak", ("TTFT-TAIL",), ("past_knee", "kv_pressure")),
)

VALIDATION = (
    Row("9.1 step 13", "TTFT P99 more than 30 % above the benchmark", ("BENCH-TTFT",)),
    Row("9.1 step 13", "GPU utilization more than 20 points below", ("BENCH-GPU",)),
)

GUARDRAILS = (
    Row("9.4", "Input token limit at 2-3 times the P95", ("INPUT-TAIL",)),
    Row("9.4", "One request must not fill the KV cache", ("INPUT-WHOLE-CACHE",)),
    Row("9.4", "Output token limit", ("OUTPUT-CAP",), ("runaway_generation",)),
    Row("9.4", "Runaway generation", ("OUTPUT-CAP",), ("runaway_generation",)),
    Row(
        "9.4",
        "Per-tenant rate limit",
        ("REJECTED",),
        gap="tenants are not visible in a server's metrics; needs the gateway's",
    ),
    Row("9.4", "Circuit breaker at 80-90 % of the safe queue depth", ("BREAKER", "REJECTED")),
)

TIERS = (
    Row(
        "9.5",
        "Each hardware tier judged by itself",
        gap="held by construction: every engine is judged alone, nothing is averaged across "
        "targets; mixed tiers behind one balancer need a fleet's view",
    ),
)

ROWS: tuple[Row, ...] = (
    *MONITORING,
    *KV_TABLE,
    *DECISIONS,
    *SYMPTOM_LIST,
    *VALIDATION,
    *GUARDRAILS,
    *TIERS,
)
