"""One real `vllm serve` on 127.0.0.1, in a process group of its own. I/O edge."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.lab import model

HOST = "127.0.0.1"
MODEL = "tiny"
READY_WITHIN_S = 400.0
"""Three processes import torch one after the other; 30 to 40 s on two cores."""

CPU_INFO = Path("/proc/cpuinfo")
# Without such instructions a step in bfloat16 takes several times as long.
DTYPE = "bfloat16" if CPU_INFO.exists() and "bf16" in CPU_INFO.read_text() else "float32"

PLAIN = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", DTYPE),
    *("--enforce-eager", "--disable-uvicorn-access-log"),
    *("--block-size", "32"),  # fewer are refused on CPU
)
"""What every server of the lab is started with."""

SMALL_CACHE = (
    # 159 usable blocks of 32 tokens (one is vLLM's null block): 26 requests of 100 + 300 tokens
    # want 215 on average.
    *("--num-gpu-blocks-override", "160"),
    *("--max-num-seqs", "128", "--max-model-len", "2048"),
)
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerError(Exception):
    """The server is not installed, or did not come up."""


class Server:
    """A running server; it ends, with all that it started, when its `with` block does."""

    def __init__(
        self,
        lab: Path,
        flags: Sequence[str] = SMALL_CACHE,
        config: Mapping[str, Any] = model.CONFIG,
    ) -> None:
        program = lab / "venv" / "bin" / "vllm"
        if not program.exists():
            raise ServerError(f"{program} is missing; run `sh tests/lab/install.sh` first")
        model.write(lab / "model", config)
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = lab / "server.log"
        address = ("--host", HOST, "--port", str(self.port))
        self.command = [str(program), "serve", str(lab / "model"), *address, *PLAIN, *flags]
        self.log.unlink(missing_ok=True)
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_ready(self) -> float:
        """Seconds until /health answered 200.

        Raises:
            ServerError: the process ended, or the time was up.
        """
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < READY_WITHIN_S:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}: {self.log}")
            if self._healthy():
                return waited_s
            time.sleep(0.5)
        raise ServerError(f"the server was not ready after {READY_WITHIN_S:.0f} s: {self.log}")

    def cpu_wait_s(self) -> float:
        """Seconds that threads of the server were ready to run and waited for a CPU so far."""
        waited_ns = 0
        for tasks in Path("/proc").glob("[0-9]*/task"):
            with suppress(OSError):  # it has ended
                if os.getpgid(int(tasks.parent.name)) == self._process.pid:
                    for task in tasks.iterdir():
                        waited_ns += int((task / "schedstat").read_text().split()[1])
        return waited_ns / 1e9

    def engine_processes(self) -> list[int]:
        """The processes that run the engine: vLLM names them `VLLM::`."""
        found: list[int] = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                own = os.getpgid(int(command.parent.name)) == self._process.pid
                if own and command.read_bytes().startswith(b"VLLM::"):
                    found.append(int(command.parent.name))
        return found

    def kill(self) -> None:
        """SIGKILL to the whole process group: an abrupt crash. Harmless when it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def restart(self, flags: Sequence[str] = ()) -> None:
        """Kill it and start it again on the same port, with further flags. It is not ready yet."""
        self.kill()
        self.command += flags
        self._process = self._spawn()

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
