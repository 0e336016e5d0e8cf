"""Rules of gateway limits, errors and idle hours: guide 9.2 and 9.4. Pure."""

from __future__ import annotations

from kneewatch.rules.baseline import ITL, LENGTHS, LOAD, TTFT
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

HOURS = 3600.0

RULES = (
    Rule(
        id="INPUT-TAIL",
        signal="prompt_tail_ratio",
        bounds=(Bound(Severity.INFO, 3.0, "guide 9.4: limit at 2-3x the P95"),),
        summary="Prompt length P99 is more than 3x the P95",
        advice="Set a hard input limit at the gateway: 2-3x the P95 prompt length.",
        guide=("9.4",),
        for_s=300.0,
    ),
    Rule(
        id="INPUT-WHOLE-CACHE",
        signal="prompt_p99_kv_share_ratio",
        bounds=(Bound(Severity.INFO, 0.25, "guide 9.4: one request must not fill the cache"),),
        summary="One long prompt (P99) takes 25% of the KV cache or more",
        advice="Lower --max-model-len or the gateway's input limit.",
        guide=("9.4",),
        for_s=60.0,
    ),
    Rule(
        id="OUTPUT-CAP",
        signal="finished_length_drift_points",
        bounds=(Bound(Severity.INFO, 0.2, "guide 9.4: watch for drift of the output length"),),
        summary="More requests than usual hit their output limit",
        advice="Look for prompts that make the model ramble or repeat; cap outputs per use case.",
        guide=("9.4",),
        for_s=30.0,
    ),
    Rule(
        id="ERRORS",
        signal="finished_error_ratio",
        bounds=(
            Bound(Severity.WARNING, 0.02, "public runbooks: 2%"),
            Bound(Severity.CRITICAL, 0.10, "public runbooks: 10%"),
        ),
        summary="Requests end in an error",
        advice="Read vLLM's log.",
        guide=("9.4",),
        for_s=30.0,
        guards=(Guard("errors_in_window", 3.0),),
        moves=(
            LENGTHS,
            LOAD,
        ),
    ),
    Rule(
        id="REJECTED",
        signal="rejected_per_s",
        bounds=(Bound(Severity.INFO, 0.0, "guide 9.4: a circuit breaker that works"),),
        summary="Requests are rejected",
        advice="Expected during a spike; add replicas if it lasts.",
        guide=("9.4",),
    ),
    Rule(
        id="BREAKER",
        signal="queue_wait_estimate_ratio",
        bounds=(Bound(Severity.WARNING, 0.8, "guide 9.4: shed load at 80-90% of the safe depth"),),
        summary="The queue is almost as long as the TTFT target allows",
        advice="Shed load at the gateway (HTTP 429) before all requests miss the target.",
        guide=("9.4",),
        for_s=10.0,
        guards=(Guard("waiting_min", 1.0),),
        moves=(
            TTFT,
            ITL,
            LOAD,
        ),
    ),
    Rule(
        id="IDLE-HOURS",
        signal="running_avg",
        bounds=(Bound(Severity.INFO, 0.5, "guide 9.2: the utilization trap"),),
        below=True,
        summary="Idle for hours: fewer than 0.5 requests running on average",
        advice="Add batch work, consolidate, or keep fewer replicas warm.",
        guide=("9.2", "9.3"),
        for_s=4 * HOURS,
    ),
)
