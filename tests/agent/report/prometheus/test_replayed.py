"""Scrapes put together again from a metrics system's samples are judged as the sidecar judged."""

from __future__ import annotations

import pytest

from kneewatch.agent.report.prometheus.replayed import replayed
from kneewatch.agent.source import TargetStream, capture_name
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition.parser import Limits
from kneewatch.collector.prometheus.answers import Track
from kneewatch.collector.samples import Page
from kneewatch.diagnose.engine import Catalogue
from kneewatch.diagnose.fleet.shape import label_map, shape_of
from kneewatch.diagnose.profile import Profile
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
    found = [Track(dict(labels), values) for labels, values in points.items()]
    return [*found, Track({**TARGET, "__name__": "up"}, up)]


def told_by_the_sidecar(name: str) -> dict[str, tuple[float, float]]:
    """Each cause with the first and the last time that it was told."""
    path = CAPTURES / f"{name}.jsonl.gz"
    stream = TargetStream(capture_name(path), PROFILE, Limits())
    told: dict[str, tuple[float, float]] = {}
    for entry in CaptureReader(path):
        for found in stream.replay(entry):
            for cause in found.causes:
                first_s, _ = told.get(cause.id, (found.t_s, found.t_s))
                told[cause.id] = first_s, found.t_s
    return told


@pytest.mark.parametrize("name", ["kv_pressure_cascade", "queue_overload", "restart_mid_run"])
def test_causes_and_their_times_are_the_sidecars(name: str) -> None:
    tracks = tracks_of(name)
    running = [one.labels for one in tracks if one.labels["__name__"].endswith("requests_running")]
    member = shape_of(running, label_map({}, "default")).members[0]
    made = replayed(tracks, member, PROFILE, Catalogue.of(PROFILE), "chat-0")
    wanted = told_by_the_sidecar(name)
    assert wanted
    spans = {
        cause: (
            min(held.start_s for held in made.held if held.id == cause and held.kind == "cause"),
            max(held.last_s for held in made.held if held.id == cause and held.kind == "cause"),
        )
        for cause in {held.id for held in made.held if held.kind == "cause"}
    }
    assert spans == wanted
    assert made.scrapes == len(tracks[-1].points)
    for cause in wanted:
        assert cause in {one["id"] for one in made.documents[cause]["causes"]}
    assert made.increases is not None
