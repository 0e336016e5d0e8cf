"""How the replicas of a fleet were scraped, by step. Pure."""

from __future__ import annotations

import numpy as np

from kneewatch.agent.report.prometheus.read import Read, scrape_of
from kneewatch.agent.report.prometheus.resolution import Floats, Steps
from kneewatch.agent.report.prometheus.roll import Roll, Rolled
from kneewatch.reports.weekly.happened import TargetObserved, Unread
from kneewatch.reports.weekly.measures import RUNNING

FAILED = "the scrape failed (up is 0)"


def targets(known: Roll, now: Read) -> list[TargetObserved]:
    """How each replica was scraped, by step."""
    found: dict[str, TargetObserved] = {}
    running = now.gauges[RUNNING]
    for one in known.members:
        row = running.get(one.key)
        if row is None or one.target in found or np.isnan(row).all():
            continue
        found[one.target] = _target(one, row, now.up.get(scrape_of(one.member.labels)), known, now)
    return list(found.values())


def _target(one: Rolled, row: Floats, up: Floats | None, known: Roll, now: Read) -> TargetObserved:
    at, scrape_s = now.at, known.scrape_s
    there = ~np.isnan(row)
    missed = np.nan_to_num(1 - up) if up is not None else np.zeros(at.count)
    lost: Floats = np.where(there, missed, 1.0)
    lost[: int(np.flatnonzero(there)[0])] = 0.0
    each = at.step_s / scrape_s
    watched = float((1 - lost)[int(np.flatnonzero(there)[0]) :].sum())
    return TargetObserved(
        target=one.target,
        scrapes=round(watched * each),
        failed=round(float(missed.sum()) * each),
        interval_s=scrape_s,
        watched_s=watched * at.step_s,
        unread=_unread(lost, missed, at),
    )


def _unread(lost: Floats, failed: Floats, at: Steps) -> list[Unread]:
    """Runs of steps without a page; of the first and the last of a run the share that was lost."""
    places = np.flatnonzero(lost > 0)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []
    found: list[Unread] = []
    for run in runs:
        first, last = int(run[0]), int(run[-1])
        from_s = float(at.begins_s[first])
        to_s = float(at.begins_s[last]) + float(lost[last]) * at.step_s
        if last > first:
            from_s += (1 - float(lost[first])) * at.step_s
        found.append(Unread(from_s, to_s, FAILED if failed[run].any() else ""))
    return found
