"""The cause that request lengths or rates differ from last week's or from the sizing profile. Pure.

Guide 9.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from msgspec import Struct

from kneewatch.diagnose.catalogue.gpu_specs import recognise
from kneewatch.diagnose.catalogue.models import known_model
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.causes.workload import departure_text, drift_text
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.fleet.inventory import Past
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, closed
from kneewatch.diagnose.learned.live_workload import band, departure
from kneewatch.diagnose.lengths import (
    ALIKE,
    ANSWERS,
    FALSE_ALARM,
    PROMPTS,
    RATE,
    RATE_MIN,
    SHIFT_MIN,
    SHIFTS,
    WORDS,
    Departure,
    StatedWorkload,
    more_than_chance,
)
from kneewatch.diagnose.values import Histogram
from kneewatch.rules.formatting import number, percent
from kneewatch.rules.rule import HOUR_S, Severity

SIGNALS = {side: f"{side}_mean" for side in WORDS}
"""The signals of prompt and answer lengths."""


def workload_drift(
    tier: Tier, past: Past, stated: Stated, tiers: Sequence[Tier]
) -> FleetCause | None:
    """Lengths differ from the same hour a week ago or from the stated profile; or the request rate
    on all `tiers` of the profile exceeds the stated peak."""
    drifted = _since_last_week(tier, past)
    left, rate, workload = dict[str, Departure](), None, stated.workload
    profiled = _profiled(tiers, stated)
    if workload is not None and any(member is tier for member in profiled):
        left = _departures(tier, past, stated, workload)
        rate = _rate(past, profiled, workload)
    if not drifted and not left and rate is None:
        return None
    sentences = [_drift_sentence(drifted)] if drifted else []
    if workload is not None and (left or rate is not None):
        sentences.append(f"Against the profile {workload.origin}: {drift_text(left, rate)}.")
    case = Case(
        "workload_drift",
        " ".join(sentences),
        "Size again for these requests (kneewatch size), and check what was released this week.",
        Severity.INFO,
        log_odds=0.4,
    )
    for side, week in drifted.items():
        case.weigh(SIGNALS[side], abs(week.shift_ratio), SHIFT_MIN, 1.2, _evidence(week, side))
    for side, shift in left.items():
        text = departure_text(shift, WORDS[side], "the last hour")
        case.weigh(SHIFTS[side], abs(shift.shift_ratio), shift.least_ratio, 1.2, text)
    if rate is not None and workload is not None:
        text = (
            f"{rate:.1f}x the profile's peak of {number(workload.peak_requests_per_s)} requests/s"
        )
        case.weigh(RATE, rate, RATE_MIN, 1.2, f"{text} in the last hour")
    return closed(case, tier.pool, tier.tier, tier.engines)


def unprofiled(tiers: Sequence[Tier], stated: Stated) -> list[str]:
    """A line if no tier serves a model of the stated profile; otherwise empty."""
    if stated.workload is None or not tiers or _profiled(tiers, stated):
        return []
    return [f"workload_drift: no pool serves a model of the profile {stated.workload.origin}"]


def _profiled(tiers: Sequence[Tier], stated: Stated) -> list[Tier]:
    """The tiers that serve a model of the stated profile.

    If there are none, the tiers of the only pool.
    """
    if stated.workload is None:
        return []
    models = {part.model for part in stated.workload.parts}
    serving = [tier for tier in tiers if _model_id(tier, stated) in models]
    if serving or len({tier.pool for tier in tiers}) > 1:
        return serving
    return list(tiers)


def _since_last_week(tier: Tier, past: Past) -> dict[str, LengthShift]:
    lengths = past.lengths.get(tier.group, {})
    return {
        side: shift
        for side, key in SIGNALS.items()
        if key in lengths and (shift := drift(*lengths[key])) and shift.real
    }


def _departures(
    tier: Tier, past: Past, stated: Stated, workload: StatedWorkload
) -> dict[str, Departure]:
    gpu = stated.gpu or (recognise(tier.tier) if tier.tier else None)
    points = workload.lengths(_model_id(tier, stated), gpu.id if gpu else None)
    now = past.recent.get(tier.group, {})
    return {
        side: shift
        for side, stated_points in points.items()
        # A prefill server answers every request with one token.
        if not (tier.role == "prefill" and side == ANSWERS)
        and (shift := departure(stated_points, now.get(SIGNALS[side], {})))
        and shift.real
    }


def _rate(past: Past, tiers: Sequence[Tier], workload: StatedWorkload) -> float | None:
    """The last hour's requests divided by those at the stated peak rate.

    None unless they are certainly more than at the peak rate.
    """
    key = SIGNALS[PROMPTS]
    # Disaggregated requests are counted at the decode replicas.
    groups = {tier.group for tier in tiers if tier.role != "prefill"}
    counted = [past.recent.get(group, {}).get(key, {}) for group in groups]
    requests = sum(max(buckets.values(), default=0.0) for buckets in counted)
    expected = (workload.peak_requests_per_s or 0.0) * HOUR_S
    if not more_than_chance(requests, expected) or requests < RATE_MIN * expected:
        return None
    return requests / expected


class LengthShift(Struct, frozen=True):
    """The distance between two distributions.

    `shift_ratio`: share of the requests that moved to the other side of `edge`; positive if
    requests are longer now. `chance_ratio`: the largest shift that chance explains.
    """

    shift_ratio: float
    edge: float
    chance_ratio: float

    @property
    def real(self) -> bool:
        """Whether the shift is more than chance, and large enough to be another workload."""
        return abs(self.shift_ratio) > max(self.chance_ratio, SHIFT_MIN)


def drift(
    before: Histogram, now: Histogram, *, false_alarm: float = FALSE_ALARM, alike: float = ALIKE
) -> LengthShift | None:
    """The distance of `now` from `before`.

    None if either is empty or not a histogram, or if their edges differ. `alike` observations count
    as one independent observation.
    """
    edges = sorted(before)
    if edges != sorted(now) or not edges or edges[-1] != inf:
        return None
    counts = before[inf], now[inf]
    if not all(isfinite(count) for count in (*before.values(), *now.values())) or min(counts) <= 0:
        return None
    shifts = [(before[edge] / counts[0] - now[edge] / counts[1], edge) for edge in edges]
    shift, edge = max(shifts, key=lambda shift_and_edge: abs(shift_and_edge[0]))
    return LengthShift(shift, edge, sum(band(count / alike, false_alarm / 2) for count in counts))


def _drift_sentence(drifted: Mapping[str, LengthShift]) -> str:
    clauses = [
        f"{WORDS[side]} are {'longer' if shift.shift_ratio > 0 else 'shorter'}"
        for side, shift in drifted.items()
    ]
    return f"{' and '.join(clauses).capitalize()} than in the same hour a week ago."


def _evidence(shift: LengthShift, side: str) -> str:
    where = "above" if shift.shift_ratio > 0 else "at or below"
    return (
        f"{percent(abs(shift.shift_ratio))} more {WORDS[side]} than a week ago are {where} "
        f"{shift.edge:g} tokens; chance explains at most {percent(shift.chance_ratio)}"
    )


def _model_id(tier: Tier, stated: Stated) -> str | None:
    served = stated.model or known_model(tier.engines[0].member.model)
    return None if served is None else served.id
