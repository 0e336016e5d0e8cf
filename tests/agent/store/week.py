"""A week of eight engines at 5 s in accelerated time: what the store takes, and what it costs.

    python -m tests.agent.store.week [--days 7] [--interval 5] [--keep FILE]

Prints the bytes on disk, bytes and CPU for each engine and scrape, and times of reading.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.rules.rule import DAY_S
from tests.agent.store.factories import Span
from tests.agent.store.load import Server, fleet
from tests.agent.store.snapshots import snapshots
from tests.reports.documents import document_then

START_S = 1_795_000_000.0
BUDGET_BYTES = 400e6
"""For eight engines at 5 s over a week."""

QUEUED_MOST = 200


def cycles(servers: list[Server], *, days: float, interval_s: float) -> Iterator[Cycle]:
    """The cycles of all servers in the order of time; each has its own phase and some jitter."""
    rng = random.Random(7)
    for at in range(round(days * DAY_S / interval_s)):
        for phase, server in enumerate(servers):
            offset_s = interval_s * phase / len(servers) + abs(rng.gauss(0, 0.003))
            yield server.cycle(START_S + at * interval_s + offset_s)


def write(path: Path, *, days: float, interval_s: float) -> tuple[int, float]:
    """Engine-scrapes written, and the CPU that the store took for each, in milliseconds."""
    now_s = START_S
    store = Store.open(path, retention=Retention(), clock=lambda: now_s)
    writer = next(thread for thread in threading.enumerate() if thread.name == "store")
    clock = time.pthread_getcpuclockid(writer.ident or 0)
    scrapes, put_s, said_s = 0, 0.0, time.monotonic()
    for cycle in cycles(fleet(start_s=START_S), days=days, interval_s=interval_s):
        scrapes += len(cycle.engines)
        now_s = cycle.t_s
        before_s = time.thread_time()
        store.put(cycle)
        put_s += time.thread_time() - before_s
        while store_is_behind(store):
            store.flush()
            time.sleep(0.001)
        if time.monotonic() - said_s > 30:
            said_s = time.monotonic()
            rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            done = (now_s - START_S) / DAY_S
            print(f"day {done:.2f}: {store.stats()}, RSS {rss_mib:.0f} MiB", file=sys.stderr)
    while store.stats().queued:
        time.sleep(0.01)
    cpu_s = put_s + time.clock_gettime(clock)
    store.close(60.0)
    stats = store.stats()
    if stats.dropped or stats.last_error:
        sys.exit(f"not all was written: {stats}")
    return scrapes, 1000 * cpu_s / scrapes


def store_is_behind(store: Store) -> bool:
    """Whether the writer has to catch up before more cycles come."""
    return len(store._inbox) > QUEUED_MOST  # pyright: ignore[reportPrivateUsage]


def read(path: Path) -> None:
    """How long it takes to read what charts, reports and past views read."""
    reader = Reader(path)
    engine = reader.engines()[-3]
    span: Span = {"from_s": engine.first_s, "to_s": engine.last_s}

    def timed(what: str, answer: object, since_s: float) -> None:
        print(f"{what}: {answer} in {1000 * (time.monotonic() - since_s):.1f} ms")

    since_s = time.monotonic()
    keys = ("kv_usage_ratio", "ttft_p99_s", "running")
    timed("3 signals, all", len(reader.signals(engine.id, keys, **span).times), since_s)
    since_s = time.monotonic()
    hours: Span = {"from_s": engine.last_s - 6 * 3600, "to_s": engine.last_s}
    timed("3 signals, 6 h", len(reader.signals(engine.id, keys, **hours).times), since_s)
    since_s = time.monotonic()
    document = document_then(
        reader, engine.id, engine.first_s + 0.6 * (engine.last_s - engine.first_s)
    )
    timed("document in the past", document and document["health"], since_s)
    since_s = time.monotonic()
    timed("counters, all", len(snapshots(path, engine.id, **span)), since_s)
    since_s = time.monotonic()
    timed("intervals, all", len(reader.intervals(**span)), since_s)
    since_s = time.monotonic()
    timed("scrapes, all", len(reader.scrapes(engine.target, **span).times), since_s)
    reader.close()


def main() -> None:
    """Write, print, compare with the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "week.db"
        since_s = time.monotonic()
        scrapes, cpu_ms = write(path, days=args.days, interval_s=args.interval)
        taken_bytes = path.stat().st_size
        a_week = 8 * 7 * DAY_S / 5
        print(f"engine-scrapes: {scrapes}")
        print(f"bytes: {taken_bytes}")
        print(f"bytes per engine-scrape: {taken_bytes / scrapes:.1f}")
        print(f"a week of 8 engines at 5 s: {taken_bytes / scrapes * a_week / 1e6:.0f} MB")
        print(f"CPU of put and write per engine-scrape: {cpu_ms:.3f} ms")
        print(f"seconds: {time.monotonic() - since_s:.0f}")
        read(path)
        if taken_bytes / scrapes * a_week > BUDGET_BYTES:
            sys.exit("over the budget")


if __name__ == "__main__":
    main()
