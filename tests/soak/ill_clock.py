"""A clock that is set back and forward by an hour under the daemon's own scheduler and history."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from kneewatch.agent.daemon.cycle import Sinks
from kneewatch.agent.daemon.periodic_jobs import DueQueue
from kneewatch.agent.daemon.supervisor import TargetJobs
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import argument_specs
from tests.agent.daemon.factories import settings
from tests.agent.daemon.test_scheduler import Clock
from tests.agent.store.factories import EVER
from tests.soak.fault_outcome import FaultOutcome
from tests.soak.servers import servers

TARGETS = 8
INTERVAL_S = 1.0
SPAN_S = 12.0
HOUR_S = 3600.0
WAIT_S = 2 * INTERVAL_S
"""The longest that a target may be left alone around a step: what is left of one interval, and one
on the new grid."""


class Noted:
    """A history that also notes when cycles came, by a clock that nobody sets."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.came_s: dict[str, list[float]] = {}

    def put(self, cycle: Cycle) -> None:
        """Note and pass on."""
        self.came_s.setdefault(cycle.target, []).append(time.monotonic())
        self._store.put(cycle)


def worst_wait_s(came_s: Sequence[float]) -> float:
    """The longest time between two cycles."""
    return max((after - before for before, after in pairwise(came_s)), default=float("inf"))


def clock_set() -> FaultOutcome:
    """An hour forward, an hour back, an hour back again."""
    with (
        tempfile.TemporaryDirectory() as name,
        servers(live=TARGETS) as urls,
    ):
        wall = Clock()
        path, daemon_settings = Path(name) / "kneewatch.db", settings(interval_s=INTERVAL_S)
        specs = argument_specs(urls["live"], daemon_settings)
        store = Store.open(path, retention=Retention(), clock=wall)
        noted, board, clockwork = Noted(store), Board(), DueQueue(wall=wall)
        fleet = TargetJobs(clockwork, Sinks(board, noted.put), wall=wall)
        clockwork.start()
        fleet.apply(specs)
        for step_s in (0.0, HOUR_S, -HOUR_S, -HOUR_S):
            wall.set_by_s += step_s
            time.sleep(SPAN_S)
        clockwork.stop()
        time.sleep(INTERVAL_S)
        unknown = sum(
            diagnosis.health == "unknown" for s in board.states() for diagnosis in s.diagnoses
        )
        store.close(30.0)
        with closing(Reader(path)) as reader:
            stored = {target: len(reader.scrapes(target, **EVER).times) for target in urls["live"]}
    put = {name: len(came_s) for name, came_s in noted.came_s.items()}
    worst_s = max(map(worst_wait_s, noted.came_s.values()))
    lines = (
        f"longest time between two cycles of a target: {worst_s:.2f} s at {INTERVAL_S:g} s",
        f"cycles {sum(put.values())}, in the history {sum(stored.values())}",
        f"targets told as unknown at the end: {unknown} of {TARGETS}",
    )
    return FaultOutcome("clock set forward, back and back by an hour", lines,
                stored == put and worst_s < WAIT_S and not unknown)  # fmt: skip
