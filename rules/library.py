"""All rules that need no setting, in display order, and the rules for a user's SLO. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.baseline import ITL, LENGTHS, LOAD, PREFIX, TRANSFER, TTFT
from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    FILLING_FROM_RATIO,
    PREEMPTIONS_MIN,
)
from kneewatch.rules.rule import BY_WORD, Bound, Finding, Guard, Rule, Severity

HOUR_S = 3600.0


# --- Of the KV cache and the prefix cache: guide 7.4, 7.7 and the KV rows of 9.3 ------------------


TRAFFIC = Guard("running_avg", 0.05)
PROMPT_WORK = Guard("prefix_query_per_s", 200.0)
"""Prompt tokens/s from which on a prefix cache's hit ratio is meaningful."""

SEVERAL = Guard("running_avg", 3.0)
"""A single long prompt that fills the KV cache is not a rising load."""

EVICTING = Guard("cascade_stage", 2.0, ends=True)
"""The rule ends when the stage ends, although the window still holds values from before.

The stage has its own hysteresis.
"""

KNOWN_REUSE = Guard("prefix_hit_quiet_ratio", 0.30)
"""The guide's row is for workloads that are known to repeat prefixes."""

KV_CACHE = (
    Rule(
        id="KV-EVICT",
        signal="preemption_ratio_per_s",
        bounds=(
            Bound(Severity.INFO, 0.0, "any preemption of running requests is a sign"),
            Bound(
                Severity.WARNING,
                EVICT_WARNING_PER_S,
                "5% of the running requests start over every second",
            ),
            Bound(
                Severity.CRITICAL,
                EVICT_CRITICAL_PER_S,
                "a fifth of the running requests starts over every second",
            ),
        ),
        summary="vLLM preempts running requests and recomputes them",
        advice="Enlarge the KV cache (fp8 KV cache, higher --gpu-memory-utilization), lower "
        "--max-num-seqs, or add replicas.",
        guide=("7.4", "7.7", "9.3"),
        clear_s=15.0,
        guards=(EVICTING, Guard("preempted_in_window", PREEMPTIONS_MIN)),
        moves=(TTFT, ITL, PREFIX, LOAD),
    ),
    Rule(
        id="KV-FULL",
        signal="kv_usage_avg_ratio",
        bounds=(Bound(Severity.INFO, FILLING_FROM_RATIO, "the target band is 75-90%"),),
        summary="KV cache usage is above its target band",
        advice="Harmless by itself. Plan an fp8 KV cache or more replicas before the load grows.",
        guide=("7.7", "9.3"),
        for_s=30.0,
    ),
    Rule(
        id="KV-EXHAUST",
        signal="kv_demand_ahead_ratio",
        bounds=(Bound(Severity.WARNING, 1.0, "above its capacity vLLM preempts"),),
        summary="The KV cache will be exhausted in minutes at the present trend",
        advice="Add replicas or enlarge the KV cache before vLLM preempts.",
        guide=("7.4",),
        for_s=30.0,
        guards=(SEVERAL, Guard("cascade_stage", 1.0, below=True, ends=True)),
    ),
    Rule(
        id="KV-UNUSED",
        signal="kv_usage_max_ratio",
        bounds=(Bound(Severity.INFO, 0.5, "low utilization is over-provisioning"),),
        below=True,
        summary="Half of the KV cache or more unused for hours",
        advice="Allow more sequences, or serve from fewer or smaller GPUs.",
        guide=("7.7", "9.3"),
        for_s=4 * HOUR_S,
        guards=(TRAFFIC,),
    ),
    Rule(
        id="PREFIX-HIT",
        signal="prefix_hit_ratio",
        bounds=(Bound(Severity.INFO, 0.30, "low for prompts that share prefixes"),),
        below=True,
        summary="Few prompt tokens come from the prefix cache",
        advice="If prompts share a prefix: put it first and unchanged, route by prefix, enlarge "
        "the KV cache. If they share none, there is nothing to fix.",
        guide=("7.2", "7.7", "9.3"),
        for_s=60.0,
        guards=(PROMPT_WORK, KNOWN_REUSE),
    ),
    Rule(
        id="PREFIX-SAVED",
        signal="prefix_saved_ratio",
        bounds=(Bound(Severity.INFO, 0.10, "hits that save little work"),),
        below=True,
        summary="The prefix cache is hit but saves little prefill work",
        advice="Find the longest prefix that requests share; check that it is cached and used for "
        "routing.",
        guide=("7.7",),
        for_s=60.0,
        guards=(PROMPT_WORK, Guard("prefix_hit_ratio", 0.30)),
    ),
    Rule(
        id="KV-RESIDENCY",
        signal="kv_residency_s",
        bounds=(Bound(Severity.INFO, 60.0, "short residency with reuse is churn"),),
        below=True,
        summary="Cached blocks are evicted within a minute of their computation",
        advice="Enlarge the KV cache, or route by prefix so that each replica serves fewer "
        "prefixes.",
        guide=("7.4", "7.7"),
        for_s=15.0,
        guards=(Guard("block_reuse_per_s", 0.1),),
    ),
)


# --- Of the queue, TTFT and ITL: the latency rows of guide 9.3, 8.1 and 8.5 -----------------------


QUEUE_SHARE_WARNING = 0.5

LATENCY = (
    Rule(
        id="QUEUE-GROWS",
        signal="waiting_slope_per_s",
        bounds=(Bound(Severity.WARNING, 0.1, "one request more every 10 s, and it goes on"),),
        summary="The queue grows",
        advice="Add replicas, or raise the limit that keeps requests out of the batch.",
        guide=("9.3",),
        for_s=20.0,
        guards=(Guard("waiting_min", 3.0),),
        moves=(TTFT, ITL, LOAD),
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
        moves=(TTFT, ITL, LOAD),
    ),
    Rule(
        id="TTFT-TAIL",
        signal="ttft_p99_p50_drift_ratio",
        bounds=(Bound(Severity.INFO, 2.0, "P99 rises faster than P50 at the knee"),),
        summary="TTFT P99 rises faster than P50",
        advice="The engine is close to its knee: add replicas or quantize before the next peak.",
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
        # Longer than the window, so that a single burst of pauses leaves the window before the rule
        # fires.
        for_s=75.0,
        guards=(Guard("itl_stall_per_s", 0.1),),
        moves=(ITL, TTFT),
    ),
)


def slo_rules(
    *,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
    benchmark_ttft_p99_s: float | None = None,
    benchmark_gpu_ratio: float | None = None,
) -> tuple[Rule, ...]:
    """Rules for the targets that the user sets; no rule for a target that is not set.

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
                    Bound(
                        Severity.INFO,
                        1.3 * benchmark_ttft_p99_s,
                        "30% above the benchmark: the workload differs",
                    ),
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
                    Bound(
                        Severity.INFO,
                        benchmark_gpu_ratio - 0.2,
                        "20 points below the benchmark: the workload differs",
                    ),
                ),
                below=True,
                summary="The GPU is more than 20 points less busy than in the benchmark",
                advice="Measure the workload again before you buy hardware.",
                guide=("9.1",),
                for_s=300.0,
                guards=(Guard("running_avg", 1.0),),
            )
        )
    return tuple(replace(rule, stated=True) for rule in rules)


# --- Of optional features: speculative decoding, LoRA adapters, KV transfers ----------------------


FEATURES = (
    Rule(
        id="SPEC-ACCEPT",
        signal="spec_acceptance_ratio",
        bounds=(
            Bound(
                Severity.INFO,
                0.60,
                "target above 60%; its estimated gain decides whether less still pays",
            ),
        ),
        below=True,
        summary="Few draft tokens are accepted",
        advice="Retune the draft or draft fewer tokens; spec_decode_poor shows whether it pays.",
        guide=("6.6", "9.3"),
        for_s=10.0,
        guards=(Guard("spec_draft_tokens_per_s", 5.0),),
        moves=(ITL,),
    ),
    Rule(
        id="LORA-WAIT",
        signal="waiting_deferred_min",
        bounds=(Bound(Severity.WARNING, 0.5, "kneewatch: waiting through the whole window"),),
        summary="Requests wait for a LoRA adapter slot",
        advice="Raise --max-loras, lower the adapters' rank, or spread adapters over replicas.",
        guide=("2.5", "9.3"),
        for_s=10.0,
        guards=(Guard("lora_max", 1.0),),
        moves=(TTFT, LOAD),
    ),
    Rule(
        id="LORA-CHANGE",
        signal="lora_change_per_s",
        bounds=(Bound(Severity.INFO, 0.2, "with enough slots the set hardly changes"),),
        summary="The set of running LoRA adapters keeps changing",
        advice="Watch TTFT by adapter; raise --max-loras if requests wait for a slot.",
        guide=("2.5", "9.3"),
        for_s=30.0,
        guards=(Guard("lora_max", 1.0), Guard("waiting_deferred_avg", 1.0)),
    ),
    Rule(
        id="XFER-FAIL",
        signal="kv_transfer_failed_per_s",
        bounds=(Bound(Severity.WARNING, 0.0, "kneewatch: a failed transfer is recomputed"),),
        summary="KV transfers fail",
        advice="Check the network and the peer's log first.",
        guide=("7.7",),
        moves=(TRANSFER, TTFT),
    ),
    Rule(
        id="XFER-SLOW",
        signal="kv_transfer_drift_ratio",
        bounds=(Bound(Severity.WARNING, 3.0, "kneewatch: three times the quiet baseline"),),
        summary="KV transfers are slower than usual",
        advice="Check network or PCIe utilization: the data path is slow, not the GPU.",
        guide=("7.7",),
        for_s=30.0,
        moves=(TRANSFER, TTFT),
    ),
)


# --- Of gateway limits, errors and idle hours: guide 9.2 and 9.4 ----------------------------------


GUARDRAILS = (
    Rule(
        id="INPUT-TAIL",
        signal="prompt_tail_ratio",
        bounds=(Bound(Severity.INFO, 3.0, "limit at 2-3x the P95"),),
        summary="Prompt length P99 is more than 3x the P95",
        advice="Set a hard input limit at the gateway: 2-3x the P95 prompt length.",
        guide=("9.4",),
        for_s=300.0,
    ),
    Rule(
        id="INPUT-WHOLE-CACHE",
        signal="prompt_p99_kv_share_ratio",
        bounds=(Bound(Severity.INFO, 0.25, "one request must not fill the cache"),),
        summary="One long prompt (P99) takes 25% of the KV cache or more",
        advice="Lower --max-model-len or the gateway's input limit.",
        guide=("9.4",),
        for_s=60.0,
    ),
    Rule(
        id="OUTPUT-CAP",
        signal="finished_length_drift_points",
        bounds=(Bound(Severity.INFO, 0.2, "20 points more than usual: output lengths drift"),),
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
        moves=(LENGTHS, LOAD),
    ),
    Rule(
        id="REJECTED",
        signal="rejected_per_s",
        bounds=(Bound(Severity.INFO, 0.0, "a queue limit that works"),),
        summary="Requests are rejected",
        advice="Expected during a spike; add replicas if it lasts.",
        guide=("9.4",),
    ),
    Rule(
        id="BREAKER",
        signal="queue_wait_estimate_ratio",
        bounds=(Bound(Severity.WARNING, 0.8, "shed load at 80-90% of the safe depth"),),
        summary="The queue is almost as long as the TTFT target allows",
        advice="Shed load at the gateway (HTTP 429) before all requests miss the target.",
        guide=("9.4",),
        for_s=10.0,
        guards=(Guard("waiting_min", 1.0),),
        moves=(TTFT, ITL, LOAD),
    ),
    Rule(
        id="IDLE-HOURS",
        signal="running_avg",
        bounds=(Bound(Severity.INFO, 0.5, "paid for and idle"),),
        below=True,
        summary="Idle for hours: fewer than 0.5 requests running on average",
        advice="Add batch work, consolidate, or keep fewer replicas warm.",
        guide=("9.2", "9.3"),
        for_s=4 * HOUR_S,
    ),
)


# --- Of GPUs: the GPU rows of guide 9.3. Without a GPU source unknown, never ok -------------------


SERVING = Guard("running_avg", 1.0)

PEGGED_FROM, TTFT_RISES_FROM = 0.98, 2.0
"""From this activity on, the GPU is busy all the time.

From this ratio of TTFT P99 to its baseline on, TTFT is no longer stable.
"""

GPU = (
    Rule(
        id="GPU-MEMORY-LOW",
        signal="gpu_memory_used_ratio",
        bounds=(Bound(Severity.INFO, 0.70, "the target band is 80-90%"),),
        below=True,
        summary="Much of the GPU's memory is unused",
        advice="Raise --gpu-memory-utilization to enlarge the KV cache.",
        guide=("9.3",),
        for_s=600.0,
    ),
    Rule(
        id="GPU-MEMORY-HIGH",
        signal="gpu_memory_used_ratio",
        bounds=(Bound(Severity.INFO, 0.97, "above 95%; vLLM takes 92% by default"),),
        summary="GPU memory is almost full",
        advice="Lower --gpu-memory-utilization a little: an allocation outside vLLM's pool may "
        "run out of memory.",
        guide=("9.3",),
        for_s=600.0,
    ),
    Rule(
        id="GPU-BUSY-LOW",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, 0.60, "the target band is 60-85% while serving"),),
        below=True,
        summary="The GPU is often idle while requests run",
        advice="Raise the batch size, or check whether the host (CPU) limits the GPU.",
        guide=("9.3",),
        for_s=300.0,
        guards=(SERVING,),
    ),
    Rule(
        id="GPU-BUSY-FULL",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, PEGGED_FROM, "fully busy with stable TTFT"),),
        summary="The GPU is busy all the time while TTFT is stable",
        advice="Nothing to do: the GPU is used fully and TTFT holds.",
        guide=("9.3",),
        for_s=300.0,
        guards=(SERVING, Guard("ttft_p99_drift_ratio", TTFT_RISES_FROM, below=True)),
    ),
    Rule(
        id="GPU-SATURATED",
        signal="ttft_p99_drift_ratio",
        bounds=(Bound(Severity.INFO, TTFT_RISES_FROM, "fully busy and TTFT rises"),),
        summary="The GPU is busy all the time and TTFT rises",
        advice="Prefill saturates the GPU: try chunked prefill, then quantized weights, then more "
        "GPUs or P/D disaggregation.",
        guide=("9.3",),
        for_s=300.0,
        guards=(SERVING, Guard("gpu_engine_active_ratio", PEGGED_FROM)),
    ),
    Rule(
        id="FLEET-LOW",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, 0.40, "paid for and idle"),),
        below=True,
        summary="GPU less than 40% busy for hours",
        advice="Consolidate, add batch work, or scale down sooner.",
        guide=("9.2", "9.3"),
        for_s=4 * 3600.0,
    ),
    Rule(
        id="FLEET-HIGH",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, 0.90, "no headroom for spikes"),),
        summary="GPU more than 90% busy for an hour",
        advice="Add a replica or quantize: there is no headroom for a spike.",
        guide=("9.3",),
        for_s=3600.0,
    ),
)


RULES: tuple[Rule, ...] = (
    *KV_CACHE,
    *LATENCY,
    *FEATURES,
    *GUARDRAILS,
    *GPU,
)

OF_TARGETS = slo_rules(
    ttft_p99_s=1.0, itl_p99_s=1.0, benchmark_ttft_p99_s=1.0, benchmark_gpu_ratio=1.0
)
RULES_BY_ID = {
    rule.id: rule for rule in (*RULES, *(replace(rule, bounds=()) for rule in OF_TARGETS))
}
"""Rules by id. Rules for SLO targets have no bounds here: a finding contains the user's bounds."""

FROM_FINDING = "setting"
"""Source of a bound that a finding contains."""


def rule_of(finding: Finding) -> Rule:
    """The rule of a finding, with the finding's bounds if it contains any.

    A rule of another version is a plain rule without bounds.
    """
    rule = RULES_BY_ID.get(finding.rule) or Rule(
        finding.rule, finding.signal, (), "a rule of another version", "", ()
    )
    if finding.signal not in ("", rule.signal):
        rule = replace(rule, signal=finding.signal, bounds=())
    if finding.bounds is None:
        return rule
    bounds = [
        Bound(BY_WORD[word], threshold, FROM_FINDING)
        for word, threshold in finding.bounds.items()
        if threshold is not None and word in BY_WORD
    ]
    return replace(rule, bounds=tuple(bounds))
