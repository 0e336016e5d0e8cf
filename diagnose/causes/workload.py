"""Causes in the workload and in what was bought for it: guide 9.2, 9.4. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.rules.model import Severity

LENGTH_POINTS = 0.2
REQUESTS_MIN = 40.0
"""Of fewer requests a share swings by more than that by chance."""

LONGER_OUTPUTS = 1.3


def rambling(values: Mapping[str, float | None]) -> bool:
    """Whether so many more outputs than in quiet times end at their limit that it matters."""
    return (values.get("finished_length_drift_points") or 0.0) >= LENGTH_POINTS


def runaway_generation(facts: Facts) -> Cause | None:
    """Outputs hit their cap far more often than before, and are longer: by a two-sample test of
    their lengths where a histogram tells them."""
    now = facts.values.get("finished_length_ratio")
    before = facts.baseline.get("finished_length_ratio")
    if now is None or before is None or now - before < LENGTH_POINTS:
        return None
    if facts.get("completed_per_s") * facts.window_s < REQUESTS_MIN:
        return None
    shift = facts.lengths
    if shift is not None and not (shift.real and shift.shift_ratio > 0):
        return None
    case = Case(
        "runaway_generation",
        f"{100 * now:.0f} % of the requests run into their output limit, {100 * before:.0f} % "
        "did in "
        "quiet times.",
        "Look for prompts that make the model ramble or repeat; cap outputs per use case at the "
        "gateway.",
        ("9.4",),
        Severity.WARNING,
        log_odds=-0.3,
    )
    case.weigh(
        "finished_length_ratio",
        now - before,
        LENGTH_POINTS,
        1.5,
        f"{100 * (now - before):.0f} points more requests end at their limit",
    )
    if shift is not None:
        text = (
            f"{shift.shift_ratio:.0%} more outputs than in quiet times are above {shift.edge:g} "
            f"tokens; chance makes {shift.chance_ratio:.0%} at most"
        )
        case.weigh("output_tokens_mean", shift.shift_ratio, shift.chance_ratio, 0.6, text)
    length, quiet = facts.values.get("output_tokens_mean"), facts.baseline.get("output_tokens_mean")
    if length is not None and quiet:
        longer = length / quiet
        case.weigh(
            "output_tokens_mean",
            longer,
            LONGER_OUTPUTS,
            1.2 if longer >= LONGER_OUTPUTS else -1.0,
            f"outputs are {longer:.1f} times as long as in quiet times",
            below=longer < LONGER_OUTPUTS,
        )
    return case.close()


def underused(facts: Facts) -> Cause | None:
    """Paid for and idle: a matter of hours, so a note on a live view."""
    if facts.severity("IDLE-HOURS") == Severity.OK and facts.severity("FLEET-LOW") == Severity.OK:
        return None
    running = facts.get("running_avg")
    case = Case(
        "underused",
        f"Paid for and idle for hours: {running:.1f} requests run on average.",
        "Fill the hours with batch work, consolidate, or keep fewer replicas warm.",
        ("9.2", "9.3"),
        Severity.INFO,
        log_odds=0.5,
    )
    case.weigh("running_avg", running, 0.5, 1.0, f"{running:.2f} requests in the batch", below=True)
    busy = facts.values.get("gpu_engine_active_ratio")
    if busy is not None:
        case.weigh(
            "gpu_engine_active_ratio",
            busy,
            0.4,
            1.0 if busy < 0.4 else -1.0,
            f"GPU {100 * busy:.0f} % busy",
            below=busy < 0.4,
        )
    return case.close()


def kv_overprovisioned(facts: Facts) -> Cause | None:
    """KV memory that is never used at the peak."""
    if facts.severity("KV-UNUSED") == Severity.OK:
        return None
    peak = facts.get("kv_usage_max_ratio")
    case = Case(
        "kv_overprovisioned",
        "The KV cache has not been more than half full for hours (now at most "
        f"{100 * peak:.0f} %).",
        "Allow more sequences, or serve from fewer or smaller GPUs.",
        ("7.7", "9.3"),
        Severity.INFO,
        log_odds=0.5,
    )
    case.weigh(
        "kv_usage_max_ratio", peak, 0.5, 1.0, f"{100 * peak:.0f} % at the window's peak", below=True
    )
    return case.close()
