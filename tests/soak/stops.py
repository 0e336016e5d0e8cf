"""SIGTERM at random moments while hostile targets are scraped: how long the end takes.

    python -m tests.soak.stops [200]

A real daemon scrapes healthy servers beside hostile ones and is told to stop at a random moment,
its start included. It must end within three seconds, and its history must open and still have all
that it had.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from kneewatch.agent.console import NO_DATA, OK
from kneewatch.agent.store.reader import Reader
from tests.agent.daemon.running import Daemon
from tests.agent.store.factories import EVER
from tests.soak.ill_targets import HOSTILE, STOP_S, both
from tests.waiting import PATIENCE_S

ALIVE_S = (0.0, 5.0)
"""How long a daemon runs before it is told to stop: from the time when it answers, or every fourth
time from its start."""

POLL_S = 0.1
"""Seconds before the end of the time that is promised, when a daemon is looked at."""

WELL = 8
ALLOWED = {OK, NO_DATA, -signal.SIGTERM}
"""Exit statuses: all is written, the log says that the last cycles are not, and the signal came
before the daemon took signals."""


def ended(daemon: Daemon) -> int:
    """The exit status. Of one that is late, the state of its threads is printed: those of the
    kernel, and by SIGABRT those of Python."""
    process = daemon.process
    with suppress(subprocess.TimeoutExpired):
        return process.wait(STOP_S - POLL_S)
    for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
        with suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()
            waits = (task / "wchan").read_text()
            print(f"{task.name}: {state[0]} in {waits}, CPU {state[11]} + {state[12]} ticks")
    with suppress(subprocess.TimeoutExpired):
        return process.wait(POLL_S)
    process.send_signal(signal.SIGABRT)
    status = process.wait(PATIENCE_S)
    print(daemon.log[-20_000:])
    return status


def ends_s(times: int, seed: int = 1) -> tuple[list[float], Counter[int], int]:
    """Seconds that each end took, how often each exit status came, and the cycles that the history
    no longer had afterwards."""
    rng, took_s, statuses, forgotten = random.Random(seed), list[float](), Counter[int](), 0
    with tempfile.TemporaryDirectory() as name, both(WELL, **HOSTILE) as urls:
        folder, store = Path(name), Path(name) / "kneewatch.db"
        exporter, well = urls.pop("gpus")[0], urls["live"]
        file_sd, had = folder / "targets.json", 0
        file_sd.write_text(json.dumps([{"targets": [u for some in urls.values() for u in some]}]))
        own = ("--interval", "1s", "--gpu-metrics", exporter, "--file-sd", file_sd)
        for at in range(times):
            with Daemon(folder, *own, env={"PYTHONFAULTHANDLER": "1"}) as daemon:
                assert at % 4 == 0 or daemon.url
                time.sleep(rng.uniform(*ALIVE_S))
                since_s = time.monotonic()
                daemon.process.send_signal(signal.SIGTERM)
                status = ended(daemon)
                took_s.append(time.monotonic() - since_s)
                statuses[status] += 1
                assert "Traceback" not in daemon.log, daemon.log
            if store.exists():
                with closing(Reader(store)) as reader:
                    has = sum(len(reader.scrapes(url, **EVER).times) for url in well)
                forgotten, had = forgotten + max(had - has, 0), has
    return took_s, statuses, forgotten


def main() -> None:
    """Try so often, print what happened."""
    took_s, statuses, forgotten = ends_s(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    print(
        f"{len(took_s)} ends: median {statistics.median(took_s):.2f} s, at most {max(took_s):.2f} s"
        f"; exit statuses {dict(statuses)}; cycles forgotten {forgotten}"
    )
    if max(took_s) > STOP_S or forgotten or not statuses.keys() <= ALLOWED:
        sys.exit("not as promised")


if __name__ == "__main__":
    main()
