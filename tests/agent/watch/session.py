"""The program on a terminal of its own: keys in, a screen out, and how the terminal is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any, Self

from tests.agent.running import ARGV, environment
from tests.waiting import PATIENCE_S

CONTROL = re.compile(
    rb"\x1b\[([<>?=]?)([0-9;]*)([ -/]*)([@-~])|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b?\][^\x07\x1b]*\x07"
)
UTF8 = {"LANG": "C.UTF-8"}


class Screen:
    """As much of a terminal as shows what a program has drawn."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        cut = len(data) - 40 if b"\x1b" in data[-40:] else len(data)
        at = 0
        while at < len(data):
            match = CONTROL.match(data, at)
            if match:
                self._control(match)
                at = match.end()
            elif data[at] == 0x1B and at >= cut:
                break  # its end has not come yet
            else:
                at = self._text(data, at)
        self._rest = data[at:]

    def _control(self, match: re.Match[bytes]) -> None:
        if match[4] == b"H":
            row, _, column = match[2].partition(b";")
            self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
        elif match[4] == b"J":
            self._cells = [[" "] * self.columns for _ in range(self.rows)]

    def _text(self, data: bytes, at: int) -> int:
        ends = [data.find(mark, at + 1) for mark in (b"\x1b", b"]22;")]
        end = min((end for end in ends if end > 0), default=len(data))
        for character in data[at:end].decode("utf-8", "replace"):
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self._row += 1
            elif self._row < self.rows and self._column < self.columns:
                self._cells[self._row][self._column] = character
                self._column += 1
        return end

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Session:
    """A running `kneewatch watch` on a terminal."""

    def __init__(
        self,
        args: Sequence[object],
        *,
        cwd: Path,
        program: Sequence[str] = (*ARGV, "watch"),
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes: list[Any] = termios.tcgetattr(slave)
        self._slave = slave
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        self.screen = Screen(columns, rows)
        self.written = b""
        given = {"TERM": "xterm", "LC_ALL": "", "LC_CTYPE": "", **UTF8, **(env or {})}
        self.process = subprocess.Popen(
            [*program, *map(str, args)],
            cwd=cwd,
            env={name: value for name, value in environment(**given).items() if value},
            stdin=slave,
            stdout=slave,
            stderr=self._stderr,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._stderr.close()
        os.close(self._slave)
        if self._master >= 0:
            os.close(self._master)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen = Screen(columns, rows)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = -1

    def shows(self, *words: str) -> str:
        """The screen once each of these regular expressions is found in it."""
        self._read(lambda: not self._missing(words))
        missing = self._missing(words)
        assert not missing, f"{missing} never came:\n{self.screen.text}\n{self._said()}"
        return self.screen.text

    def _missing(self, words: Sequence[str]) -> list[str]:
        return [word for word in words if not re.search(word, self.screen.text)]

    def ends(self) -> tuple[int, str]:
        """The exit status and what was said on stderr."""
        self._read(lambda: self.process.poll() is not None)
        assert self.process.returncode is not None, f"still running:\n{self.screen.text}"
        self._read(lambda: False)  # what is left
        return self.process.returncode, self._said()

    def stop(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: its modes, its screen, its cursor."""
        left = self.written.rfind(b"\x1b[?1049l")
        cursor = self.written.rfind(b"\x1b[?25h")
        modes: list[Any] = termios.tcgetattr(self._slave)
        return modes == self.modes and left >= 0 and cursor > self.written.rfind(b"\x1b[?25l")

    def _said(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def _read(self, done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not done() and time.monotonic() < until_s:
            if select([self._master], [], [], 0.05)[0]:
                data = os.read(self._master, 65_536)
                self.written += data
                self.screen.feed(data)
            elif self.process.poll() is not None:
                return
