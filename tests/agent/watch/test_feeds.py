"""Feeds: recordings at their pace, servers in threads of their own, and an end that comes."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.watch.command import recording_feeds, server_feeds, target_feeds
from kneewatch.agent.watch.feeds import (
    ENDED,
    FASTEST,
    GAP_MAX_S,
    SLOWEST,
    Feed,
    FeedThreads,
    Playback,
    patience_s,
)
from kneewatch.agent.watch.state import Kind, ScreenState
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.errors import CaptureError, CollectError
from tests.agent.running import bodies, capture, in_turn
from tests.agent.watch.screens import settings_of
from tests.collector.servers import Start
from tests.waiting import PATIENCE_S, until


def healths(wall: ScreenState) -> dict[str, str]:
    return {row.name: row.health for row in wall.rows()}


def at_work(feeds: list[Feed], pace: Playback) -> tuple[FeedThreads, ScreenState]:
    wall = ScreenState()
    work = FeedThreads(feeds, wall, pace)
    work.start()
    return work, wall


def short(path: Path, scrapes: int, gap_s: float = 0.0) -> Path:
    """The beginning of a recording; a gap before its last scrape."""
    entries = list(CaptureReader(capture("kv_pressure_cascade")))[:scrapes]
    with CaptureWriter(path) as out:
        for entry in entries[:-1]:
            out.write(entry)
        last = entries[-1]
        out.write(type(last)(last.t_s + gap_s, last.body, last.error, last.status))
    return path


def test_a_recording_plays_at_its_pace(tmp_path: Path) -> None:
    path = short(tmp_path / "r0.jsonl", 6)
    entries = list(CaptureReader(path))
    length_s = entries[-1].t_s - entries[0].t_s
    began_s = time.monotonic()
    work, wall = at_work(recording_feeds([str(path)], settings_of()), Playback(20.0))
    until(lambda: any(row.note == ENDED for row in wall.rows()))
    took_s = time.monotonic() - began_s
    work.stop()
    (row,) = wall.rows()
    assert row.diagnosis is not None
    assert row.diagnosis.t_s == entries[-1].t_s
    assert list(wall.trail(row.key).times_s) == [entry.t_s for entry in entries]
    assert took_s >= length_s / 20
    assert work.bug is None


def test_a_recording_s_gap_is_not_waited_for(tmp_path: Path) -> None:
    path = short(tmp_path / "r0.jsonl", 3, gap_s=7 * 86400.0)
    work, wall = at_work(recording_feeds([str(path)], settings_of()), Playback(FASTEST))
    until(lambda: any(row.note == ENDED for row in wall.rows()))
    work.stop()
    assert GAP_MAX_S / FASTEST < 1.0


def test_a_recording_stands_still_while_paused(tmp_path: Path) -> None:
    pace = Playback(20.0)
    pace.pause(True)
    path = short(tmp_path / "r0.jsonl", 5)
    work, wall = at_work(recording_feeds([str(path)], settings_of()), pace)
    until(lambda: wall.rows()[0].diagnosis is not None)
    key = wall.rows()[0].key
    until(lambda: wall.trail(key).times_s)
    time.sleep(0.5)
    assert len(wall.trail(key).times_s) == 1
    pace.pause(False)
    until(lambda: wall.rows()[0].note == ENDED)
    work.stop()


def test_a_recording_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("nothing\n")
    work, wall = at_work(recording_feeds([str(path)], settings_of()), Playback())
    until(lambda: bool(wall.rows()[0].note))
    work.stop()
    assert "nothing in it can be used" in wall.rows()[0].note
    assert healths(wall) == {"bad": "unknown"}
    with pytest.raises(CaptureError, match="no such file"):
        target_feeds([str(tmp_path / "none.jsonl")], settings_of())


def test_a_pace_ends_every_wait() -> None:
    pace, ended = Playback(), threading.Event()

    def wait() -> None:
        assert not pace.play(1e9)
        assert not list(pace.ticks(1e6, 1e6))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    pace.stop()
    thread.join(PATIENCE_S)
    assert ended.is_set()


def test_a_pace_changes_while_it_is_waited_for() -> None:
    pace = Playback(SLOWEST)
    threading.Timer(0.1, lambda: pace.change_speed(1e6)).start()
    assert pace.play(GAP_MAX_S)  # at the slowest it would outlast the test's time limit
    assert pace.speed == FASTEST
    pace.change_speed(1e-9)
    assert pace.speed == SLOWEST


def test_servers_are_watched_and_a_hanging_one_delays_nobody(serving: Start) -> None:
    well = serving(in_turn(bodies("healthy_light", 20, 40)))

    def hang(sock: socket.socket, _request: bytes, _number: int) -> bool:
        del sock
        return True

    hanging = serving(hang)
    settings = settings_of(interval_s=0.1, fetch__read_timeout_s=3.0)
    work, wall = at_work(server_feeds([hanging.url, well.url], settings), Playback())
    name = well.url.removesuffix("/metrics")
    until(lambda: len(wall.trail(next(r.key for r in wall.rows() if r.name == name)).times_s) > 5)
    until(lambda: healths(wall)[name] == "ok")
    until(lambda: healths(wall)[hanging.url.removesuffix("/metrics")] == "critical")
    work.stop()
    assert work.bug is None


def test_a_server_that_is_named_twice_is_watched_once(serving: Start) -> None:
    well = serving(in_turn(bodies("healthy_light", 20, 21)))
    bare = well.url.removesuffix("/metrics")
    feeds = target_feeds([well.url, bare, bare.removeprefix("http://"), well.url], settings_of())
    assert [feed.name for feed in feeds] == [bare]
    recordings = [str(capture("idle")), str(capture("idle"))]
    assert [feed.kind for feed in target_feeds(recordings, settings_of())] == [Kind.RECORDING]


def test_gpus_are_read_beside_the_servers(serving: Start) -> None:
    page = b'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 61\n'
    well = serving(in_turn(bodies("healthy_light", 20, 40)))
    gpus = serving(in_turn([page]))
    settings = settings_of(interval_s=0.1, gpu_metrics=gpus.url, fetch__headers={"X-Key": "secret"})
    work, wall = at_work(target_feeds([well.url], settings), Playback())

    def gpus_are_shown() -> bool:
        values = [row.diagnosis.values for row in wall.rows() if row.diagnosis]
        return any(told_.get("gpu_temperature_c") == 61.0 for told_ in values)

    until(gpus_are_shown)
    work.stop()
    assert [row.name for row in wall.rows()] == [well.url.removesuffix("/metrics")]
    assert b"secret" in well.requests[0]
    assert b"secret" not in gpus.requests[0], "what was meant for the server"


def test_a_target_that_cannot_be_one() -> None:
    with pytest.raises(CollectError, match="not a target"):
        target_feeds(["http://user:secret@:1"], settings_of())


def test_a_bug_is_kept_for_whoever_shows_it() -> None:
    def broken(_screen: ScreenState, _pace: Playback) -> None:
        raise ZeroDivisionError

    (feed,) = recording_feeds([str(capture("idle"))], settings_of())
    work, _ = at_work([replace(feed, run=broken)], Playback())
    until(lambda: work.bug is not None)
    work.stop()
    assert isinstance(work.bug, ZeroDivisionError)


def test_patience() -> None:
    assert (patience_s(2.0), patience_s(30.0)) == (10.0, 90.0)
