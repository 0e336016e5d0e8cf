"""A metrics system in trouble: what is missing is said, and what is not seen is not healthy."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kneewatch.agent.console import FOUND, NO_DATA
from kneewatch.collector.prometheus.client import PrometheusSource
from tests import fleets
from tests.agent.fleet.prometheus_fleet import QUICK, told, watched
from tests.agent.running import Document, Main
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.collector.prometheus.replies import failed, json_answer, read_form, vector
from tests.collector.prometheus.test_source import until, victoria
from tests.collector.servers import Serve, Server, Start
from tests.programs import require
from tests.waiting import PATIENCE_S

HEALTHY = 4
Change = Callable[[str, dict[str, object]], bytes | None]
"""What a server in between sends in place of the answer to a query; None: the answer itself."""


def quiet() -> fleets.Fleet:
    return fleets.Fleet(tuple(fleets.Replica(f"chat-{at}", "chat") for at in range(HEALTHY)))


@pytest.fixture(scope="module")
def end_s() -> int:
    return int(time.time()) // 15 * 15


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, end_s: int) -> Iterator[Prometheus]:
    require("promtool")
    blocks = tmp_path_factory.mktemp("quiet") / "blocks"
    fleets.write_blocks(blocks, quiet(), end_s=end_s)
    with running(require("prometheus"), blocks=blocks) as server:
        yield server


def between(port: int, change: Change) -> Serve:
    """Asks the real one, and sends on what `change` makes of its answer."""

    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        form = read_form(sock, request)
        http = HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)
        head = {"Content-Type": "application/x-www-form-urlencoded"}
        http.request("POST", request.split(b" ", 2)[1].decode(), urlencode(form), head)
        document = json.loads(http.getresponse().read())
        http.close()
        sock.sendall(change(form["query"], document) or json_answer(document))
        return True

    return serve


def diagnosed(main: Main, server: Server, end_s: int, *more: str) -> tuple[int, Document]:
    url = server.url.removesuffix("/metrics")
    argv = ["diagnose", "--prometheus", url, "--at", end_s, "--format", "json", *more]
    ended = main(*argv, "--fleet-queries-per-s", "1000")
    return ended.status, ended.documents[0]


def test_all_is_well_without_trouble(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    server = serving(between(prometheus.port, lambda _query, _document: None))
    status, document = diagnosed(main, server, end_s)
    assert (status, document["health"], document["partial"]) == (0, "ok", False)
    assert document["clock_skew_s"] is None


def test_warnings_make_the_answer_partial(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    def warn(_query: str, document: dict[str, object]) -> bytes:
        return json_answer({**document, "warnings": ["store 10.0.0.3: connection refused"]})

    status, document = diagnosed(main, serving(between(prometheus.port, warn)), end_s)
    assert (status, document["health"], document["partial"]) == (NO_DATA, "unknown", True)
    assert document["warnings"] == ["store 10.0.0.3: connection refused"]


def test_a_query_that_fails_is_named_and_the_others_count(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    def refuse(query: str, _document: dict[str, object]) -> bytes | None:
        if "inter_token" not in query:
            return None
        return failed("422 Unprocessable Entity", "query processing would load too many samples")

    status, document = diagnosed(main, serving(between(prometheus.port, refuse)), end_s)
    assert (status, document["health"]) == (NO_DATA, "unknown")
    notes = [note for note in document["unknown"] if note.startswith("samples: ")]
    assert "too many samples" in notes[0]
    assert document["engines"] == HEALTHY


@pytest.mark.parametrize("partial", [False, True])
def test_a_past_that_cannot_be_had_is_no_word_against_the_present(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int, *, partial: bool
) -> None:
    def refuse(query: str, document: dict[str, object]) -> bytes | None:
        if not (query.startswith("sum by (") and "__name__" in query and "running" in query):
            return None
        if partial:
            return json_answer({**document, "warnings": ["store 10.0.0.3: connection refused"]})
        return failed("422 Unprocessable Entity", "the query range exceeds the limit of 3d")

    status, document = diagnosed(main, serving(between(prometheus.port, refuse)), end_s)
    assert (status, document["health"]) == (0, "ok")
    assert [tier["size"]["recommended"] for tier in document["tiers"]] == [None]
    assert any(note.startswith("past load and lengths") for note in document["unknown"])


def test_series_that_no_shard_gives_are_unknown(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    def hide(query: str, document: dict[str, object]) -> bytes | None:
        if "num_preemptions" not in query:
            return None
        return json_answer({**document, "data": {"resultType": "vector", "result": []}})

    status, document = diagnosed(main, serving(between(prometheus.port, hide)), end_s)
    assert (status, document["health"]) == (NO_DATA, "unknown")


def test_a_clock_that_is_ahead_is_said(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    def ahead(query: str, _document: dict[str, object]) -> bytes | None:
        if query != "vector(time())":
            return None
        return vector([({}, time.time() + 300)])

    server = serving(between(prometheus.port, ahead))
    _, document = diagnosed(main, server, end_s)
    assert document["clock_skew_s"] == pytest.approx(300, abs=20)


def test_every_answer_at_first_busy(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    seen: set[str] = set()

    def busy(query: str, _document: dict[str, object]) -> bytes | None:
        if query in seen:
            return None
        seen.add(query)
        return failed("503 Service Unavailable", "starting", "unavailable")

    server = serving(between(prometheus.port, busy))
    status, document = diagnosed(main, server, end_s)
    assert (status, document["load"]["retried"]) == (0, len(seen))


def test_a_window_that_is_shorter_than_two_scrapes_follows_the_scrapes(
    prometheus: Prometheus, serving: Start, main: Main, end_s: int
) -> None:
    server = serving(between(prometheus.port, lambda _query, _document: None))
    status, document = diagnosed(main, server, end_s, "--window", "10s")
    assert (status, document["health"]) == (0, "ok")
    assert document["scrape_interval_s"] == pytest.approx(15.0, rel=0.6)
    assert document["window_s"] == pytest.approx(4 * document["scrape_interval_s"], rel=0.01)


def test_labels_that_would_steer_a_terminal_or_a_ticket(
    serving: Start, main: Main, tmp_path: Path, end_s: int
) -> None:
    hostile = "a\x1b[31m|<img src=x>\\n`"
    fleet = fleets.Fleet(
        (fleets.Replica(hostile, "chat", kv_usage_ratio=0.99, preemption_per_s=9.0),)
    )
    blocks = tmp_path / "blocks"
    fleets.write_blocks(blocks, fleet, end_s=end_s)
    with running(require("prometheus"), blocks=blocks) as server:
        url = f"http://{LOOPBACK}:{server.port}"
        argv = ["diagnose", "--prometheus", url, "--at", end_s, "--fleet-queries-per-s", "1000"]
        for form in ("text", "markdown"):
            ended = main(*argv, "--format", form)
            assert ended.status == FOUND
            assert "\x1b" not in ended.out + ended.err
            if form == "markdown":
                assert "<img" not in ended.out.replace("\\<img", "")


def test_victoria_metrics_says_the_same(tmp_path: Path, end_s: int) -> None:
    text = tmp_path / "fleet.om"
    fleet = fleets.fleet(24)
    fleets.write_text(text, fleet, end_s=end_s)
    lines = [
        f"{head} {round(float(t_s) * 1000)}"
        for line in text.read_text().splitlines()
        if not line.startswith("#")
        for head, _, t_s in [line.rpartition(" ")]
    ]
    with victoria(tmp_path) as url:
        subprocess.run(
            ["curl", "-sf", "--data-binary", "@-", f"{url}/api/v1/import/prometheus"],
            input="\n".join(lines).encode(),
            check=True,
        )
        urlopen(f"{url}/internal/force_flush").close()  # else found after some seconds
        with PrometheusSource(url, QUICK) as source:
            query = "count(vllm:request_queue_time_seconds_sum)"
            until(lambda: source.instant(query, end_s).samples)
        causes = told(watched(url, at_s=end_s))
    for cause in ("routing_dilution", "replica_imbalance", "bad_node", "target_down"):
        assert sorted(causes[cause]) == sorted(fleet.planted(cause)), cause
