"""Whether cycles came at their times, read from the history that the daemon has written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.daemon.periodic_jobs import phase_count, phase_ratio
from kneewatch.agent.store.reader import Reader

LATE_RATIO = 0.1
"""A cycle is late when it begins by more than this share of its interval after its time."""

EARLY_RATIO = 0.05


class Punctual(Struct, frozen=True):
    """The cycles that were due: how many there were, how many none came for, how many came late,
    how many of those that came got no page, and how late the cycles were."""

    due: int
    missed: int
    late: int
    failed: int
    median_s: float
    worst_s: float

    def __str__(self) -> str:
        """The figures in words."""
        return (
            f"cycles due {self.due}, missed {self.missed}, late {self.late}, failed {self.failed}; "
            f"began {1000 * self.median_s:.0f} ms after their time (median), "
            f"{1000 * self.worst_s:.0f} ms at most"
        )

    @property
    def on_time(self) -> bool:
        """Whether none was missed, late or without a page."""
        return not (self.missed or self.late or self.failed)


def punctual(
    store: Path,
    names: Sequence[str],
    *,
    interval_s: float,
    from_s: float,
    to_s: float,
    targets: int | None = None,
) -> Punctual:
    """The cycles of these targets between two times. `targets`: those that the daemon watches, if
    more than these."""
    phases = phase_count(len(names) if targets is None else targets, interval_s)
    due = missed = failed = 0
    after_s: list[float] = []
    with closing(Reader(store)) as reader:
        for name in names:
            phase_s = phase_ratio(name, phases) * interval_s
            scrapes = reader.scrapes(name, from_s=from_s, to_s=to_s + interval_s)
            failed += len(scrapes.failed)
            on_grid = [(t_s - phase_s) / interval_s + EARLY_RATIO for t_s in scrapes.times]
            first = int((from_s - phase_s) // interval_s) + 1
            slots = set(range(first, int((to_s - phase_s) // interval_s) + 1))
            due += len(slots)
            missed += len(slots - {int(at) for at in on_grid})
            after_s += [(at % 1.0 - EARLY_RATIO) * interval_s for at in on_grid]
    late = sum(delay_s > LATE_RATIO * interval_s for delay_s in after_s)
    middle_s = statistics.median(after_s) if after_s else 0.0
    return Punctual(due, missed, late, failed, middle_s, max(after_s, default=0.0))
