"""The rows of the guide's other tables, and all rows; docs/reference/rules.md is made of them."""

from __future__ import annotations

from kneewatch.reports.weekly.guide_tables import Row, kv_metrics, monitoring

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
    Row("7.4", "Eviction above 10% of active requests a second", ("KV-EVICT",), ("kv_pressure",)),
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
    Row("8.5", "S1 TTFT too high at low concurrency", ("TTFT-P99", "TTFT-P50"), ("prefill_bound",)),
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
    Row("9.1 step 13", "TTFT P99 more than 30% above the benchmark", ("BENCH-TTFT",)),
    Row("9.1 step 13", "ITL P99 more than 30% above the benchmark", ("BENCH-ITL",)),
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
    Row("9.4", "Circuit breaker at 80-90% of the safe queue depth", ("BREAKER", "REJECTED")),
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
    *monitoring(None, {}),
    *kv_metrics({}),
    *DECISIONS,
    *SYMPTOM_LIST,
    *VALIDATION,
    *GUARDRAILS,
    *TIERS,
)
