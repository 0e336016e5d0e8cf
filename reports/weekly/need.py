"""What a tier's peak takes, and whether that is there (guide 8.3, 9.1 step 11). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kneewatch.diagnose.causes import CAUSES
from kneewatch.diagnose.sizing.fleet.fleet import size_fleet
from kneewatch.diagnose.sizing.size import Size
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.curve import Curve
from kneewatch.reports.weekly.planning import TierWorkload
from kneewatch.rules.model import Severity

SHORT_OF_CAPACITY = tuple(record.id for record in CAUSES if record.capacity)
"""Incidents of these say that the fleet was too small for its load, for a while."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the peak takes. `usable_per_s` is of one engine, `source` how it is known; `least`: it
    carries that or more, for no load past it was seen.

    `fewest` replicas hold the peak and the margin; `most` is the guide's count, whose margin is
    taken of whole instances (9.1 step 11). In between a fleet is of the right size.
    """

    peak_per_s: float | None
    usable_per_s: float | None
    source: str
    least: bool
    fewest: int | None = None
    most: int | None = None

    def replicas(self, present: int) -> int | None:
        """The count nearest to what is there."""
        if self.fewest is None or self.most is None:
            return None
        return min(max(present, self.fewest), self.most)


def need_of(work: TierWorkload, found: Curve | None, answer: Size | None, safety: float) -> Need:
    """What the measured peak takes."""
    peak = work.arrivals.p99_per_s.value
    usable, source, least = None, "", False
    if found is not None:
        usable = found.learned.usable_requests_per_s.expected
        source, least = "learned", not found.learned.reached
    elif answer is not None and answer.usable_requests_per_s is not None:
        usable, source = answer.usable_requests_per_s, answer.usable_source
    if peak is None or not usable:
        return Need(peak, usable, source, least)
    fleet = size_fleet(
        peak_requests_per_s=max(peak, 1e-6), usable_requests_per_s=usable, safety=safety
    )
    # Counted for an engine of one GPU: its GPUs are instances.
    return Need(peak, usable, source, least, fleet.gpus_rounded_once, fleet.deployed_instances)


def verdict_of(
    need: Need, replicas: int, worst: Mapping[str, Severity]
) -> tuple[str, tuple[str, ...]]:
    """Right, too small, too large or unknown, and what makes it doubtful."""
    short = any(worst.get(cause, Severity.OK) >= Severity.WARNING for cause in SHORT_OF_CAPACITY)
    needed = need.replicas(replicas)
    if needed is None or not replicas:
        return ("too small" if short else "unknown"), ()
    if needed > replicas:
        if need.least and not short:
            note = (
                "the fleet carried all of its load; what one engine carries at most was not seen, "
                "so nothing says that it is too small"
            )
            return "unknown", (note,)
        return "too small", ()
    if short:
        note = "there were incidents of too little capacity though: look at them first"
        return ("unknown" if needed < replicas else "right"), (note,)
    return ("too large" if needed < replicas else "right"), ()


def headroom(need: Need, replicas: int) -> float | None:
    """What the fleet carries over its peak, less 1."""
    carried = None if need.usable_per_s is None else need.usable_per_s * replicas
    ratio = m.over(carried, need.peak_per_s)
    return None if ratio is None else ratio - 1
