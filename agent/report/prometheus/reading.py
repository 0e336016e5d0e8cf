"""One period of a fleet, read from a metrics system. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kneewatch.agent.fleet.queries import Asking
from kneewatch.agent.report.history import Signals
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.gpus import by_engine
from kneewatch.agent.report.prometheus.hours import BUCKETS, Hours, together
from kneewatch.agent.report.prometheus.matrix import Query, Ranges
from kneewatch.agent.report.prometheus.read import Read, process_names, scrape_of
from kneewatch.agent.report.prometheus.resolution import (
    Resolution,
    Rows,
    Steps,
    steps,
)
from kneewatch.agent.report.prometheus.roll import Roll, Rolled, frozen
from kneewatch.collector.signals.expr import any_of
from kneewatch.collector.signals.vllm import TTFT, TTFT_BOUNDS_S
from kneewatch.dashboards.prometheus.hourly import COUNTERS
from kneewatch.diagnose.causes import BY_ID
from kneewatch.diagnose.fleet.shape import Key
from kneewatch.diagnose.knee import POINT_SIGNALS
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.measures import PREEMPTIONS, RUNNING, TALLIES

CURVES_MOST = 24
"""So many engines of a tier are asked for their curve: a curve keeps no more points than they
give."""

MINUTE_S = 60.0


class Reading:
    """Reads periods of the engines of a roll."""

    def __init__(self, ranges: Ranges, roll: Roll, found: Resolution) -> None:
        self._ranges, self._roll, self._found = ranges, roll, found
        self._engines = len(roll.shape.members)

    def period(self, grid: Grid, *, late_s: float | None, closely: bool) -> Read:
        """A period; `closely` with what tells of incidents and of the curve."""
        ranges, asking = self._ranges, self._roll.asking
        at = steps(grid, self._found.step_s)
        begun_at = steps(grid, self._found.begun_s)
        gauges = ranges.steps(
            {key: self._of_engine(partial(queries.gauges, asking, key)) for key in queries.GAUGES},
            at,
        )
        hours = Hours(ranges, self._roll, grid)
        hourly, summed = hours.read(gauges[RUNNING], at)
        of_engines = ranges.slots(self._hourly(), grid.slots)
        begun = hours.of_parts("begun", partial(queries.gained, TTFT, "count"), 1)
        finely: dict[str, Rows] = {}
        curve: dict[Key, Signals] = {}
        recorded: tuple[str, ...] = ()
        if closely:
            finely = ranges.steps(self._finely(late_s), at)
            curve, recorded = self._curve(at)
        return Read(
            grid=grid,
            at=at,
            gauges={**gauges, **self._gpus(at)},
            summed=summed,
            preempted=of_engines["preempted"],
            counts={key: hourly[key] for key in COUNTERS},
            histograms={
                metric: (hourly[f"{metric}_bucket"], hourly[f"{metric}_sum"]) for metric in TALLIES
            },
            begun=together(ranges.steps(begun, begun_at))["begun"],
            begun_s=self._found.begun_s,
            signs={
                **{key: finely.get(key, {}) for key in SIGNS},
                queries.CONFIDENCE: _disturbing(finely.get(queries.CONFIDENCE, {})),
            },
            up=finely.get("up", {}),
            starts=finely.get("starts", {}),
            configs=of_engines["configs"],
            curve=curve,
            recorded=tuple(
                key for key in (queries.STAGE_SEVERITY, queries.CONFIDENCE) if finely.get(key)
            )
            + recorded,
        )

    def _gpus(self, at: Steps) -> dict[str, Rows]:
        members = [one.member for one in self._roll.members]
        rows = self._ranges.steps(
            {
                key: Query(partial(queries.gpus, key), frozen, self._engines, self._scraped(1))
                for key in queries.GPUS
            },
            at,
        )
        return {key: by_engine(found, members) for key, found in rows.items()}

    def _hourly(self) -> dict[str, Query]:
        asking = self._roll.asking
        return {
            "preempted": self._of_engine(
                lambda range_s: queries.gained(PREEMPTIONS, "", asking, asking.by, range_s)
            ),
            "configs": Query(
                partial(queries.configs, asking), frozen, self._engines, self._scraped(1)
            ),
        }

    def _finely(self, late_s: float | None) -> dict[str, Query]:
        roll, asking = self._roll, self._roll.asking
        jobs = sorted({one.member.labels.get("job", "") for one in roll.members} - {""})
        keys = [queries.PREEMPTED, queries.MADE]
        bound_s = max((one for one in TTFT_BOUNDS_S if one <= (late_s or 0.0)), default=None)
        if bound_s is not None:
            keys += [queries.LATE, queries.BEGUN]
        made = {
            key: self._of_engine(partial(queries.watched, asking, key, bound_s)) for key in keys
        }
        made[queries.STAGE_SEVERITY] = self._of_engine(
            partial(queries.recorded_worst, asking, queries.STAGE_SEVERITY)
        )
        made[queries.CONFIDENCE] = Query(
            partial(queries.recorded_worst, asking, queries.CONFIDENCE),
            lambda labels: (roll.shape.key(labels), labels.get("cause", "")),
            self._engines,
            self._scraped(1),
        )
        made["up"] = Query(partial(queries.up, jobs), scrape_of, self._engines, self._scraped(1))
        names = process_names(asking.by)
        made["starts"] = Query(
            partial(queries.starts, asking),
            lambda labels: tuple(labels.get(name, "") for name in names),
            self._engines,
            self._scraped(1),
        )
        return made

    def _curve(self, at: Steps) -> tuple[dict[Key, Signals], tuple[str, ...]]:
        """The windows of some engines of each tier, from recorded signals where all have them."""
        roll = self._roll
        chosen = [one for tier in roll.tiers() for one in _evenly(roll.of(tier), CURVES_MOST)]
        only = ",".join(
            any_of(name, [one.member.labels.get(name, "") for one in chosen])
            for name in roll.asking.by
        )
        asking = _with_window(roll, self._found.window_s)

        def made(text: Callable[..., str], keys: Sequence[str]) -> dict[str, Rows]:
            return self._ranges.steps(
                {
                    f"curve {key}": Query(
                        partial(text, asking, key, only),
                        roll.shape.key,
                        len(chosen),
                        self._scraped(BUCKETS if "p99" in key else 1),
                    )
                    for key in keys
                },
                at,
            )

        rows = made(queries.curve_recorded, POINT_SIGNALS[:1]) if roll.shape.recorded else {}
        first = rows.get(f"curve {POINT_SIGNALS[0]}", {})
        kept = all(one.key in first for one in chosen)
        text = queries.curve_recorded if kept else queries.curve
        rows = made(text, POINT_SIGNALS)
        nothing = np.full(at.count, np.nan)
        times = at.begins_s + at.step_s
        return {
            one.key: Signals(
                times, {key: rows[f"curve {key}"].get(one.key, nothing) for key in POINT_SIGNALS}
            )
            for one in chosen
        }, POINT_SIGNALS if kept else ()

    def _of_engine(self, text: Callable[[float], str]) -> Query:
        return Query(text, self._roll.shape.key, self._engines, self._scraped(1))

    def _scraped(self, parts: int) -> float:
        return self._engines * parts / self._found.scrape_s


SIGNS = (queries.PREEMPTED, queries.MADE, queries.LATE, queries.BEGUN, queries.STAGE_SEVERITY)


def _disturbing(rows: Rows) -> Rows:
    """The highest confidence in any cause that moves a baseline, by engine; a cause of another
    version's rules may move any."""
    found: Rows = {}
    for name, row in rows.items():
        key, cause = name
        record = BY_ID.get(cause.partition(":")[0])
        if (record is None or record.moves) and ":" not in cause:
            before = found.get(key)
            found[key] = row if before is None else np.fmax(before, row)
    return found


def _with_window(roll: Roll, window_s: float) -> Asking:
    return replace(roll.asking, window_s=window_s)


def _evenly(members: Sequence[Rolled], most: int) -> list[Rolled]:
    if len(members) <= most:
        return list(members)
    return [members[at * len(members) // most] for at in range(most)]
