"""The daemon as a process of its own, asked over HTTP, its log in a file."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.agent.running import ARGV, environment
from tests.waiting import PATIENCE_S, until


class Daemon:
    """A `kneewatch run` that listens on a port of its own and keeps its history in `folder`."""

    def __init__(
        self,
        folder: Path,
        *args: object,
        store: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log_file = folder / "log"
        own: list[object] = ["run", "--listen", "127.0.0.1:0"]
        if store:
            own += ["--store", folder / "kneewatch.db"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*ARGV, *map(str, (*own, *args))],
                cwd=folder,
                env=environment(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._said = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def url(self) -> str:
        """Where it answers; waits until it does."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while b"\nhistory " not in self._said:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, self.log
            if select.select([self.process.stdout], [], [], left_s)[0]:
                data = os.read(self.process.stdout.fileno(), 4096)
                assert data, f"it ended: {self.log}"
                self._said += data
        return self._said.decode().split()[1].removesuffix("/triage")

    def printed(self) -> str:
        """What it has printed, once it has ended."""
        assert self.process.stdout is not None
        self._said += self.process.stdout.read()
        return self._said.decode()

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text()

    def said(self, message: str) -> list[dict[str, str]]:
        """The fields of each line of the log with that message."""
        lines: list[dict[str, str]] = []
        for line in self.log.splitlines():
            parts = [word.partition("=") for word in shlex.split(line)]
            fields = {key: value for key, _, value in parts}
            if fields["msg"] == message:
                lines.append(fields)
        return lines

    def get(self, path: str) -> str:
        """What it answers."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def diagnoses(self) -> dict[str, dict[str, Any]]:
        """The newest diagnosis of each target."""
        document = json.loads(self.get("/api/v1/triage?format=json"))
        return {target["target"]: target for target in document["targets"]}

    def wait_for(self, message: str, times: int = 1) -> list[dict[str, str]]:
        """Wait until it has logged a message so often."""
        until(lambda: len(self.said(message)) >= times)
        return self.said(message)

    def end(self, number: int = signal.SIGTERM) -> float:
        """Tell it to stop, with status 0. Returns the seconds that took."""
        since_s = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(PATIENCE_S) == 0, self.log
        return time.monotonic() - since_s
