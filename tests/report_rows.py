"""The report's row of `make bench`: a week of eight engines at 5 s, from the store to a page.

    python -m tests.report_rows [--store FILE]

Without a store one is made first (tests/full_weeks.py), which takes minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.full_weeks import day, repeated
from tests.weeks import DAY_S, START_S

SERVERS, DAYS, EVERY_S = 8, 7, 5.0
MOST_S, MOST_MB = 10.0, 400.0


def make(path: Path) -> int:
    """Write the week. Returns how many scrapes it has."""
    written = day(SERVERS, judged_s=0.0).write(path, every_s=EVERY_S)
    repeated(path, days=DAYS)
    return DAYS * written


def measure(store: Path, out: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds of one report, and its memory in MB."""
    argv = [
        sys.executable, "-m", "kneewatch.agent.cli", "report", "--store", str(store),
        "--to", str(START_S + DAYS * DAY_S), "--slo-ttft", "5s", "--slo-itl", "500ms",
        "--out", str(out),
    ]  # fmt: skip
    began_s = time.monotonic()
    process = subprocess.Popen(argv)
    _, status, used = os.wait4(process.pid, 0)
    took_s = time.monotonic() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"the report ended with status {process.returncode}")
    return took_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def row(store: Path | None) -> tuple[str, str, str]:
    """The row: what, ours, the bound."""
    with tempfile.TemporaryDirectory() as folder:
        path = store or Path(folder) / "week.db"
        if store is None:
            make(path)
        out = Path(folder) / "report.html"
        measure(path, out)  # the first reading fills the disk's cache
        took_s, cpu_s, taken_mb = measure(path, out)
        size_kb = out.stat().st_size / 1000
    what = f"report, {SERVERS} engines x {DAYS} d at {EVERY_S:g} s"
    ours = f"{took_s:.1f} s ({cpu_s:.1f} CPU), {taken_mb:.0f} MB, page {size_kb:.0f} kB"
    return what, ours, f"{MOST_S:g} s, {MOST_MB:g} MB"


def main() -> None:
    """Print the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    print(" | ".join(row(parser.parse_args().store)))


if __name__ == "__main__":
    main()
