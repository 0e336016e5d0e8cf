"""Processes that listen on ports of this node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""

Listen = Callable[..., tuple[int, int]]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listen]:
    """Starts a Python script of that name that listens; returns its pid and port."""
    children: list[subprocess.Popen[str]] = []

    def start(
        name: str, *arguments: str, script: str = LISTEN, log: Path | None = None, **env: str
    ) -> tuple[int, int]:
        path = tmp_path / name
        path.write_text(script)
        with nullcontext() if log is None else log.open("ab") as errors:
            child = subprocess.Popen(
                [sys.executable, "-u", str(path), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=tmp_path,
                env={**os.environ, **env},
            )
        children.append(child)
        assert child.stdout is not None
        return child.pid, int(child.stdout.readline())

    yield start
    for child in children:
        child.communicate()
