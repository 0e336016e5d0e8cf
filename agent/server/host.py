"""Reads the host memory of a server's process on this node: its control group's. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups of version 2 are."""

PROC = Path("/proc")


def host_memory(pid: int, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, float]:
    """Memory in use and its limit, of the process's control group or of the one above it that has
    the least left; empty where none has a limit."""
    limited = [
        (limit, max(0.0, used - _numbers(group / "memory.stat").get("inactive_file", 0.0)))
        for group in _groups(pid, cgroups, proc)
        if (limit := _number(group / "memory.max")) is not None
        and (used := _number(group / "memory.current")) is not None
    ]
    if not limited:
        return {}
    limit, used = min(limited, key=lambda row: row[0] - row[1])
    return {"host_memory_used_bytes": used, "host_memory_limit_bytes": limit}


def _groups(pid: int, cgroups: Path, proc: Path) -> Iterator[Path]:
    """The folders of a process's control group and of those above it, version 2."""
    lines = _text(proc / str(pid) / "cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::/")), "")
    if not path or ".." in path:
        return
    group = cgroups / path.lstrip("/")
    while group.is_relative_to(cgroups):
        yield group
        group = group.parent


def _number(file: Path) -> float | None:
    """The number in a file; None where it has none, such as `max`."""
    text = _text(file).strip()
    return float(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, float]:
    """The numbers of a file with a name and a number in each line."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _text(file: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
