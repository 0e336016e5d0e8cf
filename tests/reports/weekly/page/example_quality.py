"""What became of made-up recommendations, and how far made-up data can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.reports.weekly.figures import (
    ConfigDifference,
    DataQuality,
    EngineChange,
    Gap,
    Method,
    TargetQuality,
    UnknownSignal,
)
from kneewatch.reports.weekly.report import Comparison, TrackRecord, TrackRow
from tests.reports.weekly.page.example_incidents import advice

HOUR_S = 3600.0


def nothing_advised() -> TrackRecord:
    """A week without a recommendation."""
    return TrackRecord(0, 0, 0, 0, 0, 0, 0, ())


def track_record(tier: str, from_s: float) -> TrackRecord:
    """One recommendation of each fate."""
    fates = ("kept", "missed", "worsened", "applied", "open", "lapsed")
    rows = tuple(
        TrackRow(
            tier,
            f"gpu-node-{place % 4 + 1}:8000",
            "0",
            advice(from_s + 30 * HOUR_S - place * HOUR_S, fate),
            (
                Comparison("kv_usage_ratio", 0.998, 0.74, 0.71, -0.04),
                Comparison("ttft_p99_s", 31.2, 1.3, 1.5, 0.15),
            )
            if fate in ("kept", "missed", "worsened")
            else (),
        )
        for place, fate in enumerate(fates)
    )
    return TrackRecord(6, 4, 1, 1, 1, 1, 1, rows)


def quality(targets: Sequence[str], from_s: float) -> DataQuality:
    """Targets of which the second was not watched for a while and the third failed at times."""
    hole = Gap(from_s + 146 * HOUR_S, from_s + 147.5 * HOUR_S, "")
    refused = Gap(from_s + 50 * HOUR_S, from_s + 50 * HOUR_S + 95, "connection refused")
    return DataQuality(
        targets=tuple(
            TargetQuality(
                target=target,
                scrapes=120_960,
                failed=19 if place == 2 else 0,
                interval_s=5.0,
                watched_ratio=0.991 if place == 1 else 1.0,
                gap_s=5400.0 if place == 1 else 95.0 if place == 2 else 0.0,
                gaps=(hole,) if place == 1 else (refused,) if place == 2 else (),
                gaps_left_out=3 if place == 1 else 0,
            )
            for place, target in enumerate(targets)
        ),
        changes=(
            EngineChange(from_s + 58 * HOUR_S, targets[2], "0", "started, configured anew",
                         "counters began anew", (ConfigDifference("kv_cache_dtype", "auto", "fp8"),
                                                 ConfigDifference("version", "0.10.2", "0.11.0"))),
        ) if len(targets) > 2 else (),
        unknown=(
            UnknownSignal("gpu_memory_used_ratio", "no GPU source", tuple(targets)),
            UnknownSignal("kv_residency_s", "vllm:kv_block_lifetime_seconds is not on the page",
                          tuple(targets)[:2]),
        ) if targets else (),
        notes=("Percentiles are read off histograms summed over the week and all engines; between "
               "two buckets they are interpolated.",),
        methods=(
            Method("TTFT P99", "99% quantile of time_to_first_token_seconds summed over the week.",
                   ("9.3",)),
            Method("C_max", "Where latency leaves its straight line as concurrency rises.",
                   ("8.1", "8.3")),
            Method("GPUs needed", "Peak over usable requests a second, rounded up, times tensor "
                   "parallelism and safety.", ("9.1",)),
        ),
    )  # fmt: skip
