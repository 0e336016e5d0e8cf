"""What would have to be different for a cause not to be concluded: its evidence, turned back. Pure.

Each signal that the evidence cites is moved by itself towards where it says nothing, and the cause
is examined again: the value at which it falls is found by halving. A signal that alone decides
nothing has no such value, and is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kneewatch.diagnose.case import Cause, Counterfactual, Evidence, Facts
from kneewatch.diagnose.gpu_moves import moved, on_gpus

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
        if on_gpus(evidence.signal, facts.gpus):
            now = evidence.value
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
    stands = _tried(examine, facts, evidence.signal)
    for end in (0.0, high):
        if not stands(end):
            at = _halved(stands, holds=now, falls=end)
            return Counterfactual(evidence.signal, now, at, above=end > now)
    return None


def _halved(stands: Callable[[float], bool], *, holds: float, falls: float) -> float:
    for _ in range(HALVINGS):
        middle = (holds + falls) / 2
        if stands(middle):
            holds = middle
        else:
            falls = middle
    return falls


def _tried(examine: Examine, facts: Facts, signal: str) -> Callable[[float], bool]:
    """Tells whether the cause stands with a signal at some value and all else as it is."""
    if on_gpus(signal, facts.gpus):
        gpus = facts.gpus
        return lambda value: examine(replace(facts, gpus=moved(signal, value, gpus))) is not None
    # One copy of the facts serves all values that are tried.
    values, recent = dict(facts.values), dict(facts.recent)
    copied = replace(facts, values=values, recent=recent)

    def stands(value: float) -> bool:
        values[signal] = value
        if signal in recent:
            recent[signal] = value
        return examine(copied) is not None

    return stands
