"""Recordings played to real engines in real time: each scrape gets a recording's next page.

The sidecar then judges the same pages at the times at which they were fetched.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.captures import STATUS_OK
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.format import Entry
from kneewatch.dashboards.prometheus.rule_group import Plan
from kneewatch.rules.facts import duration
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.parity import (
    CAUSES,
    FINDINGS,
    STAGE,
    STEP_S,
    Difference,
    Verdict,
    disagreements,
    sidecar,
    verdict_of,
)
from tests.programs import require
from tests.recordings import CAPTURES, WINDOW_S

PATIENCE_S = 20.0


class Play(Struct, frozen=True):
    """What is played: pages by recording, so many times as fast as they were recorded."""

    pages: Mapping[str, Sequence[Entry]]
    speed: float = 1.0

    @property
    def scrape_s(self) -> float:
        """Seconds between two scrapes."""
        return STEP_S / self.speed

    @property
    def lasts_s(self) -> float:
        """Seconds from the first scrape to the last."""
        return self.scrape_s * max(len(pages) for pages in self.pages.values())

    def plan(self, evaluation_s: float) -> Plan:
        """What rules for it are made for: a window as long in pages as the recordings' own."""
        return Plan(window_s=WINDOW_S / self.speed, interval_s=evaluation_s, scrape_s=self.scrape_s)


def play_of(names: Sequence[str], *, pages: int | None = None, speed: float = 1.0) -> Play:
    """The first pages of recordings (all of them, unless told)."""
    read = {
        name: list(islice(CaptureReader(CAPTURES / f"{name}.jsonl.gz"), pages)) for name in names
    }
    return Play(read, speed)


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

        self._pages = pages
        self._server = ThreadingHTTPServer((LOOPBACK, 0), Pages)
        self.address = f"{LOOPBACK}:{self._server.server_address[1]}"
        self._scrape_s, self._lasts_s = play.scrape_s, play.lasts_s
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def wait(self, *, after_s: float) -> None:
        """Wait until every page was fetched, and so long after it."""
        give_up_s = time.monotonic() + self._lasts_s + PATIENCE_S
        while any(len(self.served[name]) < len(pages) for name, pages in self._pages.items()):
            assert time.monotonic() < give_up_s, "an engine does not fetch the pages"
            time.sleep(0.1)
        time.sleep(after_s)

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


def compared(
    url: str, play: Play, stage: Stage, plan: Plan, *, steps: int = 1
) -> dict[str, list[Difference]]:
    """Where an engine at `url` and the sidecar disagree by more than so many evaluations, by
    recording."""
    rows = list(_rows(url, play.lasts_s + PATIENCE_S))
    by_recording: dict[str, list[Difference]] = {}
    for name, pages in stage.served.items():
        mine = [row for row in rows if row[1].get("instance") == name]
        grid = evaluations([t_s for t_s, _, _ in mine], plan.interval_s, until_s=pages[-1].t_s)
        assert len(grid) * plan.interval_s > play.scrape_s * len(pages) / 2, f"{name}: a late start"
        theirs: list[Verdict] = []
        for at_s in grid:
            now = [r[1:] for r in mine if abs(r[0] - at_s) < plan.interval_s / 2]
            theirs.append(verdict_of(now))
        by_recording[name] = disagreements(
            in_force(list(sidecar(pages, plan)), grid), theirs, steps=steps
        )
    return by_recording


def evaluations(seen_s: Sequence[float], interval_s: float, *, until_s: float) -> list[float]:
    """When rules were evaluated: from the first to be seen on, every interval."""
    first_s = min(seen_s)
    return [first_s + at * interval_s for at in range(int((until_s - first_s) / interval_s) + 1)]


def in_force(
    dated_verdicts: Sequence[tuple[float, Verdict | None]], grid: Sequence[float]
) -> list[Verdict | None]:
    """The newest verdict at each moment; None before the first page and where there was none."""
    shown: list[Verdict | None] = []
    for at_s in grid:
        before = [verdict for t_s, verdict in dated_verdicts if t_s <= at_s]
        shown.append(before[-1] if before else None)
    return shown


def _rows(url: str, back_s: float) -> Iterator[tuple[float, Mapping[str, str], float]]:
    """Every recorded stage and firing alert: when, its labels, its value."""
    for series in (STAGE, FINDINGS, CAUSES):
        asked = urlencode({"query": f"{series}[{duration(round(back_s) + 60)}]"})
        with urlopen(f"{url}/api/v1/query?{asked}", timeout=30) as response:
            answer = json.loads(response.read())
        for row in answer["data"]["result"]:
            for t_s, value in row["values"]:
                if value != "NaN":  # VictoriaMetrics shows where a series ended
                    yield float(t_s), row["metric"], float(value)


def summary_lines(by_recording: Mapping[str, Sequence[Difference]]) -> Iterator[str]:
    """A line for each recording: how many disagreements there are, and where."""
    for name, differences in by_recording.items():
        keys = sorted({difference.key for difference in differences})
        yield f"{name:28} {len(differences):4} {' '.join(keys)}"
