"""What would have to be different for a cause not to be concluded: its evidence, turned back. Pure.

Each signal that the evidence cites is moved by itself towards where it says nothing, and the cause
is examined again: the value at which it falls is found by halving. A signal that alone decides
nothing has no such value, and is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kneewatch.diagnose.case import Cause, Counterfactual, Evidence, Facts
from kneewatch.diagnose.gpu_moves import moved, on_gpus

Stands = Callable[[Facts], bool]
"""Whether a cause is concluded."""

HALVINGS = 12
"""Enough for three digits."""

FAR = 4.0
"""How many times its threshold (or its value) a signal is raised that speaks by being low."""

BARELY = 1.001
"""A turning point of the scrape before is still one where the cause stands this much inside it."""


def counterfactuals(
    stands: Stands, facts: Facts, cause: Cause, before: Sequence[Counterfactual] = ()
) -> tuple[Counterfactual, ...]:
    """The turning points of a cause's evidence, in the evidence's order, each signal once.

    `before` are those of the same cause a scrape earlier: one that still holds is not searched for
    anew.
    """
    earlier = {point.signal: point for point in before}
    points: dict[str, Counterfactual] = {}
    for evidence in cause.evidence:
        now = facts.values.get(evidence.signal)
        if evidence.signal in facts.recent or on_gpus(evidence.signal, facts.gpus):
            # The number that the cause was concluded from: of the newest part, or of one GPU.
            now = evidence.value
        if now is None or evidence.signal in points:
            continue
        point = _turning(stands, facts, evidence, now, earlier.get(evidence.signal))
        if point is not None:
            points[evidence.signal] = point
    return tuple(points.values())


def _turning(
    stands: Stands, facts: Facts, evidence: Evidence, now: float, before: Counterfactual | None
) -> Counterfactual | None:
    high = FAR * max(abs(now), abs(evidence.threshold or 0.0), 1e-9)
    if evidence.signal.endswith("_ratio") and now <= 1:
        high = 1.0
    stands_at = _tried(stands, facts, evidence.signal)
    if not stands_at(now):
        # Window and newest part differ, and it takes both.
        return None
    if before is not None:
        inside = before.at / BARELY if before.above else before.at * BARELY
        if (now < before.at) == before.above and stands_at(inside) and not stands_at(before.at):
            return replace(before, now=now)
    for end in (0.0, high):
        if not stands_at(end):
            at = _halved(stands_at, holds=now, falls=end)
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


def _tried(stands: Stands, facts: Facts, signal: str) -> Callable[[float], bool]:
    """Whether the cause stands with a signal at some value and all else as it is."""
    if on_gpus(signal, facts.gpus):
        gpus = facts.gpus
        return lambda value: stands(replace(facts, gpus=moved(signal, value, gpus)))
    # One copy of the facts serves all values that are tried.
    values, recent = dict(facts.values), dict(facts.recent)
    copied = replace(facts, values=values, recent=recent)

    def stands_at(value: float) -> bool:
        values[signal] = value
        if signal in recent:
            recent[signal] = value
        return stands(copied)

    return stands_at
