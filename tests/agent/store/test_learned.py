"""What was learned, in the store: written by one daemon, taken up by the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from kneewatch.agent.daemon.baselines import LearnedStates
from kneewatch.agent.store.learned import KEPT_S, read_learned, write_learned
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose.learned.acceptance import AcceptRequest
from tests.diagnose.test_acceptance import judge_of, played, scrapes, stream

__all__ = ["stream"]
KEY = EngineKey("tiny", "0")


def test_a_later_daemon_goes_on_with_it(tmp_path: Path, stream: TargetStream) -> None:
    (engine,) = stream.monitor.engines
    now_s = scrapes()[0].t_s + 360.0
    first = LearnedStates(tmp_path / "store.db")
    first.exchange("gpu-7", engine, now_s)
    assert engine.judge.stored is None, "the file was not read yet"
    first.cycle()
    first.exchange("gpu-7", engine, now_s)
    first.exchange("gpu-7", engine, now_s)
    first.cycle()
    assert stream.monitor.accept(now_s, AcceptRequest(target="gpu-7"))[0].deviations
    first.exchange("gpu-7", engine, now_s)
    first.cycle()
    fresh = TargetStream("gpu-7", stream.monitor.profile, Limits())
    played(fresh, 360.0, 366.0)
    (engine,) = fresh.monitor.engines
    second = LearnedStates(tmp_path / "store.db")
    second.cycle()
    second.exchange("gpu-7", engine, now_s)
    assert judge_of(fresh).stored is not None
    verdict = played(fresh, 366.0)[-1]
    assert "usual_changed" in {cause.id for cause in verdict.causes}


def test_old_engines_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    write_learned(file, {("old", KEY): (100.0, b"{}"), ("new", KEY): (200.0, b"1")})
    write_learned(file, {("new", KEY): (150.0 + KEPT_S, b"2")})
    assert read_learned(file) == {("new", KEY): b"2"}


def test_a_file_that_cannot_be_used_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: TargetStream
) -> None:
    file, aside, (engine,) = tmp_path / "store.db", tmp_path / "aside", stream.monitor.engines
    write_learned(file, {("gpu-7", engine.key): (scrapes()[0].t_s, b"{}")})
    file.rename(aside)
    file.mkdir()
    states = LearnedStates(file)
    for _ in range(2):
        states.cycle()
        states.exchange("gpu-7", engine, scrapes()[0].t_s)
    assert caplog.text.count("cannot store what was learned") == 1
    file.rmdir()
    aside.rename(file)
    states.cycle()
    states.exchange("gpu-7", engine, scrapes()[0].t_s)
    assert engine.judge.stored == b"{}", "it is not lost"
