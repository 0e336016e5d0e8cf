"""A capture played as if it were live: its pace, its times, its start over."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest

from kneewatch.agent.daemon.scraping import PAUSE_S, PlayedPages
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CaptureError, CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Page
from kneewatch.diagnose.diagnosis_config import Profile
from tests.agent.running import capture

HEALTHY = capture("healthy_light")
NOW_S = 1_900_000_000.0


class Clock:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def stream() -> TargetStream:
    return TargetStream("t", Profile(), Limits())


def recorded(path: Path, *entries: Entry) -> str:
    with CaptureWriter(path) as out:
        for entry in entries:
            out.write(entry)
    return str(path)


def simple(value: float) -> str:
    return (
        f"vllm:num_requests_running {value}\nprocess_start_time_seconds {value}\n"
        f"a_total {value}\na_created {value}\n"
    )


def values(page: Page | CollectError) -> dict[str, float]:
    assert isinstance(page, Page)
    return {series.name: value for series, value in page.samples()}


def due_in_s(player: PlayedPages) -> float:
    due_s = player.due_in_s()
    assert due_s is not None
    return due_s


def test_pages_come_at_their_own_pace() -> None:
    entries = list(CaptureReader(HEALTHY))
    clock = Clock()
    player, reader = PlayedPages(str(HEALTHY), "c", clock=clock), stream()
    for before, after in pairwise(entries[:7]):
        page = player.take(reader, NOW_S)
        assert isinstance(page, Page)
        assert player.due_in_s() == pytest.approx(after.t_s - before.t_s, abs=1e-6)
        clock.now_s += due_in_s(player) + 1e-6


def test_missed_pages_are_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path / "c.jsonl", *(Entry(100.0 + 2 * n, simple(n)) for n in range(10)))
    clock = Clock()
    player, reader = PlayedPages(path, "c", clock=clock), stream()
    assert values(player.take(reader, NOW_S))["a_total"] == 0
    clock.now_s += 7.0
    assert values(player.take(reader, NOW_S + 7))["a_total"] == 3
    assert player.due_in_s() == pytest.approx(1.0)


def test_times_of_the_process_are_moved_and_each_start_is_another_process(tmp_path: Path) -> None:
    path = recorded(tmp_path / "c.jsonl", Entry(100.0, simple(40)), Entry(102.0, simple(40)))
    clock = Clock()
    player, reader = PlayedPages(path, "c", clock=clock), stream()
    starts: list[float] = []
    for _ in range(3):
        for _ in range(2):
            page_values = values(player.take(reader, NOW_S + clock.now_s - 1000))
            assert page_values["a_total"] == page_values["vllm:num_requests_running"] == 40
            assert page_values["a_created"] == page_values["process_start_time_seconds"]
            starts.append(page_values["a_created"])
            clock.now_s += due_in_s(player)
    assert starts[0::2] == starts[1::2], "as long as it is one process"
    lasts_s = 2.0 + PAUSE_S
    assert starts[0::2] == [NOW_S - 60 + turn * lasts_s for turn in range(3)]


def test_a_recorded_failure_is_one(tmp_path: Path) -> None:
    path = recorded(tmp_path / "c.jsonl", Entry(100.0, None, "connection refused"))
    page = PlayedPages(path, "c").take(stream(), NOW_S)
    assert isinstance(page, CollectError)
    assert str(page) == "connection refused"


def test_times_that_go_back_do_not_hurry(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "c.jsonl",
        Entry(100.0, simple(1)),
        Entry(50.0, simple(2)),
        Entry(52.0, simple(3)),
    )
    clock = Clock()
    player, reader = PlayedPages(path, "c", clock=clock), stream()
    assert values(player.take(reader, NOW_S))["a_total"] == 2
    assert player.due_in_s() == pytest.approx(2.0)


def test_a_file_that_goes_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    path = recorded(file, Entry(100.0, simple(1)))
    clock = Clock()
    player, reader = PlayedPages(path, "c", clock=clock), stream()
    file.rename(tmp_path / "d.jsonl")
    for _ in range(3):
        page = player.take(reader, NOW_S)
        assert isinstance(page, CollectError)
        assert "no such file" in str(page)
        assert player.due_in_s() == PAUSE_S
        clock.now_s += due_in_s(player)
    (tmp_path / "d.jsonl").rename(file)
    assert values(player.take(reader, NOW_S))["a_total"] == 1


def test_a_new_start_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recorded(tmp_path / "c.jsonl", Entry(100.0, simple(1)))
    pages, reader = PlayedPages(path, "c"), stream()
    with caplog.at_level(logging.INFO):
        pages.take(reader, NOW_S)
        assert caplog.messages == []
        pages.take(reader, NOW_S)
    assert caplog.messages == ["recording starts again target=c"]


def test_nothing_to_play(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").touch()
    with pytest.raises(CaptureError, match="it is empty"):
        PlayedPages(str(tmp_path / "c.jsonl"), "c")
    with pytest.raises(CaptureError, match="no such file"):
        PlayedPages(str(tmp_path / "d.jsonl"), "c")
