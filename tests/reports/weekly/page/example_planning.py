"""What a made-up tier was asked for, what it needs, what it costs."""

from __future__ import annotations

from kneewatch.reports.weekly.figures import ReportedFlag, Trend
from kneewatch.reports.weekly.report import (
    Arrivals,
    Drift,
    Lengths,
    Lever,
    LeverFigure,
    MemoryPart,
    Option,
    Saving,
    TierMoney,
    TierSize,
    TierWorkload,
)
from tests.reports.weekly.page.example_service import figure

GIB = 1024.0**3


def lengths(p50: float, p99: float, *, longer: bool = False) -> Lengths:
    """Lengths of prompts or outputs; `longer` than the week before."""

    def length_trend(name: str, value: float) -> Trend:
        if longer:
            return figure(name, "tokens", value, 0.7 * value, "up")
        return figure(name, "tokens", value, value)

    return Lengths(
        length_trend("P50", p50),
        length_trend("P95", 0.7 * p99),
        length_trend("P99", p99),
        length_trend("mean", 1.4 * p50),
    )


def workload(tier: str, from_s: float, place: int) -> TierWorkload:
    """A chat with longer prompts than stated, or code without a stated profile."""
    sick = place % 5 == 0
    return TierWorkload(
        tier=tier,
        prompt=lengths(1210.0, 7900.0, longer=sick),
        output=lengths(214.0, 1022.0),
        computed_prompt_ratio=0.63,
        arrivals=Arrivals(
            window_s=60.0,
            mean_per_s=figure("mean", "per_s", 1.34, 1.11, "up"),
            p95_per_s=figure("P95", "per_s", 4.9, 4.6),
            p99_per_s=figure("P99", "per_s", 7.2, 5.1, "up"),
            highest_per_s=9.8,
            highest_at_s=from_s + 38.6 * 3600,
            peak_to_mean_ratio=5.4,
        ),
        archetype="chat" if sick else "code",
        archetype_why="Prompts of 1,210 and outputs of 214 tokens, half of them turns of a "
        "conversation.",
        bottleneck="Decode takes most of the time: memory bandwidth is what there is least of.",
        drift=(
            Drift("Mean prompt", "tokens", 1100.0, 1690.0, 1.54, 1.3, "warning"),
            Drift("Mean output", "tokens", 300.0, 299.0, 1.0, 1.3, "ok"),
            Drift("Peak", "per_s", 6.0, 7.2, 1.2, 1.3, "ok"),
        ) if sick else (),
        drift_missing="" if sick else "No workload is stated: name its profile in the settings "
        "([[tiers]] workload) to be told of drift.",
    )  # fmt: skip


def size(tier: str, place: int) -> TierSize:
    """A tier that is too small, or one that is too large."""
    sick = place % 5 == 0
    return TierSize(
        tier=tier,
        verdict="too small" if sick else "too large",
        relative=False,
        replicas_present=4 if sick else 2,
        replicas_needed=6 if sick else 1,
        gpus_present=8 if sick else 4,
        gpus_needed=12 if sick else 2,
        peak_requests_per_s=7.2,
        usable_requests_per_s=2.1,
        usable_source="learned from this week's windows",
        safety=1.3,
        headroom_ratio=-0.29 if sick else 2.2,
        memory=(
            MemoryPart("weights", 65.7 * GIB),
            MemoryPart("activations", 2.1 * GIB),
            MemoryPart("CUDA graphs and overhead", 1.9 * GIB),
            MemoryPart("KV cache at the peak", 6.8 * GIB if sick else 0.9 * GIB),
        ),
        gpu_memory_bytes=79.1 * GIB,
        kv_capacity_tokens=44_500.0,
        kv_peak_tokens=44_411.0 if sick else 6_000.0,
        kv_peak_ratio=0.998 if sick else 0.13,
        options=(
            Option("H100", 2, 6, 12, 36.0, 8.4, "as now, two replicas more"),
            Option("H200", 2, 4, 8, 33.6, 9.1, "the KV cache grows by 113 GiB"),
            Option("B200", 1, 5, 5, None, 8.8, "weights in fp8; no price is stated for it"),
        ),
        levers=(
            Lever("kv-fp8", "Store the KV cache in fp8.",
                  (ReportedFlag("--kv-cache-dtype", "auto", "fp8"),),
                  (LeverFigure("kv_capacity_tokens", 44_500.0, 89_000.0),
                   LeverFigure("kv_usage_ratio", 0.998, 0.74)), 8, 12.0),
            Lever("replicas", "Two replicas more.", (), (LeverFigure("load_ratio", 1.29, 0.86),),
                  12, -12.0),
        ) if sick else (),
        doubts=() if sick else ("No load past the knee was seen: one engine may carry more.",),
        notes=("The memory is predicted for this launch; vLLM's own figure of the KV cache is "
               "1.2% lower.",),
    )  # fmt: skip


def money(tier: str, place: int) -> TierMoney:
    """What a week cost; the second tier is idle for half of it."""
    sick = place % 5 == 0
    return TierMoney(
        tier=tier,
        gpus=8 if sick else 4,
        gpu_hours=1344.0 if sick else 672.0,
        usd_per_gpu_hour=2.0 if sick else 2.75,
        price_source="stated in the settings",
        usd=figure("Paid", "usd", 2688.0 if sick else 1848.0, 2688.0),
        tokens_per_gpu_hour=figure("Tokens per GPU-hour", "tokens", 1_148_000.0, 921_000.0, "up",
                                   True),
        usd_per_million_tokens=figure("Cost of tokens", "usd_per_million_tokens", 1.84, 2.31,
                                      "down", True),
        requests_per_s_per_gpu=figure("Requests/s per GPU", "per_s", 0.84, 0.71, "up", True),
        requests_in_time_per_usd=figure("In time per USD", "requests_per_usd", 1480.0, 1210.0,
                                        "up", True),
        tokens_per_s_per_hbm_gb=figure("Tokens/s per GB", "tokens_per_s", 3.7, 3.1, "up", True),
        usd_per_million_tokens_at_full=0.85,
        utilization_ratio=figure("Utilization", "ratio", 0.46 if sick else 0.18, 0.44),
        utilization_basis="mean requests a second over the usable ones, learned this week",
        idle_hours=121.0 if sick else 390.0,
        idle_ratio=0.09 if sick else 0.58,
        idle_usd=242.0 if sick else 1072.5,
        savings=(
            Saving("kv-fp8", "gpu-node-3:8000", "0", "Store the KV cache in fp8.", "open", 12.0,
                   8760.0, "the quality of answers must be checked"),
            Saving("replicas", "gpu-node-1:8000", "0", "Two replicas more.", "lapsed", -12.0,
                   -8760.0, ""),
        ) if sick else (),
    )  # fmt: skip
