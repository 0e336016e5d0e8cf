"""Scrapes put together again from a metrics system's samples are judged as the sidecar judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from msgspec import Raw, Struct

from kneewatch.agent.captures import capture_name
from kneewatch.agent.report.history import History
from kneewatch.agent.report.prometheus.incidents import (
    ReplayWindow,
    Timeline,
    bare_cause,
    replay_samples,
    verdict,
)
from kneewatch.agent.report.prometheus.inventory import TierEngine
from kneewatch.agent.report.prometheus.suspect_spans import KnownCause, SuspectSpan
from kneewatch.agent.report.series import METRICS
from kneewatch.agent.store.encoding import EngineName
from kneewatch.agent.store.ingest import StoreFill
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import EngineCycle
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Page
from kneewatch.collector.prometheus.responses import RawSeries, Track
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.fleet.inventory import label_map, shape_of
from kneewatch.rules.rule import Severity
from tests.agent.store.factories import EVER, recorded, written
from tests.diagnose.fleet.example_fleets import pod, shaped
from tests.recordings import CAPTURES, WINDOW_S

TARGET = {"instance": "10.0.0.1:8000", "job": "vllm", "pod": "chat-0"}
PROFILE = Profile(window_s=WINDOW_S)
Judge = Callable[..., "Judged"]


def tracks_of(name: str) -> list[Track]:
    """A recording as a metrics system would have it: the target's labels on every series."""
    path = CAPTURES / f"{name}.jsonl.gz"
    stream = TargetStream(capture_name(path), PROFILE, Limits())
    points: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    up: list[tuple[float, float]] = []
    for entry in CaptureReader(path):
        page = stream.read(entry)
        up.append((entry.t_s, float(isinstance(page, Page))))
        if isinstance(page, Page):
            for series, value in page.samples():
                labels = {**dict(series.labels), **TARGET, "__name__": series.name}
                points.setdefault(tuple(sorted(labels.items())), []).append((entry.t_s, value))
    read = [Track(dict(labels), values) for labels, values in points.items()]
    return [*read, Track({**TARGET, "__name__": "up"}, up)]


def raw(tracks: Sequence[Track]) -> list[RawSeries]:
    """The tracks as a metrics system answers."""
    return [
        RawSeries(
            Raw(json.dumps(dict(track.labels)).encode()),
            Raw(json.dumps([(t_s, repr(value)) for t_s, value in track.points]).encode()),
        )
        for track in tracks
    ]


def kept_by_the_sidecar(name: str, folder: Path) -> list[Interval]:
    """The stages and causes that a daemon's history has of a recording."""
    written(folder / "history.db", *recorded(name))
    return Reader(folder / "history.db").intervals(**EVER, kinds=("stage", "cause"))


NAME = EngineName("chat-0", "m", "0", "")


class Judged(Struct, frozen=True):
    """What a filled store has of a replay."""

    intervals: list[Interval]
    reader: History
    scrapes: int


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """A function that fills a store from samples."""
    numbers = count()

    def judge(
        tracks: Sequence[Track], lived_s: tuple[float, float] = (-math.inf, math.inf)
    ) -> Judged:
        running = [
            track.labels for track in tracks if track.labels["__name__"].endswith("s_running")
        ]
        member = shape_of(running, label_map({}, "default")).members[0]
        path = tmp_path / f"{next(numbers)}.db"
        monitor = TargetMonitor("chat-0", PROFILE)
        fill, scrapes = StoreFill(path), 0
        for cycle in replay_samples(raw(tracks), member, monitor, lived_s):
            fill.write(NAME, cycle)
            scrapes += 1
        fill.close()
        history = History(path)
        return Judged(history.intervals(**EVER, kinds=("stage", "cause")), history, scrapes)

    return judge


def span(held: Interval) -> tuple[object, ...]:
    return held.kind, held.id, held.severity, held.start_s, held.end_s, held.last_s, held.ended


@pytest.mark.parametrize("name", ["kv_pressure_cascade", "queue_overload", "restart_mid_run"])
def test_what_is_stored_of_samples_is_what_the_sidecar_stores(
    name: str, tmp_path: Path, judged: Judge
) -> None:
    tracks = tracks_of(name)
    replay = judged(tracks)
    kept = kept_by_the_sidecar(name, tmp_path)
    assert sorted(map(span, replay.intervals)) == sorted(map(span, kept))
    assert replay.scrapes == len(tracks[-1].points)
    causes = [interval for interval in replay.intervals if interval.kind == "cause"]
    assert causes
    for interval in causes:
        verdict = replay.reader.verdict(interval.engine_id, interval.last_s - 1.0)
        assert verdict is not None
        assert interval.id in {cause.id for cause in verdict.causes}
    assert [*replay.reader.counter_arrays(causes[0].engine_id, METRICS, **EVER)]


def pressed(judged: Judge) -> tuple[list[Track], float]:
    """A recording up to the middle of its pressure, and when that is."""
    tracks = tracks_of("kv_pressure_cascade")
    held = next(row for row in judged(tracks).intervals if row.id == "kv_pressure")
    end_s = (held.start_s + (held.last_s if held.end_s is None else held.end_s)) / 2
    cut = [Track(track.labels, [p for p in track.points if p[0] <= end_s]) for track in tracks]
    return [track for track in cut if track.points], cut[-1].points[-1][0]


def test_what_a_process_had_ended_with_it(judged: Judge) -> None:
    tracks, end_s = pressed(judged)
    first_s = tracks[-1].points[0][0]
    later_s = end_s + 2.0 - first_s
    anew: list[Track] = []
    for track in tracks:
        began = track.labels["__name__"].endswith(("_created", "process_start_time_seconds"))
        first = [(t_s, value) for t_s, value in track.points if t_s < first_s + 18.0]
        again = [(t_s + later_s, value + later_s * began) for t_s, value in first]
        anew.append(Track(track.labels, [*track.points, *again]))
    (interval,) = [row for row in judged(anew).intervals if row.id == "kv_pressure"]
    assert (interval.end_s, interval.ended) == (end_s, "restarted")


def test_what_was_not_seen_to_go_on_is_paused_since_it_was_last_seen(judged: Judge) -> None:
    tracks, end_s = pressed(judged)
    up = tracks[-1]
    failing = [(end_s + 2.0 * at, 0.0) for at in range(1, 9)]
    replay = judged([*tracks[:-1], Track(up.labels, [*up.points, *failing])]).intervals
    assert [row.last_s for row in replay if row.id == "kv_pressure"] == [end_s]
    assert [row.end_s for row in replay if row.id == "target_down"] == [None]


def test_scrapes_that_fail_while_a_pod_loads_or_terminates_are_no_outage(judged: Judge) -> None:
    tracks = tracks_of("kv_pressure_cascade")
    up = tracks[-1]
    first_s, last_s = up.points[0][0], up.points[-1][0]
    loading = [(first_s - 60.0 + 2.0 * at, 0.0) for at in range(30)]
    ending = [(last_s + 2.0 * at, 0.0) for at in range(1, 30)]
    rolled = [*tracks[:-1], Track(up.labels, [*loading, *up.points, *ending])]
    assert "target_down" in {interval.id for interval in judged(rolled).intervals}
    held = judged(rolled, (first_s - 1.0, last_s + 1.0)).intervals
    assert "target_down" not in {interval.id for interval in held}


# --- Between replays ------------------------------------------------------------------------------


T_S = 1_795_262_400.0


def known(cause: str, from_s: float, to_s: float, *, goes_on: bool = False) -> KnownCause:
    return KnownCause(
        T_S + from_s,
        T_S + to_s,
        bare_cause(cause, Severity.WARNING, T_S + from_s, "seen in the steps"),
        goes_on,
    )


def kept(path: Path, *causes: KnownCause) -> list[tuple[object, ...]]:
    """The causes of a store that is filled without a replay."""
    fill = StoreFill(path)
    timeline = Timeline(fill, NAME, causes, end_s=T_S + 90_000, step_s=60.0)
    timeline.finish()
    fill.close()
    intervals = Reader(path).intervals(**EVER, kinds=("cause",))
    return [
        (row.id, row.start_s - T_S, None if row.end_s is None else row.end_s - T_S)
        for row in intervals
    ]


def test_what_the_steps_know_lasts_from_its_begin_to_its_end(tmp_path: Path) -> None:
    causes = (
        known("target_down", 0, 600),
        known("engine_restarted", 700, 760),
        known("bad_node", 800, 80_000),
        known("target_down", 900, 960),
    )
    assert kept(tmp_path / "a.db", *causes) == [
        ("target_down", 0, 600),
        ("engine_restarted", 700, 760),
        ("bad_node", 800, 80_000),
        ("target_down", 900, 960),
    ]
    going = known("bad_node", 0, 90_000, goes_on=True)
    assert kept(tmp_path / "b.db", going) == [("bad_node", 0, None)]


def test_a_known_cause_explains_what_a_replay_saw(tmp_path: Path) -> None:
    fill = StoreFill(tmp_path / "a.db")
    router = known("replica_imbalance", 0, 600)
    timeline = Timeline(fill, NAME, [router], end_s=T_S + 90_000, step_s=60.0)
    (member,) = shaped([pod("a")]).members
    span = SuspectSpan("requests are queued", T_S + 60, T_S + 300, 4)
    window = ReplayWindow(TierEngine(member, "m", ""), span, T_S, T_S + 300)
    queue = bare_cause("admission_limit", Severity.CRITICAL, T_S, "")
    cycles = [EngineCycle(verdict(T_S + at_s, [queue])) for at_s in (60.0, 120.0, 240.0)]
    assert timeline.replay(window, cycles)
    timeline.finish()
    fill.close()
    intervals = Reader(tmp_path / "a.db").intervals(**EVER, kinds=("cause",))
    assert {(row.id, row.severity) for row in intervals} == {
        ("replica_imbalance", Severity.CRITICAL)
    }
