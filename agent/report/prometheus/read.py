"""One period of a fleet as it was read from a metrics system. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.report.history import Signals
from kneewatch.agent.report.prometheus.queries import PROCESS
from kneewatch.agent.report.prometheus.resolution import Floats, RowKey, Rows, Steps
from kneewatch.agent.report.prometheus.together import added, tallies_of
from kneewatch.diagnose.fleet.shape import Key, Labels
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.tally import Tally

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Read:
    """A period. Rows by engine (`gauges`, `signs`, `preempted`), by process (`starts`), by scrape
    (`up`), by labels of one tier (`counts`, `histograms`, `begun`).

    `counts` and `histograms` of `summed` of its hours are what recording rules added up.
    """

    grid: Grid
    at: Steps
    gauges: Mapping[str, Rows]
    summed: int
    preempted: Rows
    counts: Mapping[str, Rows]
    histograms: Mapping[str, tuple[Rows, Rows]]
    begun: Rows
    begun_s: float
    signs: Mapping[str, Rows]
    up: Rows
    starts: Rows
    configs: Rows
    curve: Mapping[Key, Signals]
    recorded: tuple[str, ...]

    def counted(self, groups: Sequence[RowKey]) -> dict[str, Floats]:
        """Counters by hour, added up; those that nobody has are left out."""
        hours = len(self.grid.slots)
        return {
            name: added([rows[group] for group in groups if group in rows], hours)
            for name, rows in self.counts.items()
            if any(group in rows for group in groups)
        }

    def tallies(self, groups: Sequence[RowKey]) -> dict[str, list[Tally | None]]:
        """Histograms by hour, added up."""
        hours = len(self.grid.slots)
        made: dict[str, list[Tally | None]] = {}
        for metric, (buckets, sums) in self.histograms.items():
            by_bound: dict[float, list[Floats]] = {}
            for key, row in buckets.items():
                group, bound = key
                if group in groups:
                    by_bound.setdefault(bound, []).append(row)
            if by_bound:
                whole = added([sums[group] for group in groups if group in sums], hours)
                made[metric] = tallies_of(
                    {bound: added(rows, hours) for bound, rows in by_bound.items()}, whole, hours
                )
        return made

    def minutes(self, groups: Sequence[RowKey]) -> list[float]:
        """Requests that began in each minute; those of a longer step spread evenly over it."""
        rows = [self.begun[group] for group in groups if group in self.begun]
        if not rows:
            return []
        each = int(self.begun_s // MINUTE_S)
        spread: list[float] = np.repeat(added(rows, len(rows[0])) / each, each).tolist()
        return spread

    def engine(self, key: Key) -> dict[str, Floats]:
        """What tells of an engine whether it was in trouble, by step."""
        found = {**self.gauges, **self.signs}
        return {name: rows[key] for name, rows in found.items() if key in rows}


def scrape_of(labels: Labels) -> RowKey:
    """What tells scrapes apart."""
    return labels.get("job", ""), labels.get("instance", "")


def process_names(by: Sequence[str]) -> tuple[str, ...]:
    """The labels that tell processes apart."""
    return tuple(one for one in by if one not in PROCESS)
