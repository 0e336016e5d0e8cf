"""What the HTTP endpoint answers from, how fresh it is, and whether the daemon is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import Board, TargetState
from kneewatch.agent.targets import TargetSpec
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.formatting import clock, date
from kneewatch.reports.triage.verdict import LATE_INTERVALS, LATE_S, RANKS

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetWatch
    from kneewatch.agent.notify.notifier import Notifier
    from kneewatch.agent.store.reader import Reader
    from kneewatch.agent.store.writer import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The running daemon as a request sees it. `reader` and `store` are None where no history is
    kept, `notifier` where nobody is told, `fleet` where no metrics system is asked. `targets` gives
    what is configured now, `restart_needed` the keys of settings that were read and are not in
    force."""

    board: Board
    settings: Settings
    targets: Callable[[], Sequence[TargetSpec]]
    version: str
    started_s: float
    reader: Reader | None = None
    store: Store | None = None
    notifier: Notifier | None = None
    fleet: FleetWatch | None = None
    restart_needed: Callable[[], Sequence[str]] = tuple
    clock: Callable[[], float] = time.time


# --- What may be said of a target now: what was seen a while ago is not how things are ------------


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


# Whether the daemon is of use yet: every target has had a cycle, and the history can be written.
# Pure but for the service it asks.


SHOWN = 20


def reasons(service: Service) -> list[str]:
    """Why it is not ready, a line each; none when it is."""
    now_s, found = service.clock(), list[str]()
    for spec in service.targets():
        state = service.board.get(spec.name)
        if state is None:
            found.append(f"{spec.name}: not scraped yet")
        elif late(state, now_s):
            found.append(f"{spec.name}: no cycle for {now_s - state.t_s:.0f} s")
    if service.fleet is not None:
        told = service.fleet.state.told(now_s)
        if told is None:
            found.append(f"fleet: {service.fleet.state.error or 'not asked yet'}")
        elif told.lost:
            found.append(f"fleet: {told.lost}")
    more = len(found) - SHOWN
    if more > 0:
        found[SHOWN:] = [f"and {more} more targets"]
    if service.store is not None and service.store.stats().last_error:
        found.append("the history cannot be written; the log of kneewatch says why")
    return found
