"""The state of a server whose page cannot be read, by /health, its process and its systemd unit.
I/O edge."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kneewatch.agent.server.host import control_groups, numbers_in
from kneewatch.agent.server.probe import is_healthy
from kneewatch.agent.server.process import is_local, running_server
from kneewatch.collector.errors import CollectError
from kneewatch.collector.http.address import parse_target
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.diagnose.deployment.server_facts import (
    LOOP_S,
    NO_STATE,
    PROCESS,
    ServerState,
    SourceReading,
)

ANSWERED = ("http_status", "timeout", "auth", "too_large", "truncated", "not_found")
"""Failures of a scrape after which the server may still be healthy."""

SYSTEMCTL_S = 2.0
_UNIT = re.compile(r"[A-Za-z0-9@_:.\\-]{1,200}\.service")


@dataclass(frozen=True, slots=True)
class ServerStart:
    """A process of the server: its id, when it was started, its systemd unit, and the OOM kills of
    its control group when it was first observed; None where they cannot be read."""

    pid: int
    started_s: float
    unit: str
    events_file: Path | None
    oom_kills: int | None


class Liveness:
    """Follows the processes of one target's server on this node."""

    def __init__(self, address: str, fetch: FetchSettings) -> None:
        self._target, self._fetch = address, fetch
        address_ = parse_target(address)
        self._host, self._port = address_.host, address_.port
        self._processes: list[ServerStart] = []

    def note(self, readings: Sequence[SourceReading]) -> None:
        """Remember the process whose facts were read."""
        for reading in readings:
            pid, started_s = reading.values.get("pid"), reading.values.get("process_started_s")
            if reading.source == PROCESS and isinstance(pid, int) and isinstance(started_s, float):
                self._add(pid, started_s, str(reading.values.get("unit", "")))

    def state(self, error: CollectError, now_s: float) -> ServerState:
        """The state of the server after a failed scrape."""
        healthy = is_healthy(self._target, self._fetch) if error.kind in ANSWERED else None
        state = replace(NO_STATE, healthy=healthy)
        return self._of_process(state, now_s) if is_local(self._host) else state

    def _of_process(self, state: ServerState, now_s: float) -> ServerState:
        # Lazy: only for targets on this node.
        import psutil

        try:
            newest, listens = running_server(self._host, self._port)
            if newest is not None:
                self._add(newest.pid, newest.create_time(), "")
        except (psutil.Error, OSError):
            return state
        if not self._processes:
            return state
        last = self._processes[-1]
        runs = _runs(last)
        recent = [start for start in self._processes if now_s - start.started_s <= LOOP_S]
        return replace(
            state,
            pid=last.pid,
            runs=runs,
            listens=listens if runs else None,
            processes=len(recent),
            oom_kills=max((_oom_kills_since(start) or 0 for start in self._processes), default=0)
            or None,
            exit_words="" if runs else _exit_words(last.unit),
        )

    def _add(self, pid: int, started_s: float, unit: str) -> None:
        if any((start.pid, start.started_s) == (pid, started_s) for start in self._processes):
            return
        events_file = _events_file(pid)
        kills = None if events_file is None else _oom_kills(events_file)
        unit = unit or (self._processes[-1].unit if self._processes else "")
        # Sixteen starts are a loop, however many more there were.
        self._processes = [*self._processes, ServerStart(pid, started_s, unit, events_file, kills)][
            -16:
        ]


def _runs(start: ServerStart) -> bool:
    import psutil

    try:
        process = psutil.Process(start.pid)
        return process.create_time() == start.started_s and process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def _events_file(pid: int) -> Path | None:
    """memory.events of the process's control group, version 2; None in version 1 and where the
    group is the root, which has none."""
    files = (group / "memory.events" for group in control_groups(pid)[:1])
    return next((file for file in files if file.is_file()), None)


def _oom_kills(file: Path) -> int | None:
    kills = numbers_in(file).get("oom_kill")
    return None if kills is None else int(kills)


def _oom_kills_since(start: ServerStart) -> int | None:
    """OOM kills in the process's control group since it was first observed; None where unknown."""
    if start.events_file is None or start.oom_kills is None:
        return None
    now = _oom_kills(start.events_file)
    return None if now is None else max(0, now - start.oom_kills)


def _exit_words(unit: str) -> str:
    """How a unit ended, according to systemd; empty without systemd or without a failure."""
    if not _UNIT.fullmatch(unit):
        return ""
    command = ("systemctl", "show", "--property=Result,ExecMainStatus,NRestarts", "--", unit)
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SYSTEMCTL_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if done.returncode or shown.get("Result", "success") == "success":
        return ""
    return (
        f"{unit} ended with {shown['Result']}, status {shown.get('ExecMainStatus', '?')}, "
        f"{shown.get('NRestarts', '?')} restarts"
    )
