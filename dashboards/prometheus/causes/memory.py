"""Causes that lie in memory and admission, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, duration, number, recorded
from kneewatch.dashboards.prometheus.odds import ZERO, Term, value
from kneewatch.diagnose.causes import (
    memory,
)
from kneewatch.rules.cascade import EVICT_WARNING_PER_S
from kneewatch.rules.model import Severity


def kv_pressure(plan: Plan) -> CauseQuery:
    """Requests are evicted, or wait because the cache is full."""
    usage, stage = recorded("kv_usage_avg_ratio"), recorded("cascade_stage")
    evicting = f"{stage} >= 2"
    bound = f"({usage} >= {number(memory.KV_BOUND_FROM)}) and {_queued(plan)}"
    severity = recorded("cascade_severity")
    return CauseQuery(
        "kv_pressure",
        f"({evicting}) or ({bound})",
        (
            Term(f"{ZERO} - 0.5", None, -0.5, f"{stage} < 2"),
            Term(value("preemption_ratio_per_s"), number(EVICT_WARNING_PER_S), 2.0, evicting),
            Term(usage, "0.9", 2.0, f"{usage} >= 0.85"),
            Term(usage, "0.9", -1.5, f"{usage} < 0.85", below=True),
            Term(
                recorded("waiting_by_capacity"), "1", 1.0, f"{recorded('waiting_by_capacity')} >= 1"
            ),
            Term(
                recorded("itl_stall_time_ratio"),
                "0.02",
                0.5,
                f"({recorded('itl_stall_time_ratio')} > 0.02) and ({evicting})",
            ),
        ),
        0.0,
        (
            (Severity.CRITICAL, f"({stage} >= 2) and ({severity} == 3)"),
            (Severity.WARNING, f"(({stage} >= 2) and ({severity} == 2)) or ({stage} < 2)"),
            (Severity.INFO, ""),
        ),
        "The KV cache is too small for this load",
        "Give the KV cache more room (fp8 KV cache, higher --gpu-memory-utilization), admit less "
        "(lower --max-num-seqs), or add replicas.",
        ("7.4", "9.3"),
    )


def queue_saturation(plan: Plan) -> CauseQuery:
    """A queue that neither the KV cache nor the number of seats explains."""
    return _queue(plan, pinned=False)


def admission_limit(plan: Plan) -> CauseQuery:
    """A queue while every seat is taken and there is room for more."""
    return _queue(plan, pinned=True)


def _queue(plan: Plan, *, pinned: bool) -> CauseQuery:
    waiting, usage = recorded("waiting_by_capacity"), recorded("kv_usage_avg_ratio")
    wait = f"({waiting} / ({recorded('completed_per_s')} > 0))"
    target_s = plan.targets.ttft_p99_s
    if target_s is not None:
        hurts = f"{wait} >= {number(0.5 * target_s)}"
    else:
        floor = (
            f"clamp_min({number(memory.QUEUE_SHARE_OF_REQUEST)} * {value('e2e_mean_s')},"
            f" {number(memory.QUEUE_WAIT_MIN_S)})"
        )
        hurts = f"{wait} >= {floor}"
    hurts = f"(({hurts}) or ({waiting} unless {recorded('completed_per_s')} > 0))"
    seats = _seats_bind()
    binding = f"and {seats}" if pinned else f"unless {seats}"
    drift = recorded("itl_mean_drift_ratio")
    return CauseQuery(
        "admission_limit" if pinned else "queue_saturation",
        f"({_queued(plan)} and {hurts} and ({recorded('cascade_stage')} < 2)"
        f" and ({value('kv_usage_avg_ratio')} < {number(memory.KV_BOUND_FROM)})) {binding}",
        (
            Term(waiting, "2", 1.2),
            Term(
                usage,
                number(memory.KV_ROOM_BELOW),
                1.0,
                f"{usage} < {number(memory.KV_ROOM_BELOW)}",
                below=True,
            ),
            Term(
                recorded("waiting_slope_per_s"),
                "0.1",
                0.6,
                f"{recorded('waiting_slope_per_s')} > 0.1",
            ),
            Term(drift, number(memory.GPU_ROOM_DRIFT), 0.6, below=pinned),
        ),
        0.3,
        (
            (Severity.CRITICAL, f"{wait} >= {number(memory.CRITICAL_WAIT_S)}"),
            (Severity.WARNING, ""),
        ),
        "The batch is pinned at its limit while KV and GPU have room"
        if pinned
        else "More requests arrive than are served, and the KV cache is not the limit",
        "Raise --max-num-seqs; check ITL as the batch grows."
        if pinned
        else "Add replicas; the KV cache is not what limits this one.",
        ("9.3", "8.1"),
    )


def _queued(plan: Plan) -> str:
    return (
        f"(min_over_time({recorded('queued')}[{duration(memory.QUEUE_HELD_S * plan.scale)}]) == 1)"
    )


def _seats_bind() -> str:
    drift = recorded("itl_mean_drift_ratio")
    top = recorded("running_max")
    return (
        f"(({recorded('running_avg')} >= {number(memory.PINNED_RATIO)} * {top})"
        f" and ({top} >= 1)"
        f" and ({recorded('kv_usage_avg_ratio')} < {number(memory.KV_ROOM_BELOW)})"
        f" unless ({drift} >= {number(memory.GPU_ROOM_DRIFT)}))"
    )
