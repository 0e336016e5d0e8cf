"""A check: a condition with a duration. Pure.

A rule is a check with one bound on one signal (`rule.py`).
"""

from __future__ import annotations

from msgspec import Struct

from kneewatch.rules.conditions import Condition, Number, Scope


class Check(Condition, Struct, frozen=True):
    """Whether a condition has held for `for_s`, and for at least two scrapes.

    With `stretch`, a shorter window shortens the duration. A longer one does not lengthen it: what
    it shows has lasted. The condition reads the streak `name`; a single scrape to the contrary does
    not end a streak. Without a streak the condition is false, never unknown.
    """

    name: str
    of: Condition
    for_s: Number
    stretch: bool = True

    def source(self, scope: Scope, *, side: bool = True) -> str:
        least_s = f"{self.for_s.source(scope)}{' * min(1.0, facts.scale)' if self.stretch else ''}"
        return f"((facts.streaks_s.get({self.name!r}, -1.0) >= {least_s}) is {side})"
