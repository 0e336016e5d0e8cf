"""A real Alertmanager that posts to the real endpoint, and what people are sent."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, EngineCycle, Retention
from kneewatch.agent.store.writer import Store
from tests.agent.api.serving import served, settings_of
from tests.agent.notify.conftest import Starting
from tests.agent.notify.factories import healthy, sick, state
from tests.agent.notify.posts import time_of
from tests.agent.notify.test_alerts import at, service
from tests.agent.notify.test_settings import ALERTING
from tests.agent.notify.web import Taking
from tests.agent.notify.webhooks import settle, webhook
from tests.collector.oracle import free_port
from tests.programs import require
from tests.reports.diagnoses import NOW_S
from tests.waiting import PATIENCE_S, until

TOKEN = "a-token-that-may-post-0123456789"
CONFIG = """
route:
  receiver: kneewatch
  group_by: [alertname]
  group_wait: 0s
  group_interval: 1s
  repeat_interval: 1s
receivers:
  - name: kneewatch
    webhook_configs:
      - url: {url}/api/v1/alerts
        send_resolved: true
        http_config:
          authorization:
            credentials_file: {token}
"""


class Alertmanager:
    """The program, with a configuration that posts to a URL."""

    def __init__(self, program: str, folder: Path, url: str, token: Path) -> None:
        config = folder / "alertmanager.yml"
        config.write_text(CONFIG.format(url=url, token=token))
        self.port = free_port()
        with (folder / "alertmanager.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            )
        self._until(lambda: self._ask("/-/ready") is not None)

    def tell(self, *alerts: dict[str, Any]) -> None:
        """Give it alerts, as Prometheus does."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v2/alerts",
            json.dumps(alerts).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def wait_posts(self, count: int) -> None:
        """Wait until it has posted so often and none of it failed."""

        def posted(name: str) -> float:
            page = self._ask("/metrics") or ""
            match = re.search(rf'^{name}{{integration="webhook"[^}}]*}} (\S+)', page, re.MULTILINE)
            return float(match.group(1)) if match else 0.0

        self._until(lambda: posted("alertmanager_notifications_total") >= count)
        assert posted("alertmanager_notifications_failed_total") == 0

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def _ask(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S
            ) as answer:
                return str(answer.read(), "utf-8")
        except OSError:
            return None

    def _until(self, is_so: Any) -> None:  # noqa: ANN401
        until(lambda: is_so() or self._process.poll() is not None)
        assert self._process.poll() is None


@pytest.fixture
def history(tmp_path: Path) -> Iterator[tuple[Reader, float]]:
    """A history that ends now and was bad two minutes ago; and when that was."""
    now_s = time.time()
    store = Store.open(tmp_path / "kneewatch.db", retention=Retention())
    for number in range(40):
        t_s = now_s - 200 + 5 * number
        diagnosis = at(sick() if t_s < now_s - 100 else healthy(), t_s)
        store.put(Cycle(t_s, "r0", {}, (EngineCycle(diagnosis),)))
    store.close(10.0)
    reader = Reader(tmp_path / "kneewatch.db")
    yield reader, now_s - 118  # two seconds after a scrape
    reader.close()


def test_from_alertmanager_to_the_people(
    history: tuple[Reader, float], starting: Starting, taking: Taking, tmp_path: Path
) -> None:
    program = require("prometheus-alertmanager")
    reader, began_s = history
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    taker = taking()
    notifier = starting(webhook(taker))
    now = state(healthy(), after_s=time.time() - NOW_S)
    asked = replace(
        service(now, settings=settings_of(http__admin_token_file=str(token)), reader=reader),
        notifier=notifier,
        clock=time.time,
    )
    alert = {
        "labels": {"alertname": "SlowFirstToken", "instance": "r0:8000", "severity": "page"},
        "annotations": {"summary": "TTFT P99 is over its target"},
        "startsAt": time_of(began_s),
    }
    with served(asked) as server:
        manager = Alertmanager(program, tmp_path, server.url, token)
        try:
            manager.tell(alert)
            (firing,) = taker.wait(1)
            manager.wait_posts(2)  # it repeats itself; we do not
            settle(notifier)
            assert len(taker.posts) == 1
            manager.tell({**alert, "endsAt": time_of(time.time())})
            resolved = taker.wait(2)[1]
        finally:
            manager.close()
    (event,) = firing.body["events"]
    assert event["match"]["text"] == "matched r0 by instance=r0:8000"
    (look,) = event["diagnoses"]
    assert (look["at_start"]["health"], look["now"]["health"]) == ("critical", "ok")
    assert began_s - look["at_start"]["t"] == pytest.approx(2, abs=0.1)
    assert firing.body["title"] == "ALERT: SlowFirstToken on r0"
    assert resolved.body["title"] == "ALERT RESOLVED: SlowFirstToken on r0"
    assert resolved.body["events"][0]["ends"] is not None


def test_the_documented_configuration_is_right(tmp_path: Path) -> None:
    amtool = require("amtool")
    config = tmp_path / "alertmanager.yml"
    config.write_text(ALERTING.read_text().partition("```yaml\n")[2].partition("```")[0])
    done = subprocess.run([amtool, "check-config", config], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
