"""Queries to a real Prometheus and a real VictoriaMetrics, and the limits they are asked in."""

from __future__ import annotations

import itertools
import math
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.errors import CollectError
from kneewatch.collector.page import Layout, Page, Series
from kneewatch.collector.prometheus.client import PrometheusSource, QueryPace, SourceSettings
from kneewatch.collector.prometheus.responses import Answer, Sample, halves, pieces, steps_of
from tests.collector.oracle import LOOPBACK, Target, free_port, running
from tests.collector.prometheus.replies import in_turn, vector
from tests.collector.servers import Start
from tests.programs import require
from tests.waiting import PATIENCE_S

QUICK = SourceSettings(pause_s=0.01, per_s=1000.0)
SCRAPES = 40
STEP_S = 15.0


def page(value: float) -> Page:
    series = (Series("up", (("job", "vllm"),)), Series("n_total", (("job", "vllm"),)))
    return Page(Layout(series, {}), [1.0, value])


def first_ms() -> int:
    """A while ago, on a step."""
    return (int(time.time()) // 15 * 15 - 900) * 1000


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[str, float]]:
    """A real Prometheus with ten minutes of one target, and the first moment."""
    start_ms = first_ms()
    with running(require("prometheus")) as prometheus:
        rows = [(start_ms + 15_000 * at, page(float(at))) for at in range(SCRAPES)]
        prometheus.load([Target("a:8000", rows)])
        yield f"http://{LOOPBACK}:{prometheus.port}", start_ms / 1000


def test_an_instant_query(loaded: tuple[str, float]) -> None:
    url, start_s = loaded
    with PrometheusSource(url, QUICK) as source:
        (sample,) = source.instant("n_total", start_s + 75).samples
        assert (sample.value, sample.labels["instance"]) == (5.0, "a:8000")
        assert source.instant("no_such_series").samples == []


def test_many_queries_at_once_keep_their_keys_and_their_errors(loaded: tuple[str, float]) -> None:
    url, start_s = loaded
    queries = {str(at): f"n_total + {at}" for at in range(20)} | {"bad": "n_total +"}
    with PrometheusSource(url, QUICK) as source:
        answers = source.instants(queries, start_s)
        assert source.pace.asked == len(queries)
    bad = answers.pop("bad")
    assert isinstance(bad, CollectError)
    assert "n_total +" in str(bad)
    for key, answer in answers.items():
        assert isinstance(answer, Answer)
        assert answer.samples[0].value == float(key)


def test_a_range_in_pieces_is_the_whole_range(
    loaded: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, start_s = loaded
    to_s = start_s + STEP_S * (SCRAPES - 1)
    monkeypatch.setattr("kneewatch.collector.prometheus.responses.POINTS_MOST", 7)
    with PrometheusSource(url, QUICK) as source:
        range_pieces = list(source.range("n_total", from_s=start_s, to_s=to_s, step_s=STEP_S))
    points = [point for piece in range_pieces for track in piece.tracks for point in track.points]
    assert len(range_pieces) == math.ceil(SCRAPES / 7)
    assert points == [(start_s + STEP_S * at, float(at)) for at in range(SCRAPES)]


def test_a_piece_with_more_points_than_prometheus_gives_is_halved(
    loaded: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, start_s = loaded
    monkeypatch.setattr("kneewatch.collector.prometheus.responses.POINTS_MOST", 100_000)
    with PrometheusSource(url, QUICK) as source:
        range_pieces = list(
            source.range("vector(1)", from_s=start_s, to_s=start_s + 14_999, step_s=1.0)
        )
    assert len(range_pieces) == 2
    assert sum(len(piece.tracks[0].points) for piece in range_pieces) == 15_000


def test_the_clock_of_the_same_machine_has_no_skew(loaded: tuple[str, float]) -> None:
    url, _ = loaded
    with PrometheusSource(url, QUICK) as source:
        clock, _ = source.now()
        assert abs(clock.skew_s) <= clock.within_s + 0.05
    with PrometheusSource(url, QUICK, wall=lambda: time.time() + 90) as source:
        clock, _ = source.now()
        assert clock.skew_s == pytest.approx(-90, abs=clock.within_s + 0.05)


def test_victoria_metrics_answers_the_same_queries(tmp_path: Path) -> None:
    start_s = first_ms() / 1000
    with victoria(tmp_path) as url:
        lines = [
            f'n_total{{job="vllm",instance="a:8000"}} {at} {round((start_s + STEP_S * at) * 1000)}'
            for at in range(SCRAPES)
        ]
        subprocess.run(
            ["curl", "-sf", "--data-binary", "@-", f"{url}/api/v1/import/prometheus"],
            input="\n".join(lines).encode(),
            check=True,
        )
        urlopen(f"{url}/internal/force_flush").close()  # else found after some seconds
        with PrometheusSource(url, QUICK) as source:
            samples = until(lambda: source.instant("n_total", start_s + 75).samples)
            assert samples[0].value == 5.0
            to_s = start_s + STEP_S * (SCRAPES - 1)
            (piece,) = source.range("n_total", from_s=start_s, to_s=to_s, step_s=STEP_S)
            assert len(piece.tracks[0].points) == SCRAPES
            assert abs(source.now()[0].skew_s) < 2


def test_warnings_are_kept_with_the_answer_that_had_them(start: Start) -> None:
    rows = [({"instance": "a"}, 1.0)]
    server = start(in_turn(vector(rows, warnings=["shard 2 is down"]), vector(rows)))
    with PrometheusSource(server.url, QUICK) as source:
        assert source.instant("up").warnings == ("shard 2 is down",)
        assert source.instant("up").warnings == ()


def query_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("kneewatch-query")}


def test_queries_at_once_share_threads_that_end_with_their_source(start: Start) -> None:
    server = start(in_turn(vector([({"instance": "a"}, 1.0)])))
    before = query_threads()
    with PrometheusSource(server.url, QUICK) as source:
        source.instants({str(at): "up" for at in range(20)})
        first = query_threads() - before
        source.instants({str(at): "up" for at in range(20)})
        assert 1 <= len(first) <= len(query_threads() - before) <= QUICK.at_once
        assert first <= query_threads()
    for thread in first:
        thread.join(PATIENCE_S)
    assert not first & query_threads()


def test_the_pace_is_kept_and_counted() -> None:
    now_s, slept = [0.0], list[float]()
    pace = QueryPace(at_once=2, per_s=4.0, clock=lambda: now_s[0], sleep=slept.append)
    for _ in range(8):
        with pace.turn():
            pass
    assert pace.asked == 8
    assert slept == [pytest.approx(0.25 * n) for n in range(1, 5)], "four at once, then in turn"
    now_s[0] = 10.0
    slept.clear()
    with pace.turn():
        pass
    assert slept == []


@given(st.integers(0, 500), st.integers(1, 60), st.sampled_from((1.0, 15.0, 0.5)))
def test_pieces_hold_every_step_once(steps: int, most: int, step_s: float) -> None:
    to_s = 1000 + steps * step_s
    ranges = list(pieces(from_s=1000.0, to_s=to_s, step_s=step_s, steps=most))
    counts = [steps_of(from_s=a, to_s=b, step_s=step_s) for a, b in ranges]
    assert sum(counts) == steps + 1
    assert max(counts) <= most
    assert all(b[0] - a[1] == step_s for a, b in itertools.pairwise(ranges))


@given(st.integers(1, 500))
def test_halves_hold_every_step_once(steps: int) -> None:
    first, other = halves(0.0, float(steps), 1.0)
    assert (first[0], other[1]) == (0.0, float(steps))
    assert other[0] - first[1] == 1.0
    assert halves(5.0, 5.0, 1.0) == []


@contextmanager
def victoria(folder: Path) -> Generator[str]:
    """An empty VictoriaMetrics' address; it is gone afterwards."""
    port = free_port()
    process = subprocess.Popen(
        [
            require("victoria-metrics"),
            f"-storageDataPath={folder}/data",
            f"-httpListenAddr={LOOPBACK}:{port}",
            "-search.latencyOffset=0s",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://{LOOPBACK}:{port}"
    try:
        with PrometheusSource(url, SourceSettings(tries=9, pause_s=0.05)) as source:
            source.now()
        yield url
    finally:
        process.kill()
        process.wait()


def until(ask: Callable[[], Sequence[Sample]]) -> Sequence[Sample]:
    """What is asked for, once it is there: what was written is searchable a moment later."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not (answer := ask()) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return answer
