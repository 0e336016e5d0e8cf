"""Counters and histograms of a period by the hour: from what recording rules added up where that is
whole, else from raw series. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from kneewatch.agent.fleet.queries import Asking
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.matrix import Query, Ranges
from kneewatch.agent.report.prometheus.resolution import Floats, RowKey, Rows, Steps
from kneewatch.agent.report.prometheus.roll import Part, Roll
from kneewatch.dashboards.prometheus.hourly import COUNTERS, STEP_S
from kneewatch.diagnose.fleet.shape import Labels
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.measures import TALLIES

Truths = npt.NDArray[np.bool_]

BUCKETS = 20
"""About as many has a histogram of vLLM."""

WHOLE = 0.95
"""Sums of that share of a tier's engine-hours are taken; one evaluation an hour is a twelfth."""

PART = "#"
"""Stands before the number of a query's part."""

ENGINES = "engines in the recorded sums"
Text = Callable[[Asking, Sequence[str], float], str]


class Hours:
    """Asks for what the engines of a roll counted in each hour of a period."""

    def __init__(self, ranges: Ranges, roll: Roll, grid: Grid) -> None:
        self._ranges, self._roll, self._grid = ranges, roll, grid
        self._groups = len({roll.group(one) for one in roll.members})

    def read(self, running: Rows, at: Steps) -> tuple[dict[str, Rows], int]:
        """Rows by counter, or histogram and part; and how many hours are of recorded sums.
        `running` says which engine was there when."""
        whole = self._whole(running, at)
        slots = self._grid.slots
        found: dict[str, Rows] = {name: {} for name in self._named(queries.gained)}
        for text, wanted in ((queries.gained_kept, whole), (queries.gained, ~whole)):
            places = np.flatnonzero(wanted)
            if len(places) == 0:
                continue
            asked: dict[str, Query] = {}
            for name, (made, series) in self._named(text).items():
                asked |= self.of_parts(name, made, series, kept=text is queries.gained_kept)
            rows = together(self._ranges.slots(asked, [slots[at] for at in places.tolist()]))
            for name, part in rows.items():
                for key, row in part.items():
                    found[name].setdefault(key, np.full(len(slots), np.nan))[places] = row
        return found, int(whole.sum())

    def of_parts(
        self, name: str, text: Text, series: int, *, kept: bool = False
    ) -> dict[str, Query]:
        """A query for each part that engines are added up by; `series` are those of one engine.
        With `kept` of recorded sums."""
        roll = self._roll
        made: dict[str, Query] = {}
        for at, part in enumerate(roll.parts):
            only = (part.kept or "") if kept else part.only
            made[f"{name}{PART}{at}"] = Query(
                partial(text, queries.narrowed(roll.asking, only), part.by),
                partial(_bucket, part) if series > 1 else part.key,
                self._groups * series,
                series * (self._groups / STEP_S if kept else len(roll.members) / roll.scrape_s),
            )
        return made

    def _named(self, text: Callable[..., str]) -> dict[str, tuple[Text, int]]:
        """What is asked for, and how many series one engine has of it."""
        made: dict[str, tuple[Text, int]] = {key: (partial(text, key, ""), 1) for key in COUNTERS}
        for metric, part in product(TALLIES, ("bucket", "sum")):
            made[f"{metric}_{part}"] = (
                partial(text, metric, part), BUCKETS if part == "bucket" else 1
            )  # fmt: skip
        return made

    def _whole(self, running: Rows, at: Steps) -> Truths:
        """The hours in which recorded sums are of all engines, all the time. Shape: (slots,)."""
        slots = self._grid.slots
        if any(part.kept is None for part in self._roll.parts):
            return np.zeros(len(slots), dtype=np.bool_)
        asked = self.of_parts(ENGINES, queries.engines_kept, 1, kept=True)
        summed = together(self._ranges.slots(asked, slots))[ENGINES]
        if not summed:
            return np.zeros(len(slots), dtype=np.bool_)
        nothing = np.zeros(len(slots))
        whole = np.ones(len(slots), dtype=np.bool_)
        for group, there_s in self._there_s(running, at).items():
            told_s = np.nan_to_num(summed.get(group, nothing)) * STEP_S
            whole &= np.abs(told_s - there_s) <= (1 - WHOLE) * there_s
        return whole

    def _there_s(self, running: Rows, at: Steps) -> Mapping[RowKey, Floats]:
        """Seconds of engines that were there in each hour, by what they are added up to."""
        edges_s = np.array(self._grid.edges_s)
        slot = np.searchsorted(edges_s, at.begins_s + 1e-3, side="right") - 1
        found: dict[RowKey, Floats] = {}
        for one in self._roll.members:
            row = running.get(one.key)
            if row is not None:
                sums = found.setdefault(self._roll.group(one), np.zeros(len(edges_s) - 1))
                np.add.at(sums, slot, ~np.isnan(row) * at.step_s)
        return found


def together(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows of all parts of a query together."""
    made: dict[str, Rows] = {}
    for name, found in rows.items():
        made.setdefault(name.partition(PART)[0], {}).update(found)
    return made


def _bucket(part: Part, labels: Labels) -> RowKey:
    return part.key(labels), float(labels["le"])
