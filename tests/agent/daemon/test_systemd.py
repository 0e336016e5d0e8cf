"""What systemd is told, over a real datagram socket."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kneewatch.agent.daemon.supervisor import Systemd
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
    systemd = Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"})
    systemd.ready("8 targets")
    assert sock.recv(4096) == b"READY=1\nSTATUS=8 targets"
    systemd.status("7 targets")
    assert sock.recv(4096) == b"STATUS=7 targets"
    systemd.alive()
    assert sock.recv(4096) == b"WATCHDOG=1"
    systemd.reloading()
    match = re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=(\d+)", sock.recv(4096))
    assert match is not None
    assert abs(int(match[1]) / 1e6 - time.monotonic()) < PATIENCE_S
    systemd.stopping()
    assert sock.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize("name", ["", "/no/such/socket", "@kneewatch-nobody", "x" * 300])
def test_nobody_there(name: str) -> None:
    Systemd({"NOTIFY_SOCKET": name}).ready("here")
    Systemd({}).alive()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert Systemd(environ).watchdog_s == watchdog_s


def test_a_full_socket_blocks_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        address = str(tmp_path / "notify")
        systemd = Systemd({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
        for _ in range(2000):  # nobody reads: what blocks does not end
            systemd.alive()
