"""The guide's symptom list (8.5) as S1 to S8, in its order. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kneewatch.diagnose.case import Cause, Facts
from kneewatch.diagnose.causes import BY_ID

SYMPTOMS = {
    "S1": "TTFT too high at low concurrency",
    "S2": "ITL spikes under mixed load",
    "S3": "throughput plateau too low",
    "S4": "TTFT and ITL targets cannot both be met",
    "S5": "requests per second and GPU fall as tensor parallelism grows",
    "S6": "ITL too high at low concurrency while the GPU has compute to spare",
    "S7": "TTFT spikes on some tenants without a prefill pattern",
    "S8": "P99 healthy at low load, spiking at the peak",
}

LOW_CONCURRENCY = 8.0
SLOW_DRIFT = 3.0
GPU_SPARE_BELOW = 0.6


def symptoms(facts: Facts, causes: Iterable[Cause]) -> list[str]:
    """Ids of the symptoms that show, in the guide's order.

    "Too high" is over the target where one is set, else three times the quiet baseline.
    """
    found = {cause.id for cause in causes}
    found |= {other for cause in causes for other in cause.explains}
    few = facts.get("running_avg") < LOW_CONCURRENCY
    slow_first = _too_high(facts, "ttft", facts.targets.ttft_p99_s)
    slow_steps = _too_high(facts, "itl", facts.targets.itl_p99_s)
    busy = facts.values.get("gpu_engine_active_ratio")
    queued = any(BY_ID[cause].queues for cause in found)
    shown = {symptom for cause in found for symptom in BY_ID[cause].symptoms}
    if few and slow_first and not queued:
        shown.add("S1")
    if few and slow_steps and busy is not None and busy < GPU_SPARE_BELOW:
        shown.add("S6")
    if queued and slow_first:
        shown.add("S8")
    return [symptom for symptom in SYMPTOMS if symptom in shown]


def _too_high(facts: Facts, name: str, target_s: float | None) -> bool:
    value = facts.values.get(f"{name}_p99_s")
    if target_s is not None:
        return value is not None and value > target_s
    return (facts.values.get(f"{name}_p99_drift_ratio") or 0.0) >= SLOW_DRIFT
