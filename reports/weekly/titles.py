"""Causes in a few words, as headings of incidents. Pure."""

from __future__ import annotations

from collections.abc import Mapping

TITLES: Mapping[str, str] = {
    "kv_pressure": "KV cache too small for the load",
    "queue_saturation": "Requests came faster than they were served",
    "admission_limit": "max_num_seqs kept requests waiting",
    "past_knee": "Past the knee of the curve",
    "prefix_cache_off": "Prefix caching off under heavy prefill",
    "prefix_reuse_lost": "Prompts stopped sharing prefixes",
    "prefix_churn": "Prefixes evicted before they were used again",
    "routing_dilution": "Routing ignored prefixes",
    "replica_imbalance": "Replicas unevenly loaded",
    "prefill_interference": "Long prefills stalled the streams",
    "prefill_bound": "Prefill made first tokens late",
    "decode_bound": "Decode was slow at every percentile",
    "slo_conflict": "TTFT and ITL targets not both to be met",
    "spec_decode_poor": "Speculative decoding rejected most drafts",
    "adapter_thrash": "LoRA adapters swapped in and out",
    "kv_transfer_slow": "KV transfers were the wait",
    "gpu_throttled": "GPU slowed down",
    "gpu_fault": "GPU fault",
    "workload_drift": "Workload left its profile",
    "runaway_generation": "Outputs ran into their limit",
    "engine_stalled": "Engine stood still",
    "engine_restarted": "Engine was restarted",
    "target_down": "Target was down",
    "metrics_missing": "Metrics were missing",
}


def title(cause: str) -> str:
    """A cause in a few words."""
    return TITLES.get(cause, cause.replace("_", " "))
