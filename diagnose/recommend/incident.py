"""What a cause has asked for since it began: sizes do not follow the drain down. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kneewatch.diagnose.recommend.demand import Demand
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation, Value

LIMITS = frozenset(
    {
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--long-prefill-token-threshold",
        "--max-num-queued-reqs",
    }
)
"""Flags that are lowered where what they are now is not known."""


class Incidents:
    """The peak demand and the largest sizes told, by cause, while each cause lasts."""

    def __init__(self) -> None:
        self._peaks: dict[str, Demand] = {}
        self._told: dict[str, dict[str, Recommendation]] = {}

    def keep(self, causes: Collection[str]) -> None:
        """Forget the causes that have ended."""
        for ended in [cause for cause in self._peaks if cause not in causes]:
            del self._peaks[ended]
            self._told.pop(ended, None)

    def peak(self, cause: str, now: Demand) -> Demand:
        """The most that was wanted since the cause began."""
        was = self._peaks.get(cause, now)
        self._peaks[cause] = made = replace(
            now,
            requests=max(was.requests, now.requests),
            running=max(was.running, now.running),
            waiting=max(was.waiting, now.waiting),
            held_tokens=_larger(was.held_tokens, now.held_tokens),
            served_per_s=max(was.served_per_s, now.served_per_s),
            arrival_per_s=max(was.arrival_per_s, now.arrival_per_s),
            spread_tokens=max(was.spread_tokens, now.spread_tokens),
        )
        return made

    def grown(self, made: Recommendation) -> Recommendation:
        """The recommendation, or the one told before where that went further."""
        told = self._told.setdefault(made.cause, {})
        was = told.get(made.id)
        if was is not None and _went_further(was, made):
            return was
        told[made.id] = made
        return made


def _larger(was: float | None, now: float | None) -> float | None:
    return max((value for value in (was, now) if value is not None), default=None)


def _went_further(was: Recommendation, now: Recommendation) -> bool:
    before = {change.flag: change for change in was.changes}
    if before.keys() != {change.flag for change in now.changes}:
        return False
    return any(_further(before[change.flag], change.after) for change in now.changes)


def _further(was: Change, after: Value) -> bool:
    told = was.after
    if isinstance(told, bool | str | None) or isinstance(after, bool | str | None):
        return False
    lowered = was.flag in LIMITS
    if isinstance(was.before, int | float):
        lowered = told < was.before
    return told < after if lowered else told > after
