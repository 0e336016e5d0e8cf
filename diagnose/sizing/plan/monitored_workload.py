"""The values of a workload profile that are monitored on live servers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.learned.length_drift import (
    ANSWERS,
    KEYS,
    PROMPTS,
    Part,
    Point,
    StatedWorkload,
)
from kneewatch.diagnose.sizing.plan.plan_result import call_lengths, planned_peak_per_s
from kneewatch.diagnose.sizing.plan.workload_profile import Deployment, Lengths, WorkloadProfile

PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def watched(profile: WorkloadProfile, *, origin: str) -> StatedWorkload:
    """Length percentiles by tier, and the peak that the plan is sized for.

    A session's input lengths are between those of its first call, which are stated, and of its
    last.
    """
    launches: Sequence[tuple[str, Deployment, Lengths]] = [
        (tier.name, tier, tier.lengths) for tier in profile.tiers
    ] or [("", profile.deployment, profile.lengths)]
    # A batch is done as fast as it goes; what a tier gets of a peak, its plan decides.
    judged = profile.traffic.kind == "online" and not profile.tiers
    return StatedWorkload(
        origin,
        tuple(
            Part(name, launch.model, launch.gpus, _lengths(lengths, profile))
            for name, launch, lengths in launches
        ),
        planned_peak_per_s(profile) if judged else None,
        grown=profile.session is not None,
    )


def _lengths(first: Lengths, profile: WorkloadProfile) -> Mapping[str, tuple[Point, ...]]:
    last = call_lengths(first, profile.session)
    # The plan's P50 is of the call in the middle, its P95 and P99 are of the last one.
    grown = {PROMPTS: last.input_p99_tokens - first.input_p99_tokens, ANSWERS: 0}
    return {side: _points(first, KEYS[side], grown[side]) for side in (PROMPTS, ANSWERS)}


def _points(first: Lengths, side: str, grown: int) -> tuple[Point, ...]:
    stated = [(ratio, getattr(first, f"{side}_{name}_tokens")) for name, ratio in PERCENTILES]
    return tuple(Point(ratio, float(tokens), float(tokens + grown)) for ratio, tokens in stated)
