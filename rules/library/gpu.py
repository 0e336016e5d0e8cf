"""GPU rules: the GPU rows of guide 9.3. Without a GPU source they are unknown, never ok. Pure."""

from __future__ import annotations

from kneewatch.rules.rule import Bound, Guard, Rule, Severity

SERVING = Guard("running_avg", 1.0)

PEGGED_FROM, TTFT_RISES_FROM = 0.98, 2.0
"""A GPU that is busy all the time; TTFT P99 over its baseline where it is no longer stable."""

RULES = (
    Rule(
        id="GPU-MEMORY-LOW",
        signal="gpu_memory_used_ratio",
        bounds=(Bound(Severity.INFO, 0.70, "guide 9.3: target 80-90%"),),
        below=True,
        summary="Much of the GPU's memory is unused",
        advice="Raise --gpu-memory-utilization to enlarge the KV cache.",
        guide=("9.3",),
        for_s=600.0,
    ),
    Rule(
        id="GPU-MEMORY-HIGH",
        signal="gpu_memory_used_ratio",
        bounds=(Bound(Severity.INFO, 0.97, "guide 9.3: above 95%; vLLM takes 92% by default"),),
        summary="GPU memory is almost full",
        advice="Lower --gpu-memory-utilization a little: an allocation outside vLLM's pool may "
        "run out of memory.",
        guide=("9.3",),
        for_s=600.0,
    ),
    Rule(
        id="GPU-BUSY-LOW",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, 0.60, "guide 9.3: target 60-85% while serving"),),
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
        bounds=(Bound(Severity.INFO, PEGGED_FROM, "guide 9.3: fully busy with stable TTFT"),),
        summary="The GPU is busy all the time while TTFT is stable",
        advice="Nothing to do: the GPU is used fully and TTFT holds.",
        guide=("9.3",),
        for_s=300.0,
        guards=(SERVING, Guard("ttft_p99_drift_ratio", TTFT_RISES_FROM, below=True)),
    ),
    Rule(
        id="GPU-SATURATED",
        signal="ttft_p99_drift_ratio",
        bounds=(Bound(Severity.INFO, TTFT_RISES_FROM, "guide 9.3: fully busy and TTFT rises"),),
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
        bounds=(Bound(Severity.INFO, 0.40, "guide 9.2, 9.3: the utilization trap"),),
        below=True,
        summary="GPU less than 40% busy for hours",
        advice="Consolidate, add batch work, or scale down sooner.",
        guide=("9.2", "9.3"),
        for_s=4 * 3600.0,
    ),
    Rule(
        id="FLEET-HIGH",
        signal="gpu_engine_active_ratio",
        bounds=(Bound(Severity.INFO, 0.90, "guide 9.3: no headroom for spikes"),),
        summary="GPU more than 90% busy for an hour",
        advice="Add a replica or quantize: there is no headroom for a spike.",
        guide=("9.3",),
        for_s=3600.0,
    ),
)
