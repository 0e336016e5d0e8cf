"""What an engine's steps show: times worth a closer look, and times without a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    CONFIDENCE,
    LATE,
    MADE,
    PREEMPTED,
    STAGE_SEVERITY,
)
from kneewatch.agent.report.prometheus.read import Read, scrape_of
from kneewatch.agent.report.prometheus.resolution import Floats, Steps
from kneewatch.agent.report.prometheus.roll import Roll, Rolled
from kneewatch.agent.report.scraping import runs
from kneewatch.diagnose.case import DOUBTFUL_BELOW
from kneewatch.diagnose.causes.signals import QUEUED_MIN
from kneewatch.reports.weekly.happened import TargetObserved, Unread
from kneewatch.reports.weekly.measures import RUNNING, WAITING
from kneewatch.rules.cascade import PREEMPTIONS_MIN, QUEUE_SHARE_OF_RUNNING
from kneewatch.rules.model import Severity

Truths = npt.NDArray[np.bool_]

DOWN, PRESSED, STALLED, CONCLUDED, QUEUED, TOO_LATE = (
    "scrapes fail",
    "requests are preempted",
    "no token comes out",
    "recording rules conclude a cause",
    "requests wait",
    "first tokens come late",
)
ORDER = (DOWN, STALLED, PRESSED, CONCLUDED, TOO_LATE, QUEUED)
"""What is looked into first."""

CAUSES: Mapping[str, str] = {
    DOWN: "target_down", STALLED: "engine_stalled", PRESSED: "kv_pressure",
}  # fmt: skip
"""The cause of which each sign is evidence by itself, as long as it lasts."""

LATE_SHARE, LATE_MIN = 0.1, 5.0
"""So many of a step's requests came after the target: the P99's own bound is left by chance."""

BRIDGED_STEPS = 2
FAILED = "the scrape failed (up is 0)"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time with a sign of trouble; how many steps show it is its weight."""

    why: str
    from_s: float
    to_s: float
    steps: int


def stretches(values: Mapping[str, Floats], at: Steps, up: Floats | None) -> list[Stretch]:
    """An engine's times with signs of trouble, those with several signs once. Shapes: (steps,)."""
    signs = _signs(values, up)
    found: list[Stretch] = []
    for why in ORDER:
        if why in signs:
            found += _runs(why, signs[why], at)
    return _merged(found)


def _signs(values: Mapping[str, Floats], up: Floats | None) -> dict[str, Truths]:
    """Where each sign is to be seen; comparisons with NaN are false."""
    signs: dict[str, Truths] = {}
    running, waiting = values.get(RUNNING), values.get(WAITING)
    if up is not None:
        signs[DOWN] = up < 1
    if PREEMPTED in values:
        signs[PRESSED] = values[PREEMPTED] >= PREEMPTIONS_MIN
    if running is not None and MADE in values:
        signs[STALLED] = (running >= 1) & (values[MADE] == 0)
    if running is not None and waiting is not None:
        signs[QUEUED] = waiting >= np.maximum(QUEUED_MIN, QUEUE_SHARE_OF_RUNNING * running)
    if LATE in values and BEGUN in values:
        late = values[BEGUN] - values[LATE]
        signs[TOO_LATE] = (late >= LATE_MIN) & (late > LATE_SHARE * values[BEGUN])
    concluded = [
        row >= bound
        for key, bound in ((STAGE_SEVERITY, float(Severity.WARNING)), (CONFIDENCE, DOUBTFUL_BELOW))
        if (row := values.get(key)) is not None
    ]
    if concluded:
        signs[CONCLUDED] = np.logical_or.reduce(concluded)
    return signs


def _runs(why: str, holds: Truths, at: Steps) -> list[Stretch]:
    begins_s = at.begins_s
    return [
        Stretch(why, float(begins_s[run[0]]), float(begins_s[run[-1]]) + at.step_s, len(run))
        for run in runs(holds, bridged=BRIDGED_STEPS)
    ]


def _merged(found: Sequence[Stretch]) -> list[Stretch]:
    """Those that overlap as one, called as the worst of them; `found` has the worst first."""
    kept: list[Stretch] = []
    for one in found:
        over = next((k for k, other in enumerate(kept) if _overlap(one, other)), None)
        if over is None:
            kept.append(one)
            continue
        other = kept[over]
        kept[over] = Stretch(
            other.why,
            min(one.from_s, other.from_s),
            max(one.to_s, other.to_s),
            max(one.steps, other.steps),
        )
    return sorted(kept, key=lambda one: one.from_s)


def _overlap(one: Stretch, other: Stretch) -> bool:
    return one.from_s <= other.to_s and one.to_s >= other.from_s


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
    found: list[Unread] = []
    for run in runs(lost > 0):
        first, last = int(run[0]), int(run[-1])
        from_s = float(at.begins_s[first])
        to_s = float(at.begins_s[last]) + float(lost[last]) * at.step_s
        if last > first:
            from_s += (1 - float(lost[first])) * at.step_s
        found.append(Unread(from_s, to_s, FAILED if failed[run].any() else ""))
    return found
