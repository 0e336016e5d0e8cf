"""What would have to be different for a cause not to be concluded: its evidence, turned back. Pure.

Each signal that the evidence cites is moved by itself towards where it says nothing, and the cause
is examined again: the value at which it falls is found by halving. A signal that alone decides
nothing has no such value, and is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kneewatch.diagnose.case import Cause, Counterfactual, Evidence, Facts

Examine = Callable[[Facts], Cause | None]

HALVINGS = 12
"""Enough for three digits."""

FAR = 4.0
"""How many times its threshold (or its value) a signal is raised that speaks by being low."""


def counterfactuals(examine: Examine, facts: Facts, cause: Cause) -> tuple[Counterfactual, ...]:
    """The turning points of a cause's evidence, in the evidence's order, each signal once."""
    found: dict[str, Counterfactual] = {}
    for evidence in cause.evidence:
        now = facts.values.get(evidence.signal)
        if now is None or evidence.signal in found:
            continue
        point = _turning(examine, facts, evidence, now)
        if point is not None:
            found[evidence.signal] = point
    return tuple(found.values())


def _turning(
    examine: Examine, facts: Facts, evidence: Evidence, now: float
) -> Counterfactual | None:
    high = FAR * max(abs(now), abs(evidence.threshold or 0.0), 1e-9)
    if evidence.signal.endswith("_ratio") and now <= 1:
        high = 1.0
    for end in (0.0, high):
        if not _stands(examine, facts, evidence.signal, end):
            at = _halved(examine, facts, evidence.signal, stands=now, falls=end)
            return Counterfactual(evidence.signal, now, at, above=end > now)
    return None


def _halved(examine: Examine, facts: Facts, signal: str, *, stands: float, falls: float) -> float:
    for _ in range(HALVINGS):
        middle = (stands + falls) / 2
        if _stands(examine, facts, signal, middle):
            stands = middle
        else:
            falls = middle
    return falls


def _stands(examine: Examine, facts: Facts, signal: str, value: float) -> bool:
    recent = facts.recent
    if signal in recent:
        recent = {**recent, signal: value}
    changed = replace(facts, values={**facts.values, signal: value}, recent=recent)
    return examine(changed) is not None
