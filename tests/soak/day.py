"""A day of eight engines at 5 s in accelerated time: memory at its start and end, and the history.

    python -m tests.soak.day [--hours 24] [--trace]

Every page is a real GET of a real server, every cycle the daemon's own code, history, board and GPU
page included; only the clock is the program's. `--trace` tells at the end which lines hold the
memory that has come since the first hour (slow).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from kneewatch.agent.console import infrequent_gc
from kneewatch.agent.daemon import supervisor as process
from kneewatch.agent.daemon.cycle import Sinks, TargetWatch
from kneewatch.agent.daemon.discovery import target_profile
from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.daemon.periodic_jobs import phase_count, phase_ratio
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import Store
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import argument_specs
from tests.agent.daemon.factories import settings
from tests.soak.process import MIB, rss_bytes
from tests.soak.servers import servers

TARGETS = 8
INTERVAL_S = 5.0
PHASES = phase_count(TARGETS, INTERVAL_S)
GPU_EVERY = 3
START_S = 1_795_000_000.0
HOUR_S = 3600.0
HOUR_TURNS = round(HOUR_S / INTERVAL_S)
QUEUED_MOST = 64
"""The history's writer is not left further behind: time would not run so fast."""

GROWS_BYTES = 8 * MIB
"""Growing by more from the second hour to the last would be trouble within months."""

TRACED_LINES = 15


class Clock(Struct):
    """The time as the program says."""

    now_s: float = START_S

    def __call__(self) -> float:
        """Now."""
        return self.now_s


class Hour(Struct, frozen=True):
    """The end of an hour: memory, what the history takes, cycles, and those that failed or that
    the history has not got."""

    rss_bytes: int
    store_bytes: int
    cycles: int
    lost: int

    def __str__(self) -> str:
        """The figures in words."""
        return (
            f"RSS {self.rss_bytes / MIB:.1f} MiB, history {self.store_bytes / MIB:.1f} MiB, "
            f"cycles {self.cycles}, failed or not written {self.lost}"
        )


class Node(Struct):
    """Eight targets under watch, their GPUs, and where all of it goes."""

    watches: Sequence[TargetWatch]
    gpus: GpuSources
    store: Store
    board: Board
    clock: Clock = field(default_factory=Clock)

    def hour(self, number: int) -> Hour:
        """An hour of cycles, from 0 on."""
        for at in range(number * HOUR_TURNS, (number + 1) * HOUR_TURNS):
            self._turn(START_S + at * INTERVAL_S, gpus=at % GPU_EVERY == 0)
        while self.store.stats().queued:
            time.sleep(0.01)
        gc.collect()
        states, stats = self.board.states(), self.store.stats()
        cycles, failed = (sum(s.cycles for s in states), sum(s.failures for s in states))
        return Hour(rss_bytes(os.getpid()), stats.bytes, cycles, failed + cycles - stats.written)

    def _turn(self, t_s: float, *, gpus: bool) -> None:
        self.clock.now_s = t_s
        if gpus:
            self.gpus.collect(t_s)
        for watch in self.watches:
            self.clock.now_s = t_s + phase_ratio(watch.spec.name, PHASES) * INTERVAL_S
            watch.cycle()
        while self.store.stats().queued > QUEUED_MOST:
            self.store.flush()
            time.sleep(0.001)


@contextmanager
def node(path: Path) -> Generator[Node]:
    """A node whose history is at `path`."""
    clock = Clock()
    with servers(turn=TARGETS, gpu=1) as urls, infrequent_gc():
        daemon_settings = settings(interval_s=INTERVAL_S, gpu_metrics=urls["gpu"][0])
        specs, board = argument_specs(urls["turn"], daemon_settings), Board()
        specs.sort(key=lambda spec: phase_ratio(spec.name, PHASES))
        gpus = GpuSources(specs, daemon_settings, monotonic=clock)
        profile = target_profile(daemon_settings)
        store = Store.open(path, retention=Retention(), clock=clock)
        sinks = Sinks(board, store.put, gpus=gpus)
        watches = [TargetWatch(spec, profile, sinks, wall=clock) for spec in specs]
        process.tune_process()
        try:
            yield Node(watches, gpus, store, board, clock)
        finally:
            for watch in watches:
                watch.retire()
            gpus.close(1.0)
            store.close(60.0)


def main() -> None:
    """Run, print, compare the last hour with the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    began_s, ended, first = time.monotonic(), list[Hour](), None
    with tempfile.TemporaryDirectory() as folder, node(Path(folder) / "day.db") as day_node:
        if args.trace:
            tracemalloc.start()
        for number in range(args.hours):
            ended.append(day_node.hour(number))
            print(f"hour {number + 1}: {ended[-1]}", flush=True)
            if args.trace and first is None:
                first = tracemalloc.take_snapshot()
        if first is not None:
            for line in tracemalloc.take_snapshot().compare_to(first, "lineno")[:TRACED_LINES]:
                print(line)
    print(f"{args.hours} hours in {time.monotonic() - began_s:.0f} s")
    grown_bytes = ended[-1].rss_bytes - ended[min(1, len(ended) - 1)].rss_bytes
    print(f"memory has grown by {grown_bytes / MIB:.1f} MiB since the second hour")
    if grown_bytes > GROWS_BYTES or ended[-1].lost:
        sys.exit("memory grows, or cycles were lost")


if __name__ == "__main__":
    main()
