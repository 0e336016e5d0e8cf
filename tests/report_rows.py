"""The report's rows of `make bench`: a week of eight engines at 5 s, from the store to a page, and
the week of a fleet from a real Prometheus, with what recording rules keep.

    python -m tests.report_rows [--store FILE] [--replicas 1000] [--every 120] [--url URL --to T]

Without a store one is made first (tests/full_weeks.py), without a URL a Prometheus is filled
(tests/fleet_weeks.py): each takes minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.collector.oracle import LOOPBACK, running
from tests.fleet_replica import HOUR_S
from tests.fleet_weeks import FleetWeek
from tests.full_weeks import day, repeated
from tests.programs import require
from tests.weeks import DAY_S, START_S

SERVERS, DAYS, EVERY_S = 8, 7, 5.0
MOST_S, MOST_MB = 10.0, 400.0
REPLICAS, FLEET_EVERY_S = 1000, 120
FLEET_MOST_S, FLEET_MOST_MB = 60.0, 1000.0

Row = tuple[str, str, str]
"""What, our figure, the bound."""


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


def row(store: Path | None) -> Row:
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


def fleet_row(replicas: int, every_s: int) -> Row:
    """The row of a fleet's week in a Prometheus that is filled for it: what, ours, the bound.

    It is scraped as rarely as the recorded increases of five minutes allow: with two samples.
    """
    end_s = int(time.time()) // HOUR_S * HOUR_S
    week = FleetWeek(
        replicas, end_s=end_s, days=DAYS, every_s=every_s, recorded=True, tiered=True
    )  # fmt: skip
    with running(require("prometheus")) as server:
        samples = week.send(server)
        url = f"http://{LOOPBACK}:{server.port}"
        scraped = f"{replicas} replicas at {every_s} s", f"{samples / 1e6:.0f} M samples"
        return fleet_row_of(url, end_s, *scraped)


def fleet_row_of(url: str, to_s: float, *what: str) -> Row:
    """The same of a Prometheus that is there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.html"
        took_s, cpu_s, taken_mb = measure(out, "--prometheus", url, "--to", str(to_s))
        size_kb = out.stat().st_size / 1000
    ours = f"{took_s:.1f} s ({cpu_s:.1f} CPU), {taken_mb:.0f} MB, page {size_kb:.0f} kB"
    bound = f"{FLEET_MOST_S:g} s, {FLEET_MOST_MB:g} MB"
    return ", ".join(("report from Prometheus", f"{DAYS} d", *what)), ours, bound


def report_rows() -> Iterator[Row]:
    """Both, each as soon as it is measured."""
    yield row(None)
    yield fleet_row(REPLICAS, FLEET_EVERY_S)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--every", type=int, default=FLEET_EVERY_S)
    parser.add_argument("--url")
    parser.add_argument("--to", type=float)
    given = parser.parse_args()
    if given.url is None:
        print(" | ".join(row(given.store)), flush=True)
        print(" | ".join(fleet_row(given.replicas, given.every)))
    elif given.to is None:
        parser.error("--url needs --to")
    else:
        print(" | ".join(fleet_row_of(given.url, given.to)))


if __name__ == "__main__":
    main()
