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

from kneewatch.agent.server.process import container_id, text_of
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
    SourceReading,
    merge,
)
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.verdict import LogFailure, Server, Value

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
"""The names of facts, by their names in the parsed log. Logged arguments are in `launch`."""

CHUNK_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
"""Of a file larger than this, only the last TAIL_BYTES are read."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,100}/[A-Za-z0-9][\w.-]{0,200}")

NO_START = "no vLLM start-up in this log; save it from the start of the server"


class LogFollower:
    """Reads a log file as it grows. The facts are those of vLLM's newest start.

    If another program named the file, `user_id` is that program's user: the file must belong to
    this user or be readable by everyone. None: kneewatch's own user named the file.
    """

    def __init__(self, path: str, *, user_id: int | None = None) -> None:
        self.path, self._user_id = path, user_id
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self.log = StartupLog()

    def read(self, limit_bytes: int = CHUNK_BYTES) -> int:
        """Read up to `limit_bytes` of the unread part of the file. Returns the number of bytes
        read.

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
        """Read the unread part of the file. Returns whether the end was reached.

        At most about `limit_bytes` are read: a file may grow faster than it can be read.

        Raises:
            SettingsError: as in `read`.
        """
        return any(not self.read() for _ in range(max(1, limit_bytes // CHUNK_BYTES)))

    def _place(self, status: os.stat_result) -> None:
        """Find the position from which to read: the start, if the file was replaced or has become
        shorter than the part that was read. Of a large file that is read for the first time, only
        the end is read."""
        file_id = status.st_dev, status.st_ino
        if file_id == self._file_id and status.st_size >= self._offset:
            return
        self._offset = 0 if self._file_id else max(0, status.st_size - TAIL_BYTES)
        self._file_id = file_id
        self.log.restart(mid_line=self._offset > 0)


def read_log(path: str) -> StartupLog:
    """Read a whole log file, or only the end of a large one.

    Raises:
        SettingsError: the file cannot be read, or is no regular file.
    """
    follower = LogFollower(path)
    follower.read_rest()
    follower.log.close()
    return follower.log


def facts_of_log(stated: Stated, log: StartupLog, now_s: float) -> tuple[Server, Stated]:
    """The facts from the settings and a log, for a server whose page was not read. Settings take
    precedence."""
    reading = reading_of(log, now_s)
    return merge(stated, [reading], config={}, model_names=(), settings_s=now_s, page_s=now_s)


def failure_of(log: StartupLog, stated: Stated, now_s: float) -> LogFailure | None:
    """The failure at the end of the log, which was first read at `now_s`. None if the log does not
    end with a failure."""
    # Imported here: most servers start, and this import is slow.
    from kneewatch.diagnose.recommend.startup import log_failure

    return log_failure(log, facts_of_log(stated, log, now_s)[1], now_s)


def reading_of(log: StartupLog, now_s: float) -> SourceReading:
    """The facts of the newest start in the log, read at `now_s`, and the model that the log
    names."""
    values: dict[str, Value] = {
        name: log.facts[logged].value for logged, name in NAMES.items() if logged in log.facts
    }
    return SourceReading(LOG, now_s, values, command_line=log.launch, model=_logged_model(log))


def _logged_model(log: StartupLog) -> Model | None:
    """The model that the log names. It is looked up by id in the catalogue and the local Hugging
    Face cache; None for a path. No file named in the log is read."""
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
"""Systemd units that start other programs. Their journal is not the log of a server."""


def log_of(pid: int) -> LogFollower | Journal | None:
    """A reader of a process's log, which is not opened yet. None if the process writes to a
    terminal or a pipe, or if the place of its log cannot be determined."""
    return _redirected(pid) or log_of_group(text_of(Path(f"/proc/{pid}/cgroup")))


def _redirected(pid: int) -> LogFollower | None:
    """The regular file to which the process's output is redirected. None if there is none."""
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
            return LogFollower(path, user_id=user_id)
    return None


def log_of_group(cgroup: str) -> LogFollower | Journal | None:
    """A reader of the log that Kubernetes, Docker or systemd stores of a control group. `cgroup` is
    the text of /proc/PID/cgroup."""
    container = container_id(cgroup)
    if container:
        files = [*PODS.glob(f"*-{container}.log")][:1]
        docker = DOCKER / container / f"{container}-json.log"
        files += [docker] if _exists(docker) else []
        return LogFollower(str(files[0])) if files else None
    unit = _UNIT.search(cgroup)
    if unit is None or unit[1].partition(".")[0].partition("@")[0] in _RUNTIMES:
        return None
    return Journal(unit[1])


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # Only root may look into Docker's folder: reading fails later, with a note that says so.
        return True


class Journal:
    """Reads the journal of a systemd unit as it grows, at most every `JOURNAL_EVERY_S` seconds."""

    def __init__(self, unit: str) -> None:
        self.path, self.log = f"journal of {unit}", StartupLog()
        self._unit, self._cursor = unit, ""
        self._due_s = 0.0

    def read_rest(self, limit_bytes: int = TAIL_BYTES) -> bool:
        """Read the new part of the journal; the first time, its last `JOURNAL_LINES` lines. If the
        part is longer than `limit_bytes`, only its end is read. Returns True, because the end is
        always reached.

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
