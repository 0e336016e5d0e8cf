"""Requests that are no longer of the lengths, or of the rate, that a size was computed for: guide
9.1. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.catalogue.gpu_specs import recognise
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.causes.workload import departure_words, told_of
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.fleet.observed import HOUR_S, Past
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, names_of
from kneewatch.diagnose.learned.live_workload import RATE, SHIFTS
from kneewatch.diagnose.workload.drift import (
    FALSE_ALARM,
    SHIFT_MIN,
    Departure,
    Drift,
    departure,
    drift,
    more_than_chance,
)
from kneewatch.diagnose.workload.stated_workload import (
    ANSWERS,
    PROMPTS,
    RATE_MIN,
    WORDS,
    StatedWorkload,
)
from kneewatch.rules.rule import Severity

SIGNALS = {side: f"{side}_mean" for side in WORDS}
"""The signals of a request's lengths, by side."""


def workload_drift(
    tier: Tier, past: Past, stated: Stated, tiers: Sequence[Tier]
) -> FleetCause | None:
    """Requests of other lengths than in the same hour a week ago, or than the stated profile's, or
    more of them than its peak on all `tiers` that it is of."""
    drifted = _since_last_week(tier, past)
    left, rate, workload = dict[str, Departure](), None, stated.workload
    of_it = _profiled(tiers, stated)
    if workload is not None and any(one is tier for one in of_it):
        left = _left(tier, past, stated, workload)
        rate = _rate(past, of_it, workload)
    if not drifted and not left and rate is None:
        return None
    told = [_words(drifted)] if drifted else []
    if workload is not None and (left or rate is not None):
        told.append(f"Against the profile {workload.origin}: {told_of(left, rate)}.")
    case = Case(
        "workload_drift",
        " ".join(told),
        "Size again for these requests (kneewatch size), and see what was released in the week.",
        ("9.1",),
        Severity.INFO,
        log_odds=0.4,
    )
    for side, week in drifted.items():
        case.weigh(SIGNALS[side], abs(week.shift_ratio), SHIFT_MIN, 1.2, _evidence(week, side))
    for side, one in left.items():
        text = departure_words(one, WORDS[side], "the last hour")
        case.weigh(SHIFTS[side], abs(one.shift_ratio), one.least_ratio, 1.2, text)
    if rate is not None and workload is not None:
        text = f"{rate:.1f} times the {workload.peak_requests_per_s:.3g} requests/s of its peak"
        case.weigh(RATE, rate, RATE_MIN, 1.2, f"{text}, over the last hour")
    cause = case.close()
    return (
        None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(tier.engines))
    )


def unprofiled(tiers: Sequence[Tier], stated: Stated) -> list[str]:
    """A line where a stated profile is of no tier."""
    if stated.workload is None or not tiers or _profiled(tiers, stated):
        return []
    return [f"workload_drift: no pool serves a model of the profile {stated.workload.origin}"]


def _profiled(tiers: Sequence[Tier], stated: Stated) -> list[Tier]:
    """The tiers that the stated profile is of: those that serve a model of it, or the only pool."""
    if stated.workload is None:
        return []
    models = {part.model for part in stated.workload.parts}
    serving = [tier for tier in tiers if _model_id(tier, stated) in models]
    if serving or len({tier.pool for tier in tiers}) > 1:
        return serving
    return list(tiers)


def _since_last_week(tier: Tier, past: Past) -> dict[str, Drift]:
    lengths = past.lengths.get((tier.pool, tier.tier, tier.role), {})
    return {
        side: one
        for side, key in SIGNALS.items()
        if key in lengths and (one := drift(*lengths[key])) and one.real
    }


def _left(tier: Tier, past: Past, stated: Stated, workload: StatedWorkload) -> dict[str, Departure]:
    gpu = stated.gpu or (recognise(tier.tier) if tier.tier else None)
    points = workload.lengths(_model_id(tier, stated), gpu.id if gpu else None)
    now = past.recent.get((tier.pool, tier.tier, tier.role), {})
    return {
        side: one
        for side, stated_points in points.items()
        # A server that only prefills answers with one token, whatever was asked.
        if not (tier.role == "prefill" and side == ANSWERS)
        and (one := departure(stated_points, now.get(SIGNALS[side], {})))
        and one.real
    }


def _rate(past: Past, tiers: Sequence[Tier], workload: StatedWorkload) -> float | None:
    """The last hour's requests over so many of the peak, where these are surely more."""
    key = SIGNALS[PROMPTS]
    # What is prefilled apart is counted where it is decoded.
    groups = {(one.pool, one.tier, one.role) for one in tiers if one.role != "prefill"}
    counted = [past.recent.get(group, {}).get(key, {}) for group in groups]
    requests = sum(max(buckets.values(), default=0.0) for buckets in counted)
    expected = (workload.peak_requests_per_s or 0.0) * HOUR_S
    if not more_than_chance(requests, expected) or requests < RATE_MIN * expected:
        return None
    return requests / expected


def _words(drifted: Mapping[str, Drift]) -> str:
    told = [
        f"{WORDS[side]} are {'longer' if one.shift_ratio > 0 else 'shorter'}"
        for side, one in drifted.items()
    ]
    return f"{' and '.join(told).capitalize()} than in the same hour a week ago."


def _evidence(one: Drift, side: str) -> str:
    where = "above" if one.shift_ratio > 0 else "at or below"
    return (
        f"{abs(one.shift_ratio):.0%} more of the {WORDS[side]} are {where} {one.edge:g} tokens "
        f"than a week ago; chance makes {one.chance_ratio:.0%} at most but once in "
        f"{1 / FALSE_ALARM:,.0f}"
    )


def _model_id(tier: Tier, stated: Stated) -> str | None:
    if stated.model is not None:
        return stated.model.id
    try:
        return model(tier.engines[0].member.model).id
    except SizingError:
        return None
