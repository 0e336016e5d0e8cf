"""What a process takes of the machine, as the kernel counts it."""

from __future__ import annotations

import os
import re
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1024 * 1024


def cpu_s(pid: int) -> float:
    """CPU seconds that it has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _status(pid: int, key: str) -> int:
    match = re.search(rf"(?m)^{key}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None, key
    return int(match[1])


def rss_bytes(pid: int) -> int:
    """Memory that it has resident."""
    return 1024 * _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most memory that it has had resident."""
    return 1024 * _status(pid, "VmHWM")


def threads(pid: int) -> int:
    """How many threads it has."""
    return _status(pid, "Threads")
