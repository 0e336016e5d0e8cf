"""Range queries read into arrays, several at a time, piece by piece. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from kneewatch.agent.report.prometheus.resolution import RowKey, Rows, Steps, hour_runs
from kneewatch.collector.base import CollectError
from kneewatch.collector.prometheus.answers import Piece
from kneewatch.collector.prometheus.ranges import SAMPLES_MOST
from kneewatch.collector.prometheus.source import PrometheusSource
from kneewatch.diagnose.fleet.shape import Labels
from kneewatch.reports.weekly.grid import Slot

PIECE_VALUES = 200_000
"""What one answer may hold: about 20 MB while it is read."""

PIECE_SCRAPED = 20_000_000
"""Scraped samples that one query may have the server go through: a second's work or so."""

KeyOf = Callable[[Labels], RowKey]


@dataclass(frozen=True, slots=True)
class Query:
    """A range query: `text` makes it for the length of a step; `key` names a row of the answer.

    `rows` and `scraped` are about how many rows there are, and how many scraped samples a second
    the server goes through: the range is cut by both.
    """

    text: Callable[[float], str]
    key: KeyOf
    rows: int = 1
    scraped: float = 1.0


@dataclass(slots=True)
class Told:
    """What the server said of its answers: warnings, what is partial, what failed and why."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, CollectError] = field(default_factory=dict[str, CollectError])
    lock: Lock = field(default_factory=Lock)


Tell = Callable[[str], None]
"""Is told of each query that is done."""


class Ranges:
    """Asks a metrics system for ranges."""

    def __init__(self, source: PrometheusSource, *, at_once: int, tell: Tell) -> None:
        self.source, self._at_once, self._tell = source, at_once, tell
        self.told = Told()

    def steps(self, queries: Mapping[str, Query], at: Steps) -> dict[str, Rows]:
        """The rows of each query; NaN where there is no value. Shape of a row: (count,)."""
        return self._all(queries, [at])

    def slots(self, queries: Mapping[str, Query], slots: Sequence[Slot]) -> dict[str, Rows]:
        """The rows of each query, a value for each hour. Shape of a row: (slots,)."""
        return self._all(queries, hour_runs(slots))

    def _all(self, queries: Mapping[str, Query], runs: Sequence[Steps]) -> dict[str, Rows]:
        def one(name: str) -> Rows:
            rows: Rows = {}
            at, count = 0, sum(run.count for run in runs)
            try:
                for run in runs:
                    self._run(queries[name], run, rows, at, count)
                    at += run.count
            except CollectError as exc:
                with self.told.lock:
                    self.told.failed[name] = exc
            self._tell(name)
            return rows

        with ThreadPoolExecutor(self._at_once) as pool:
            return dict(zip(queries, pool.map(one, queries), strict=True))

    def _run(self, query: Query, run: Steps, rows: Rows, at: int, count: int) -> None:
        each = min(
            PIECE_VALUES // max(1, query.rows),
            int(PIECE_SCRAPED / max(1.0, query.scraped * run.step_s)),
        )
        for piece in self.source.range(
            query.text(run.step_s),
            from_s=run.first_s,
            to_s=run.last_s,
            step_s=run.step_s,
            series=SAMPLES_MOST // max(1, each),
        ):
            self._take(piece, query.key, run, rows, at, count)

    def _take(self, piece: Piece, key: KeyOf, run: Steps, rows: Rows, at: int, count: int) -> None:
        if piece.warnings:
            with self.told.lock:
                self.told.warnings.update(dict.fromkeys(piece.warnings))
        for track in piece.tracks:
            row = rows.setdefault(key(track.labels), np.full(count, np.nan))
            found = np.array(track.points)
            places = np.rint((found[:, 0] - run.first_s) / run.step_s).astype(np.intp)
            row[at + places] = found[:, 1]
