"""Recordings read in order of time: none is lost, those before an error come first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent import captures
from kneewatch.agent.captures import Captures
from kneewatch.agent.console import COLLECT_AFTER, infrequent_gc
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from tests.recordings import CAPTURES
from tests.reports.documents import document
from tests.waiting import PATIENCE_S


def written(path: Path, count: int, *, start_s: float = 0.0) -> str:
    """A capture of so many scrapes, one a second."""
    with CaptureWriter(path) as out:
        for number in range(count):
            out.write(Entry(start_s + number, f"page {number}"))
    return str(path)


def test_entries_of_several_captures_come_in_order_of_time(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "a.jsonl.gz", 20),
        written(tmp_path / "b.jsonl.gz", 20, start_s=0.5),
    ]
    numbered = [(at, entry.t_s) for at, entry in Captures(paths)]
    assert numbered == [(number % 2, number / 2) for number in range(40)]


def test_what_was_read_before_an_error_is_told_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(CaptureReader):
        """A reader whose disk fails at its end."""

        def __iter__(self) -> Iterator[Entry]:
            yield from super().__iter__()
            raise CaptureError("the disk failed")

    path = written(tmp_path / "a.jsonl.gz", 3)
    monkeypatch.setattr(captures, "CaptureReader", Breaking)
    entries = iter(Captures([path]))
    assert [next(entries)[1].t_s for _ in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(CaptureError, match="the disk failed"):
        next(entries)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_replay_that_waits_for_its_capture_can_be_ended(
    tmp_path: Path, by: signal.Signals
) -> None:
    fifo = tmp_path / "never.jsonl"
    os.mkfifo(fifo)
    argv = [sys.executable, "-m", "kneewatch.agent.cli", "replay", str(fifo), "--format", "json"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        writer = os.open(fifo, os.O_WRONLY)  # waits until it is read
        os.kill(process.pid, by)
        _, said = process.communicate(timeout=PATIENCE_S)
        os.close(writer)
    assert b"Traceback" not in said
    assert process.returncode != 0


def test_what_is_made_of_a_page_has_no_cycles() -> None:
    stream = TargetStream("tiny", Profile(window_s=15.0), Limits())
    entries = list(CaptureReader(CAPTURES / "knee_sweep.jsonl.gz"))
    usual = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold()[0] == COLLECT_AFTER
        for entry in entries[:20]:
            stream.replay(entry)
        gc.collect()
        documents = [
            document(diagnosis) for entry in entries[20:] for diagnosis in stream.replay(entry)
        ]
        assert len(documents) == len(entries) - 20
        assert gc.collect() <= len(documents), "nothing that grows by the page"
    assert gc.get_threshold() == usual
