"""The history in bulk is the history as it is read one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kneewatch.agent.report.history import History
from kneewatch.agent.store.reader import Reader
from kneewatch.reports.weekly.measures import COUNTS, LEVELS, TALLIES
from tests.weeks import START_S, Week


def test_signals_counters_and_scrapes_agree(made_store: Path, made_week: Week) -> None:
    history, reader = History(made_store), Reader(made_store)
    metrics = {*COUNTS, *TALLIES}
    for engine in reader.engines():
        from_s = START_S + 2.3 * 86_400.0  # the restart of chat-0, and none of the others
        span = {"from_s": from_s, "to_s": from_s + 10_000.0}
        bulk = history.signal_arrays(engine.id, LEVELS, **span)
        single = reader.signals(engine.id, LEVELS, **span)
        assert bulk.times.tolist() == list(single.times)
        for key in LEVELS:
            assert np.array_equal(bulk.values[key], np.array(single.values[key]), equal_nan=True)
        snapshots = {one.t_s: one.values for one in reader.raw(engine.id, **span)}
        seen = 0
        for counted in history.counter_arrays(engine.id, metrics, **span):
            for at, t_s in enumerate(counted.times.tolist()):
                values = snapshots.get(t_s)
                if values is None:
                    assert not span["from_s"] <= t_s <= span["to_s"]
                    continue
                seen += 1
                for column, row in zip(counted.columns, counted.values, strict=True):
                    known = values.get(column)
                    assert (known is None and np.isnan(row[at])) or known == row[at]
        assert seen == len(snapshots)
    for server in made_week.servers:
        span = {"from_s": START_S + 1000.0, "to_s": START_S + 5 * 86_400.0}
        scrapes = reader.scrapes(server.name, **span)
        found = history.scrape_arrays(server.name, **span)
        assert found.times.tolist() == [one.t_s for one in scrapes]
        assert [at for at, _ in found.failed] == [
            at for at, one in enumerate(scrapes) if not one.ok
        ]
    history.close()
    reader.close()


def test_what_is_not_there_is_empty(made_store: Path) -> None:
    history = History(made_store)
    span = {"from_s": 0.0, "to_s": 1.0}
    assert len(history.signal_arrays(1, LEVELS, **span).times) == 0
    assert not [one for one in history.counter_arrays(1, COUNTS, **span) if len(one.times)]
    assert len(history.scrape_arrays("unknown", **span).times) == 0
    history.close()


@pytest.mark.parametrize("key", ["no_such_signal"])
def test_a_signal_that_nobody_has_is_unknown(made_store: Path, key: str) -> None:
    history = History(made_store)
    found = history.signal_arrays(1, [key], from_s=START_S, to_s=START_S + 86_400.0)
    assert len(found.times) > 0
    assert np.isnan(found.values[key]).all()
    history.close()
