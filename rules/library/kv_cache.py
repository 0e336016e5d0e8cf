"""Rules of the KV cache and the prefix cache: guide 7.4, 7.7 and the KV rows of 9.3. Pure."""

from __future__ import annotations

from kneewatch.rules.baseline import ITL, LOAD, PREFIX, TTFT
from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    FILLING_FROM_RATIO,
    PREEMPTIONS_MIN,
)
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

TRAFFIC = Guard("running_avg", 0.05)
PROMPT_WORK = Guard("prefix_query_per_s", 200.0)
"""Prompt tokens/s from which on a prefix cache's hit ratio is meaningful."""

SEVERAL = Guard("running_avg", 3.0)
"""One long prompt that fills the KV cache is no load that climbs."""

EVICTING = Guard("cascade_stage", 2.0, ends=True)
"""The rule ends with the stage, which has a hysteresis of its own; what the window still holds is
the past."""

KNOWN_REUSE = Guard("prefix_hit_quiet_ratio", 0.30)
"""The guide's row is for workloads that are known to repeat prefixes."""

HOURS = 3600.0

RULES = (
    Rule(
        id="KV-EVICT",
        signal="preemption_ratio_per_s",
        bounds=(
            Bound(Severity.INFO, 0.0, "guide 7.4: any eviction of active requests is a signal"),
            Bound(Severity.WARNING, EVICT_WARNING_PER_S, "guide 9.3 and 7.4: 5%; 7.7 has 10%"),
            Bound(Severity.CRITICAL, EVICT_CRITICAL_PER_S, "guide 9.3, 7.4, 7.7: 20%"),
        ),
        summary="vLLM preempts running requests and recomputes them",
        advice="Enlarge the KV cache (fp8 KV cache, higher --gpu-memory-utilization), lower "
        "--max-num-seqs, or add replicas.",
        guide=("7.4", "7.7", "9.3"),
        clear_s=15.0,
        guards=(EVICTING, Guard("preempted_in_window", PREEMPTIONS_MIN)),
        moves=(
            TTFT,
            ITL,
            PREFIX,
            LOAD,
        ),
    ),
    Rule(
        id="KV-FULL",
        signal="kv_usage_avg_ratio",
        bounds=(Bound(Severity.INFO, FILLING_FROM_RATIO, "guide 9.3: target 75-90%"),),
        summary="KV cache usage is above its target band",
        advice="No harm by itself. Plan an fp8 KV cache or more replicas before the load grows.",
        guide=("7.7", "9.3"),
        for_s=30.0,
    ),
    Rule(
        id="KV-EXHAUST",
        signal="kv_demand_ahead_ratio",
        bounds=(Bound(Severity.WARNING, 1.0, "beyond its capacity vLLM preempts"),),
        summary="The KV cache will be exhausted in minutes at the present trend",
        advice="Add replicas or enlarge the KV cache now; nothing is harmed yet.",
        guide=("7.4",),
        for_s=30.0,
        guards=(SEVERAL, Guard("cascade_stage", 1.0, below=True, ends=True)),
    ),
    Rule(
        id="KV-UNUSED",
        signal="kv_usage_max_ratio",
        bounds=(Bound(Severity.INFO, 0.5, "guide 7.7: low utilization is over-provisioning"),),
        below=True,
        summary="Half of the KV cache or more unused for hours",
        advice="Allow more sequences, or serve from fewer or smaller GPUs.",
        guide=("7.7", "9.3"),
        for_s=4 * HOURS,
        guards=(TRAFFIC,),
    ),
    Rule(
        id="PREFIX-HIT",
        signal="prefix_hit_ratio",
        bounds=(Bound(Severity.INFO, 0.30, "guide 9.3: below 30% with known reuse"),),
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
        bounds=(Bound(Severity.INFO, 0.10, "guide 7.7: high hit rate, low reuse ratio"),),
        below=True,
        summary="The prefix cache is hit but saves little prefill work",
        advice="Find the longest prefix that requests share; check that it is cached and routed "
        "by.",
        guide=("7.7",),
        for_s=60.0,
        guards=(PROMPT_WORK, Guard("prefix_hit_ratio", 0.30)),
    ),
    Rule(
        id="KV-RESIDENCY",
        signal="kv_residency_s",
        bounds=(Bound(Severity.INFO, 60.0, "guide 7.7: short residency with reuse is churn"),),
        below=True,
        summary="Cached blocks are evicted within a minute of their computation",
        advice="Enlarge the KV cache, or route by prefix so that each replica serves fewer "
        "prefixes.",
        guide=("7.4", "7.7"),
        for_s=15.0,
        guards=(Guard("block_reuse_per_s", 0.1),),
    ),
)
