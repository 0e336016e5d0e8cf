"""The stages of the KV memory-pressure cascade as recording rules. Pure.

The same conditions as rules/cascade.py. A stage holds while its evidence was seen within the hold;
a restarted process has nothing to hold.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.model import Group, Plan, Record
from kneewatch.dashboards.prometheus.recording import Recorded
from kneewatch.rules.cascade import EVIDENCE, EXIT_HOLD_S, severities
from kneewatch.rules.conditions import ToPromQL
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.work import FALLS_TO, LOAD_HOLDS_AT, SAMPLES_KEPT


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
    """The stage that the evidence of this moment shows: the conditions of rules/cascade.py."""
    to = ToPromQL(Recorded(plan))
    stages = [f"(({when.compile(to).vector}) * 0 + {stage})" for stage, when in EVIDENCE]
    return f"{' or '.join(stages)} or ({recorded('kv_usage_ratio')} * 0)"


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
    to = ToPromQL(Recorded(plan))
    evicting = next(rule for rule in plan.rules() if rule.id == "KV-EVICT")
    levels = [
        f"(({when.compile(to).vector or recorded('cascade_stage')}) * 0 + {int(severity)})"
        for severity, when in severities(evicting)
    ]
    return " or ".join(levels)


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
