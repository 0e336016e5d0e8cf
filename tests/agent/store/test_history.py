"""What is written of a real recording is what is read: signals, counters, documents, scrapes."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.store.database import connect
from kneewatch.agent.store.encoding import Packer
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.ingest import FLUSH_ROWS, CycleWriter
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Series
from tests.agent.store.factories import (
    EVER,
    START_S,
    STEP_S,
    counted,
    cycle,
    diagnosis,
    recorded,
    written,
)
from tests.agent.store.snapshots import snapshots
from tests.reports.documents import document, document_then


def float32(value: float | None) -> float:
    return array("f", [math.nan if value is None else value])[0]


def same(value: float, wanted: float) -> bool:
    return value == wanted or (math.isnan(value) and math.isnan(wanted))


def said(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a document says, signals with a float32's digits; what follows from these aside."""
    signals: Mapping[str, float | None] = answer["signals"]
    return {
        **{key: value for key, value in answer.items() if key != "window_s"},
        "findings": [{**finding, "value": None} for finding in answer["findings"]],
        "recommendations": [
            {**recommendation, "before": {}} for recommendation in answer["recommendations"]
        ],
        "stage": {**answer["stage"], "forecast_s": None},
        "signals": {k: None if v is None else float32(v) for k, v in signals.items()},
    }


def near(value: float | None, wanted: float | None) -> bool:
    """A float32 may round to another sixth digit."""
    if value is None or wanted is None:
        return value is wanted
    return abs(value - wanted) <= 1e-5 * abs(wanted)


def assert_numbers_are_of_the_scrape(read: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """What repeats signals moves with them."""
    for finding, wanted in zip(read["findings"], expected["findings"], strict=True):
        assert near(finding["value"], wanted["value"]), finding["rule"]
    for finding, wanted in zip(read["recommendations"], expected["recommendations"], strict=True):
        assert finding["before"].keys() == wanted["before"].keys()
        for key, value in wanted["before"].items():
            assert near(finding["before"][key], value), key
    told_s, made_s = read["stage"]["forecast_s"], expected["stage"]["forecast_s"]
    assert (told_s is None) == (made_s is None)
    assert told_s is None or abs(told_s - made_s) <= 0.2


@pytest.fixture(scope="module", params=["kv_pressure_cascade", "restart_mid_run", "lora_thrash"])
def cycles(request: pytest.FixtureRequest) -> list[Cycle]:
    return recorded(request.param)


@pytest.fixture
def reader(cycles: list[Cycle], tmp_path: Path) -> Reader:
    written(tmp_path / "store.db", *cycles)
    return Reader(tmp_path / "store.db")


def test_every_document_of_a_recording_can_be_told_again(
    cycles: list[Cycle], reader: Reader
) -> None:
    by_name = {(e.model, e.engine): e.id for e in reader.engines()}
    for scrape in cycles:
        for engine in scrape.engines:
            verdict = engine.diagnosis
            stored = document_then(reader, by_name[verdict.model, verdict.engine], scrape.t_s)
            assert stored is not None
            assert said(stored) == said(document(verdict))
            assert_numbers_are_of_the_scrape(stored, document(verdict))


def test_signals_of_every_scrape_are_kept(cycles: list[Cycle], reader: Reader) -> None:
    engine = reader.engines()[-1]
    own = [
        e.diagnosis
        for scrape in cycles
        for e in scrape.engines
        if (e.diagnosis.model, e.diagnosis.engine) == (engine.model, engine.engine)
    ]
    keys = list(dict.fromkeys(key for verdict in own for key in verdict.values))
    series = reader.signals(engine.id, keys, **EVER)
    assert list(series.times) == [verdict.t_s for verdict in own]
    assert (engine.first_s, engine.last_s) == (own[0].t_s, own[-1].t_s)
    for key in keys:
        for value, judged in zip(series.values[key], own, strict=True):
            assert same(value, float32(judged.values.get(key))), key


def test_scrapes_say_when_and_why_they_failed(cycles: list[Cycle], reader: Reader) -> None:
    scrapes = reader.scrapes(cycles[0].target, **EVER)
    assert list(scrapes.times) == [scrape.t_s for scrape in cycles]
    assert scrapes.failed == {
        at: scrape.error for at, scrape in enumerate(cycles) if scrape.error is not None
    }


def test_counters_are_kept_exactly_each_minute_and_around_restarts(
    cycles: list[Cycle], reader: Reader
) -> None:
    engine = reader.engines()[-1]
    pages = [(scrape.t_s, e) for scrape in cycles for e in scrape.engines if e.columns]
    exact = {
        t_s: {
            column: value
            for column, value in zip(e.columns, e.counters, strict=True)
            if value == value
        }
        for t_s, e in pages
    }
    counters = snapshots(reader.path, engine.id, **EVER)
    for snapshot in counters:
        assert snapshot.values == exact[snapshot.t_s]
    times = [snapshot.t_s for snapshot in counters]
    all_times = [t_s for t_s, _ in pages]
    assert times[0] == all_times[0]
    assert times[-1] == all_times[-1]
    longest_s = max(b - a for a, b in pairwise(all_times))
    assert max(b - a for a, b in pairwise(times)) <= max(60.0, longest_s)
    for before, (t_s, e) in zip(all_times, pages[1:], strict=False):
        if e.restart is not None:
            assert {before, t_s} <= set(times)


def long_run(scrapes: int) -> list[Cycle]:
    return [
        cycle(
            diagnosis(START_S + STEP_S * at, values={"n": at, "flat": 7.0, "none": None}),
            raw=counted(float(at)),
        )
        for at in range(scrapes)
    ]


def test_the_newest_counters_are_replaced_by_one_statement(tmp_path: Path) -> None:
    connection, packer, statements = connect(tmp_path / "store.db"), Packer(), list[str]()
    writer = CycleWriter(connection, EngineCache(connection, set()), time.monotonic)
    first, second, *others = map(packer.pack, long_run(8))
    writer.write(first)
    writer.write(second)
    connection.set_trace_callback(statements.append)
    for packed in others:
        writer.write(packed)
    connection.close()
    of_counters = [each.split()[0] for each in statements if "open_counters" in each]
    assert of_counters == ["UPDATE"] * len(others)


def plain(series: Series) -> list[tuple[float, float]]:
    return list(zip(series.times, series.values["n"], strict=True))


def test_sealed_and_open_rows_read_as_one(tmp_path: Path) -> None:
    cycles = long_run(2 * FLUSH_ROWS + 100)
    written(tmp_path / "store.db", *cycles[: FLUSH_ROWS + 7])
    written(tmp_path / "store.db", *cycles[FLUSH_ROWS + 7 :])
    reader = Reader(tmp_path / "store.db")
    (engine,) = reader.engines("a")
    series = reader.signals(engine.id, ["n", "flat", "none", "other"], **EVER)
    assert plain(series) == [(START_S + STEP_S * at, at) for at in range(len(cycles))]
    assert set(series.values["flat"]) == {7.0}
    assert all(map(math.isnan, [*series.values["none"], *series.values["other"]]))
    from_s, to_s = START_S + STEP_S * (FLUSH_ROWS - 3), START_S + STEP_S * (FLUSH_ROWS + 4)
    some = reader.signals(engine.id, ["n"], from_s=from_s, to_s=to_s)
    assert [n for _, n in plain(some)] == list(range(FLUSH_ROWS - 3, FLUSH_ROWS + 5))
    raw = snapshots(reader.path, engine.id, **EVER)
    assert all(set(s.values.values()) == {(s.t_s - START_S) / STEP_S} for s in raw)
    assert max(b.t_s - a.t_s for a, b in pairwise(raw)) <= 60.0
    assert len(raw) < len(cycles) / 10
    assert len(reader.scrapes("a", **EVER).times) == len(cycles)
    for at in (0, FLUSH_ROWS - 1, FLUSH_ROWS, FLUSH_ROWS + 50, len(cycles) - 1):
        stored = document_then(reader, engine.id, START_S + STEP_S * at + 1)
        assert stored is not None
        assert stored["signals"] == {"n": at, "flat": 7.0, "none": None}
    reader.close()


def test_a_moment_that_was_not_watched_has_no_document(tmp_path: Path) -> None:
    cycles = long_run(20)
    written(tmp_path / "store.db", *cycles)
    reader = Reader(tmp_path / "store.db")
    (engine,) = reader.engines()
    assert document_then(reader, engine.id, START_S - 0.1) is None
    last_s = cycles[-1].t_s
    assert document_then(reader, engine.id, last_s + 5 * STEP_S) is not None
    assert document_then(reader, engine.id, last_s + 5 * STEP_S + 1) is None
    assert document_then(reader, engine.id + 1, last_s) is None
