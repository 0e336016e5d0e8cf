"""Alertmanager as a receiver: a real one, told of problems, silenced, and told of their end."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kneewatch.agent.notify.alert_state import StateFile
from kneewatch.agent.notify.notifier import Channel, RetryPolicy
from kneewatch.rules.rule import Severity
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import healthy, receiver, sick, state
from tests.agent.notify.posts import time_of
from tests.agent.notify.web import Reply, Taker, Taking
from tests.agent.notify.webhooks import stats_of
from tests.collector.oracle import LOOPBACK, free_port
from tests.programs import require
from tests.reports.diagnoses import NOW_S
from tests.waiting import PATIENCE_S, until

CONFIG = """
route: {receiver: nobody}
receivers: [{name: nobody}]
"""
PASSED_S = 30.0
"""Longer than hold_s."""


class Manager:
    """A running Alertmanager that notifies nobody."""

    def __init__(self, program: str, folder: Path, settings: str = CONFIG) -> None:
        config = folder / "alertmanager.yml"
        config.write_text(settings)
        self.url = f"http://{LOOPBACK}:{free_port()}"
        with (folder / "alertmanager.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            )
        until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None
        try:
            self.ask("/-/ready")
        except OSError:
            return False
        return True

    def ask(self, path: str, body: object = None) -> str:
        """The answer to a GET, or to a POST of JSON."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(answer.read(), "utf-8")

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that it holds and that have not ended."""
        rows: list[dict[str, Any]] = json.loads(self.ask("/api/v2/alerts"))
        return rows

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(require("prometheus-alertmanager"), tmp_path)
    yield running
    running.close()


def table(url: str, more: str = "") -> str:
    """A receiver's table."""
    return (
        f'[[notify]]\nkind = "alertmanager"\nurl = "{url}"\nhold_s = 20\ntimeout_s = 60\n{more}\n'
    )


def rows(taker: Taker) -> list[dict[str, Any]]:
    """The alerts that were posted, oldest first."""
    return [row for post in list(taker.posts) for row in post.body]


def test_an_alert_is_held_silenced_and_resolved(manager: Manager, starting: Starting) -> None:
    notifier = starting(table(manager.url, 'triage_url = "https://ops.example"\n'))
    at_s = time.time() - NOW_S - 60
    notifier.offer(state(sick(), after_s=at_s))
    until(lambda: len(manager.alerts()) == 1)
    (alert,) = manager.alerts()
    assert alert["labels"] == {
        "alertname": "KneewatchCauseKvPressure", "severity": "critical", "kneewatch": "cause",
        "cause": "kv_pressure", "kneewatch_target": "r0", "model_name": sick().model,
        "engine": sick().engine, "tier": "prod", "namespace": "ml",
    }  # fmt: skip
    assert alert["annotations"]["summary"].startswith("CRITICAL: kv_pressure on r0")
    assert "--kv-cache-dtype" in alert["annotations"]["description"]
    assert alert["generatorURL"].startswith("https://ops.example/triage?target=r0&at=")
    assert alert["status"]["state"] == "active"
    silence = {
        "matchers": [{"name": "kneewatch_target", "value": "r0", "isRegex": False}],
        "startsAt": time_of(time.time()), "endsAt": time_of(time.time() + 600),
        "createdBy": "test", "comment": "known",
    }  # fmt: skip
    manager.ask("/api/v2/silences", silence)
    until(lambda: [row["status"]["state"] for row in manager.alerts()] == ["suppressed"])
    notifier.offer(state(healthy(), after_s=at_s + 1))
    notifier.offer(state(healthy(), after_s=at_s + 10))
    assert len(manager.alerts()) == 1, "it may come back within hold_s"
    notifier.offer(state(healthy(), after_s=at_s + 1 + PASSED_S))
    until(lambda: manager.alerts() == [] and stats_of(notifier).queued == 0)
    assert notifier.active_targets() == set()


def test_another_severity_is_another_alert(manager: Manager, starting: Starting) -> None:
    notifier = starting(table(manager.url, 'severity = "warning"'))
    at_s = time.time() - NOW_S - 60

    def severities() -> list[str]:
        return [row["labels"]["severity"] for row in manager.alerts()]

    for after_s in (at_s - 5, at_s):
        notifier.offer(state(sick(Severity.WARNING, 2), after_s=after_s))
    until(lambda: severities() == ["warning"])
    notifier.offer(state(sick(Severity.CRITICAL), after_s=at_s + 60))
    until(lambda: severities() == ["critical"])


def test_targets_that_are_no_longer_watched_are_resolved(
    manager: Manager, starting: Starting
) -> None:
    notifier = starting(table(manager.url + "/"))
    notifier.offer(state(sick(), after_s=time.time() - NOW_S - 60))
    until(lambda: len(manager.alerts()) == 1)
    notifier.set_watched(["r1"])
    until(lambda: manager.alerts() == [])


def test_active_alerts_are_sent_again_and_an_outage_loses_none(
    taking: Taking, tmp_path: Path
) -> None:
    taker = taking(Reply(status=503), Reply())
    channel = Channel(
        receiver(tmp_path, table(taker.url).partition("\n")[2]), StateFile(None),
        RetryPolicy(first_s=0.05, most_s=0.2), lambda: NOW_S, repeat_s=0.2,
    )  # fmt: skip
    try:
        channel.offer(state(sick()))
        posts = taker.wait(4)
        assert {post.path for post in posts} == {"/services/T0/B0/SECRETPATH/api/v2/alerts"}
        rows = [row for post in posts for row in post.body]
        assert len({json.dumps(row["labels"], sort_keys=True) for row in rows}) == 1
        assert {row["startsAt"] for row in rows} == {rows[0]["startsAt"]}
        assert not any("endsAt" in row for row in rows), "Alertmanager's resolve_timeout counts"
        assert channel.stats().failed == 1
    finally:
        channel.close(time.monotonic() + PATIENCE_S)
        channel.join()


def test_what_a_gone_alertmanager_lost_is_repeated_once_it_is_back(
    taking: Taking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kneewatch.agent.notify.notifier.QUEUE_MAX", 3)
    taker = taking(Reply(status=503))
    channel = Channel(
        receiver(tmp_path, table(taker.url).partition("\n")[2]), StateFile(None),
        RetryPolicy(first_s=0.05, most_s=0.2), lambda: NOW_S, repeat_s=0.2,
    )  # fmt: skip
    try:
        for number in range(6):
            channel.offer(state(sick(), name=f"r{number}"))
        until(lambda: channel.stats().dropped >= 2)
        taker.replies = [Reply()]
        firing = {f"r{number}" for number in range(6)}
        until(lambda: {row["labels"]["kneewatch_target"] for row in rows(taker)} >= firing)
    finally:
        channel.close(time.monotonic() + PATIENCE_S)
        channel.join()


def test_a_restart_resolves_what_ended_meanwhile(
    taking: Taking, starting: Starting, tmp_path: Path
) -> None:
    taker = taking()
    memory = tmp_path / "kept.json"
    before = starting(table(taker.url), state_file=memory)
    before.offer(state(sick()))
    (began,) = taker.wait(1)
    before.close(PATIENCE_S)
    after = starting(table(taker.url), state_file=memory)
    for after_s in (100, 130, 160):
        after.offer(state(healthy(), after_s=after_s))
    over = taker.wait(2)[-1]
    assert over.body[0]["labels"] == began.body[0]["labels"]
    assert all("endsAt" in row for row in over.body)


def test_tls_and_a_bearer_token(
    taking: Taking, starting: Starting, tmp_path: Path, server_tls: ssl.SSLContext, ca_file: str
) -> None:
    taker = taking(tls=server_tls)
    (tmp_path / "token").write_text("t0ken\n")
    more = f'ca_file = "{ca_file}"\nbearer_token_file = "{tmp_path / "token"}"'
    notifier = starting(table(taker.url, more))
    notifier.offer(state(sick()))
    (post,) = taker.wait(1)
    assert post.headers["Authorization"] == "Bearer t0ken"


def test_alerts_of_alertmanager_are_not_sent_back(taking: Taking, tmp_path: Path) -> None:
    configured = receiver(tmp_path, table(taking().url).partition("\n")[2])
    assert not configured.alerts
