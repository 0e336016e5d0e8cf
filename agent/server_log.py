"""Follows vLLM's log file: rotation, truncation, a bounded read at a time. I/O edge."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

from kneewatch.agent.input_files import named_model
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.recommend.startup import with_log

CHUNK_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
"""A larger file is read from this far before its end."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,100}/[A-Za-z0-9][\w.-]{0,200}")


NO_START = "no line of a vLLM start-up in it; save the log from the start of the server on"


class LogFollower:
    """A log file and what was read of it; the newest start counts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self.log = StartupLog()

    def read(self, limit_bytes: int = CHUNK_BYTES) -> int:
        """Read at most `limit_bytes` more of the file. Returns how many bytes were read.

        Raises:
            SettingsError: the file cannot be read, or is no regular file.
        """
        try:
            # Opening a pipe without a writer would block.
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise SettingsError(f"server_log {self._path[:200]}: {reason}") from exc
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"server_log {self._path[:200]}: not a regular file")
            self._place(status)
            data = os.pread(file, limit_bytes, self._offset)
        except OSError as exc:
            raise SettingsError(f"server_log {self._path[:200]}: {exc.strerror}") from exc
        finally:
            os.close(file)
        self._offset += len(data)
        self.log.feed(data)
        return len(data)

    def _place(self, status: os.stat_result) -> None:
        """Start again where the file was replaced or is shorter than what was read of it."""
        file_id = status.st_dev, status.st_ino
        if file_id == self._file_id and status.st_size >= self._offset:
            return
        self._offset = 0 if self._file_id else max(0, status.st_size - TAIL_BYTES)
        self._file_id = file_id
        self.log.restart()


def read_log(path: str) -> StartupLog:
    """A whole log file, or the end of a large one.

    Raises:
        SettingsError: the file cannot be read, or is no regular file.
    """
    follower = LogFollower(path)
    # A file that grows faster than it is read must not be read for ever.
    for _ in range(2 * TAIL_BYTES // CHUNK_BYTES):
        if not follower.read():
            break
    follower.log.close()
    return follower.log


def stated_with_log(stated: Stated, log: StartupLog) -> Stated:
    """What is stated, and for what is not, what the log says. No file that the log names is read:
    its model is looked up by id only."""
    known = with_log(stated, log)
    model_id = known.launch.model if known.launch else ""
    if known.model is not None or not _MODEL_ID.fullmatch(model_id) or Path(model_id).exists():
        return known
    try:
        return replace(known, model=named_model(model_id))
    except SizingError:
        # Recommendations stay without numbers of the model, and say what to state.
        return known
