"""What the GPUs of an engine say of it, where labels are stated that join them. Pure.

A GPU's health is the worst of an engine's GPUs; which one it is, the GPU's own alert says.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.gpus.clocks import RATIO, THROTTLED, WANTED
from kneewatch.dashboards.prometheus.gpus.faults import AILMENT
from kneewatch.dashboards.prometheus.gpus.series import (
    BOARD,
    BUSY,
    CLOCK,
    FREE,
    INSTANCE,
    USED,
    each,
    field_of,
    raw,
    spellings,
)
from kneewatch.dashboards.prometheus.model import Group, Plan, Record
from kneewatch.dashboards.prometheus.recording import FOUND
from kneewatch.diagnose.causes.gpu_faults import WEIGHTS
from kneewatch.diagnose.gpu_health import XID
from kneewatch.rules.facts import number, recorded

GIVEN = each("given")
THROTTLED_ODDS, FAULT_ODDS = recorded("gpu_throttled_log_odds"), recorded("gpu_fault_log_odds")
CLOCK_RATIO, UNWANTED = recorded("gpu_throttled_clock_ratio"), recorded("gpu_throttled_unwanted")
ENGINE_CLOCK, ENGINE_HEAT, ENGINE_XID = map(recorded, (
    "gpu_sm_clock_min_hz", "gpu_temperature_max_c", "gpu_xid_max"
))  # fmt: skip
"""Of an engine's GPUs the slowest, the hottest and the greatest XID: what peers are compared by."""

FAULT_SEVERITY, FAULT_AT_WORK = recorded("gpu_fault_severity"), recorded("gpu_fault_at_work")


def joined_group(plan: Plan) -> Group:
    """An engine's GPU signals, and what its GPUs' causes are concluded from; nothing unjoined."""
    if not plan.gpu_join:
        return Group("kneewatch-engine-gpus", ())
    used, free = field_of(USED), field_of(FREE)
    sure = f"max by ({BOARD}) ({THROTTLED})"
    own = f"{BOARD}, {INSTANCE}"
    return Group(
        "kneewatch-engine-gpus",
        (
            Record(GIVEN, _given(plan)),
            Record(
                recorded(FOUND[0]),
                f"{_engine(plan, 'sum', used, own)} / on ({plan.engine})"
                f" ({_engine(plan, 'sum', f'{used} + {free}', own)} > 0)",
            ),
            Record(recorded(FOUND[1]), _engine(plan, "avg", field_of(BUSY), own)),
            Record(ENGINE_CLOCK, _engine(plan, "min", f"max by ({BOARD}) ({field_of(CLOCK)})")),
            Record(ENGINE_HEAT, _engine(plan, "max", each("temperature_c"))),
            Record(ENGINE_XID, _engine(plan, "max", field_of(XID))),
            Record(THROTTLED_ODDS, _engine(plan, "max", f"ln({sure} / (1 - {sure}))")),
            Record(CLOCK_RATIO, _engine(plan, "min", f"{RATIO} and on ({BOARD}) {THROTTLED}")),
            Record(UNWANTED, _engine(plan, "max", f"{sure} unless {WANTED}")),
            Record(FAULT_ODDS, _engine(plan, "max", f"sum by ({BOARD}) ({_weights()})")),
            Record(FAULT_SEVERITY, _engine(plan, "max", f"max by ({BOARD}) ({_severities()})")),
            Record(
                FAULT_AT_WORK,
                _engine(plan, "max", f'count by ({BOARD}) ({AILMENT}{{at_work="true"}})'),
            ),
        ),
    )


def _given(plan: Plan) -> str:
    """1 for each GPU or MIG instance and what it is given to, in the engine's labels."""
    there = ", ".join(f'{gpu}!=""' for _, gpu in plan.gpu_join)
    mine = ", ".join(label for label, _ in plan.gpu_join)
    parts: list[str] = []
    for name, _ in spellings(CLOCK):
        series = raw(plan, name, there)
        for label, gpu in plan.gpu_join:
            if label != gpu:
                series = f'label_replace({series}, "{label}", "$1", "{gpu}", "(.+)")'
        parts.append(f"max by ({BOARD}, {INSTANCE}, {mine}) ({series}) * 0 + 1")
    return " or ".join(parts)


def _engine(plan: Plan, fold: str, expr: str, by: str = BOARD) -> str:
    """What is said of boards, or of instances, folded over those that an engine is given."""
    mine = ", ".join(label for label, _ in plan.gpu_join)
    folded = f"{fold} by ({mine}) ({GIVEN} * on ({by}) group_left () ({expr}))"
    return f"({recorded('running')} * 0 + on ({mine}) group_left () {folded})"


def _weights() -> str:
    return " or ".join(
        f'({AILMENT}{{severity="{severity.word}"}} * 0 + {number(weight)})'
        for severity, weight in WEIGHTS.items()
    )


def _severities() -> str:
    return " or ".join(
        f'({AILMENT}{{severity="{severity.word}"}} * 0 + {int(severity)})' for severity in WEIGHTS
    )
