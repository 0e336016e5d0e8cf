"""The stages of the KV memory-pressure cascade as recording rules. Pure.

The same conditions as rules/cascade.py. A stage holds while its evidence was seen within the hold;
a restarted process has nothing to hold.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.model import Group, Plan, Record, duration, number, recorded
from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    EXIT_HOLD_S,
    FILLING_FROM_RATIO,
    FULL_FROM_RATIO,
    PREEMPTIONS_MIN,
    QUEUE_SHARE_OF_RUNNING,
    QUEUED_FROM,
    TTFT_DRIFT,
)
from kneewatch.rules.work import FALLS_TO, LOAD_HOLDS_AT, SAMPLES_KEPT

SEVERITIES = ("info", "warning", "critical")


def stage_group(plan: Plan) -> Group:
    """Evidence, stage and severity, a series each."""
    return Group(
        "kneewatch-cascade",
        (
            Record(recorded("in_flight_avg"), _sum("running_avg", "waiting_avg")),
            Record(recorded("work_fallen"), _work_fallen(plan)),
            Record(recorded("cascade_evidence"), _evidence(plan)),
            Record(recorded("cascade_stage"), _held(plan, "cascade_evidence")),
            Record(recorded("cascade_severity_evidence"), _severity(plan)),
            Record(
                recorded("cascade_severity"),
                f"(({_held(plan, 'cascade_severity_evidence')}) and"
                f" {recorded('cascade_stage')} >= 2) or {recorded('cascade_severity_evidence')}",
            ),
        ),
    )


def _evidence(plan: Plan) -> str:
    usage, waiting = recorded("kv_usage_ratio"), recorded("waiting_by_capacity")
    dialect = plan.dialect
    preemptions = dialect.series("num_preemptions", "_total")
    preempted = f"{dialect.sum(f'irate({preemptions}[{dialect.range}])')} > 0"
    stuck = (
        f"({usage} >= {number(FULL_FROM_RATIO)}) and ({waiting} >= 1)"
        f" and ({recorded('cascade_stage')} >= 2)"
    )
    evicting = f"(({preempted}) or ({stuck}))"
    queueing = f"({evicting} and ({_queueing(plan)}))"
    hold = duration(EXIT_HOLD_S * plan.scale)
    filling = (
        f"(({usage} >= {number(FILLING_FROM_RATIO)}) and"
        f" (({recorded('kv_usage_slope_per_s')} > 0)"
        f" or (min_over_time({usage}[{hold}]) >= {number(FILLING_FROM_RATIO)})))"
    )
    collapsing = f"({queueing} and {recorded('work_fallen')} > 0)"
    return (
        f"({collapsing} * 0 + 4) or ({queueing} * 0 + 3) or ({evicting} * 0 + 2)"
        f" or ({filling} * 0 + 1) or ({usage} * 0)"
    )


def _queueing(plan: Plan) -> str:
    waiting, running = recorded("waiting_by_capacity"), recorded("running")
    behind = f"({waiting} >= clamp_min({number(QUEUE_SHARE_OF_RUNNING)} * {running}, 2))"
    target_s = plan.targets.ttft_p99_s
    slow = f"({recorded('ttft_p99_drift_ratio')} > {number(TTFT_DRIFT)})"
    if target_s is not None:
        slow = f"({recorded('ttft_p99_s')} > {number(target_s)})"
    there = f"({recorded('waiting')} >= 1) and ({recorded('waiting_avg')} >= {number(QUEUED_FROM)})"
    return f"{behind} or ({slow} and {there})"


def _work_fallen(plan: Plan) -> str:
    """1 where tokens have been below their median of earlier windows for half a window while the
    load holds."""
    made, load = recorded("generation_tokens_per_s"), recorded("in_flight_avg")
    half = plan.window_s / 2
    earlier = f"[{duration(SAMPLES_KEPT * half)}] offset {duration(plan.window_s)}"
    fallen = (
        f"({made} < bool {number(FALLS_TO)} * quantile_over_time(0.5, {made}{earlier}))"
        f" * ({load} >= bool {number(LOAD_HOLDS_AT)} * quantile_over_time(0.5, {load}{earlier}))"
    )
    return f"min_over_time(({fallen})[{duration(half)}:{duration(plan.interval_s)}])"


def _severity(plan: Plan) -> str:
    """0 ok, 1 info, 2 warning, 3 critical, before the hold."""
    bounds = plan.thresholds.get("KV-EVICT", {})
    warning = bounds.get("warning", EVICT_WARNING_PER_S)
    critical = bounds.get("critical", EVICT_CRITICAL_PER_S)
    stage, ratio = recorded("cascade_stage"), recorded("preemption_ratio_per_s")
    many = f"({recorded('preempted_in_window')} >= {number(PREEMPTIONS_MIN)})"
    return (
        f"(({stage} == 4) * 0 + 3)"
        f" or ((({stage} >= 2) and ({ratio} > {number(critical)}) and {many}) * 0 + 3)"
        f" or (({stage} == 3) * 0 + 2)"
        f" or ((({stage} >= 2) and ({ratio} > {number(warning)}) and {many}) * 0 + 2)"
        f" or (({stage} >= 1) * 0 + 1) or ({stage} * 0)"
    )


def _held(plan: Plan, key: str) -> str:
    """The highest of a series within the hold; half of it once no request is left."""
    series, hold_s = recorded(key), EXIT_HOLD_S * plan.scale
    starts = plan.dialect.names.get("process_start_time_seconds", "process_start_time_seconds")
    selector = f"{{{plan.selector}}}" if plan.selector else ""
    restarted = f"(changes({starts}{selector}[{duration(hold_s)}]) > 0)"
    busy = f"({_sum('running', 'waiting')} > 0)"
    unheld = f"unless on ({plan.process}) {restarted}"
    return (
        f"((max_over_time({series}[{duration(hold_s)}]) and {busy})"
        f" or max_over_time({series}[{duration(hold_s / 2)}])) {unheld} or {series}"
    )


def _sum(one: str, other: str) -> str:
    return f"({recorded(one)} + {recorded(other)})"
