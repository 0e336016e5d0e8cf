"""How a target was scraped: how often, what failed, and when nobody looked. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.history import Floats, in_order
from kneewatch.agent.store.model import Scrapes
from kneewatch.reports.weekly.happened import TargetObserved, Unread

GAP_SCRAPES = 3.0
GAP_LEAST_S = 30.0
"""Scrapes that lie further apart have a gap between them."""


def usual_step_s(times: Floats) -> float:
    """The usual distance of two scrapes; 0 where there are none."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def gap_s(times: Floats) -> float:
    """Scrapes that lie further apart than this have a gap between them."""
    return max(GAP_SCRAPES * usual_step_s(times), GAP_LEAST_S)


def runs(holds: npt.NDArray[np.bool_], *, bridged: int = 1) -> list[npt.NDArray[np.intp]]:
    """The places where something holds, those at most `bridged` apart together. A run begins with
    its first place and ends with its last one, both included.

    Shape: `holds` (scrapes,) or (steps,).
    """
    places = np.flatnonzero(holds)
    apart = np.flatnonzero(np.diff(places) > bridged) + 1
    return np.split(places, apart) if len(places) else []


def target_observed(target: str, scrapes: Scrapes, *, from_s: float, to_s: float) -> TargetObserved:
    """A target's scrapes of a period. What lies before its first one ever is no gap: `from_s` is
    the later of the two."""
    times = np.asarray(scrapes.times)
    places = np.flatnonzero(in_order(times))
    times, failed = times[places], np.isin(places, list(scrapes.failed))
    usual_s, gap = usual_step_s(times), gap_s(times)
    # A failure lasts to the next scrape, and has the reason of the first one in a row.
    ends = np.append(times[1:], times[-1:] + usual_s)
    unread = [
        Unread(float(times[run[0]]), float(ends[run[-1]]), scrapes.failed[int(places[run[0]])])
        for run in runs(failed)
    ]
    bounds = np.concatenate(([from_s], times, [to_s]))
    for at in np.flatnonzero(np.diff(bounds) > gap).tolist():
        unread.append(Unread(float(bounds[at]), float(bounds[at + 1]), ""))
    unread.sort(key=lambda one: one.from_s)
    lost_s = sum(one.to_s - one.from_s for one in unread)
    return TargetObserved(
        target=target,
        scrapes=len(times),
        failed=int(failed.sum()),
        interval_s=usual_s or None,
        watched_s=max(to_s - from_s - lost_s, 0.0) if len(times) else 0.0,
        unread=unread,
    )
