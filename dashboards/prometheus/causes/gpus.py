"""Causes that lie in an engine's GPUs, as PromQL; none where no label joins them. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.gpus.joined import (
    CLOCK_RATIO,
    FAULT_AT_WORK,
    FAULT_ODDS,
    FAULT_SEVERITY,
    THROTTLED_ODDS,
    UNWANTED,
)
from kneewatch.dashboards.prometheus.model import Plan, duration, number, recorded
from kneewatch.dashboards.prometheus.odds import Term
from kneewatch.diagnose.causes.gpu_clocks import (
    AS_EVER,
    HALF_SPEED,
    NEARLY_FULL,
    QUEUED_S,
    SLOWER,
)
from kneewatch.rules.model import Severity

DRIFT = recorded("itl_mean_drift_ratio")


def gpu_fault(plan: Plan) -> CauseQuery | None:
    """A GPU has an error that bears on what it does now."""
    return _fault(f"{FAULT_AT_WORK} > 0") if plan.gpu_join else None


def gpu_fault_apart(plan: Plan) -> CauseQuery | None:
    """A GPU has the mark of an old error: nothing follows from it now."""
    when = f"{FAULT_SEVERITY} unless {FAULT_AT_WORK}"
    return _fault(when, "apart") if plan.gpu_join else None


def gpu_throttled(plan: Plan) -> CauseQuery | None:
    """The clocks are held down, nobody may want it so or tokens are slow, and it shows."""
    if not plan.gpu_join:
        return None
    slow = f"({_slow()})"
    harmed = (
        f"({recorded('cascade_stage')} >= 2)"
        f" or (min_over_time({recorded('queued')}[{duration(QUEUED_S * plan.scale)}]) == 1)"
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


def gpu_throttled_apart(plan: Plan) -> CauseQuery | None:
    """The clocks are held down and tokens come as ever, or somebody wants it so."""
    if not plan.gpu_join:
        return None
    levels = ((Severity.WARNING, _grave()), (Severity.INFO, ""))
    when = f"{THROTTLED_ODDS} unless ({_grave()} unless {_apart()})"
    return _throttled(when, levels, "apart")


def _fault(when: str, note: str = "") -> CauseQuery:
    return CauseQuery(
        "gpu_fault",
        when,
        (),
        FAULT_ODDS,
        (
            (Severity.CRITICAL, f"{FAULT_SEVERITY} == 3"),
            (Severity.WARNING, f"{FAULT_SEVERITY} == 2"),
            (Severity.INFO, ""),
        ),
        "A GPU of this server has an error of its own",
        "Drain its node; the alert KneewatchGpuFault says which GPU it is and what to do.",
        ("9.3",),
        note,
    )


def _throttled(when: str, levels: tuple[tuple[Severity, str], ...], note: str = "") -> CauseQuery:
    return CauseQuery(
        "gpu_throttled",
        f"({recorded('running_avg')} >= 1) and ({when})",
        (
            Term(DRIFT, number(SLOWER), 0.8, f"{DRIFT} >= {number(SLOWER)}"),
            Term(DRIFT, None, -0.6, f"{DRIFT} < {number(AS_EVER)}"),
        ),
        THROTTLED_ODDS,
        levels,
        "A GPU of this server cannot reach its clocks while it works",
        "Look at that GPU's heat, power and settings; the alert KneewatchGpuThrottled says which "
        "it is and why.",
        ("9.3",),
        note,
    )


def _slow() -> str:
    return (
        f"({DRIFT} >= {number(SLOWER)}) or (({CLOCK_RATIO} < {number(HALF_SPEED)}) unless {DRIFT})"
    )


def _grave() -> str:
    """More than a note: nobody wants it so, or it is slow."""
    return f"(({UNWANTED} or ({_slow()})) unless ({CLOCK_RATIO} >= {number(NEARLY_FULL)}))"


def _apart() -> str:
    return f"({DRIFT} < {number(AS_EVER)})"
