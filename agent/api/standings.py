"""What may be said of a target now: what was seen a while ago is not how things are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kneewatch.agent.board import TargetState
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.triage.standing import LATE_INTERVALS, LATE_S, RANKS
from kneewatch.reports.words import clock, date

UNKNOWN = "unknown"


def late(state: TargetState, now_s: float) -> bool:
    """Whether a target's newest cycle is too old to tell of now."""
    return now_s - state.t_s > max(LATE_S, LATE_INTERVALS * state.interval_s)


def shown(state: TargetState, *, is_late: bool) -> Sequence[Diagnosis]:
    """A target's diagnoses; of one that is late, nothing better than unknown is said."""
    if not is_late:
        return state.diagnoses
    why = f"every signal: no scrape since {date(state.t_s)} {clock(state.t_s)} UTC"
    return tuple(
        replace(
            diagnosis,
            health=diagnosis.health if rank(diagnosis) > RANKS[UNKNOWN] else UNKNOWN,
            unknown=[why, *diagnosis.unknown],
        )
        for diagnosis in state.diagnoses
    )


def rank(diagnosis: Diagnosis) -> int:
    """How bad, the worst highest: unknown is worse than a note, for somebody must look."""
    return RANKS.get(diagnosis.health, RANKS[UNKNOWN])


def worst_first(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Diagnoses by how bad they are, then by name."""
    return sorted(diagnoses, key=lambda one: (-rank(one), one.target, one.model, one.engine))
