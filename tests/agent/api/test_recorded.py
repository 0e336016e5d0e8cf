"""A recorded cascade as the API tells it: played into a board and a real store, asked about at its
worst and at its end."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import cast

import pytest
from msgspec import Struct

from kneewatch.agent.api.service import Service
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, EngineCycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.target_state import Board, TargetState
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.rules.rule import Severity
from tests.agent.api.serving import PAGE, asking, settings_of, spec_of
from tests.agent.api.test_triage import TRIAGE, told
from tests.reports.documents import document

NAME = "http://gpu-7:8000"


class Played(Struct, frozen=True):
    """The service at the recording's end, and when it was at its worst."""

    service: Service
    worst_s: float
    worst: dict[str, object]
    advised: dict[float, object]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """The shipped recording, played as a daemon would see it."""
    path = tmp_path_factory.mktemp("store") / "kneewatch.db"
    stream = TargetStream(NAME, Profile(window_s=15.0), Limits())
    capture = Path(str(files("kneewatch.agent") / "demo.jsonl.gz"))
    board, worst, worst_s, end_s = Board(), Severity.OK, 0.0, 0.0
    said: dict[str, object] = {}
    advised: dict[float, object] = {}
    store = Store.open(path, retention=Retention(), clock=lambda: end_s)
    for number, entry in enumerate(CaptureReader(capture), 1):
        diagnoses, end_s = stream.replay(entry), entry.t_s
        engines = tuple(EngineCycle(diagnosis) for diagnosis in diagnoses)
        store.put(Cycle(entry.t_s, NAME, {}, engines))
        board.put(
            TargetState(NAME, NAME, {}, entry.t_s, tuple(diagnoses), 0.004, 2.0, number, 0, 0,
                        (PAGE,))
        )  # fmt: skip
        if diagnoses and diagnoses[0].recommendations:
            advised[entry.t_s] = document(diagnoses[0])["recommendations"]
        if diagnoses and diagnoses[0].severity > worst:
            worst, worst_s, said = diagnoses[0].severity, entry.t_s, document(diagnoses[0])
    store.close(10.0)
    reader, settings = Reader(path), settings_of()
    service = Service(
        board=board, settings=settings, targets=lambda: [spec_of(NAME, settings)],
        version="0.1.0", started_s=end_s - 600, reader=reader, store=store, clock=lambda: end_s + 1,
    )  # fmt: skip
    yield Played(service, worst_s, said, advised)
    reader.close()


def test_the_worst_moment_is_told_as_it_was(played: Played) -> None:
    with asking(played.service) as client:
        triage = told(client, f"{TRIAGE}?at={played.worst_s}")
        plain = client.get(f"{TRIAGE}/{NAME}?at={played.worst_s}").text
    (then,) = triage["targets"]
    assert then["causes"][0]["id"] == "kv_pressure"
    assert then["stage"]["number"] >= 2
    assert then["causes"] == [
        {**cause, "docs": f"/docs/causes/{cause['id']}"}
        for cause in cast("list[dict[str, object]]", played.worst["causes"])
    ]
    for key in ("t", "health", "stage", "symptoms", "recommendations", "window_s"):
        assert then[key] == played.worst[key], key
    assert "CRITICAL  kv_pressure" in plain


def test_time_travel_shows_the_advice_that_was_given_then(played: Played) -> None:
    moments = [*played.advised]
    shown: list[object] = []
    with asking(played.service) as client:
        for at_s in (moments[0], *moments[3::7], moments[-1]):
            (then,) = told(client, f"{TRIAGE}?at={at_s}")["targets"]
            assert then["recommendations"] == played.advised[at_s]
            shown.append(then["recommendations"])
    assert len(shown) > 4
    assert any(earlier != shown[-1] for earlier in shown), "it changed meanwhile"


def test_the_cascade_is_in_the_intervals(played: Played) -> None:
    with asking(played.service) as client:
        triage = told(client, f"{TRIAGE}/{NAME}?since=-1h")
        plain = client.get(f"{TRIAGE}?since=-1h").text
    stages = [interval["id"] for interval in triage["intervals"] if interval["kind"] == "stage"]
    causes = {interval["id"] for interval in triage["intervals"] if interval["kind"] == "cause"}
    assert {"0", "2", "3"} <= set(stages)
    assert "kv_pressure" in causes
    assert "stage 3 queueing (critical)" in plain


def test_the_page_has_the_timeline_and_charts_of_then_and_now(played: Played) -> None:
    with asking(played.service) as client:
        for query in ("", f"&at={played.worst_s}"):
            page = client.get(f"/triage?target=http%3A%2F%2Fgpu-7%3A8000&since=1h{query}")
            assert page.status_code == 200
            assert "No history is stored" not in page.text
            assert "queueing" in page.text
            assert page.text.count("<svg") > 5


def test_the_metrics_have_the_store(played: Played) -> None:
    with asking(played.service) as client:
        page = client.get("/metrics").text
        ready = client.get("/readyz")
    assert "kneewatch_store_working 1.0" in page
    assert ready.status_code == 200, ready.text
