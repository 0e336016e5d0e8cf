"""Recordings played to a real Prometheus in real time: each scrape gets the next page."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.captures import STATUS_OK
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.signals.promql import duration
from tests.collector.oracle import LOOPBACK, free_port
from tests.programs import require

PATIENCE_S = 20.0
STEP_S = 2.0
"""Seconds between two pages of a recording."""


class Play(Struct, frozen=True):
    """What is played: pages by recording, so many times as fast as they were recorded."""

    pages: Mapping[str, Sequence[Entry]]
    speed: float = 1.0

    @property
    def scrape_s(self) -> float:
        """Seconds between two scrapes."""
        return STEP_S / self.speed


class Stage:
    """A server whose /NAME is the next page of a recording at each GET, and what it served when."""

    def __init__(self, play: Play) -> None:
        self.served: dict[str, list[Entry]] = {name: [] for name in play.pages}
        stage, pages = self, play.pages

        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/")
                shown = stage.served[name]
                ended = len(shown) == len(pages[name])
                entry = Entry(0.0, None) if ended else pages[name][len(shown)]
                if not ended:
                    shown.append(replace(entry, t_s=time.time()))
                fine = entry.body is not None and entry.status in (None, STATUS_OK)
                body = entry.body.encode() if fine and entry.body is not None else b""
                self.send_response(HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                """Take alerts as an Alertmanager does; they are read from the engine instead."""
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(HTTPStatus.OK)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Pages)
        self.address = f"{LOOPBACK}:{self._server.server_address[1]}"
        self._scrape_s = play.scrape_s
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def scrapes(self) -> list[dict[str, Any]]:
        """A job for Prometheus's configuration: a target named as its recording, for each."""
        named = [{"__metrics_path__": f"/{name}", "instance": name} for name in self.served]
        every = duration(self._scrape_s)
        return [
            {
                "job_name": "vllm",
                "scrape_interval": every,
                "scrape_timeout": every,
                "static_configs": [
                    {"targets": [self.address], "labels": labels} for labels in named
                ],
            }
        ]


@contextmanager
def staged(play: Play) -> Generator[Stage]:
    """A server of a play; it ends with the context."""
    stage = Stage(play)
    try:
        yield stage
    finally:
        stage.close()


@contextmanager
def process(command: Sequence[str], *, ready: str, log: Path) -> Generator[int]:
    """The process id of a program that answers at the address `ready`; it is killed afterwards."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        give_up_s = time.monotonic() + PATIENCE_S
        while not _answers(ready):
            if started.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield started.pid
    finally:
        started.kill()
        started.wait()


@contextmanager
def prometheus(stage: Stage, folder: Path, rules: str) -> Generator[tuple[str, int]]:
    """A real Prometheus that scrapes a stage and evaluates rules: its URL, and its process id. Its
    files are in `folder`, the rules in rules.yml."""
    port = free_port()
    config = {"rule_files": ["rules.yml"], "scrape_configs": stage.scrapes()}
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        require("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={LOOPBACK}:{port}",
        "--log.level=warn",
    ]
    url = f"http://{LOOPBACK}:{port}"
    with process(command, ready=f"{url}/-/ready", log=folder / "log") as pid:
        yield url, pid


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as response:
            return bool(response.status == HTTPStatus.OK)
    except (URLError, OSError):
        return False
