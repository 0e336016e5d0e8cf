"""An engine's counters in a store, one scrape after another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from kneewatch.agent.report.history import History
from kneewatch.collector.names.vllm_metrics import metric_table
from kneewatch.collector.scrape_history import Column
from tests.agent.store.factories import COLUMNS


class Snapshot(NamedTuple):
    """An engine's counters at one scrape; a series that the page lacked is left out."""

    t_s: float
    values: Mapping[Column, float]


def snapshots(path: Path, engine_id: int, *, from_s: float, to_s: float) -> list[Snapshot]:
    """The counters that a store has of an engine, one scrape after another."""
    metrics = {*metric_table().metrics, *(column.metric for column in COLUMNS)}
    with closing(History(path)) as history:
        return [
            Snapshot(t_s, {c: v for c, v in zip(part.columns, row, strict=True) if v == v})
            for part in history.counter_arrays(engine_id, metrics, from_s=from_s, to_s=to_s)
            for t_s, row in zip(part.times.tolist(), part.values.T.tolist(), strict=True)
            if from_s <= t_s <= to_s
        ]
