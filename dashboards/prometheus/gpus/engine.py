"""Causes that lie in an engine's GPUs, as PromQL; none where no label joins them. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.gpus.joined import (
    CLOCK_RATIO,
    FAULT_AT_WORK,
    FAULT_ODDS,
    FAULT_SEVERITY,
    THROTTLED_ODDS,
    UNWANTED,
)
from kneewatch.dashboards.prometheus.model import Plan
from kneewatch.dashboards.prometheus.query import CauseQuery, Spelled, scored
from kneewatch.diagnose.causes import BY_ID
from kneewatch.diagnose.causes.gpu_clocks import (
    AS_EVER,
    ENGINE_TERMS,
    HALF_SPEED,
    NEARLY_FULL,
    QUEUED_S,
    SLOWER,
)
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.model import Severity

DRIFT = recorded("itl_mean_drift_ratio")
ENGINES = Spelled({"itl_mean_drift_ratio": DRIFT})


def gpu_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """An engine's GPUs have an error that bears on what they do now, or the mark of an old one;
    their clocks are held down and it shows, or tokens come as ever (or somebody wants it so)."""
    return (
        _fault(f"{FAULT_AT_WORK} > 0"),
        _fault(f"{FAULT_SEVERITY} unless {FAULT_AT_WORK}", "apart"),
        _throttled_and_slow(plan),
        _throttled_apart(),
    )


def _throttled_and_slow(plan: Plan) -> CauseQuery:
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
        "A GPU of this server has an error of its own",
        "Drain its node; the alert KneewatchGpuFault says which GPU it is and what to do.",
        ("9.3",),
        note,
        apart=bool(note),
    )


def _throttled(when: str, levels: tuple[tuple[Severity, str], ...], note: str = "") -> CauseQuery:
    return CauseQuery(
        BY_ID["gpu_throttled"],
        f"({recorded('running_avg')} >= 1) and ({when})",
        tuple(made for each in ENGINE_TERMS if (made := scored(ENGINES, each)) is not None),
        THROTTLED_ODDS,
        levels,
        "A GPU of this server cannot reach its clocks while it works",
        "Look at that GPU's heat, power and settings; the alert KneewatchGpuThrottled says which "
        "it is and why.",
        ("9.3",),
        note,
        apart=bool(note),
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
