"""Causes that show in the latencies, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery, Levels
from kneewatch.dashboards.prometheus.model import Plan, number, recorded
from kneewatch.dashboards.prometheus.odds import Term, value
from kneewatch.diagnose.causes import (
    latency,
)
from kneewatch.rules.model import Severity


def prefill_interference(plan: Plan) -> CauseQuery:
    """Decoding pauses while long prompts are computed."""
    share, per_s = recorded("itl_stall_time_ratio"), recorded("itl_stall_per_s")
    long, median = recorded("prefill_long_per_s"), recorded("itl_p50_s")
    counted = f"{long} * {number(plan.window_s)}"
    longs = f"({counted} >= {number(latency.LONG_MIN - latency.COUNTED_SHORT)})"
    drift = recorded("itl_p50_drift_ratio")
    stalls = (
        f"(({share} >= {number(latency.STALL_SHARE)})"
        f" and ({per_s} * {number(plan.window_s)}"
        f" >= {number(latency.STALLS_MIN - latency.COUNTED_SHORT)}) and {longs}"
        f" unless ({recorded('large_step_per_s')} * {number(plan.window_s)}"
        f" < {number(latency.LONG_MIN - latency.COUNTED_SHORT)}))"
    )
    terms = [Term(share, number(latency.STALL_SHARE), 1.8, stalls)]
    when, target_s = stalls, plan.targets.itl_p99_s
    if target_s is not None:
        tail = recorded("itl_p99_s")
        over = f"(({tail} > {number(target_s)}) and ({median} <= {number(target_s / 2)}))"
        when = f"({stalls} or {over})"
        terms.append(Term(tail, number(target_s), 1.5, over))
    holds = number(latency.MEDIAN_HOLDS_DRIFT)
    return CauseQuery(
        "prefill_interference",
        f"{when} and ({value('preemption_per_s')} == 0) and ({recorded('cascade_stage')} < 2)",
        (
            *terms,
            Term(median, None, 0.6, f"{drift} <= {holds}"),
            Term(median, None, -0.6, f"{drift} > {holds}"),
            Term(counted, number(latency.LONG_MIN), 0.8, longs),
        ),
        -0.2,
        ((Severity.WARNING, ""),),
        "Decode stalls behind long prefills",
        "Enable chunked prefill or lower --max-num-batched-tokens; for strict targets put prefill "
        "on its own servers.",
        ("6.4", "8.5", "9.3"),
    )


def slo_conflict(plan: Plan) -> CauseQuery | None:
    """Both targets are missed; None without both."""
    ttft_s, itl_s = plan.targets.ttft_p99_s, plan.targets.itl_p99_s
    if ttft_s is None or itl_s is None:
        return None
    ttft, itl = recorded("ttft_p99_s"), recorded("itl_p99_s")
    return CauseQuery(
        "slo_conflict",
        f"({ttft} > {number(ttft_s)}) and ({itl} > {number(itl_s)})"
        f" and ({recorded('cascade_stage')} < 2)",
        (Term(ttft, number(ttft_s), 1.0), Term(itl, number(itl_s), 1.0)),
        0.0,
        ((Severity.CRITICAL, ""),),
        "Neither TTFT nor ITL meets its target at this load",
        "Separate prefill and decode (P/D disaggregation), or take load away.",
        ("6.5", "8.5"),
    )


def prefill_bound(plan: Plan) -> CauseQuery | None:
    """The TTFT target is missed by prefill; None without one."""
    target_s = plan.targets.ttft_p99_s
    if target_s is None:
        return None
    ttft, prefill_s = recorded("ttft_p99_s"), value("prefill_mean_s")
    share = f"({prefill_s} / clamp_min({prefill_s} + {value('queue_mean_s')}, 1e-9))"
    bound, alone = number(1 - latency.QUEUE_SMALL_SHARE), f"({prefill_s} > {number(target_s)})"
    return CauseQuery(
        "prefill_bound",
        f"({ttft} > {number(target_s)}) and (({share} > {bound}) or {alone})",
        (
            Term(ttft, number(target_s), 1.0),
            Term(prefill_s, number(target_s), 1.5, alone),
            Term(share, bound, 1.5, f"{share} unless {alone}"),
        ),
        0.0,
        ((Severity.WARNING, ""),),
        "First tokens are late because of prefill, not of the queue",
        "Check the prefix cache's hit ratio first, then a higher tensor-parallel degree, then P/D.",
        ("8.5", "9.3"),
    )


def decode_bound(plan: Plan) -> CauseQuery | None:
    """The ITL target is missed at the median; None without one."""
    target_s = plan.targets.itl_p99_s
    if target_s is None:
        return None
    median, share = recorded("itl_p50_s"), recorded("decode_share_ratio")
    return CauseQuery(
        "decode_bound",
        f"{median} > {number(target_s)}",
        (Term(median, number(target_s), 2.0), Term(share, "0.5", 0.8, f"{share} >= 0.5")),
        0.3,
        ((Severity.WARNING, ""),),
        "Decode is slow at every percentile",
        "A smaller batch (--max-num-seqs), weight quantization, or GPUs with more bandwidth.",
        ("3.3", "9.3"),
    )


def past_knee(plan: Plan) -> CauseQuery:
    """TTFT's tail has left its middle as the load grew."""
    drift = recorded("ttft_p99_p50_drift_ratio")
    growth = f"({recorded('running_avg')} / ({recorded('running_avg:baseline')} > 0))"
    queue = f"(({recorded('queue_share_ratio')} >= 0.2) and ({recorded('waiting_avg')} >= 1))"
    terms = [
        Term(drift, number(latency.KNEE_DRIFT), 1.2),
        Term(growth, number(latency.KNEE_LOAD_GROWTH), 0.6),
    ]
    when, target_s = queue, plan.targets.ttft_p99_s
    levels: Levels = ((Severity.INFO, ""),)
    if target_s is not None:
        over = f"({recorded('ttft_p99_s')} > {number(target_s)})"
        when, levels = f"({over} or {queue})", ((Severity.WARNING, over), (Severity.INFO, ""))
        terms.append(Term(recorded("ttft_p99_s"), number(target_s), 1.0, over))
    return CauseQuery(
        "past_knee",
        f"({drift} >= {number(latency.KNEE_DRIFT)})"
        f" and ({growth} >= {number(latency.KNEE_LOAD_GROWTH)})"
        f" and ({recorded('cascade_stage')} < 2) and {when}",
        tuple(terms),
        -0.2,
        levels,
        "The tail of TTFT has left its middle behind as the batch grew",
        "Take load away from this replica: more replicas, or quantization to move the knee.",
        ("8.1", "8.5"),
    )
