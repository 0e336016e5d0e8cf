"""Scrapes put together again from a metrics system's samples are judged as the sidecar judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from kneewatch.agent.captures import capture_name
from kneewatch.agent.report.prometheus.incidents import Replay, replay_samples
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Interval
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.collector.prometheus.responses import Track
from kneewatch.collector.samples import Page
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import Catalogue
from kneewatch.diagnose.fleet.inventory import label_map, shape_of
from kneewatch.reports.weekly.observed import Held
from tests.agent.store.factories import EVER, recorded, written
from tests.recordings import CAPTURES, WINDOW_S

TARGET = {"instance": "10.0.0.1:8000", "job": "vllm", "pod": "chat-0"}
PROFILE = Profile(window_s=WINDOW_S)


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


def kept_by_the_sidecar(name: str, folder: Path) -> list[Interval]:
    """The stages and causes that a daemon's history has of a recording."""
    written(folder / "history.db", *recorded(name))
    return Reader(folder / "history.db").intervals(**EVER, kinds=("stage", "cause"))


def judged(tracks: Sequence[Track], lived_s: tuple[float, float] = (-math.inf, math.inf)) -> Replay:
    running = [
        track.labels for track in tracks if track.labels["__name__"].endswith("requests_running")
    ]
    member = shape_of(running, label_map({}, "default")).members[0]
    return replay_samples(tracks, member, PROFILE, Catalogue.of(PROFILE), "chat-0", lived_s)


def span(held: Held | Interval) -> tuple[object, ...]:
    return held.kind, held.id, held.severity, held.start_s, held.end_s, held.last_s, held.ended


@pytest.mark.parametrize("name", ["kv_pressure_cascade", "queue_overload", "restart_mid_run"])
def test_stages_causes_and_their_times_are_the_sidecars(name: str, tmp_path: Path) -> None:
    tracks = tracks_of(name)
    replay = judged(tracks)
    kept = kept_by_the_sidecar(name, tmp_path)
    assert sorted(map(span, replay.held)) == sorted(map(span, kept))
    assert replay.scrapes == len(tracks[-1].points)
    causes = {interval.id for interval in kept if interval.kind == "cause"}
    assert causes
    for cause in causes:
        assert cause in {row["id"] for row in replay.documents[cause]["causes"]}
    assert replay.increases is not None


def pressed() -> tuple[list[Track], float]:
    """A recording up to the middle of its pressure, and when that is."""
    tracks = tracks_of("kv_pressure_cascade")
    held = next(interval for interval in judged(tracks).held if interval.id == "kv_pressure")
    end_s = (held.start_s + held.until_s) / 2
    cut = [Track(track.labels, [p for p in track.points if p[0] <= end_s]) for track in tracks]
    return [track for track in cut if track.points], cut[-1].points[-1][0]


def test_what_a_process_had_ended_with_it() -> None:
    tracks, end_s = pressed()
    first_s = tracks[-1].points[0][0]
    later_s = end_s + 2.0 - first_s
    anew: list[Track] = []
    for track in tracks:
        began = track.labels["__name__"].endswith(("_created", "process_start_time_seconds"))
        first = [(t_s, value) for t_s, value in track.points if t_s < first_s + 18.0]
        again = [(t_s + later_s, value + later_s * began) for t_s, value in first]
        anew.append(Track(track.labels, [*track.points, *again]))
    (interval,) = [row for row in judged(anew).held if row.id == "kv_pressure"]
    assert (interval.end_s, interval.ended) == (end_s, "restarted")


def test_what_was_not_seen_to_go_on_ended_when_it_was_last_seen() -> None:
    tracks, end_s = pressed()
    up = tracks[-1]
    failing = [(end_s + 2.0 * at, 0.0) for at in range(1, 9)]
    replay = judged([*tracks[:-1], Track(up.labels, [*up.points, *failing])]).held
    assert [
        (interval.end_s, interval.ended) for interval in replay if interval.id == "kv_pressure"
    ] == [(end_s, "unwatched")]
    assert [interval.end_s for interval in replay if interval.id == "target_down"] == [None]


def test_scrapes_that_fail_while_a_pod_loads_or_terminates_are_no_outage() -> None:
    tracks = tracks_of("kv_pressure_cascade")
    up = tracks[-1]
    first_s, last_s = up.points[0][0], up.points[-1][0]
    loading = [(first_s - 60.0 + 2.0 * at, 0.0) for at in range(30)]
    ending = [(last_s + 2.0 * at, 0.0) for at in range(1, 30)]
    rolled = [*tracks[:-1], Track(up.labels, [*loading, *up.points, *ending])]
    assert "target_down" in {interval.id for interval in judged(rolled).held}
    held = judged(rolled, (first_s - 1.0, last_s + 1.0)).held
    assert "target_down" not in {interval.id for interval in held}
