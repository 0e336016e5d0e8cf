"""Follows vLLM's log file through rotation and truncation, and reads its lines. I/O edge."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kneewatch.agent.stated_deployment import named_model
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_facts import (
    AVAILABLE_KV_GIB,
    KV_BLOCKS,
    KV_TOKENS,
    LOG,
    MAX_MODEL_LEN,
    VERSION,
    WEIGHTS_GIB,
    ServerFacts,
    SourceReading,
    Value,
    merge,
)
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.engine.diagnosis import LogFailure, log_failure

NAMES: Mapping[str, str] = {
    "version": VERSION,
    "max_model_len": MAX_MODEL_LEN,
    "weights_gib": WEIGHTS_GIB,
    "load_s": "load_s",
    "available_kv_gib": AVAILABLE_KV_GIB,
    "kv_cache_tokens": KV_TOKENS,
    "gpu_blocks": KV_BLOCKS,
    "max_concurrency": "max_concurrency",
    "graph_s": "graph_s",
    "graph_gib": "graph_gib",
    "attention_backend": "attention_backend",
}
"""Names of facts by their names in the log. Logged arguments are in `launch`."""

CHUNK_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
"""A larger file is read from this far before its end."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,100}/[A-Za-z0-9][\w.-]{0,200}")

NO_START = "no vLLM start-up in this log; save it from the start of the server"


class LogSource(Protocol):
    """A log and what has been read of it; the newest start counts. `path` says where it is."""

    path: str
    log: StartupLog

    def read_rest(self, limit_bytes: int = ...) -> bool:
        """Read what is new, about `limit_bytes` at most. Returns whether that was all.

        Raises:
            SettingsError: the log cannot be read.
        """
        ...


class LogFollower:
    """A log file and what was read of it; the newest start counts.

    `user_id`: the file must be that user's or readable by everyone, because another program named
    it; None: kneewatch's own user named it.
    """

    def __init__(self, path: str, *, user_id: int | None = None) -> None:
        self.path, self._user_id = path, user_id
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
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise SettingsError(f"server_log {self.path[:200]}: {reason}") from exc
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"server_log {self.path[:200]}: not a regular file")
            if self._user_id not in (None, 0, status.st_uid) and not status.st_mode & stat.S_IROTH:
                raise SettingsError(
                    f"server_log {self.path[:200]}: unreadable for the server's user"
                )
            self._place(status)
            data = os.pread(file, limit_bytes, self._offset)
        except OSError as exc:
            raise SettingsError(f"server_log {self.path[:200]}: {exc.strerror}") from exc
        finally:
            os.close(file)
        self._offset += len(data)
        self.log.feed(data)
        return len(data)

    def read_rest(self, limit_bytes: int = 2 * TAIL_BYTES) -> bool:
        """Read what is new in the file, about `limit_bytes` at most: a file that grows faster than
        it is read must not be read for ever. Returns whether that was all.

        Raises:
            SettingsError: as `read`.
        """
        return any(not self.read() for _ in range(max(1, limit_bytes // CHUNK_BYTES)))

    def _place(self, status: os.stat_result) -> None:
        """Start again where the file was replaced or is shorter than what was read of it."""
        file_id = status.st_dev, status.st_ino
        if file_id == self._file_id and status.st_size >= self._offset:
            return
        self._offset = 0 if self._file_id else max(0, status.st_size - TAIL_BYTES)
        self._file_id = file_id
        self.log.restart(mid_line=self._offset > 0)


def read_log(path: str) -> StartupLog:
    """A whole log file, or the end of a large one.

    Raises:
        SettingsError: the file cannot be read, or is no regular file.
    """
    follower = LogFollower(path)
    follower.read_rest()
    follower.log.close()
    return follower.log


def facts_of_log(stated: Stated, log: StartupLog, now_s: float) -> tuple[ServerFacts, Stated]:
    """The facts from settings and log, settings first, without a page of the server."""
    reading = reading_of(log, now_s)
    return merge(stated, [reading], config={}, model_names=(), settings_s=now_s, page_s=now_s)


def failure_of(log: StartupLog, stated: Stated, now_s: float) -> LogFailure | None:
    """The failure that the log ends with, first read at `now_s`; None without one."""
    return log_failure(log, facts_of_log(stated, log, now_s)[1], now_s)


def reading_of(log: StartupLog, now_s: float) -> SourceReading:
    """The facts of the log's newest start, read at `now_s`, with the model that it names."""
    values: dict[str, Value] = {
        name: log.facts[logged].value for logged, name in NAMES.items() if logged in log.facts
    }
    return SourceReading(LOG, now_s, values, launch=log.launch, model=_logged_model(log))


def _logged_model(log: StartupLog) -> Model | None:
    """The model that the log names, looked up by id in the catalogue and the local Hugging Face
    cache; None for a path. No file that the log names is read."""
    name = log.launch.model if log.launch else ""
    if not _MODEL_ID.fullmatch(name) or Path(name).exists():
        return None
    try:
        return named_model(name)
    except SizingError:
        return None
