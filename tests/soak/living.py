"""A living fleet of 64 replicas under a real Prometheus and a real Alertmanager, in real time.

    python -m tests.soak.living [--minutes 10] [--every 15]

Three faults and a rolling update. Prints what `run --prometheus` and the exported alerts send, how
long queries take, and what the rules and the daemon cost.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.agent.daemon.running import Daemon
from tests.agent.notify.test_alertmanager_receiver import Manager
from tests.agent.notify.web import Posted, Taker
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.playing import process
from tests.living_engine import Work
from tests.living_fleet import MIN_S, LivingFleet, Pod, ScrapedPod, Series
from tests.programs import require
from tests.soak.footprint import Taken, taken

FAULTS_S = 3.0 * MIN_S, 6.0 * MIN_S
"""When the three faults begin and end."""

ROLL_S = 2.0 * MIN_S
LOAD_S = 20.0
"""How long a server loads its model here: a rolling update of ten replicas is done in time."""

FAULTS = {
    "code": ("engine_stalled",),
    "chat": ("replica_imbalance", "router_fault"),
    "lora": ("adapter_thrash",),
}
"""The causes that each pool with a fault may have."""


def fleet_of(every_s: int, epoch_s: int) -> LivingFleet:
    """64 replicas in nine pools of eight namespaces: two serve one model, a pair is P/D, one has
    adapters, one is for throughput only, one is rolled."""
    fleet = LivingFleet(scrape_s=every_s, epoch_s=epoch_s)
    from_s, to_s = FAULTS_S
    chat = fleet.pool("Deployment", "chat", 12, per_replica_per_s=1.2)
    for pod in chat.pods[1:]:
        pod.ails(from_s, to_s, arrival_per_s=0.0)
    fleet.pool("StatefulSet", "code", 8).pods[0].ails(from_s, to_s, hangs=True)
    fleet.pool("Deployment", "lora", 6, work=Work(adapters=3)).overload(from_s, to_s, adapters=12)
    search = fleet.pool("Deployment", "search", 10, load_s=LOAD_S)
    fleet.pool("Deployment", "rag", 8, model="m-search")
    prefill, decode = Work(role="prefill", seats=16.0), Work(role="decode", output_tokens=150.0)
    fleet.pool("Deployment", "pd", 4, workload="prefill", work=prefill, role="prefill",
               per_replica_per_s=4.5)  # fmt: skip
    fleet.pool("Deployment", "pd", 6, workload="decode", work=decode, role="decode",
               per_replica_per_s=3.0)  # fmt: skip
    work = Work(backlog=300.0, arrival_per_s=0.0, seats=96.0)
    fleet.pool("Deployment", "batch", 4, work=work, kneewatch_goal="throughput")
    fleet.pool("Deployment", "small", 6)
    search.roll(ROLL_S)
    return fleet


class Pages:
    """The pages of a fleet's pods at the present moment, and the targets that are there."""

    def __init__(self, fleet: LivingFleet) -> None:
        self._fleet = fleet
        self._pods: dict[str, tuple[Pod, ScrapedPod, threading.Lock]] = {}
        self._targets: dict[str, dict[str, str]] = {}
        for pool in fleet.pools:
            for at, pod in enumerate(pool.pods):
                path = f"/{pool.namespace}/{pod.name}"
                page = ScrapedPod(pool, pod, fleet.scrape_s, len(self._pods) + at)
                self._pods[path] = pod, page, threading.Lock()
                self._targets[path] = {
                    **pool.labels, "__metrics_path__": path, "namespace": pool.namespace,
                    "pod": pod.name, "instance": f"{pod.address}:8000",
                    "job": f"{pool.namespace}/vllm",
                }  # fmt: skip

    def now_s(self) -> float:
        """Seconds of the fleet's life."""
        return time.time() - self._fleet.epoch_s

    def present(self, address: str) -> str:
        """The targets as a file of Prometheus's service discovery."""
        now_s = self.now_s()
        return json.dumps([
            {"targets": [address], "labels": self._targets[path]}
            for path, (pod, *_) in self._pods.items() if pod.born_s <= now_s < pod.gone_s
        ])  # fmt: skip

    def page(self, path: str) -> str | None:
        """A pod's page; None where it does not answer."""
        pod, scraped, lock = self._pods[path]
        with lock:
            now_s = self.now_s()
            if not pod.answers(now_s):
                return None
            return "".join(_lines(scraped.shown(now_s)))


def _lines(samples: Sequence[tuple[Series, float]]) -> Iterator[str]:
    for series, value in samples:
        labels = dict(series)
        if (name := labels.pop("__name__")) != "up":
            inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
            yield f"{name}{{{inside}}} {value!r}\n"


@contextmanager
def served(pages: Pages) -> Generator[str]:
    """The address at which the pages are served."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = pages.page(self.path)
            body = (text or "").encode()
            self.send_response(HTTPStatus.SERVICE_UNAVAILABLE if text is None else HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{LOOPBACK}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _settings(folder: Path, every_s: int, manager: str) -> dict[str, Any]:
    every = f"{every_s}s"
    job = {"job_name": "vllm", "honor_labels": True,
           "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}]}  # fmt: skip
    return {
        "global": {
            "scrape_interval": every,
            "scrape_timeout": "10s",
            "evaluation_interval": every,
            "query_log_file": str(folder / "queries.log"),
        },
        "rule_files": ["rules.yml"],
        "scrape_configs": [job],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
    }


class Queries(Struct, frozen=True):
    """Seconds that queries over HTTP took and their text, and the seconds of the rules, added up by
    evaluation."""

    asked: Sequence[tuple[float, str]]
    rules: Sequence[float]

    @classmethod
    def of(cls, log: Path) -> Queries:
        """Those of Prometheus's query log."""
        asked: list[tuple[float, str]] = []
        rules: dict[tuple[str, str], float] = {}
        for line in log.read_text().splitlines():
            row = json.loads(line)
            took_s = row["stats"]["timings"]["execTotalTime"]
            if "ruleGroup" in row:
                key = row["ruleGroup"]["name"], row["params"]["start"]
                rules[key] = rules.get(key, 0.0) + took_s
            elif "httpRequest" in row:
                asked.append((took_s, row["params"]["query"]))
        moments: dict[str, float] = {}
        for (_, at), took_s in rules.items():
            moments[at] = moments.get(at, 0.0) + took_s
        return cls(sorted(asked), sorted(moments.values()))


def _told(post: Posted, began_s: float) -> str:
    body, at_s = post.body, post.at_s - began_s
    if "alerts" not in body:
        return f"{at_s:6.0f} s {body['status']:8} {body['title']}"
    names = sorted({row["labels"]["alertname"] for row in body["alerts"]})
    labels = body["commonLabels"]
    return f"{at_s:6.0f} s {body['status']:8} {labels.get('namespace', '?')} {', '.join(names)}"


def lived(
    minutes: float, every_s: int, folder: Path
) -> tuple[list[str], list[str], Queries, Sequence[Taken]]:
    """What the daemon and what Alertmanager send, the queries, and what the daemon and Prometheus
    take."""
    pages = Pages(fleet_of(every_s, int(time.time())))
    own, alerts = Taker(), Taker()
    route = {"group_by": ["namespace"], "receiver": "hook", "group_wait": "10s",
             "group_interval": "30s", "repeat_interval": "4h"}  # fmt: skip
    settings = {"route": route, "receivers": [{"name": "hook",
                "webhook_configs": [{"url": alerts.url}]}]}  # fmt: skip
    manager = Manager(require("prometheus-alertmanager"), folder, json.dumps(settings))
    with ExitStack() as stack:
        stack.callback(own.close)
        stack.callback(alerts.close)
        stack.callback(manager.close)
        address = stack.enter_context(served(pages))
        (folder / "targets.json").write_text(pages.present(address))
        plan = Plan(scrape_s=every_s, interval_s=every_s)
        (folder / "rules.yml").write_text(rule_files(plan)[RULES_FILE])
        scraping = _settings(folder, every_s, manager.url.removeprefix("http://"))
        (folder / "prometheus.yml").write_text(json.dumps(scraping))
        url = f"http://{LOOPBACK}:{free_port()}"
        command = [
            require("prometheus"), f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", "--log.level=warn",
            f"--web.listen-address={url.removeprefix('http://')}",
        ]  # fmt: skip
        peer = stack.enter_context(
            process(command, ready=f"{url}/-/ready", log=folder / "prometheus.log")
        )
        config = folder / "kneewatch.toml"
        hook = f'[[notify]]\nkind = "webhook"\nurl = "{own.url}"\nseverity = "warning"\n'
        config.write_text(hook)
        began_s = time.monotonic()
        stack.enter_context(_following(pages, address, folder / "targets.json"))
        daemon = stack.enter_context(
            Daemon(folder, "--config", config, "--prometheus", url,
                   "--fleet-interval", f"{every_s}s")
        )  # fmt: skip
        time.sleep(2 * MIN_S)
        used = taken([daemon.process.pid, peer], (minutes - 2) * MIN_S)
        for line in daemon.log.splitlines():
            if "level=warn" in line or "level=error" in line:
                print(line)
    return (
        [_told(post, began_s) for post in own.posts],
        [_told(post, began_s) for post in alerts.posts],
        Queries.of(folder / "queries.log"),
        used,
    )


@contextmanager
def _following(pages: Pages, address: str, file: Path) -> Generator[None]:
    """Keep the file of targets as the pods come and go."""
    stopped = threading.Event()

    def follow() -> None:
        before = ""
        while not stopped.wait(1.0):
            if (now := pages.present(address)) != before:
                fresh = file.with_suffix(".new")
                fresh.write_text(now)
                fresh.replace(file)
                before = now

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def main() -> None:
    """Play and print."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kneewatch-living-") as folder:
        own, alerts, queries, used = lived(args.minutes, args.every, Path(folder))
    first, last = (at_s / MIN_S for at_s in FAULTS_S)
    print(f"faults from minute {first:g} to {last:g}: {FAULTS}")
    print(f"run --prometheus sent {len(own)}:", *own, sep="\n  ")
    print(f"the exported alerts, {len(alerts)} messages of Alertmanager:", *alerts, sep="\n  ")
    asked, rules = queries.asked, queries.rules
    for took_s, query in asked[-3:]:
        print(f"{took_s:.3f} s: {query[:120]}")
    print(f"{len(asked)} queries over HTTP, these the longest; an evaluation of the rules"
          f" {1000 * rules[len(rules) // 2]:.0f} ms, {1000 * rules[len(rules) // 2] / 64:.2f} "
          "ms per replica (median)")  # fmt: skip
    print(f"daemon {used[0]}; Prometheus {used[1]}")


if __name__ == "__main__":
    main()
