"""Reads the host of a server's process on this node: its control group's memory, CPU pressure,
steal. I/O edge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups of version 2 are."""

PROC = Path("/proc")

STEAL_AT = 8
"""The column of stolen time in /proc/stat; guests' times after it are counted in the others."""


class HostReader:
    """Follows the host of one process."""

    def __init__(self, pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self.pid = pid
        self._cgroups, self._proc = cgroups, proc
        self._cpu: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """The signals of the host; what cannot be read is left out."""
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
        """Share of the last minute in which a task waited for a CPU: of the process's control
        group, else of the node."""
        files = [group / "cpu.pressure" for group in groups[:1]]
        for file in (*files, self._proc / "pressure/cpu"):
            for line in _text(file).splitlines():
                kind, *pairs = line.split()
                if kind == "some":
                    averages = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                    with suppress(ValueError):
                        return float(averages.get("avg60", "")) / 100
        return None

    def _cpu_times(self) -> tuple[float, float] | None:
        """Time stolen from the node by its hypervisor, and all CPU time, since the node started."""
        words = _text(self._proc / "stat").partition("\n")[0].split()
        if len(words) < STEAL_AT + 1 or words[0] != "cpu" or not all(map(str.isdecimal, words[1:])):
            return None
        times = [float(word) for word in words[1 : STEAL_AT + 1]]
        return times[-1], sum(times)


def host_memory(groups: Iterable[Path]) -> dict[str, float]:
    """Memory in use and its limit, of the one of these control groups that has the least left;
    empty where none has a limit."""
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
    """The folders of a process's control group and of those above it, version 2; empty in version
    1 and where the process is gone."""
    lines = _text(proc / str(pid) / "cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "")
    if not path or ".." in path:
        return []
    group = cgroups / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(cgroups)]


def _number(file: Path) -> float | None:
    """The number in a file; None where it has none, such as `max`."""
    text = _text(file).strip()
    return float(text) if text.isdecimal() else None


def numbers_in(file: Path) -> dict[str, float]:
    """The numbers of a file with a name and a number in each line."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _text(file: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
