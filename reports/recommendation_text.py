"""Recommendations in words: the best one in full, the others by their flags. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.recommendation import (
    Change,
    Recommendation,
    Value,
    with_current_values,
)
from kneewatch.reports.formatting import duration, number, percent

NUMBERS_SHOWN = 5

Told = tuple[str, str, Callable[[float], str]]
NUMBERS: tuple[Told, ...] = (
    ("kv_capacity_tokens", "KV tokens", number),
    ("max_concurrency", "requests at once", number),
    ("kv_usage_ratio", "KV usage", percent),
    ("preemption_per_s", "preemptions a second", number),
    ("queue_wait_s", "wait", duration),
    ("ttft_s", "TTFT", duration),
    ("itl_s", "ITL", duration),
    ("longest_step_s", "longest step", duration),
    ("waiting", "waiting", number),
    ("waiting_deferred", "held back", number),
    ("spec_acceptance_ratio", "accepted", percent),
    ("load_ratio", "load", percent),
    ("output_tokens_p99", "output tokens P99", number),
    ("usd_per_million_tokens", "USD per million tokens", number),
    ("usd_per_million_tokens_at_least", "USD per million tokens at least", number),
    ("tokens_per_s_per_gpu", "tokens a second and GPU by the benchmark", number),
    ("requests_per_s_per_gpu", "requests a second and GPU by the benchmark", number),
    ("usd_per_million_tokens_at_limit", "USD per million tokens there", number),
)
"""What is worth a person's eye, in this order; the JSON has all of it."""


def advised(diagnosis: Diagnosis, cause: Cause) -> list[Recommendation]:
    """The recommendations against a cause, best first, with the numbers of this diagnosis."""
    return [
        with_current_values(made, diagnosis.values)
        for made in diagnosis.recommendations
        if made.cause == cause.id
    ]


def change_words(change: Change) -> str:
    """A change as it would be typed: a flag with its value before and after."""
    if change.after is None or change.flag.startswith("--no-"):
        return f"drop {change.flag}"
    if change.after is True and change.flag.startswith("--"):
        return f"add {change.flag}"
    before = "" if change.before is None else f" {_value(change.before)}"
    return f"{change.flag}{before} -> {_value(change.after)}"


def changes_words(made: Recommendation) -> str:
    """All changes of a recommendation in a line."""
    return ", ".join(change_words(change) for change in made.changes)


def numbers_words(made: Recommendation) -> str:
    """What the change would do: numbers that move, before and after, and the price."""
    parts: list[str] = []
    for key, label, told in NUMBERS:
        then, now = made.predicted.get(key), made.before.get(key)
        if then is None:
            continue
        shown = told(then)
        if now is None:
            parts.append(f"{label} {shown}")
        elif told(now) != shown:
            parts.append(f"{label} {told(now)} -> {shown}")
    parts[NUMBERS_SHOWN:] = []
    if made.cost_usd_per_hour:
        parts.append(f"{made.cost_usd_per_hour:+,.2f} USD/h")
    return "; ".join(parts)


def rows(made: Sequence[Recommendation]) -> list[str]:
    """Lines for a person: the best recommendation in full, the others short."""
    if not made:
        return []
    best = made[0]
    head = changes_words(best)
    lines = [f"do first: {head}. {best.summary}" if head else f"advice: {best.summary}"]
    if numbers := numbers_words(best):
        lines.append(f"expected: {numbers}")
    if best.unknown:
        lines.append(f"not known: {'; '.join(best.unknown)}")
    lines.append(f"check before: {'; '.join(best.checks)}")
    lines.append(f"verify: {'; '.join(best.verify)}")
    others = "; ".join(_short(other) for other in made[1:] if other.changes)
    if others:
        lines.append(f"also: {others}")
    return lines


def _short(made: Recommendation) -> str:
    demand = made.predicted.get("kv_demand_ratio", 0.0)
    said = ["not enough alone"] if demand > KV_TARGET_RATIO else []
    if made.cost_usd_per_hour:
        said.append(f"{made.cost_usd_per_hour:+,.4g} USD/h")
    return changes_words(made) + (f" ({', '.join(said)})" if said else "")


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
