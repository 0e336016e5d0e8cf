"""`kneewatch run --prometheus` as a process, on a Prometheus that is killed and comes back."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from kneewatch.reports.json_schemas import schema as schema_of
from tests import fleets
from tests.agent.daemon.running import Daemon
from tests.agent.fleet.prometheus_fleet import watched
from tests.agent.notify.web import Taker
from tests.agent.running import run
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.programs import require
from tests.waiting import until

REPLICAS = 24
LIVE_S = 150
"""The made-up fleet lasts so much longer than now: the daemon sees it as it goes on."""

QUICK = ("--fleet-interval", "1s", "--fleet-queries-per-s", "1000", "--gpu-metrics", "none")
HOOK = '[[notify]]\nkind = "webhook"\nseverity = "warning"\ngroup_wait_s = 0.1\n'
Series = dict[str, list[tuple[dict[str, str], float]]]


def live_blocks(folder: Path) -> Path:
    """The fleet, alive from now on for LIVE_S."""
    require("promtool")
    end_s = (int(time.time()) + LIVE_S) // 15 * 15
    fleets.write_blocks(folder, fleets.fleet(REPLICAS), end_s=end_s)
    return folder


def told(daemon: Daemon) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(daemon.get("/api/v1/fleet?format=json"))
    return document


def metrics(daemon: Daemon) -> Series:
    series: Series = {}
    for family in text_string_to_metric_families(daemon.get("/metrics")):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return series


def value(series: Series, name: str) -> float:
    ((_, number),) = series[name]
    return number


def answered(daemon: Daemon) -> bool:
    try:
        return bool(told(daemon)["health"] == "critical")
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


@pytest.fixture
def taker() -> Iterator[Taker]:
    webhook = Taker()
    yield webhook
    webhook.close()


def check_the_past(daemon: Daemon, server: Prometheus) -> int:
    """A past moment is told as `diagnose --prometheus --at` tells it, by either address. Returns
    the queries of a diagnosis that knows nothing of earlier ones."""
    at_s = int(time.time()) - 20
    then: dict[str, Any] = json.loads(daemon.get(f"/api/v1/triage?at={at_s}&format=json"))
    assert (then["t"], then["partial"], then["lost"]) == (at_s, False, None)
    now = msgspec.json.encode(watched(server, at_s=float(at_s)).linked("/docs"))
    same: dict[str, Any] = json.loads(now)
    assert {**then, "load": 0, "watch": 0} == {**same, "load": 0, "watch": 0}
    assert then["load"]["queries"] == same["load"]["queries"], "those of the cycles are not counted"
    assert "past moment, judged by today's settings" in daemon.get(f"/api/v1/fleet?at={at_s}")
    assert "past moment, judged by today's settings" in daemon.get(
        f"/api/v1/fleet?at={at_s}&format=markdown"
    )
    assert told(daemon)["t"] > at_s, "now is told as before"
    return int(same["load"]["queries"])


def check_the_page(daemon: Daemon) -> None:
    """The pools are on the page, and their history is kept."""
    html = daemon.get("/triage")
    pools = sorted({cause["pool"] for cause in told(daemon)["causes"]})
    for pool in pools:
        assert f"fleet/{pool}" in html

    def kept() -> set[str]:
        past = json.loads(daemon.get(f"/api/v1/triage/fleet/{pools[0]}?since=-5m&format=json"))
        return {interval["target"] for interval in past["intervals"]}

    until(lambda: kept() == {f"fleet/{pools[0]}"})


def ids(taker: Taker) -> set[tuple[str, str]]:
    """What a receiver has been told of."""
    return {(event["target"], event["id"]) for post in taker.posts for event in post.body["events"]}


def test_a_prometheus_that_is_killed_and_comes_back(tmp_path: Path, taker: Taker) -> None:
    fleet = fleets.fleet(REPLICAS)
    config = tmp_path / "told.toml"
    blocks = live_blocks(tmp_path / "before")
    with running(require("prometheus"), blocks=blocks) as server:
        port = server.port
        fleet_setting = f'fleet.prometheus = "http://{LOOPBACK}:{port}"\n'
        config.write_text(f'{fleet_setting}{HOOK}url = "{taker.url}"\n')
        with_fleet = (*QUICK, "--config", str(config))
        daemon = Daemon(tmp_path, *with_fleet).__enter__()
        try:
            until(lambda: answered(daemon))
            planted = ("bad_node", "routing_dilution", "replica_imbalance")
            until(lambda: {*planted} <= {cause["id"] for cause in told(daemon)["causes"]})
            shown, series = told(daemon), metrics(daemon)
            causes = {cause["id"]: cause["replicas"] for cause in shown["causes"]}
            for cause in planted:
                assert sorted(causes[cause]) == sorted(fleet.planted(cause)), cause
            schema = schema_of("fleet")
            validator: Any = Draft202012Validator(schema)  # its stubs leave an argument untyped
            validator.validate(shown)
            assert shown["watch"]["queries_per_s"] == shown["load"]["queries"]
            assert value(series, "kneewatch_fleet_up") == 1
            assert {
                labels["pool"].split("/")[0]: number
                for labels, number in series["kneewatch_recommended_replicas"]
            } == {"rag": 3, "idle": 2}, "none of a pool that is partly down, or of kinds of GPU"
            active = {
                labels["cause"] for labels, number in series["kneewatch_fleet_cause"] if number
            }
            assert active == causes.keys()
            severities = series["kneewatch_fleet_cause_severity"]
            assert {labels["cause"] for labels, _ in severities} == active
            queries = check_the_past(daemon, server)
            until(lambda: told(daemon)["watch"]["cycles"] >= 3)
            check_the_page(daemon)
            asked = told(daemon)["load"]["queries"]
            assert asked < queries, "peaks of days are not asked each time"
        except BaseException:
            daemon.__exit__()
            raise
    with daemon:
        # A query that was under way is cut off; the next one is refused.
        until(lambda: "connection refused" in (told(daemon)["lost"] or ""))
        shown, series = told(daemon), metrics(daemon)
        assert shown["health"] == "unknown"
        assert shown["watch"]["failing"] >= 1
        assert value(series, "kneewatch_fleet_up") == 0
        held = [number for _, number in series["kneewatch_recommended_replicas_held"]]
        assert held == [1, 1], "the last numbers stay"
        assert not {"kneewatch_fleet_cause", "kneewatch_fleet_cause_severity"} & set(series)
        assert "CURRENT STATE UNKNOWN" in daemon.get("/api/v1/fleet")
        assert "connection refused" in daemon.get("/readyz")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            daemon.get("/readyz?strict")
        until(lambda: ("fleet", "metrics_system_down") in ids(taker))
        assert any(t.startswith("fleet/chat/") and i == "kv_pressure" for t, i in ids(taker))
        blocks = live_blocks(tmp_path / "after")
        with running(require("prometheus"), blocks=blocks, port=port):
            until(lambda: answered(daemon))
            assert told(daemon)["lost"] is None
            assert value(metrics(daemon), "kneewatch_fleet_up") == 1
            assert daemon.wait_for("metrics system answers again")
            daemon.end()
    assert "Traceback" not in daemon.log


def test_before_the_first_answer_nothing_is_told(tmp_path: Path) -> None:
    settings = tmp_path / "kneewatch.toml"
    settings.write_text(f'[fleet]\nprometheus = "http://{LOOPBACK}:1"\n')
    with Daemon(tmp_path, "--config", settings, *QUICK) as daemon:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            daemon.get("/api/v1/fleet")
        until(lambda: "connection refused" in failed(daemon, "/readyz"))
        health = {
            labels["health"]: number for labels, number in metrics(daemon)["kneewatch_fleet_health"]
        }
        assert health.pop("unknown") == 1
        assert set(health.values()) == {0}


def failed(daemon: Daemon, path: str) -> str:
    """What it answers with an error."""
    try:
        return daemon.get(path)
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_a_selector_without_a_metrics_system_is_refused(tmp_path: Path) -> None:
    ended = run("run", "--selector", 'namespace="a"', cwd=tmp_path)
    assert ended.status == 2
    assert "--prometheus" in ended.err
