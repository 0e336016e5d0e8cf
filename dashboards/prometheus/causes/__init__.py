"""The causes that PromQL can conclude for one engine, with the sidecar's evidence. Pure.

What needs a number inside a label (the KV capacity), a quarter of the window or the order of
scrapes is the sidecar's alone: `INEXPRESSIBLE` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kneewatch.dashboards.prometheus.causes import (
    features,
    gpus,
    latency,
    memory,
    nodes,
    observer,
    prefix,
    transfer,
    workload,
)
from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan

UNJOINED = (
    "of an engine, whose GPUs no label says: --gpu-join states it. Each GPU by itself has its alert"
)
INEXPRESSIBLE: Mapping[str, str] = {
    "workload_drift": "the profile that the size was computed for (workload_profile) is no series",
    "gpu_fault": UNJOINED,
    "gpu_throttled": UNJOINED,
    "prefix_churn": "how long a cached block lasts follows from the KV capacity, a number that "
    "stands inside a label of cache_config_info",
    "tp_overhead": "sweeps are files of the user's, not series",
}

BUILDERS: tuple[Callable[[Plan], CauseQuery | None], ...] = (
    gpus.gpu_fault,
    gpus.gpu_fault_apart,
    gpus.gpu_throttled,
    gpus.gpu_throttled_apart,
    observer.engine_stalled,
    memory.kv_pressure,
    memory.queue_saturation,
    memory.admission_limit,
    prefix.prefix_cache_off,
    prefix.prefix_reuse_lost,
    prefix.prefix_never_shared,
    features.adapter_thrash,
    transfer.kv_transfer_slow,
    features.spec_decode_poor,
    latency.prefill_interference,
    latency.slo_conflict,
    latency.prefill_bound,
    latency.decode_bound,
    latency.past_knee,
    workload.runaway_generation,
    nodes.bad_node,
)


def inexpressible(plan: Plan) -> Mapping[str, str]:
    """The causes that a plan's rules do not conclude, and why."""
    told = {query.id for query in cause_queries(plan)}
    return {cause: why for cause, why in INEXPRESSIBLE.items() if cause not in told}


def cause_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """Every cause that a plan's series can show."""
    made = (build(plan) for build in BUILDERS)
    return tuple(query for query in made if query is not None)
