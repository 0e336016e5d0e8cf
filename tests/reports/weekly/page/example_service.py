"""How a made-up tier served: the guide's tables, the SLO, the knee."""

from __future__ import annotations

import math

from kneewatch.diagnose.capacity import Range
from kneewatch.reports.weekly.figures import Spark, Trend
from kneewatch.reports.weekly.report import (
    BenchmarkCheck,
    ErrorBudget,
    Hour,
    KneeStep,
    Latency,
    TableRow,
    TierKnee,
    TierSlo,
    TierTables,
    WeekdayHour,
)

HOUR_S = 3600.0
NO_GPU = "no GPU source"
ENABLE_GPU = "name the GPUs' DCGM exporter (--gpu-metrics), or run kneewatch on their node"


def load(hour: int) -> float:
    """How busy an hour of the week is, 0 to 1: days and nights, a calm weekend."""
    day, clock = divmod(hour, 24)
    wave = 0.5 - 0.5 * math.cos((clock - 3) / 24 * 2 * math.pi)
    return (0.12 + 0.88 * wave**2) * (0.35 if day % 7 >= 5 else 1.0)


def incident(hour: int) -> bool:
    """Whether an hour of the week is one of an incident."""
    return hour in (38, 39, 86)


def spark(high: float, unit: str, *, unknown: bool = False, floor: float = 0.0) -> Spark:
    """A figure that follows the load, by four hours."""
    values = tuple(
        None if unknown or step == 36 else floor + (high - floor) * load(4 * step + 2)
        for step in range(42)
    )  # fmt: skip
    return Spark(1794178800.0, 4 * HOUR_S, unit, values)


def row(
    subject: str,
    figures: tuple[Trend, ...],
    band: str,
    state: str,
    *,
    section: str = "9.3",
    low: float | None = None,
    high: float | None = None,
    advice: str = "",
    missing: str = "",
    enable: str = "",
    shown: Spark | None = None,
    rules: tuple[str, ...] = (),
    causes: tuple[str, ...] = (),
) -> TableRow:
    """A row of one of the guide's tables."""
    how = f"Time-weighted mean of {subject.lower()} over all engines, from every scrape."
    return TableRow(section, subject, figures, band, low, high, state, advice, missing, enable, how,
                    rules, causes, shown)  # fmt: skip


def figure(name: str, unit: str, value: float | None, before: float | None = None,
           direction: str = "same", good: bool | None = None) -> Trend:  # fmt: skip
    """A figure with its former value."""
    return Trend(name.lower() or "figure", name, unit, value, before, 0.01, direction, good)


def tables(tier: str, place: int) -> TierTables:
    """Every row of both tables: in band, beyond it, unknown, without a bound."""
    sick = place % 5 == 0
    none = (figure("", "ratio", None, None, "unknown"),)
    monitoring = (
        row("GPU memory utilization", none, "80 to 90%", "unknown", missing=NO_GPU,
            enable=ENABLE_GPU, low=0.8, high=0.9),
        row("GPU compute utilization", none, "60 to 85% while serving", "unknown", missing=NO_GPU,
            enable=ENABLE_GPU, low=0.6, high=0.85),
        row("Adapter cache hit rate", none, "above 80%", "unknown",
            missing="no LoRA adapter was served", enable="nothing to do without adapters"),
        row("Adapter eviction rate", (figure("", "per_s", 0.0, 0.0),), "near zero", "ok"),
        row("KV cache utilization",
            (figure("while serving", "ratio", 0.83 if sick else 0.21, 0.71, "up"),
             figure("busiest hour", "ratio", 0.998 if sick else 0.34, 0.93, "up")),
            "75 to 90%", "warning" if sick else "info", low=0.75, high=0.9,
            advice="Near 100%: store the KV cache in fp8 or give it more memory."
            if sick else "Low: more sequences, or fewer replicas.",
            shown=spark(0.98, "ratio"), rules=("KV-HIGH",), causes=("kv_pressure",)),
        row("KV cache eviction rate",
            (figure("", "ratio_per_s", 0.013 if sick else 0.0, 0.0, "up" if sick else "same",
                    False if sick else None),
             figure("worst hour", "ratio_per_s", 0.24 if sick else 0.0, 0.0,
                    "up" if sick else "same", False if sick else None)),
            "below 5%", "critical" if sick else "ok", high=0.05,
            advice="The fleet was degraded: see the incidents." if sick else "",
            shown=spark(0.21 if sick else 0.0, "ratio_per_s"), rules=("KV-EVICT",)),
        row("Fleet utilization", (figure("", "ratio", 0.46 if sick else 0.18, 0.44),),
            "60 to 80%", "ok" if sick else "warning", low=0.6, high=0.8,
            advice="" if sick else "Below 40%: the utilization trap.", shown=spark(0.79, "ratio")),
        row("Prefix cache hit rate", (figure("", "ratio", 0.61, 0.6),), "depends on the workload",
            "trend", shown=spark(0.66, "ratio", floor=0.5)),
        row("TTFT", (figure("P50", "s", 0.21, 0.2),
                     figure("P99", "s", 4.21 if sick else 0.62, 1.32 if sick else 0.6,
                            "up" if sick else "same", False if sick else None)),
            "P99 within 2 s", "warning" if sick else "ok", high=2.0,
            advice="P99 is over and P50 is fine: queue or prefill in between." if sick else "",
            shown=spark(3.9 if sick else 0.7, "s", floor=0.3)),
        row("ITL", (figure("P50", "s", 0.024, 0.024), figure("P99", "s", 0.081, 0.079)),
            "P99 within 100 ms", "ok", high=0.1, shown=spark(0.085, "s", floor=0.05)),
        row("Queue depth", (figure("", "", 3.4 if sick else 0.02, 0.9, "up", not sick),),
            "near zero", "warning" if sick else "ok", shown=spark(41.0 if sick else 0.1, "")),
        row("Tokens per GPU-hour", (figure("", "tokens", 1_148_000.0, 921_000.0, "up", True),),
            "as many as possible", "trend", shown=spark(2.4e6, "tokens")),
        row("Speculative decoding acceptance rate", none, "above 60%", "unknown",
            missing="no speculative decoding in this time",
            enable="nothing to do where it is not used"),
    )  # fmt: skip
    kv = (
        row("Cache hit rate", (figure("", "ratio", 0.61, 0.6),), "depends on the workload", "trend",
            section="7.7", shown=spark(0.66, "ratio", floor=0.5)),
        row("Prefix cache reuse ratio", (figure("", "ratio", 0.37, 0.36),), "near the hit rate",
            "ok", section="7.7", shown=spark(0.4, "ratio", floor=0.3)),
        row("KV cache utilization", (figure("", "ratio", 0.83 if sick else 0.21, 0.71, "up"),),
            "neither low nor near 100%", "warning" if sick else "info", section="7.7",
            shown=spark(0.98, "ratio")),
        row("Eviction rate", (figure("", "ratio_per_s", 0.013 if sick else 0.0, 0.0),),
            "below 10%", "ok", section="7.7", high=0.1,
            shown=spark(0.21 if sick else 0.0, "ratio_per_s")),
        row("KV residency time", (figure("", "s", None, None, "unknown"),), "longer than reuse",
            "unknown", section="7.7", missing="vllm:kv_block_lifetime_seconds is not on the page",
            enable="start vLLM with --kv-cache-metrics (0.11 or newer)"),
        row("KV transfer latency", (figure("", "s", None, None, "unknown"),), "steady", "unknown",
            section="7.7", missing="no KV transfer between nodes or tiers",
            enable="nothing to do where the cache stays on its GPU"),
    )  # fmt: skip
    return TierTables(tier, monitoring, kv)


def latency(name: str, p50: float, p99: float, budget_s: float | None, *, worse: bool) -> Latency:
    """A latency of the week and of the one before."""
    p95, mean = 0.6 * p99, 1.3 * p50
    state = "unknown" if budget_s is None else "warning" if p99 > budget_s else "ok"
    p50_, p95_, p99_, mean_ = (
        figure(label, "s", value, value / 2 if worse and label == "P99" else 0.98 * value,
               "up" if worse and label == "P99" else "same", False if worse else None)
        for label, value in (("P50", p50), ("P95", p95), ("P99", p99), ("mean", mean))
    )  # fmt: skip
    judged = None if budget_s is None else budget_s
    return Latency(name, p50_, p95_, p99_, mean_, observations=812_345.0, budget_s=budget_s,
                   within_ratio=None if budget_s is None else 0.978 if worse else 0.9994,
                   judged_at_s=judged, state=state)  # fmt: skip


def slo(tier: str, from_s: float, place: int) -> TierSlo:
    """A week of latencies, hour by hour, with an hour that nobody watched."""
    sick = place % 5 == 0
    scale = 6000.0 if sick else 900.0
    hours: list[Hour] = []
    for place_of_hour in range(168):
        busy, bad = load(place_of_hour), sick and incident(place_of_hour)
        seen = place_of_hour != 146
        bad_ratio = 0.31 if bad else 0.002 * busy
        hours.append(
            Hour(
                start_s=from_s + place_of_hour * HOUR_S,
                weekday=place_of_hour // 24,
                hour=place_of_hour % 24,
                watched_ratio=1.0 if seen else 0.0,
                requests=scale * busy if seen else None,
                tokens=scale * busy * 310 if seen else None,
                ttft_p50_s=(0.15 + 0.15 * busy) if seen else None,
                ttft_p99_s=(31.0 if bad else 0.4 + 0.9 * busy) if seen else None,
                itl_p99_s=0.05 + 0.03 * busy if seen else None,
                in_flight=48 * busy if seen else None,
                bad_ratio=bad_ratio if seen else None,
                burn=bad_ratio / 0.01 if seen else None,
            )
        )
    return TierSlo(
        tier=tier,
        latencies=(
            latency("ttft", 0.21, 4.21 if sick else 0.62, 2.0, worse=sick),
            latency("itl", 0.024, 0.081, 0.1, worse=False),
            latency("e2e", 6.1, 21.4, None, worse=False),
            latency("queue", 0.01, 2.9 if sick else 0.02, None, worse=False),
            latency("prefill", 0.17, 0.48, None, worse=False),
            latency("decode", 5.8, 20.2, None, worse=False),
        ),
        served_per_s=figure("Served", "per_s", 1.34, 1.11, "up"),
        goodput_per_s=figure("In time", "per_s", 1.31, 1.1, "up", True),
        budget=ErrorBudget(0.99, 812_345.0, 17_872.0 if sick else 487.0, 0.022 if sick else 0.0006,
                           2.2 if sick else 0.06),
        hours=tuple(hours),
        by_weekday=tuple(
            WeekdayHour(hour.weekday, hour.hour, hour.requests, hour.bad_ratio, hour.burn,
                        hour.ttft_p99_s)
            for hour in hours
        ),
        queue_ratio=0.07,
        prefill_ratio=0.05,
        decode_ratio=0.86,
        other_ratio=0.02,
    )  # fmt: skip


def spread(value: float, off: float = 0.08) -> Range:
    """A value and what it may be."""
    return Range(value * (1 - off), value, value * (1 + off))


def knee(tier: str, from_s: float, place: int) -> TierKnee:
    """A knee at 41 requests in flight; the peak past it in the first tier."""
    sick = place % 5 == 0
    loads = (2, 6, 10, 16, 22, 28, 34, 40, 46, 52, 60) if sick else (1, 2, 4, 6, 9, 12, 15)
    steps = tuple(
        KneeStep(
            in_flight=float(at),
            windows=40 + 7 * number,
            requests_per_s=spread(0.42 * at / (1 + (at / 60) ** 2)),
            tokens_per_s=spread(62 * at / (1 + (at / 55) ** 3)),
            token_s=spread(0.016 * (1 + (at / 55) ** 3)),
            ttft_p99_s=spread(0.3 * (1 + (at / 36) ** 5), 0.15),
            itl_p99_s=spread(0.05 * (1 + (at / 50) ** 4)),
        )
        for number, at in enumerate(loads)
    )
    return TierKnee(
        tier=tier,
        steps=steps,
        c_max=Range(37.0, 41.0, 46.0) if sick else Range(15.0, 15.0, 15.0),
        usable_requests_per_s=Range(1.9, 2.1, 2.3) if sick else spread(0.8),
        reached=sick,
        basis="Windows of one minute in which the load was steady."
        if sick else "No load past the knee was seen.",
        peak_in_flight=52.0 if sick else 12.0,
        peak_requests_per_s=2.4 if sick else 0.6,
        peak_at_s=from_s + 38.6 * HOUR_S,
        peak_target="gpu-node-3:8000" if sick else "coder-a:8000",
        position_ratio=1.27 if sick else 0.8,
        little_requests_per_s=2.6,
        little_gap_ratio=1.24,
        benchmark=(
            BenchmarkCheck("TTFT P99", "s", 1.1, 4.21, 2.83, 0.3, "warning"),
            BenchmarkCheck("GPU compute utilization", "ratio", 0.78, None, None, -0.2, "unknown",
                           NO_GPU),
        ) if sick else (),
        windows=9871,
    )  # fmt: skip
