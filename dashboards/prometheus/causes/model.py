"""What the rules of a cause are made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.dashboards.prometheus.odds import Term
from kneewatch.rules.model import Severity

Levels = tuple[tuple[Severity, str], ...]
"""Severities and when each applies, worst first; an empty condition always does."""


@dataclass(frozen=True, slots=True)
class CauseQuery:
    """A cause as PromQL: concluded where `when` holds and the evidence carries it. `start` are the
    log-odds that the terms are added to, a number or an expression."""

    id: str
    when: str
    terms: tuple[Term, ...]
    start: float | str
    levels: Levels
    summary: str
    lever: str
    guide: tuple[str, ...]
    note: str = ""
    """Another form of the cause, told beside it by a name of its own."""
    for_s: float | None = None
    """How long it must hold, where that is not every cause's onset."""

    @property
    def series(self) -> str:
        """What tells its recorded confidence from those of the others."""
        return f"{self.id}:{self.note}" if self.note else self.id
