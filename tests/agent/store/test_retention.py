"""What is old: thinned to a value a minute, deleted by age and by size; and clocks that are set."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kneewatch.agent.store.downsampling_and_retention import fold_of, mean, minutes
from kneewatch.agent.store.ingest import FLUSH_ROWS
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.rules.rule import DAY_S
from tests.agent.store.factories import EVER, cause, counted, cycle, diagnosis, settle
from tests.agent.store.snapshots import snapshots
from tests.reports.documents import document_then
from tests.waiting import PATIENCE_S

START_S = 29_916_666 * 60.0
"""Minutes begin here."""

STEP_S = 10.0
CHUNK_S = FLUSH_ROWS * STEP_S


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def numbered(
    at: int, t_s: float | None = None, *, causes: Sequence[str] = (), noisy: bool = False
) -> Cycle:
    t_s = START_S + STEP_S * at if t_s is None else t_s
    values = {"n": float(at), "running_max": float(at % 7), "waiting_min": float(at % 5), "x": None}
    if noisy:
        values |= {f"noise_{of}": random.random() for of in range(10)}
    verdict = diagnosis(t_s, values=values, causes=[cause(cause_id) for cause_id in causes])
    error = "refused" if at % 500 == 3 else None
    return cycle(verdict, raw=counted(float(at)), config={"block_size": "16"}, error=error)


def put(store: Store, clock: Clock, cycles: Sequence[Cycle]) -> None:
    """Put cycles, each at its time, and let the store do what it then does."""
    for at, scrape in enumerate(cycles):
        clock.now_s = scrape.t_s
        store.put(scrape)
        if at % 50 == 0:
            settle(store)
    settle(store)
    assert (store.stats().dropped, store.stats().last_error) == (0, "")


def tidied(store: Store, clock: Clock, later_s: float = 3601.0) -> None:
    """Let it be later, and the store do its rounds."""
    clock.now_s += later_s
    for _ in range(40):
        verdict = diagnosis(clock.now_s, target="other", values={})
        store.put(cycle(verdict))
        settle(store)
        clock.now_s += 0.01


def test_old_signals_become_a_value_a_minute(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    store = Store.open(path, retention=Retention(keep_s=CHUNK_S), clock=clock)
    count = 9 * FLUSH_ROWS
    put(store, clock, [numbered(at) for at in range(count)])
    tidied(store, clock)
    store.close(PATIENCE_S)
    reader = Reader(path)
    engine = reader.engines("a")[0]
    series = reader.signals(engine.id, ["n", "running_max", "waiting_min", "x"], **EVER)
    steps_s = [b - a for a, b in pairwise(series.times)]
    young = steps_s.index(STEP_S)
    assert young == pytest.approx(6 * CHUNK_S / 60, abs=50)
    assert set(steps_s[: young - 1]) == {60.0}
    assert set(steps_s[young:]) == {STEP_S}, "what is young is whole"
    for at in range(young - 1):
        last = (series.times[at] - START_S) / STEP_S
        rows = range(round(last) - 5, round(last) + 1)
        assert series.values["n"][at] == pytest.approx(sum(rows) / 6, rel=1e-6)
        assert series.values["running_max"][at] == max(row % 7 for row in rows)
        assert series.values["waiting_min"][at] == min(row % 5 for row in rows)
    assert all(map(math.isnan, series.values["x"]))
    document = document_then(reader, engine.id, START_S + 3 * CHUNK_S + 30)
    assert document is not None
    assert document["t"] == pytest.approx(START_S + 3 * CHUNK_S, abs=60)
    scrapes = reader.scrapes("a", **EVER)
    assert [scrapes.times[at] for at in scrapes.failed] == [
        START_S + STEP_S * at for at in range(3, count, 500)
    ]
    assert len(scrapes.times) < 5 * FLUSH_ROWS
    reader.close()


def test_what_is_too_old_goes_but_what_was_in_force_stays(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    keep = Retention(keep_s=1e9, keep_coarse_s=2 * CHUNK_S)
    store = Store.open(path, retention=keep, clock=clock)
    cycles = [
        numbered(at, causes=["early"] if at < 50 else ["kv_pressure"])
        for at in range(6 * FLUSH_ROWS)
    ]
    put(store, clock, cycles)
    tidied(store, clock)
    store.close(PATIENCE_S)
    reader = Reader(path)
    engine = reader.engines("a")[0]
    times = reader.signals(engine.id, ["n"], **EVER).times
    assert START_S + 3 * CHUNK_S <= times[0] <= START_S + 4 * CHUNK_S
    assert snapshots(path, engine.id, **EVER)[0].t_s >= times[0] - 60
    assert reader.scrapes("a", **EVER).times[0] >= times[0] - 60
    assert [interval.id for interval in reader.intervals(kinds=("cause",), **EVER)] == [
        "kv_pressure"
    ]
    document = document_then(reader, engine.id, times[0])
    assert document is not None, "the document from before still holds"
    assert [row["id"] for row in document["causes"]] == ["kv_pressure"]
    assert [config.after for config in reader.configs(engine.id, **EVER)] == [{"block_size": "16"}]
    reader.close()


def test_an_engine_of_which_nothing_is_left_is_forgotten(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    keep = Retention(keep_s=1e9, keep_coarse_s=DAY_S)
    store = Store.open(path, retention=keep, clock=clock)
    put(store, clock, [numbered(at) for at in range(100)])
    for day in range(1, 5):
        tidied(store, clock, DAY_S)
        late = [
            cycle(diagnosis(clock.now_s + at, target="other", values={"n": 1.0}))
            for at in range(FLUSH_ROWS + day)
        ]
        put(store, clock, late)
    store.close(PATIENCE_S)
    reader = Reader(path)
    assert [engine.target for engine in reader.engines()] == ["other"]
    assert {interval.engine_id for interval in reader.intervals(**EVER)} == {2}
    reader.close()


def test_a_store_that_is_too_large_loses_the_oldest(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    keep = Retention(keep_s=1e9, keep_coarse_s=1e9, max_bytes=300_000)
    store = Store.open(path, retention=keep, clock=clock)
    count = 20 * FLUSH_ROWS
    put(store, clock, [numbered(at, noisy=True) for at in range(count)])
    tidied(store, clock)
    store.close(PATIENCE_S)
    assert path.stat().st_size < 2 * keep.max_bytes
    reader = Reader(path)
    engine = reader.engines("a")[0]
    numbers = list(reader.signals(engine.id, ["n"], **EVER).values["n"])
    assert numbers[0] > FLUSH_ROWS
    assert numbers == list(range(int(numbers[0]), count)), "the youngest are whole"
    reader.close()


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_a_clock_that_is_set_by_an_hour_loses_nothing(tmp_path: Path, hours: float) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    store = Store.open(path, retention=Retention(), clock=clock)
    shift_s = hours * 3600
    before = [numbered(at, causes=["kv_pressure"]) for at in range(FLUSH_ROWS // 2)]
    after = [
        numbered(at, START_S + STEP_S * at + shift_s, causes=["kv_pressure"])
        for at in range(FLUSH_ROWS // 2, 2 * FLUSH_ROWS)
    ]
    put(store, clock, [*before, *after])
    store.close(PATIENCE_S)
    reader = Reader(path)
    engine = reader.engines("a")[0]
    series = reader.signals(engine.id, ["n"], **EVER)
    assert list(series.values["n"]) == list(range(2 * FLUSH_ROWS)), "in order of arrival"
    assert list(series.times) == [scrape.t_s for scrape in [*before, *after]]
    assert len(reader.scrapes("a", **EVER).times) == 2 * FLUSH_ROWS
    raw = snapshots(path, engine.id, **EVER)
    assert [set(s.values.values()) for s in raw] == sorted(set(s.values.values()) for s in raw)
    assert {before[0].t_s, before[-1].t_s, after[-1].t_s} <= {s.t_s for s in raw}
    intervals = reader.intervals(kinds=("cause", "health"), **EVER)
    spans = {(interval.kind, interval.start_s, interval.end_s) for interval in intervals}
    assert {("health", START_S, before[-1].t_s), ("health", after[0].t_s, None)} < spans
    assert all(interval.end_s is None or interval.end_s <= before[-1].t_s for interval in intervals)
    for at_scrape in (before[3], after[-1]):
        document = document_then(reader, engine.id, at_scrape.t_s)
        assert document is not None
        assert document["t"] == at_scrape.t_s
    reader.close()


def test_a_clock_that_is_years_ahead_deletes_nothing_that_is_sealed(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "store.db"
    store = Store.open(path, retention=Retention(), clock=clock)
    put(store, clock, [numbered(at) for at in range(FLUSH_ROWS + 5)])
    tidied(store, clock, 3000 * DAY_S)
    store.close(PATIENCE_S)
    reader = Reader(path)
    series = reader.signals(reader.engines("a")[0].id, ["n"], **EVER).values["n"]
    assert list(series) == list(range(FLUSH_ROWS + 5))
    reader.close()


@pytest.mark.parametrize(
    ("key", "fold"),
    [
        ("running_max", max), ("ttft_p99_s", max), ("itl_p95_s", max), ("cascade_stage", max),
        ("running_min", min), ("kv_usage_max_ratio", max), ("kv_usage_ratio", mean),
        ("ttft_mean_s", mean), ("ttft_p50_s", mean),
    ],
)  # fmt: skip
def test_peaks_stay_peaks(key: str, fold: object) -> None:
    assert fold_of(key) is fold


def test_minutes_are_runs_of_neighbours() -> None:
    assert list(minutes([0, 59, 60, 61, 3600, 30])) == [
        slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)
    ]  # fmt: skip
    assert list(minutes([])) == []


def test_a_clock_that_was_years_ahead_for_a_chunk_deletes_nothing(tmp_path: Path) -> None:
    clock, path, ahead_s = Clock(), tmp_path / "store.db", 3 * 365 * DAY_S
    store = Store.open(path, retention=Retention(), clock=clock)
    now = [numbered(at) for at in range(FLUSH_ROWS + 5)]
    ahead = [
        numbered(at, START_S + ahead_s + STEP_S * at) for at in range(len(now), 3 * FLUSH_ROWS)
    ]
    put(store, clock, [*now, *ahead])
    store.close(PATIENCE_S)
    store = Store.open(path, retention=Retention(), clock=clock)
    tidied(store, clock, DAY_S)
    store.close(PATIENCE_S)
    reader = Reader(path)
    series = reader.signals(reader.engines("a")[0].id, ["n"], **EVER)
    assert list(series.values["n"]) == list(range(3 * FLUSH_ROWS))
    reader.close()
