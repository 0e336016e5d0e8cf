"""Rules of the queue, TTFT and ITL: the latency rows of guide 9.3, 8.1 and 8.5. Pure."""

from __future__ import annotations

from kneewatch.rules.baseline import ITL, LOAD, TTFT
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

QUEUE_SHARE_WARNING = 0.5

RULES = (
    Rule(
        id="QUEUE-GROWS",
        signal="waiting_slope_per_s",
        bounds=(Bound(Severity.WARNING, 0.1, "guide 9.3: consistently growing"),),
        summary="The queue grows",
        advice="Add replicas, or raise the limit that keeps requests out of the batch.",
        guide=("9.3",),
        for_s=20.0,
        guards=(Guard("waiting_min", 3.0),),
        moves=(
            TTFT,
            ITL,
            LOAD,
        ),
    ),
    Rule(
        id="QUEUE-SHARE",
        signal="queue_share_ratio",
        bounds=(
            Bound(Severity.INFO, 0.2, "kneewatch: 20% of request time"),
            Bound(Severity.WARNING, QUEUE_SHARE_WARNING, "kneewatch: 50% of request time"),
        ),
        summary="Requests spend much of their time in the queue",
        advice="Check which limit binds: KV blocks, --max-num-seqs, adapter slots or the GPU "
        "itself.",
        guide=("8.4", "9.3"),
        for_s=15.0,
        guards=(Guard("waiting_min", 1.0),),
        moves=(
            TTFT,
            ITL,
            LOAD,
        ),
    ),
    Rule(
        id="TTFT-TAIL",
        signal="ttft_p99_p50_drift_ratio",
        bounds=(Bound(Severity.INFO, 2.0, "guide 8.1: P99 rises faster than P50 at the knee"),),
        summary="TTFT P99 rises faster than P50",
        advice="The engine nears its knee: add replicas or quantize before the next peak.",
        guide=("8.1", "8.5", "9.3"),
        for_s=30.0,
    ),
    Rule(
        id="ITL-STALL",
        signal="itl_stall_time_ratio",
        bounds=(
            Bound(Severity.INFO, 0.05, "kneewatch: 5% of decode time"),
            Bound(Severity.WARNING, 0.20, "kneewatch: 20% of decode time"),
        ),
        summary="Streams stall for more than 0.5 s",
        advice="Use chunked prefill with a smaller token budget per step, or run prefill on its "
        "own servers.",
        guide=("6.4", "8.5", "9.3"),
        for_s=15.0,
        guards=(Guard("itl_stall_per_s", 0.1),),
        moves=(
            ITL,
            TTFT,
        ),
    ),
)


def slo_rules(
    *,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
    benchmark_ttft_p99_s: float | None = None,
    benchmark_gpu_ratio: float | None = None,
) -> tuple[Rule, ...]:
    """Rules for the targets that the user states; none for a target that is not stated.

    Source: guide 9.3 (TTFT, ITL within SLO), 9.1 step 13 (30% and 20 points off the benchmark).
    """
    rules: list[Rule] = []
    for key, name, target_s, advice in (
        (
            "ttft",
            "TTFT",
            ttft_p99_s,
            "Check whether queue or prefill time dominates, and the reported cause.",
        ),
        (
            "itl",
            "ITL",
            itl_p99_s,
            "Only P99 high: prefill interference. All percentiles high: decode.",
        ),
    ):
        if target_s is None:
            continue
        for percent, severity in ((99, Severity.WARNING), (50, Severity.CRITICAL)):
            rules.append(
                Rule(
                    id=f"{name}-P{percent}",
                    signal=f"{key}_p{percent}_s",
                    bounds=(Bound(severity, target_s, "setting: SLO"),),
                    summary=f"{name} P{percent} is over its target",
                    advice=advice,
                    guide=("9.3",),
                    for_s=15.0,
                    clear_ratio=0.0,
                )
            )
    if benchmark_ttft_p99_s is not None:
        rules.append(
            Rule(
                id="BENCH-TTFT",
                signal="ttft_p99_s",
                bounds=(
                    Bound(Severity.INFO, 1.3 * benchmark_ttft_p99_s, "guide 9.1 step 13: 30%"),
                ),
                summary="TTFT P99 is more than 30% above the sizing benchmark",
                advice="Measure the workload again: lengths or arrivals differ from the benchmark.",
                guide=("9.1",),
                for_s=300.0,
            )
        )
    if benchmark_gpu_ratio is not None:
        rules.append(
            Rule(
                id="BENCH-GPU",
                signal="gpu_engine_active_ratio",
                bounds=(
                    Bound(Severity.INFO, benchmark_gpu_ratio - 0.2, "guide 9.1 step 13: 20 points"),
                ),
                below=True,
                summary="The GPU is more than 20 points less busy than in the benchmark",
                advice="Measure the workload again before you buy hardware.",
                guide=("9.1",),
                for_s=300.0,
                guards=(Guard("running_avg", 1.0),),
            )
        )
    return tuple(rules)
