"""Real routers in front of workers that fail: `python -m tests.lab.routers`.

Starts vllm-router and sglang-router where they are installed (`pip install vllm-router
sglang-router` in any environment, then its bin folder in ROUTERS_LAB_BIN), each before two workers:
one serves, the other serves, answers 500 to every request, or is stopped. The workers are small
HTTP servers with llama.cpp's page, for no engine is needed to open a breaker. Prints what
`kneewatch diagnose` says of each router. Ends with 1 where that is not what was done, with 0 if
none is installed.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from tests.collector.oracle import LOOPBACK, free_port

ROOT = Path(__file__).parents[2]
PAGE = gzip.decompress(
    (ROOT / "tests/fixtures/engines/llamacpp-metrics-loaded.txt.gz").read_bytes()
)
WATCH_S = 15
PATIENCE_S = 60.0


class LabRouter(Struct, frozen=True):
    """A router: how it is started, and what has to be said of it after each fault."""

    program: str
    flags: tuple[str, ...]
    says: dict[str, str]


ROUTERS = (
    LabRouter(
        "vllm-router",
        ("--cb-failure-threshold", "3", "--health-check-interval-secs", "2"),
        {"serves": "", "fails": "its circuit breaker is open", "stopped": "nothing for"},
    ),
    LabRouter(
        "sglang-router",
        ("launch", "--cb-failure-threshold", "3", "--health-check-interval-secs", "2"),
        {"serves": "", "fails": "its circuit breaker is open", "stopped": "nothing for"},
    ),
)


class Worker(BaseHTTPRequestHandler):
    """Answers as an engine does; 500 to completions once the server's `failing` is set."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The page, health and models."""
        body = PAGE if self.path == "/metrics" else json.dumps({"data": [{"id": "tiny"}]}).encode()
        self._answer(200, body)

    def do_POST(self) -> None:
        """A completion."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        failing = getattr(self.server, "failing", False)
        answer = {"id": "c", "object": "text_completion", "model": "tiny",
                  "choices": [{"index": 0, "text": "w", "finish_reason": "stop"}]}  # fmt: skip
        self._answer(500 if failing else 200, json.dumps(answer).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


def worker() -> ThreadingHTTPServer:
    """A worker that serves."""
    server = ThreadingHTTPServer((LOOPBACK, 0), Worker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextmanager
def started(
    router: LabRouter, workers: Sequence[ThreadingHTTPServer]
) -> Generator[tuple[str, str]]:
    """A router before these workers: its address, and that of its page."""
    bin_folder = os.environ.get("ROUTERS_LAB_BIN", "")
    program = shutil.which(router.program, path=bin_folder or None) or router.program
    port, page = free_port(), free_port()
    urls = [f"http://{LOOPBACK}:{each.server_port}" for each in workers]
    command = [program, *router.flags[:1]] if router.flags[0] == "launch" else [program]
    flags = router.flags[1:] if router.flags[0] == "launch" else router.flags
    command += ["--worker-urls", *urls, "--policy", "round_robin", *flags]
    command += ["--host", LOOPBACK, "--port", str(port)]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(page)]
    with TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://{LOOPBACK}:{port}", f"http://{LOOPBACK}:{page}"
        finally:
            process.kill()
            process.wait()


def ask(url: str, *, model: str = "tiny", prompt: str = "w1", max_tokens: int = 2) -> int:
    """The status of a completion; 0 without an answer."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def verdict(page: str) -> dict[str, Any]:
    """What `kneewatch diagnose` says of a router."""
    command = [str(Path(sys.executable).parent / "kneewatch"), "diagnose", page, "--format", "json"]
    ran = subprocess.run(
        [*command, "--for", f"{WATCH_S}s", "--interval", "2s"], capture_output=True, check=False
    )
    lines = ran.stdout.splitlines()
    return json.loads(lines[0]) if lines else {"health": ran.stderr.decode(), "causes": []}


def said(router: LabRouter, fault: str) -> str:
    """The summary of the first cause after a fault of one worker; "" if there is none."""
    workers = [worker(), worker()]
    with started(router, workers) as (url, page):
        give_up_s = time.monotonic() + PATIENCE_S
        while ask(url) != 200 and time.monotonic() < give_up_s:
            time.sleep(0.5)
        if fault == "fails":
            workers[1].failing = True  # type: ignore[attr-defined]
        elif fault == "stopped":
            workers[1].shutdown()
            workers[1].server_close()
        stop = threading.Event()

        def load() -> None:
            while not stop.wait(0.1):
                ask(url)

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(8.0)
        found = verdict(page)
        stop.set()
        thread.join()
    for each in workers:
        each.shutdown()
    causes = found["causes"]
    print(f"{router.program}, a worker {fault}: {found['health']}", flush=True)
    for cause in causes:
        print(f"  {cause['summary']}\n  {cause['lever']}", flush=True)
    return str(causes[0]["summary"]) if causes else ""


def main() -> int:
    """Print what is said of each router that is installed."""
    wrong = 0
    for router in ROUTERS:
        if shutil.which(router.program, path=os.environ.get("ROUTERS_LAB_BIN") or None) is None:
            print(f"{router.program}: not installed, skipped")
            continue
        for fault, words in router.says.items():
            summary = said(router, fault)
            wrong += words not in summary if words else bool(summary)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
