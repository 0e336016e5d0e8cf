"""The history store read in bulk as numpy arrays: signals and counters. I/O edge."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from kneewatch.agent.report.series import NO_TIMES, Signals, in_order
from kneewatch.agent.report.spans import Counted
from kneewatch.agent.store.chunks import ColumnRow, CounterChunk, column_of
from kneewatch.agent.store.columns import DamagedError, Decoders, decoding
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.schema import COUNTERS
from kneewatch.agent.store.stored_series import (
    chunk_reader,
    chunk_rows,
    columns_by_name,
    log_damage,
    open_counters,
    signal_parts,
)
from kneewatch.collector.columns import Column


def _sums(data: bytes, order: int) -> array[int]:
    # Overflow wraps around here exactly as it did when the differences were encoded.
    folded = np.frombuffer(data, dtype="<u8")
    signs = (folded & np.uint64(1)).view(np.int64)
    values = (folded >> np.uint64(1)).view(np.int64)
    values ^= np.negative(signs, out=signs)
    for _ in range(order):
        np.cumsum(values, out=values)
    sums: array[int] = array("q")
    sums.frombytes(values.data.cast("B"))
    return sums


def _doubles(data: bytes) -> array[float]:
    doubles: array[float] = array("d")
    doubles.frombytes(np.frombuffer(data, dtype="<f4").astype(np.float64).data.cast("B"))
    return doubles


NUMPY = Decoders(_sums, _doubles)
"""The store's loops over numbers, with numpy."""


class History(Reader):
    """A store's reader that also reads in bulk."""

    def __init__(self, path: Path) -> None:
        """Opens the store.

        Raises:
            StoreError: there is none, or it cannot be read; the message says what to do.
        """
        super().__init__(path, NUMPY)

    def signal_arrays(
        self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float
    ) -> Signals:
        """Signals of an engine; one value per minute where they were downsampled."""
        span = {"from_s": from_s, "to_s": to_s}
        with self._snapshot() as connection:
            parts = list(signal_parts(connection, engine_id, keys, NUMPY, **span))
        times = np.concatenate([NO_TIMES, *(part.times for part in parts)])
        keep = in_order(times)
        return Signals(
            times[keep],
            {
                key: np.concatenate([NO_TIMES, *(part.values[key] for part in parts)])[keep]
                for key in keys
            },
        )

    def counter_arrays(
        self, engine_id: int, metrics: Collection[str], *, from_s: float, to_s: float
    ) -> Iterator[Counted]:
        """Counters of `metrics`, about an hour per item; the first and the last item reach a
        little outside of the range."""
        chosen = _Chosen(metrics)
        with self._snapshot() as connection:
            for row in chunk_rows(connection, COUNTERS, engine_id, from_s=from_s, to_s=to_s):
                try:
                    with chunk_reader(connection, row.id) as read:
                        yield chosen.counted(CounterChunk(read, NUMPY))
                except DamagedError as error:
                    log_damage("counters", row.id, error)
            opened = [
                (t_s, row)
                for _, t_s, row in open_counters(connection, engine_id)
                if from_s <= t_s <= to_s
            ]
        if opened:
            times, rows = zip(*opened, strict=True)
            columns = {
                column: values
                for column, values in columns_by_name(rows).items()
                if column.metric in chosen.metrics and any(value == value for value in values)
            }
            table = np.array(list(columns.values())).reshape(len(columns), len(times))
            yield Counted(np.array(times), tuple(columns), table)


class _Chosen:
    """Selects the columns of some metrics. Caches them: successive chunks share columns."""

    def __init__(self, metrics: Collection[str]) -> None:
        self.metrics = frozenset(metrics)
        self._rows: list[ColumnRow] = []
        self._columns: tuple[Column, ...] = ()
        self._places: list[int] = []

    def counted(self, chunk: CounterChunk) -> Counted:
        """A chunk's counters.

        Raises:
            DamagedError: the columns or the times are not what was written.
        """
        integers, floats = np.asarray(chunk.integers), np.asarray(chunk.floats)
        with decoding("counters"):
            rows = [row for row, _ in chunk.columns]
            if rows != self._rows:
                self._places = [at for at, row in enumerate(rows) if row[0] in self.metrics]
                self._columns = tuple(column_of(rows[at]) for at in self._places)
                self._rows = rows
            values = np.empty((len(self._places), chunk.rows))
            for row, place in enumerate(self._places):
                (_, kind), at = chunk.columns[place], chunk.starts[place]
                if kind == "i":
                    values[row] = integers[at : at + chunk.rows]
                elif kind == "b":
                    values[row] = floats[at : at + chunk.rows]
                else:
                    values[row] = kind
        return Counted(np.asarray(chunk.times()), self._columns, values)
