"""Finds vLLM's log on this node, follows it through rotation and truncation, and reads its lines.
I/O edge."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.server.process import container_id
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
"""The name of each fact, by its name in the log. Logged arguments are in `launch`."""

CHUNK_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
"""A larger file is read from this far before its end."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,100}/[A-Za-z0-9][\w.-]{0,200}")

NO_START = "no vLLM start-up in this log; save it from the start of the server"


class LogFollower:
    """A log file and what was read of it; facts are those of vLLM's newest start.

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
        it is read must not be read forever. Returns whether the end was reached.

        Raises:
            SettingsError: as `read`.
        """
        return any(not self.read() for _ in range(max(1, limit_bytes // CHUNK_BYTES)))

    def _place(self, status: os.stat_result) -> None:
        """Start from the beginning if the file was replaced or is shorter than what was read of
        it."""
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


# --- Finds the log of a process on this node: redirected output, container, unit. I/O edge --------


PODS = Path("/var/log/containers")
DOCKER = Path("/var/lib/docker/containers")

JOURNAL_LINES = 20_000
JOURNAL_EVERY_S = 15.0
JOURNAL_TIMEOUT_S = 5.0
_CURSOR = re.compile(rb"(?m)^-- cursor: (\S{1,500})\n?\Z")
_UNIT = re.compile(r"/system\.slice/(?:[^/]+\.slice/)*([A-Za-z0-9@_:.\\-]{1,200}\.service)(?:/|$)")
_RUNTIMES = ("docker", "containerd", "kubelet", "crio", "podman", "ssh", "sshd")
"""Units that start other programs: their journal is not a server's log."""


class LogPlace(Struct, frozen=True):
    """Where a process's log is: a file, or the journal of a unit.

    `user_id`: the file must be that user's or readable by everyone; None: no user can choose the
    path.
    """

    path: str
    user_id: int | None = None
    unit: str = ""

    def open(self) -> LogFollower | Journal:
        """A follower of the log."""
        return Journal(self.unit) if self.unit else LogFollower(self.path, user_id=self.user_id)


def log_place(pid: int) -> LogPlace | None:
    """Where the log of a process is; None if it writes to a terminal or to a pipe, or cannot be
    read."""
    redirected = _redirected(pid)
    if redirected is not None:
        return redirected
    try:
        return place_of_group(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return None


def _redirected(pid: int) -> LogPlace | None:
    """The regular file that the output is redirected to."""
    for descriptor in (1, 2):
        link = f"/proc/{pid}/fd/{descriptor}"
        try:
            if not stat.S_ISREG(os.stat(link).st_mode):  # noqa: PTH116 - the open file, not the name
                continue
            path, user_id = os.readlink(link), os.stat(f"/proc/{pid}").st_uid  # noqa: PTH115, PTH116
            # In another mount namespace, or after a removal, the name can mean another file.
            same = os.path.samestat(os.stat(path), os.stat(link))  # noqa: PTH116
        except OSError:
            continue
        if same:
            return LogPlace(path, user_id)
    return None


def place_of_group(cgroup: str) -> LogPlace | None:
    """The log that Kubernetes, Docker or systemd keeps of a control group, by the text of
    /proc/PID/cgroup."""
    container = container_id(cgroup)
    if container:
        files = [*PODS.glob(f"*-{container}.log")][:1]
        docker = DOCKER / container / f"{container}-json.log"
        files += [docker] if _exists(docker) else []
        return LogPlace(str(files[0])) if files else None
    unit = _UNIT.search(cgroup)
    if unit is None or unit[1].partition(".")[0].partition("@")[0] in _RUNTIMES:
        return None
    return LogPlace(f"journal of {unit[1]}", unit=unit[1])


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # Only root may look into Docker's folder: reading fails later, with a note that says so.
        return True


class Journal:
    """The journal of a unit and what was read of it; asked at most every `JOURNAL_EVERY_S`."""

    def __init__(self, unit: str) -> None:
        self.path, self.log = f"journal of {unit}", StartupLog()
        self._unit, self._cursor = unit, ""
        self._due_s = 0.0

    def read_rest(self, limit_bytes: int = TAIL_BYTES) -> bool:
        """Read what is new in the journal, the end of it if that is more than `limit_bytes`; the
        first time, its last `JOURNAL_LINES` lines. Returns True: it was read to its end.

        Raises:
            SettingsError: the journal cannot be read.
        """
        if time.monotonic() < self._due_s:
            return True
        self._due_s = time.monotonic() + JOURNAL_EVERY_S
        since = f"--after-cursor={self._cursor}" if self._cursor else f"--lines={JOURNAL_LINES}"
        command = ("journalctl", "--no-pager", "--quiet", "--output=cat", "--show-cursor", since)
        try:
            done = subprocess.run(
                (*command, f"--unit={self._unit}"),
                capture_output=True,
                timeout=JOURNAL_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise SettingsError(f"server_log {self.path}: {type(exc).__name__}") from exc
        if done.returncode:
            raise SettingsError(f"server_log {self.path}: journalctl exits with {done.returncode}")
        cursor = _CURSOR.search(done.stdout)
        if cursor is not None:
            self._cursor = cursor[1].decode("ascii", "replace")
        text = done.stdout[: cursor.start()] if cursor else done.stdout
        self.log.feed(text[-limit_bytes:])
        return True
