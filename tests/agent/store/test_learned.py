"""What was learned, in the store: written by one daemon, taken up by the next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kneewatch.agent.daemon.baselines import LearnedStates
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.writer import LEARNED_KEPT_S, Store
from kneewatch.agent.stream import AcceptRequest, TargetStream, accept
from kneewatch.collector.exposition import Limits
from kneewatch.collector.names.vllm_metrics import EngineKey
from tests.agent.store.factories import KEEP_ALL, START_S, cycle, diagnosis, settle
from tests.diagnose.test_acceptance import judge_of, played, scrapes, stream
from tests.waiting import PATIENCE_S

__all__ = ["stream"]
KEY = EngineKey("tiny", "0")


def put(store: Store, at: int) -> None:
    """A cycle: what was learned goes with it."""
    store.put(cycle(diagnosis(START_S + at)))
    settle(store)


def test_a_later_daemon_goes_on_with_it(tmp_path: Path, stream: TargetStream) -> None:
    (engine,) = stream.monitor.engines
    now_s = scrapes()[0].t_s + 360.0
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    with closing(Reader(store.path)) as reader:
        first = LearnedStates(reader, store.learn)
        first.exchange("gpu-7", engine, now_s)
        first.cycle()
        assert engine.judge.stored is None, "there was none"
        first.exchange("gpu-7", engine, now_s)
        put(store, 0)
        before = reader.learned("gpu-7", engine.key)
        assert accept(stream.monitor, now_s, AcceptRequest(target="gpu-7"))[0].deviations
        first.exchange("gpu-7", engine, now_s)
        put(store, 1)
        assert None is not before != reader.learned("gpu-7", engine.key)
        store.close(PATIENCE_S)
        fresh = TargetStream("gpu-7", stream.monitor.profile, Limits())
        played(fresh, 360.0, 366.0)
        (engine,) = fresh.monitor.engines
        second = LearnedStates(reader, store.learn)
        second.exchange("gpu-7", engine, now_s)
        second.cycle()
    assert judge_of(fresh).stored is not None
    verdict = played(fresh, 366.0)[-1]
    assert "usual_changed" in {cause.id for cause in verdict.causes}


def test_a_target_that_is_watched_again_goes_on_with_it(
    tmp_path: Path, stream: TargetStream
) -> None:
    (engine,), now_s = stream.monitor.engines, scrapes()[0].t_s + 360.0
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    with closing(Reader(store.path)) as reader:
        states = LearnedStates(reader, store.learn)
        for _ in range(2):
            states.exchange("a", engine, now_s)
            states.cycle()
        put(store, 0)
        for target, is_stored in (("a", True), ("b", False)):
            again = TargetStream(target, stream.monitor.profile, Limits())
            played(again, 360.0, 366.0)
            (fresh,) = again.monitor.engines
            states.exchange(target, fresh, now_s)
            states.cycle()
            assert (judge_of(again).stored is not None) is is_stored
    store.close(PATIENCE_S)


def test_old_engines_are_forgotten(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store.db", retention=KEEP_ALL)
    store.learn("old", KEY, 100.0, b"{}")
    store.learn("new", KEY, 200.0, b"1")
    put(store, 0)
    with closing(Reader(store.path)) as reader:
        assert (reader.learned("old", KEY), reader.learned("new", KEY)) == (b"{}", b"1")
        store.learn("new", KEY, 150.0 + LEARNED_KEPT_S, b"2")
        put(store, 1)
        assert (reader.learned("old", KEY), reader.learned("new", KEY)) == (None, b"2")
    store.close(PATIENCE_S)


def test_a_file_that_cannot_be_used_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: TargetStream
) -> None:
    file, aside, (engine,) = tmp_path / "store.db", tmp_path / "aside", stream.monitor.engines
    store = Store.open(file, retention=KEEP_ALL)
    store.learn("gpu-7", engine.key, scrapes()[0].t_s, b"{}")
    put(store, 0)
    store.close(PATIENCE_S)
    file.rename(aside)
    file.mkdir()
    states = LearnedStates(Reader(file, may_be_late=True), store.learn)
    for _ in range(2):
        states.exchange("gpu-7", engine, scrapes()[0].t_s)
        states.cycle()
    assert caplog.text.count("cannot read what was learned") == 1
    file.rmdir()
    aside.rename(file)
    states.exchange("gpu-7", engine, scrapes()[0].t_s)
    states.cycle()
    assert engine.judge.stored == b"{}", "it is not lost"
