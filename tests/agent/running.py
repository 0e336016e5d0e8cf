"""The program as users run it: a process of its own, or its `main` where a process is too slow."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.collector.captures.capture import CaptureReader
from tests.collector.servers import Serve, Server, answer
from tests.recordings import CAPTURES
from tests.waiting import PATIENCE_S, until

ARGV = [sys.executable, "-m", "kneewatch.agent.cli"]

Document = dict[str, Any]


class Ended(Struct, frozen=True):
    """How a run of the program ended."""

    status: int
    out: str
    err: str

    @property
    def documents(self) -> list[Document]:
        """The JSON documents on stdout; NaN and infinities are no JSON."""
        return [json.loads(line, parse_constant=refuse) for line in self.out.splitlines()]


Main = Callable[..., Ended]


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what would change the program's output, plus `more`."""
    unwanted = ("KNEEWATCH_", "_KNEEWATCH_", "NO_COLOR", "COLUMNS", "TERM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    # The servers of most tests serve pages only, one a request.
    return {**kept, "KNEEWATCH_SERVER_PROBE": "false", **more}


def start(*args: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """The program, running, with its output in pipes."""
    return subprocess.Popen(
        [*ARGV, *map(str, args)],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    """How a running program ends."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, out, err)


def wait_for(server: Server, scrapes: int) -> None:
    """Wait until a server has been asked for so many more pages."""
    enough = len(server.requests) + scrapes
    until(lambda: len(server.requests) >= enough)


def run(*args: object, cwd: Path, **env: str) -> Ended:
    """A whole run of the program."""
    return ended(start(*args, cwd=cwd, **env))


def capture(name: str) -> Path:
    """A recorded capture."""
    return CAPTURES / f"{name}.jsonl.gz"


def bodies(name: str, first: int = 0, last: int | None = None) -> list[bytes]:
    """Pages of a recorded capture."""
    pages = [entry.body.encode() for entry in CaptureReader(capture(name)) if entry.body]
    return pages[first:last]


def in_turn(pages: list[bytes]) -> Serve:
    """Serves pages one after the other; the last one stays."""

    def serve(sock: socket.socket, _request: bytes, number: int) -> bool:
        sock.sendall(answer(pages[min(number, len(pages) - 1)]))
        return True

    return serve
