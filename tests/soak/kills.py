"""kill -9 of the daemon at random moments under load: what is left of the history.

    python -m tests.soak.kills [200]

A real daemon scrapes eight real servers and is killed at a random moment, its start included. The
history must open and be whole, hold all that it held before, and for each target every page that
its server has given, but for the one of the cycle that was running. The next daemon goes on with
the same file. (tests/agent/store/kills.py does the same to the store alone, at its full speed.)
"""

from __future__ import annotations

import math
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.store.reader import Reader
from tests.agent.daemon.running import Daemon
from tests.agent.store.factories import EVER
from tests.soak.servers import served_by, servers

TARGETS = 8
INTERVAL = "0.2s"
ALIVE_S = (0.0, 2.0)
"""How long a daemon runs before it is killed: after its first cycles, or every fourth time after
its start."""

FIRST_PAGES = 2
"""A daemon that has asked each target for its second page has finished its first cycle."""

SCRAPES_WITHIN_S = 120.0

SIGNAL = "running"
"""A signal that every page tells."""

Times = Mapping[str, Sequence[float]]


class Left(Struct, frozen=True):
    """What one kill left: cycles that the history has, pages given for which it has none (of the
    worst target), and cycles that it no longer has."""

    cycles: int
    missing: int
    forgotten: int


def scrapes_in(store: Path, names: Sequence[str]) -> Times:
    """When each target was scraped, as the history has it.

    Raises:
        AssertionError: it is not whole, or a scrape is there in part.
    """
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return dict.fromkeys(names, ())  # killed before it had made its tables
    times: dict[str, list[float]] = {}
    with closing(Reader(store)) as reader:
        for name in names:
            scrapes = reader.scrapes(name, **EVER)
            times[name] = [t for at, t in enumerate(scrapes.times) if at not in scrapes.failed]
            signals = [
                reader.signals(engine.id, [SIGNAL], **EVER) for engine in reader.engines(name)
            ]
            whole_cycles = sum(
                not math.isnan(value)
                for engine_signals in signals
                for value in engine_signals.values[SIGNAL]
            )
            assert whole_cycles == len(times[name]), (
                f"{name}: {whole_cycles} of {len(times[name])} cycles whole"
            )
    return times


def kill_once(
    folder: Path,
    names: Sequence[str],
    before: Times,
    alive_s: float,
    *,
    interval: str,
    starting: bool,
) -> tuple[Times, Left]:
    """One daemon, killed `alive_s` after its first cycles (`starting`: after its start): what the
    history has then."""
    store, given = folder / "kneewatch.db", served_by(names[0])
    began_s = time.time()
    with Daemon(folder, *names, "--interval", interval, "--gpu-metrics", "none") as daemon:
        if not starting:
            wait_for_pages(names, given)
        time.sleep(alive_s)
        daemon.process.send_signal(signal.SIGKILL)
        assert daemon.process.wait() == -signal.SIGKILL, daemon.log
        assert "Traceback" not in daemon.log, daemon.log
    if not store.exists():
        return before, Left(0, 0, 0)
    after, served = scrapes_in(store, names), served_by(names[0])
    forgotten = missing = 0
    for name in names:
        had, has = before.get(name, ()), after[name]
        forgotten += len(set(had) - set(has))
        new = sum(t_s >= began_s for t_s in has)
        missing = max(missing, served.get(name, 0) - given.get(name, 0) - new)
    return after, Left(sum(map(len, after.values())), missing, forgotten)


def wait_for_pages(names: Sequence[str], given: Mapping[str, int]) -> None:
    """Wait until each server has given FIRST_PAGES more pages than `given`."""
    until_s = time.monotonic() + SCRAPES_WITHIN_S
    while True:
        served = served_by(names[0])
        if all(served.get(name, 0) - given.get(name, 0) >= FIRST_PAGES for name in names):
            return
        assert time.monotonic() < until_s, f"no cycle within {SCRAPES_WITHIN_S:g} s: {served}"
        time.sleep(0.05)


def kill_often(folder: Path, times: int, *, interval: str = INTERVAL, seed: int = 1) -> list[Left]:
    """So many daemons, one after the other on one history."""
    rng, left = random.Random(seed), list[Left]()
    scrape_times: Times = {}
    with servers(turn=TARGETS) as urls:
        for turn in range(times):
            scrape_times, loss = kill_once(
                folder, urls["turn"], scrape_times, rng.uniform(*ALIVE_S),
                interval=interval, starting=turn % 4 == 1)  # fmt: skip
            left.append(loss)
    return left


def main() -> None:
    """Kill, print the figures."""
    times = int(sys.argv[1]) if sys.argv[1:] else 200
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        left = kill_often(Path(folder), times)
    print(f"kills: {times} in {time.monotonic() - began_s:.0f} s; the history opened and was whole")
    print(f"cycles in the history: {left[-1].cycles}")
    print(f"cycles missing of a target after a kill: {max(loss.missing for loss in left)} at most")
    print(f"kills that cost a running cycle: {sum(loss.missing > 0 for loss in left)}")
    print(f"cycles that had been there and were not any more: {sum(o.forgotten for o in left)}")
    if any(loss.missing > 1 or loss.forgotten for loss in left):
        sys.exit("more than the running cycle was lost")


if __name__ == "__main__":
    main()
