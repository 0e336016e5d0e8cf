"""The report's rows of `make bench`: a week of eight engines at 5 s, from the store to a page, and
the week of a fleet from a real Prometheus.

    python -m tests.report_rows [--store FILE]
    python -m tests.report_rows --blocks FOLDER --to T --replicas N --every S

Without a store one is made first (tests/full_weeks.py), which takes minutes. `tests/fleet_weeks.py`
makes blocks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.collector.oracle import LOOPBACK, running
from tests.full_weeks import day, repeated
from tests.programs import require
from tests.weeks import DAY_S, START_S

SERVERS, DAYS, EVERY_S = 8, 7, 5.0
MOST_S, MOST_MB = 10.0, 400.0
FLEET_MOST_S, FLEET_MOST_MB = 60.0, 1000.0


def make(path: Path) -> int:
    """Write the week. Returns how many scrapes it has."""
    written = day(SERVERS, judged_s=0.0).write(path, every_s=EVERY_S)
    repeated(path, days=DAYS)
    return DAYS * written


def measure(out: Path, *asked: str) -> tuple[float, float, float]:
    """Wall and CPU seconds of one report, and its memory in MB."""
    argv = [
        sys.executable, "-m", "kneewatch.agent.cli", "report", *asked,
        "--slo-ttft", "5s", "--slo-itl", "500ms", "--out", str(out),
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
        asked = ("--store", str(path), "--to", str(START_S + DAYS * DAY_S))
        measure(out, *asked)  # the first reading fills the disk's cache
        took_s, cpu_s, taken_mb = measure(out, *asked)
        size_kb = out.stat().st_size / 1000
    what = f"report, {SERVERS} engines x {DAYS} d at {EVERY_S:g} s"
    ours = f"{took_s:.1f} s ({cpu_s:.1f} CPU), {taken_mb:.0f} MB, page {size_kb:.0f} kB"
    return what, ours, f"{MOST_S:g} s, {MOST_MB:g} MB"


def fleet_row(blocks: Path, *, to_s: float, replicas: int, every_s: int) -> tuple[str, str, str]:
    """The row of a fleet's week in a Prometheus: what, ours, the bound."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(require("prometheus"), blocks=blocks) as server,
    ):
        out = Path(folder) / "report.html"
        url = f"http://{LOOPBACK}:{server.port}"
        took_s, cpu_s, taken_mb = measure(out, "--prometheus", url, "--to", str(to_s))
        size_kb = out.stat().st_size / 1000
    what = f"report, {replicas} replicas x {DAYS} d at {every_s} s from Prometheus"
    ours = f"{took_s:.1f} s ({cpu_s:.1f} CPU), {taken_mb:.0f} MB, page {size_kb:.0f} kB"
    return what, ours, f"{FLEET_MOST_S:g} s, {FLEET_MOST_MB:g} MB for 1,000"


def main() -> None:
    """Print the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--blocks", type=Path)
    parser.add_argument("--to", type=float)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--every", type=int, default=60)
    given = parser.parse_args()
    if given.blocks is None:
        print(" | ".join(row(given.store)))
        return
    if given.to is None:
        parser.error("--blocks needs --to")
    found = fleet_row(given.blocks, to_s=given.to, replicas=given.replicas, every_s=given.every)
    print(" | ".join(found))


if __name__ == "__main__":
    main()
