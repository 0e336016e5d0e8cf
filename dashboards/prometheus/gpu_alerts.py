"""Recording rules per GPU, and the GPU causes of engines if labels assign GPUs to engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.dashboards.prometheus.cause_query import CauseQuery, Spelled, scored
from kneewatch.dashboards.prometheus.gpu_clock_rules import (
    RATIO,
    THROTTLED,
    WANTED,
    clock_alerts,
    clock_records,
)
from kneewatch.dashboards.prometheus.gpu_fault_rules import AILMENT, fault_alerts, fault_records
from kneewatch.dashboards.prometheus.gpu_series import (
    BOARD,
    BUSY,
    CLOCK,
    FREE,
    INSTANCE,
    USED,
    gpu_records,
    owner_record,
    raw,
    series_of,
    spellings,
)
from kneewatch.dashboards.prometheus.recording_rules import FOUND
from kneewatch.dashboards.prometheus.rule_group import Group, Plan, Record
from kneewatch.diagnose.causes.gpu_clocks import (
    AS_EVER,
    ENGINE_TERMS,
    HALF_SPEED,
    NEARLY_FULL,
    QUEUED_S,
    SLOWER,
)
from kneewatch.diagnose.causes.gpu_faults import WEIGHTS
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.gpu import XID
from kneewatch.rules.facts import duration, number, recorded, span_s
from kneewatch.rules.rule import Severity

# --- GPU rules joined to engines, where labels allow it -------------------------------------------


GIVEN = series_of("given")
THROTTLED_ODDS, FAULT_ODDS = recorded("gpu_throttled_log_odds"), recorded("gpu_fault_log_odds")
CLOCK_RATIO, UNWANTED = recorded("gpu_throttled_clock_ratio"), recorded("gpu_throttled_unwanted")
ENGINE_CLOCK, ENGINE_HEAT, ENGINE_XID = map(recorded, (
    "gpu_sm_clock_min_hz", "gpu_temperature_max_c", "gpu_xid_max"
))  # fmt: skip
"""Names of recorded series: the lowest clock, the highest temperature and the highest XID of an
engine's GPUs. They are compared with those of its peers."""

FAULT_SEVERITY, FAULT_AT_WORK = recorded("gpu_fault_severity"), recorded("gpu_fault_at_work")


def joined_group(plan: Plan) -> Group:
    """Recording rules for an engine's GPU signals and for the inputs of its GPU causes. Empty
    without `gpu_join`."""
    if not plan.gpu_join:
        return Group("kneewatch-engine-gpus", ())
    used, free = recorded(USED), recorded(FREE)
    sure = f"max by ({BOARD}) ({THROTTLED})"
    own = f"{BOARD}, {INSTANCE}"
    odds = f"sum by ({BOARD}) ({_by_severity(WEIGHTS)})"
    worst = f"max by ({BOARD}) ({_by_severity({rank: int(rank) for rank in WEIGHTS})})"
    return Group(
        "kneewatch-engine-gpus",
        (
            Record(GIVEN, _given(plan)),
            Record(
                recorded(FOUND[0]),
                f"{_engine(plan, 'sum', used, own)} / on ({plan.engine})"
                f" ({_engine(plan, 'sum', f'{used} + {free}', own)} > 0)",
            ),
            Record(recorded(FOUND[1]), _engine(plan, "avg", recorded(BUSY), own)),
            Record(ENGINE_CLOCK, _engine(plan, "min", f"max by ({BOARD}) ({recorded(CLOCK)})")),
            Record(ENGINE_HEAT, _engine(plan, "max", series_of("temperature_c"))),
            Record(ENGINE_XID, _engine(plan, "max", recorded(XID))),
            Record(THROTTLED_ODDS, _engine(plan, "max", f"ln({sure} / (1 - {sure}))")),
            Record(CLOCK_RATIO, _engine(plan, "min", f"{RATIO} and on ({BOARD}) {THROTTLED}")),
            Record(UNWANTED, _engine(plan, "max", f"{sure} unless {WANTED}")),
            Record(FAULT_ODDS, _engine(plan, "max", odds)),
            Record(FAULT_SEVERITY, _engine(plan, "max", worst)),
            Record(
                FAULT_AT_WORK,
                _engine(plan, "max", f'count by ({BOARD}) ({AILMENT}{{at_work="true"}})'),
            ),
        ),
    )


def _given(plan: Plan) -> str:
    """A PromQL expression that is 1 for each GPU or MIG instance assigned to an engine. It has the
    labels of that engine."""
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
    """A PromQL expression per engine. It aggregates `expr` over the engine's boards with `fold`;
    `expr` has a value per board or MIG instance."""
    mine = ", ".join(label for label, _ in plan.gpu_join)
    folded = f"{fold} by ({mine}) ({GIVEN} * on ({by}) group_left () ({expr}))"
    return f"({recorded('running')} * 0 + on ({mine}) group_left () {folded})"


def _by_severity(values: Mapping[Severity, float]) -> str:
    """A PromQL expression for each active fault. Its value depends on the severity of the fault, as
    in `values`."""
    return " or ".join(
        f'({AILMENT}{{severity="{severity.word}"}} * 0 + {number(value)})'
        for severity, value in values.items()
    )


# --- GPU causes of an engine ----------------------------------------------------------------------


DRIFT = recorded("itl_mean_drift_ratio")
ENGINES = Spelled({"itl_mean_drift_ratio": DRIFT})


def gpu_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """The queries for the GPU causes, one per form: a fault that affects work now, an old fault,
    throttling that slows the engine, and throttling that does not slow it or is intended."""
    return (
        _fault(f"{FAULT_AT_WORK} > 0"),
        _fault(f"{FAULT_SEVERITY} unless {FAULT_AT_WORK}", "apart"),
        _throttled_and_slow(plan),
        _throttled_apart(),
    )


def _throttled_and_slow(plan: Plan) -> CauseQuery:
    slow = f"({_slow()})"
    queued_s = span_s(QUEUED_S * plan.scale, plan.sample_s)
    harmed = (
        f"({recorded('cascade_stage')} >= 2)"
        f" or (min_over_time({recorded('queued')}[{duration(queued_s)}]) == 1)"
    )
    for target_s, signal in (
        (plan.targets.ttft_p99_s, "ttft_p99_s"),
        (plan.targets.itl_p99_s, "itl_p99_s"),
    ):
        if target_s is not None:
            harmed += f" or ({recorded(signal)} > {number(target_s)})"
    return _throttled(
        f"{_grave()} unless {_apart()}",
        ((Severity.CRITICAL, f"{slow} and ({harmed})"), (Severity.WARNING, "")),
    )


def _throttled_apart() -> CauseQuery:
    levels = ((Severity.WARNING, _grave()), (Severity.INFO, ""))
    when = f"{THROTTLED_ODDS} unless ({_grave()} unless {_apart()})"
    return _throttled(when, levels, "apart")


def _fault(when: str, note: str = "") -> CauseQuery:
    return CauseQuery(
        BY_ID["gpu_fault"],
        when,
        (),
        FAULT_ODDS,
        (
            (Severity.CRITICAL, f"{FAULT_SEVERITY} == 3"),
            (Severity.WARNING, f"{FAULT_SEVERITY} == 2"),
            (Severity.INFO, ""),
        ),
        "A GPU of this server reports a hardware error",
        "Drain its node. The alert KneewatchGpuFault names the GPU and the repair.",
        note,
        apart=bool(note),
    )


def _throttled(when: str, levels: tuple[tuple[Severity, str], ...], note: str = "") -> CauseQuery:
    return CauseQuery(
        BY_ID["gpu_throttled"],
        f"({recorded('running_avg')} >= 1) and ({when})",
        tuple(
            term
            for engine_term in ENGINE_TERMS
            if (term := scored(ENGINES, engine_term)) is not None
        ),
        THROTTLED_ODDS,
        levels,
        "A GPU of this server is throttled under load",
        "Check that GPU's temperature, power limit and clock settings. The alert "
        "KneewatchGpuThrottled names the GPU and the reason.",
        note,
        apart=bool(note),
    )


def _slow() -> str:
    return (
        f"({DRIFT} >= {number(SLOWER)}) or (({CLOCK_RATIO} < {number(HALF_SPEED)}) unless {DRIFT})"
    )


def _grave() -> str:
    """A PromQL condition for throttling that deserves a warning: it is not intended, or the engine
    is slow."""
    return f"(({UNWANTED} or ({_slow()})) unless ({CLOCK_RATIO} >= {number(NEARLY_FULL)}))"


def _apart() -> str:
    return f"({DRIFT} < {number(AS_EVER)})"


# --- Rules per GPU --------------------------------------------------------------------------------


def gpu_group(plan: Plan) -> Group:
    """Recording rules and alerts per GPU, on series of a DCGM exporter."""
    return Group(
        "kneewatch-gpus",
        (
            *gpu_records(plan),
            *clock_records(),
            *fault_records(plan),
            owner_record(plan),
            *clock_alerts(plan),
            *fault_alerts(plan),
        ),
    )
