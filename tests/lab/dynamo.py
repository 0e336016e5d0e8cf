"""Dynamo's front end and mock workers of both engines in trouble: `python -m tests.lab.dynamo`.

Needs Dynamo in any environment (`pip install --no-deps ai-dynamo ai-dynamo-runtime`, and what they
import), with its interpreter in DYNAMO_LAB_PYTHON. Starts workers that show vLLM's page and one
that shows SGLang's behind a KV router, without etcd, NATS or a GPU. Prints what
`kneewatch diagnose` says after each fault. Ends with 1 where that is not what was done, with 0 if
Dynamo is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, field

from tests.collector.oracle import LOOPBACK, free_port
from tests.lab import model
from tests.lab.routers import PATIENCE_S, ask, verdict

PYTHON = "DYNAMO_LAB_PYTHON"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
PREFIX = " ".join(f"w{at}" for at in range(10, 1510))


class Trial(Struct, frozen=True, kw_only=True):
    """A fault: how the front end is started, and what clients do.

    - `clients`: of each model, with answers of `tokens`.
    - `groups`: beginnings that prompts share; 0: prompts are short and share nothing.
    - `dead`: the first worker is killed.
    - `says`: the first cause of each page by its name, or words of its summary; "" for no warning.
    """

    name: str
    says: Mapping[str, str]
    front_end: tuple[str, ...] = ()
    workers: int = 2
    blocks: int = 4000
    clients: int = 2
    tokens: int = 60
    groups: int = 0
    dead: bool = False
    lasts_s: float = 20.0


SHARED: dict[str, Any] = {
    "workers": 4,
    "groups": 40,
    "blocks": 1500,
    "clients": 4,
    "tokens": 5,
    "lasts_s": 60.0,
}
"""Each worker's cache holds a third of the beginnings."""

TRIALS = (
    Trial(name="serves", says={"front end": "", "vllm 0": "", "vllm 1": "", "sglang": ""}),
    Trial(
        name="a full KV cache",
        blocks=160,
        clients=60,
        tokens=200,
        says={"vllm 0": "kv_pressure", "vllm 1": "kv_pressure", "sglang": "queue_saturation"},
    ),
    Trial(name="a dead worker", dead=True, says={"vllm 0": "connection refused", "vllm 1": ""}),
    Trial(name="shared prefixes", **SHARED, says={"front end": "", "vllm 0": ""}),
    Trial(
        name="a router that picks at random",
        front_end=("--router-temperature", "100"),
        **SHARED,
        says={"front end": "on the picked one"},
    ),
    Trial(
        name="a router that sees no cache",
        front_end=("--router-kv-overlap-score-credit", "0"),
        **SHARED,
        says={"front end": ""},
    ),
)


class Fleet(Struct):
    """What runs: processes and pages by name."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"]
    )
    pages: dict[str, str] = field(default_factory=dict[str, str])

    def start(self, name: str, module: str, flags: Sequence[str], system_port: int = -1) -> None:
        """Start a program of Dynamo."""
        env = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_SYSTEM_HOST": LOOPBACK,
            "DYN_SYSTEM_PORT": str(system_port),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        }
        command = [os.environ[PYTHON], "-m", f"dynamo.{module}", *flags]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def worker(self, name: str, kind: str, blocks: int) -> None:
        """Start a worker that shows this engine's page."""
        port = free_port()
        self.pages[name] = f"http://{LOOPBACK}:{port}"
        flags = ("--model-path", str(self.folder / "tiny"), "--model-name", kind,
                 "--engine-type", kind, "--endpoint", f"dyn://lab.{kind}.generate",
                 "--num-gpu-blocks-override", str(blocks), "--block-size", "16")  # fmt: skip
        self.start(name, "mocker", flags, port)

    def front_end(self, flags: Sequence[str]) -> str:
        """Start the front end: its address."""
        port = free_port()
        url = self.pages["front end"] = f"http://{LOOPBACK}:{port}"
        own = ("--http-host", LOOPBACK, "--http-port", str(port), "--router-mode", "kv")
        self.start("front end", "frontend", (*own, *flags))
        return url


@contextmanager
def started(trial: Trial) -> Generator[Fleet]:
    """The fleet of a trial, once it serves both models."""
    with TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        model.write(fleet.folder / "tiny")
        tokenizer = {**model.TOKENIZER_CONFIG, "chat_template": CHAT_TEMPLATE}
        (fleet.folder / "tiny" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        try:
            for name in (*(f"vllm {at}" for at in range(trial.workers)), "sglang"):
                fleet.worker(name, name.partition(" ")[0], trial.blocks)
            url = fleet.front_end(trial.front_end)
            wait_for(url)
            yield fleet
        finally:
            for process in fleet.processes.values():
                process.kill()
                process.wait()


def wait_for(url: str) -> None:
    """Wait until the front end serves both models."""
    give_up_s = time.monotonic() + PATIENCE_S
    names = ""
    while not ("vllm" in names and "sglang" in names) and time.monotonic() < give_up_s:
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                names = answer.read().decode()
        except OSError:
            continue


@contextmanager
def load(trial: Trial, url: str) -> Generator[None]:
    """Clients that ask one request after the other."""
    stop = threading.Event()

    def client(kind: str, at: int) -> None:
        turn = at
        while not stop.wait(0.05):
            turn += 1
            group = f"w{1600 + turn % trial.groups} {PREFIX}" if trial.groups else "w3 " * 30
            ask(url, model=kind, prompt=f"{group} w{turn % 2000 + 10}", max_tokens=trial.tokens)

    threads = [
        threading.Thread(target=client, args=(kind, 37 * at), daemon=True)
        for kind in ("vllm", "sglang")
        for at in range(trial.clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def is_said(found: Mapping[str, Any], words: str) -> bool:
    """Whether a cause or words come first in a verdict, or nothing at warning for "". Without an
    answer, the error is the verdict."""
    causes: Sequence[Mapping[str, Any]] = found["causes"]
    if words and words in found["health"]:
        return True
    grave = [each for each in causes if each["severity"] in ("warning", "critical")]
    if not words:
        return not grave
    return bool(grave) and words in f"{grave[0]['id']} {grave[0]['summary']}"


def tried(trial: Trial) -> int:
    """The number of pages of which something else is said."""
    wrong = 0
    with started(trial) as fleet, load(trial, fleet.pages["front end"]):
        if trial.dead:
            fleet.processes["vllm 0"].kill()
        time.sleep(trial.lasts_s)
        for name, words in trial.says.items():
            found = verdict(fleet.pages[name])
            right = is_said(found, words)
            wrong += not right
            print(
                f"{trial.name}, {name}: {found['health']}{'' if right else '  WRONG'}", flush=True
            )
            for cause in found["causes"]:
                print(f"  {cause['id']}: {cause['summary']}\n    {cause['lever']}", flush=True)
    return wrong


def main() -> int:
    """Print what is said after each fault."""
    if not os.environ.get(PYTHON):
        print(f"Dynamo: {PYTHON} is not set, skipped")
        return 0
    chosen = [trial for trial in TRIALS if not sys.argv[1:] or trial.name in sys.argv[1:]]
    return 1 if sum(map(tried, chosen)) else 0


if __name__ == "__main__":
    sys.exit(main())
