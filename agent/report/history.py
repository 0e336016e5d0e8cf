"""The history read in bulk: an engine's signals and counters as numpy arrays. I/O edge.

The store's own codecs give one scrape after another; a report reads a million of them. What is
damaged is passed over and logged, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.report.bulk import (
    NO_TIMES,
    Columns,
    Counted,
    Floats,
    add_scrapes,
    add_signals,
    in_order,
)
from kneewatch.agent.store.arrays import DamagedError
from kneewatch.agent.store.history import OpenRows, chunk_rows, passed_over, reading
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.rows import rows_of
from kneewatch.agent.store.schema import COUNTERS, SCRAPES, SIGNALS


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals of every scrape, oldest first. Shapes: `times` and each of `values` (scrapes,); NaN
    where unknown."""

    times: Floats
    values: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Scrapes:
    """A target's scrapes, oldest first. Shape: `times` (scrapes,); `failed` are the places of those
    that failed, and why."""

    times: Floats
    failed: tuple[tuple[int, str], ...]


class History(Reader):
    """A store's reader that also reads in bulk."""

    def signal_arrays(
        self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float
    ) -> Signals:
        """Signals of an engine over a time; a value a minute where they are old."""
        times: list[Floats] = []
        values: dict[str, list[Floats]] = {key: [] for key in keys}
        with self._moment() as connection:
            for row in chunk_rows(connection, SIGNALS, engine_id, from_s=from_s, to_s=to_s):
                try:
                    with reading(connection, row.id) as read:
                        add_signals(read, times, values)
                except DamagedError as error:
                    passed_over("chunk", row.id, error)
            opened = list(OpenRows(connection).rows(engine_id, from_s=from_s, to_s=to_s))
        if opened:
            times.append(np.array([t_s for t_s, _, _ in opened]))
            for key, parts in values.items():
                found = [
                    np.nan if (at := places.get(key)) is None else row[at]
                    for _, places, row in opened
                ]
                parts.append(np.array(found, dtype=np.float64))
        if not times:
            return Signals(NO_TIMES, dict.fromkeys(keys, NO_TIMES))
        whole = np.concatenate(times)
        keep = in_order(whole) & (whole >= from_s) & (whole <= to_s)
        return Signals(
            whole[keep], {key: np.concatenate(parts)[keep] for key, parts in values.items()}
        )

    def scrape_arrays(self, target: str, *, from_s: float, to_s: float) -> Scrapes:
        """Every scrape of a target over a time; of old ones those that failed and one a minute."""
        times: list[Floats] = []
        failed: list[tuple[float, str]] = []
        with self._moment() as connection:
            row = connection.execute("SELECT id FROM targets WHERE name = ?", (target,)).fetchone()
            if row is None:
                return Scrapes(NO_TIMES, ())
            for chunk in chunk_rows(connection, SCRAPES, row[0], from_s=from_s, to_s=to_s):
                try:
                    with reading(connection, chunk.id) as read:
                        add_scrapes(read, times, failed)
                except DamagedError as error:
                    passed_over("scrapes", chunk.id, error)
            opened = connection.execute(
                "SELECT t_s, error FROM open_scrapes WHERE id BETWEEN ? AND ? ORDER BY id",
                rows_of(row[0]),
            ).fetchall()
        times.append(np.array([t_s for t_s, _ in opened], dtype=np.float64))
        failed += [(t_s, error) for t_s, error in opened if error is not None]
        whole = np.concatenate(times)
        whole = whole[in_order(whole) & (whole >= from_s) & (whole <= to_s)]
        places = np.searchsorted(whole, [t_s for t_s, _ in failed])
        kept = zip(places.tolist(), failed, strict=True)
        return Scrapes(
            whole,
            tuple(
                (at, why) for at, (t_s, why) in kept if at < len(whole) and float(whole[at]) == t_s
            ),
        )

    def counter_arrays(
        self, engine_id: int, metrics: Collection[str], *, from_s: float, to_s: float
    ) -> Iterator[Counted]:
        """Counters of some metrics over a time, an hour or so at once; the first and the last ones
        begin and end a little outside of it."""
        columns = Columns(metrics)
        with self._moment() as connection:
            for row in chunk_rows(connection, COUNTERS, engine_id, from_s=from_s, to_s=to_s):
                try:
                    with reading(connection, row.id) as read:
                        yield columns.unpacked(read)
                except DamagedError as error:
                    passed_over("counters", row.id, error)
            opened = [
                one
                for one in self._open_counters(connection, engine_id, -1)
                if from_s <= one.t_s <= to_s
            ]
        if opened:
            wanted = tuple(
                dict.fromkeys(
                    column
                    for snapshot in opened
                    for column in snapshot.values
                    if column.metric in columns.metrics
                )
            )
            values = [[one.values.get(column, np.nan) for one in opened] for column in wanted]
            times = np.array([one.t_s for one in opened])
            yield Counted(times, wanted, np.array(values).reshape(len(wanted), len(times)))
