"""Engines without end, as of labels that change with every scrape: the file stays small."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kneewatch.agent.store import engine_cache as ledgers
from kneewatch.agent.store.engine_cache import NEW_ENGINES_S
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.collector.scrape_history import Column
from tests.agent.store.factories import (
    EVER,
    KEEP_ALL,
    START_S,
    STEP_S,
    cache_of,
    counted,
    cycle,
    diagnosis,
    settle,
)
from tests.reports.documents import document_then
from tests.waiting import PATIENCE_S

MOST = 10


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "NEW_ENGINES_MAX", MOST)


def of(names: Sequence[str], at_s: float) -> Cycle:
    """A cycle of these engines, all well."""
    t_s = START_S + at_s
    return cycle(*[diagnosis(t_s, engine=name, stage_since_s=START_S) for name in names])


def flood(number: int) -> Cycle:
    """A cycle of one engine that stays and others that nobody saw before."""
    return of(["stays", *[f"{number}.{n}" for n in range(8)]], STEP_S * number)


def test_new_engines_are_bounded_and_known_ones_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    for number in range(20):
        store.put(flood(number))
    settle(store)
    reader = Reader(store.path)
    engines = {engine.engine: engine for engine in reader.engines()}
    assert len(engines) == MOST
    assert engines["stays"].last_s == START_S + STEP_S * 19
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "too many new engines" in warning.getMessage()
    assert cache_of(store).session == {engines["stays"].id}, "those that left are forgotten"
    store.close(PATIENCE_S)
    reader.close()


def test_there_is_room_again_and_then_all_is_told(tmp_path: Path) -> None:
    store, names = (
        Store.open(tmp_path / "store.db", retention=KEEP_ALL),
        [f"{n}" for n in range(15)],
    )
    for at_s in (0.0, STEP_S, NEW_ENGINES_S + STEP_S, NEW_ENGINES_S + 2 * STEP_S):
        store.put(of(names, at_s))
        settle(store)
    reader = Reader(store.path)
    engines = reader.engines()
    assert {engine.engine for engine in engines} == set(names)
    for stored in engines:
        assert document_then(reader, stored.id, START_S + NEW_ENGINES_S + 3 * STEP_S) is not None, (
            stored.engine
        )
    store.close(PATIENCE_S)
    reader.close()


def test_that_there_are_too_many_is_told_once_also_where_none_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    for number in range(5):
        names = [f"{number}.{n}" for n in range(2 * MOST)]
        store.put(of(names, STEP_S * number))
        settle(store)
        cache_of(store).drop_empty()
    assert len(caplog.records) == 1
    store.close(PATIENCE_S)


def test_a_target_that_fills_the_file_loses_its_own_history(tmp_path: Path) -> None:
    now_s, rng = [START_S], random.Random(1)
    keep = Retention(max_bytes=1_000_000)
    store = Store.open(tmp_path / "store.db", retention=keep, clock=lambda: now_s[0])
    cycles, most_bytes = 90, 0
    for number in range(cycles):
        t_s = now_s[0] = START_S + STEP_S * number
        verdicts = [
            diagnosis(
                t_s, target="floods", engine=f"{n}", stage_since_s=START_S,
                values={f"signal_{at}": rng.random() for at in range(100)})
            for n in range(30)
        ]  # fmt: skip
        store.put(cycle(diagnosis(t_s, target="well"), raw=counted(1.0)))
        store.put(cycle(*verdicts))
        if number % 9 == 8:
            settle(store)
        most_bytes = max(most_bytes, store.path.stat().st_size)
    store.close(PATIENCE_S)
    assert most_bytes < keep.max_bytes
    with closing(Reader(store.path)) as reader:
        (well,) = reader.engines("well")
        assert len(reader.signals(well.id, ["running"], **EVER).times) == cycles
        assert 0 < len(reader.scrapes("floods", **EVER).times) < cycles


def test_texts_without_end_do_not_fill_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "TEXTS_MAX_BYTES", 200_000)
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    for number in range(40):
        columns = tuple(Column(f"c{n}", (("l", f"{number:02}" * 500),)) for n in range(10))
        config = {f"label_{at}": f"{number:02}" * 7_500 for at in range(8)}
        verdict = diagnosis(START_S + number, stage_since_s=START_S)
        store.put(cycle(verdict, config=config, raw=(columns, (1.0,) * 10)))
    settle(store)
    store.close(PATIENCE_S)
    with closing(sqlite3.connect(store.path)) as connection:
        (names,) = connection.execute("SELECT sum(length(names)) FROM layouts").fetchone()
        (labels,) = connection.execute("SELECT sum(length(labels)) FROM configs").fetchone()
    assert 100_000 < names + labels < 2 * 200_000, "an hour's worth, in at most two hours"
