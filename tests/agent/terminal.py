"""The program on a terminal of its own: what it writes there and what goes elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests.agent.running import ARGV, environment
from tests.waiting import PATIENCE_S


class Seen(Struct, frozen=True):
    """What a run left on its terminal, and in the pipe of the other stream."""

    status: int
    terminal: str
    piped: str


def on_terminal(
    stream: str,
    args: Sequence[object],
    *,
    cwd: Path,
    columns: int = 80,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ARGV,
) -> Seen:
    """A run whose `stream` (stdout or stderr) is a terminal and the other one a pipe."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [*program, *map(str, args)],
        cwd=cwd,
        env=environment(**{"TERM": "xterm", **(env or {})}),
        stdin=subprocess.DEVNULL,
        stdout=slave if stream == "stdout" else subprocess.PIPE,
        stderr=slave if stream == "stderr" else subprocess.PIPE,
    ) as process:
        os.close(slave)
        parts: list[bytes] = []
        reader = threading.Thread(target=_read_all, args=(master, parts))
        reader.start()
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        reader.join(PATIENCE_S)
    os.close(master)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return Seen(process.returncode, text, (out or err or b"").decode())


def _read_all(terminal: int, parts: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # Linux's way to say that nobody has the terminal open any more
            return
        if not data:
            return
        parts.append(data)
