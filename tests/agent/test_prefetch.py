"""Recordings read by a process of its own: what comes is what one process would have read."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kneewatch.agent import captures as ahead
from kneewatch.agent.captures import BATCH_ENTRIES, Captures, PageRead, PrefetchedPages
from kneewatch.collector.captures.capture import CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Page
from tests.recordings import CAPTURES
from tests.waiting import PATIENCE_S

GPU = 'DCGM_FI_DEV_SM_CLOCK{{gpu="0",UUID="GPU-0",Hostname="node"}} {}\n'
PAIR = [str(CAPTURES / f"sticky_two_replicas.r{number}.jsonl.gz") for number in (0, 1)]


@pytest.fixture(params=[1, 2])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many cores there are: on one, no other process reads."""
    count: int = request.param
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    return count


def told(read: PageRead) -> object:
    """What was read, without the objects that held it."""
    at, t_s, page = read
    if isinstance(page, CollectError):
        return at, t_s, str(page), page.kind, page.hint
    layout = page.layout
    gpus = None if page.gpus is None else (page.gpus.values, page.gpus.layout.series)
    seen = page.values, page.timestamps_s, page.host, gpus
    return at, t_s, *seen, layout.series, layout.types, layout.repeated


def pages(paths: list[str]) -> Iterator[PageRead]:
    """All pages of some captures."""
    with PrefetchedPages(Captures(paths), Limits()) as batches:
        for batch in batches:
            yield from batch


def odd(path: Path) -> str:
    """A capture with scrapes that failed, text that is no page, stamps, damage."""
    with CaptureWriter(path) as out:
        for number in range(2 * BATCH_ENTRIES):
            page = f"vllm:num_requests_running {number}\n"
            host = {"host_cpu_steal_ratio": number / 100}
            gpus = GPU.format(1500 + number) if number % 3 else "<html>" * (number % 2)
            out.write(Entry(100.0 + number, page, status=200, host=host, dcgm=gpus))
        out.write(Entry(200.0, None, "connection refused"))
        out.write(Entry(201.0, "<html>", status=200))
        out.write(Entry(202.0, "busy", status=503))
        out.write(Entry(203.0, "vllm:num_requests_running 1 203000\n", status=200))
        out.write(Entry(204.0, "vllm:num_requests_running 1\nvllm:more 2\n", status=200))
    with path.open("ab") as file:
        file.write(b"no gzip")
    return str(path)


@pytest.mark.usefixtures("cores")
def test_what_is_read_ahead_is_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [*PAIR, odd(tmp_path / "odd.jsonl.gz"), str(tmp_path / "empty.jsonl")]
    Path(paths[-1]).touch()
    with PrefetchedPages(Captures(paths), Limits()) as recorded:
        read_ahead = [told(read) for batch in recorded for read in batch]
    here = [told(read) for batch in ahead.read_batches(Captures(paths), Limits()) for read in batch]
    assert read_ahead == here
    assert len(read_ahead) > 4 * BATCH_ENTRIES
    assert any("DCGM_FI_DEV_SM_CLOCK" in str(read) for read in here)
    assert recorded.unusable == 1
    said = capsys.readouterr().err
    assert said.count("1 damaged entries skipped") == 2
    assert said.count("nothing in it can be used (it is empty)") == 2
    assert active_children() == []


def test_a_layout_stays_one_object_while_the_page_keeps_it() -> None:
    layouts = [page.layout for _, _, page in pages(PAIR[:1]) if isinstance(page, Page)]
    assert len({id(layout) for layout in layouts}) < 5 < len(layouts)


@pytest.mark.usefixtures("cores")
def test_an_error_comes_after_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(CaptureError, match="nothing in it can be used"):
        list(pages([str(path)]))
    assert active_children() == []


def test_a_reader_that_is_killed_is_told() -> None:
    source = pages(PAIR)
    next(source)
    (process,) = active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CaptureError, match=r"the process that reads the captures exited \(-9\)"):
        list(source)


def test_a_reader_that_is_killed_within_a_message_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half_sent(sink: Connection, _: object) -> None:
        os.write(sink.fileno(), struct.pack("!i", 100) + b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Connection, "send", half_sent)
    with pytest.raises(CaptureError, match=r"the process that reads the captures exited \(-9\)"):
        list(pages(PAIR))


def test_a_fault_of_the_reader_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Iterator[list[PageRead]]:
        raise ZeroDivisionError("a fault")
        yield []

    monkeypatch.setattr(ahead, "read_batches", broken)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a fault"):
        list(pages(PAIR))


def test_who_stops_early_leaves_no_process() -> None:
    with PrefetchedPages(Captures(PAIR), Limits()) as batches:
        assert len(active_children()) == 1
        next(iter(batches))
    assert active_children() == []


def test_an_error_before_the_first_page_leaves_no_process() -> None:
    with pytest.raises(ZeroDivisionError), PrefetchedPages(Captures(PAIR), Limits()):
        raise ZeroDivisionError
    assert active_children() == []


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_reader_that_waits_ends_with_the_command(tmp_path: Path, by: signal.Signals) -> None:
    fifo = tmp_path / "never.jsonl"
    os.mkfifo(fifo)
    argv = [sys.executable, "-m", "kneewatch.agent.cli", "replay", str(fifo)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        writer = os.open(fifo, os.O_WRONLY)  # waits until it is read
        os.kill(process.pid, by)
        process.communicate(timeout=PATIENCE_S)  # the reading process holds stderr open, too
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"nobody reads it")
    os.close(writer)


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    fifo = tmp_path / "never.jsonl"
    os.mkfifo(fifo)
    argv = [sys.executable, "-m", "kneewatch.agent.cli", "replay", str(fifo), "--format", "json"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True) as process:
        writer = os.open(fifo, os.O_WRONLY)  # waits until it is read
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
        os.close(writer)
    assert b"Traceback" not in said
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
