"""Reads the host signals of a server's process on this node: memory of its control group, CPU
pressure and steal time. I/O edge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""The folder of the control groups (version 2)."""

PROC = Path("/proc")
TEXT_MAX_CHARS = 64 * 1024

STEAL_AT = 8
"""Index of the column of stolen time in /proc/stat. The guest times after it are already included
in other columns."""


class HostReader:
    """Reads the host signals of one process. Keeps the last CPU times, because steal time is a
    rate."""

    def __init__(self, pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self.pid = pid
        self._cgroups, self._proc = cgroups, proc
        self._cpu: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """The host signals. Signals that cannot be read are left out."""
        groups = control_groups(self.pid, cgroups=self._cgroups, proc=self._proc)
        signals = host_memory(groups)
        pressure = self._pressure(groups)
        if pressure is not None:
            signals["host_cpu_pressure_ratio"] = pressure
        before, self._cpu = self._cpu, self._cpu_times()
        if before is not None and self._cpu is not None and self._cpu[1] > before[1]:
            stolen, total = self._cpu[0] - before[0], self._cpu[1] - before[1]
            signals["host_cpu_steal_ratio"] = max(0.0, stolen / total)
        return signals

    def _pressure(self, groups: Sequence[Path]) -> float | None:
        """Share of the last minute (0-1) in which a task waited for a CPU, in the process's control
        group; without a control group, on the whole node. None if unknown."""
        files = [group / "cpu.pressure" for group in groups[:1]]
        for file in (*files, self._proc / "pressure/cpu"):
            for line in text_of(file).splitlines():
                kind, *pairs = line.split()
                if kind == "some":
                    averages = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                    with suppress(ValueError):
                        return float(averages.get("avg60", "")) / 100
        return None

    def _cpu_times(self) -> tuple[float, float] | None:
        """CPU time that the hypervisor took from the node, and total CPU time: both since the node
        started, in clock ticks. None if unknown."""
        words = text_of(self._proc / "stat").partition("\n")[0].split()
        if len(words) < STEAL_AT + 1 or words[0] != "cpu" or not all(map(str.isdecimal, words[1:])):
            return None
        times = [float(word) for word in words[1 : STEAL_AT + 1]]
        return times[-1], sum(times)


def host_memory(groups: Iterable[Path]) -> dict[str, float]:
    """Memory use and memory limit of one control group: the one with the least memory left. Empty
    if none of the groups has a limit."""
    limited = [
        (limit, max(0.0, used - numbers_in(group / "memory.stat").get("inactive_file", 0.0)))
        for group in groups
        if (limit := _number(group / "memory.max")) is not None
        and (used := _number(group / "memory.current")) is not None
    ]
    if not limited:
        return {}
    limit, used = min(limited, key=lambda row: row[0] - row[1])
    return {"host_memory_used_bytes": used, "host_memory_limit_bytes": limit}


def control_groups(pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> list[Path]:
    """The folders of a process's control group and of all groups above it (version 2). Empty with
    version 1, or if the process no longer exists."""
    lines = text_of(proc / str(pid) / "cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "")
    if not path or ".." in path:
        return []
    group = cgroups / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(cgroups)]


def _number(file: Path) -> float | None:
    """The number in a file. None if the file contains a word such as `max` instead."""
    text = text_of(file).strip()
    return float(text) if text.isdecimal() else None


def numbers_in(file: Path) -> dict[str, float]:
    """The values by name, from a file that has a name and a number in each line."""
    rows = (line.split() for line in text_of(file).splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def text_of(file: Path) -> str:
    """The text of a small file, cut to `TEXT_MAX_CHARS`. Empty if the file cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(TEXT_MAX_CHARS)
    except OSError:
        return ""
