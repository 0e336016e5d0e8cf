"""The program in this process, and servers that are closed when their test is over."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent import cli
from tests.agent.running import Ended, Main
from tests.clock import Clock
from tests.collector.servers import Serve, Server, Start


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Main:
    """Runs the program in this process; it starts in an empty folder, with no settings."""
    for name in [name for name in os.environ if name.startswith(("KNEEWATCH_", "NO_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KNEEWATCH_SERVER_PROBE", "false")  # servers here serve pages only
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> Ended:
        with pytest.raises(SystemExit) as exited:
            cli.main([str(arg) for arg in args])
        printed = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return Ended(exited.value.code, printed.out, printed.err)

    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of `diagnose` and `record`, in place of the real one: `--for 4s` takes no time."""
    clock = Clock()
    for module in ("cli", "captures", "console", "diagnose_command", "stream"):
        monkeypatch.setattr(f"kneewatch.agent.{module}.time", clock)
    return clock


@pytest.fixture
def serving() -> Iterator[Start]:
    servers: list[Server] = []

    def start(serve: Serve, tls: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(serve, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
