"""Counterfactuals: signal values at which a cause would no longer be concluded. Pure.

Each signal of the evidence is varied alone, and the cause is examined again. Bisection finds the
value at which the cause is no longer concluded. A signal that cannot change the conclusion alone
has no counterfactual, nor has one of a single GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.halving import end_of
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.verdict import Cause, Counterfactual, Evidence
from kneewatch.rules.rule import MORE_IS_BETTER

Stands = Callable[[Facts], bool]
"""Whether a cause is concluded."""

HALVINGS = 12
"""Number of bisection steps; enough for three significant digits."""

FAR = 4.0
"""How far a signal is raised if low values are the evidence: this times its threshold or value."""

BARELY = 1.001
"""An earlier counterfactual is kept if the cause is still concluded just inside it, by this
factor."""


def with_counterfactuals(facts: Facts, first: Cause, before: Cause | None) -> Cause:
    """The first cause with its counterfactuals; `before` is the last one that got them.

    During its clear time, those of the last scrape at which the cause was concluded.
    """
    points = before.unless if before is not None and before.id == first.id else ()
    if first.seen_s == facts.now_s:
        points = counterfactuals(BY_ID[first.id].stands, facts, first, points)
    return replace(first, unless=points)


def counterfactuals(
    stands: Stands, facts: Facts, cause: Cause, before: Sequence[Counterfactual] = ()
) -> tuple[Counterfactual, ...]:
    """The counterfactuals of a cause that these facts conclude: at most one per signal, in the
    order of its evidence.

    `before` has the counterfactuals of the same cause at the previous scrape. One that is still
    valid is not computed again.
    """
    earlier = {point.signal: point for point in before}
    points: dict[str, Counterfactual] = {}
    for evidence in cause.evidence:
        if evidence.signal not in points:
            point = _turning(stands, facts, evidence, earlier.get(evidence.signal))
            if point is not None:
                points[evidence.signal] = point
    return tuple(points.values())


def _turning(
    stands: Stands, facts: Facts, evidence: Evidence, before: Counterfactual | None
) -> Counterfactual | None:
    # Then the cause was concluded from the value of the window's newest part.
    of_part = evidence.signal in facts.recent
    now = evidence.value if of_part else facts.values.get(evidence.signal)
    stands_at = _tried(stands, facts, evidence.signal)
    if now is None or (of_part and not stands_at(now)):
        # The cause needs both the window's value and that of its newest part, which differ.
        return None
    high = FAR * max(abs(now), abs(evidence.threshold or 0.0), 1e-9)
    if evidence.signal.endswith("_ratio") and now <= 1:
        high = 1.0
    if before is not None:
        inside = before.at / BARELY if before.above else before.at * BARELY
        if (now < before.at) == before.above and stands_at(inside) and not stands_at(before.at):
            return replace(before, now=now)
    # Recovery first: the other end may be no better, only another cause.
    for end in (high, 0.0) if evidence.signal in MORE_IS_BETTER else (0.0, high):
        if not stands_at(end):
            at = end_of(stands_at, holds=now, falls=end, halvings=HALVINGS)
            return Counterfactual(evidence.signal, now, at, above=end > now)
    return None


def _tried(stands: Stands, facts: Facts, signal: str) -> Callable[[float], bool]:
    """A function that takes a value of `signal` and returns whether the cause is still concluded.

    Everything else stays as it is.
    """
    # One copy of the facts is enough for all values tried.
    values, recent = dict(facts.values), dict(facts.recent)
    copied = replace(facts, values=values, recent=recent)

    def stands_at(value: float) -> bool:
        values[signal] = value
        if signal in recent:
            recent[signal] = value
        return stands(copied)

    return stands_at
