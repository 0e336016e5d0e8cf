"""What systemd is told, over a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent.daemon.supervisor import notify_systemd
from tests.waiting import PATIENCE_S


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket as systemd has one, and its name as the environment gives it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@kneewatch-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1))
        sock.settimeout(PATIENCE_S)
        yield sock, name


def test_messages(manager: tuple[socket.socket, str]) -> None:
    sock, name = manager
    notify_systemd(name, "READY=1", "STATUS=8 targets")
    assert sock.recv(4096) == b"READY=1\nSTATUS=8 targets"


@pytest.mark.parametrize("name", ["", "/no/such/socket", "@kneewatch-nobody", "x" * 300])
def test_nobody_there(name: str) -> None:
    notify_systemd(name, "READY=1")


def test_a_full_socket_blocks_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        for _ in range(2000):  # nobody reads: what blocks does not end
            notify_systemd(str(tmp_path / "notify"), "WATCHDOG=1")
