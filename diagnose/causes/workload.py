"""Causes in the workload and in what was bought for it: guide 9.2, 9.4. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.diagnose.drift import Departure
from kneewatch.diagnose.lengths import ENDLESS
from kneewatch.rules.model import Severity

LENGTH_POINTS = 0.2
REQUESTS_MIN = 40.0
"""Of fewer requests a share swings by more than that by chance."""

LONGER_OUTPUTS = 1.3


def rambling(values: Mapping[str, float | None]) -> bool:
    """Whether so many more outputs than in quiet times end at their limit that it matters."""
    return (values.get("finished_length_drift_points") or 0.0) >= LENGTH_POINTS


def capped(values: Mapping[str, float | None]) -> bool:
    """Whether so many outputs end at their limit that it would matter if it were new."""
    return (values.get("finished_length_ratio") or 0.0) >= LENGTH_POINTS


def runaway_generation(facts: Facts) -> Cause | None:
    """Outputs hit their cap far more often than before, and are longer: by a two-sample test of
    their lengths where a histogram tells them. Where they go far beyond what is stated of them,
    that stands for quiet times: a server may ramble from its start on."""
    now = facts.values.get("finished_length_ratio")
    if now is None or facts.get("completed_per_s") * facts.window_s < REQUESTS_MIN:
        return None
    before, beyond = facts.baseline.get("finished_length_ratio"), facts.endless
    if beyond is not None and beyond.shift_ratio >= max(LENGTH_POINTS, beyond.chance_ratio):
        return _endless(now, before, beyond)
    if before is None or now - before < LENGTH_POINTS:
        return None
    shift = facts.lengths
    if shift is not None and not (shift.real and shift.shift_ratio > 0):
        return None
    case = _runaway(now, f"{100 * before:.0f} % did in quiet times")
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


def _runaway(now: float, against: str) -> Case:
    return Case(
        "runaway_generation",
        f"{100 * now:.0f} % of the requests run into their output limit, {against}.",
        "Look for prompts that make the model ramble or repeat; cap outputs per use case at the "
        "gateway.",
        ("9.4",),
        Severity.WARNING,
        log_odds=-0.3,
    )


def _endless(now: float, before: float | None, beyond: Departure) -> Cause | None:
    """The case by what is stated of the lengths; a note where it has always been so, for then the
    profile may be another workload's."""
    if now < LENGTH_POINTS:
        return None
    point = beyond.point
    case = _runaway(
        now,
        f"and {100 * beyond.seen_ratio:.0f} % of the answers go beyond twice the stated "
        f"P{100 * point.ratio:.0f} of {point.most / ENDLESS:g} tokens",
    )
    text = f"{100 * now:.0f} % of the requests end at their limit"
    case.weigh("finished_length_ratio", now, LENGTH_POINTS, 1.2, text)
    text = (
        f"{100 * beyond.seen_ratio:.0f} % of the answers are above {beyond.edge:g} tokens, where "
        f"the profile has {100 * beyond.may_ratio:.0f} % above {point.most / ENDLESS:g}; chance "
        f"makes {100 * beyond.chance_ratio:.0f} % more at most"
    )
    case.weigh("output_tokens_mean", beyond.shift_ratio, beyond.chance_ratio, 0.9, text)
    if before is not None and now - before < LENGTH_POINTS:
        text = f"{100 * before:.0f} % did in quiet times: it may be the profile that is another's"
        case.weigh("finished_length_ratio", before, None, -0.6, text)
        case.severity = Severity.INFO
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
