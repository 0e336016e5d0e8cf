"""Finds the log of a process on this node: redirected output, container, unit. I/O edge."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from kneewatch.agent.server.process import container_id
from kneewatch.agent.server_log import TAIL_BYTES, LogFollower, LogSource
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.deployment.startup_log import StartupLog

PODS = Path("/var/log/containers")
DOCKER = Path("/var/lib/docker/containers")

JOURNAL_LINES = 20_000
JOURNAL_EVERY_S = 15.0
JOURNAL_TIMEOUT_S = 5.0
_CURSOR = re.compile(rb"(?m)^-- cursor: (\S{1,500})\n?\Z")
_UNIT = re.compile(r"/system\.slice/(?:[^/]+\.slice/)*([A-Za-z0-9@_:.\\-]{1,200}\.service)(?:/|$)")
_RUNTIMES = ("docker", "containerd", "kubelet", "crio", "podman", "ssh", "sshd")
"""Units that start other programs: their journal is not a server's log."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a process's log is: a file, or the journal of a unit.

    `user_id`: the file must be that user's or readable by everyone; None: no user can choose it.
    """

    path: str
    user_id: int | None = None
    unit: str = ""

    def open(self) -> LogSource:
        """A follower of the log."""
        return Journal(self.unit) if self.unit else LogFollower(self.path, user_id=self.user_id)


def log_place(pid: int) -> LogPlace | None:
    """Where the log of a process is; None where it writes to a terminal or to a pipe, or cannot be
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
            # In another file system, and after a removal, the name is not the file's.
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
        # Docker's folder is root's: the note of the failed reading says so.
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
