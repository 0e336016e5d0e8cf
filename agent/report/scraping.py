"""How a target was scraped: how often, what failed, and when nobody looked."""

from __future__ import annotations

import numpy as np

from kneewatch.agent.report.history import Scrapes
from kneewatch.agent.report.levels import gap_s, usual_step_s
from kneewatch.reports.weekly.happened import TargetObserved, Unread


def target_observed(target: str, scrapes: Scrapes, *, from_s: float, to_s: float) -> TargetObserved:
    """A target's scrapes of a period. What lies before its first one ever is no gap: `from_s` is
    the later of the two."""
    times = scrapes.times
    usual_s, gap = usual_step_s(times), gap_s(times)
    unread = _failures(scrapes, usual_s)
    bounds = np.concatenate(([from_s], times, [to_s]))
    for at in np.flatnonzero(np.diff(bounds) > gap).tolist():
        unread.append(Unread(float(bounds[at]), float(bounds[at + 1]), ""))
    unread.sort(key=lambda one: one.from_s)
    lost_s = sum(one.to_s - one.from_s for one in unread)
    return TargetObserved(
        target=target,
        scrapes=len(times),
        failed=len(scrapes.failed),
        interval_s=usual_s or None,
        watched_s=max(to_s - from_s - lost_s, 0.0) if len(times) else 0.0,
        unread=unread,
    )


def _failures(scrapes: Scrapes, usual_s: float) -> list[Unread]:
    """Runs of scrapes that failed, up to the next that did not."""
    found: list[Unread] = []
    last = -2
    for at, why in scrapes.failed:
        end_s = (
            float(scrapes.times[at + 1])
            if at + 1 < len(scrapes.times)
            else usual_s + float(scrapes.times[at])
        )
        if at == last + 1:
            found[-1] = Unread(found[-1].from_s, end_s, found[-1].why)
        else:
            found.append(Unread(float(scrapes.times[at]), end_s, why))
        last = at
    return found
