"""Requests that are no longer of the lengths that a size was computed for: guide 9.1. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case
from kneewatch.diagnose.drift import FALSE_ALARM, SHIFT_MIN, drift
from kneewatch.diagnose.fleet.history import Past
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier, names_of
from kneewatch.rules.model import Severity

PROMPTS, OUTPUTS = "prompt_tokens_mean", "output_tokens_mean"
WORDS = {PROMPTS: "prompts", OUTPUTS: "answers"}


def workload_drift(tier: Tier, past: Past) -> FleetCause | None:
    """Prompts or answers of other lengths than in the same hour a week ago."""
    lengths = past.lengths.get((tier.pool, tier.tier, tier.role), {})
    found = {key: one for key, pair in lengths.items() if (one := drift(*pair)) and one.real}
    if not found:
        return None
    told = [
        f"{WORDS[key]} are {'longer' if one.shift_ratio > 0 else 'shorter'}"
        for key, one in found.items()
    ]
    case = Case(
        "workload_drift",
        f"{' and '.join(told).capitalize()} than in the same hour a week ago.",
        "Size again for these lengths (kneewatch size), and see what was released in the week.",
        ("9.1",),
        Severity.INFO,
        log_odds=0.4,
    )
    for key, one in found.items():
        side = "above" if one.shift_ratio > 0 else "at or below"
        case.weigh(
            key,
            abs(one.shift_ratio),
            SHIFT_MIN,
            1.2,
            f"{abs(one.shift_ratio):.0%} more of the {WORDS[key]} are {side} {one.edge:g} tokens; "
            f"chance makes {one.chance_ratio:.0%} at most but once in {1 / FALSE_ALARM:,.0f}",
        )
    cause = case.close()
    return (
        None if cause is None else FleetCause(cause, tier.pool, tier.tier, names_of(tier.engines))
    )
