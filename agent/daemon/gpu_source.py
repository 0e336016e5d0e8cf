"""One source of GPU numbers: its state, its backoff, and the thread that it may hang. I/O edge."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock

from kneewatch.agent.board import SourceState
from kneewatch.agent.daemon.pool import DaemonPool
from kneewatch.collector.base import CollectError
from kneewatch.collector.gpu_pages import GPUS_LOST, GpuCollector, GpuPage
from kneewatch.diagnose.gpus import GpuMonitor

log = logging.getLogger(__name__)

HANG_S = 10.0
"""A reading that has not come after so long is hanging."""

BACKOFF_MOST_S = 300.0
LOOK_AGAIN_S = 600.0
"""Until the next look where there is no GPU."""

NO_GPU = "no_gpu"
EARLY_S = 1.0
"""Readings come a little early: one that is due so soon is due."""


@dataclass(slots=True)
class Run:
    """A reading under way."""

    t_s: float
    started_s: float
    done: Event = field(default_factory=Event)
    given_up: bool = False


class GpuSource:
    """A collector that is run in one thread at a time, and the monitors that read its pages.

    `optional`: that there is no GPU is normal.
    """

    def __init__(
        self,
        collector: GpuCollector,
        *,
        interval_s: float,
        hang_s: float = HANG_S,
        optional: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collector, self._interval_s, self._hang_s = collector, interval_s, hang_s
        self._optional, self._monotonic = optional, monotonic
        self._lock = Lock()
        self._monitors: dict[str, GpuMonitor] = {}
        self._run: Run | None = None
        self._last: tuple[float, GpuPage] | CollectError | None = None
        self._failing, self._due_s = 0, float("-inf")
        self._retired = False
        self._told: set[str] = set()
        self.state: SourceState | None = None
        """How it did; None before the first reading, and where there is no GPU."""

    def subscribe(self, target: str, monitor: GpuMonitor) -> None:
        """Give a target's monitor the newest page, and all that come."""
        with self._lock:
            self._monitors[target] = monitor
            if isinstance(self._last, CollectError):
                monitor.failed(str(self._last), lost=self._last.kind == GPUS_LOST)
            elif self._last is not None:
                monitor.take(*self._last)
            else:
                monitor.failed("the GPUs have not been read yet")

    def unsubscribe(self, target: str) -> None:
        """Give a target no more pages."""
        with self._lock:
            self._monitors.pop(target, None)

    def start(self, pool: DaemonPool, t_s: float) -> Run | None:
        """Begin a reading where one is due and none is under way."""
        with self._lock:
            now_s = self._monotonic()
            if self._run is not None or self._retired or now_s + EARLY_S < self._due_s:
                return None
            run = self._run = Run(t_s, now_s)
        try:
            pool.run(lambda: self._read(pool, run))
        except RuntimeError as error:
            with self._lock:
                self._run = None
                self._fail(CollectError(str(error), kind="internal"), t_s, 0.0)
            return None
        return run

    def give_up(self, t_s: float) -> None:
        """Say of a reading that takes too long that it hangs; what it brings is not taken."""
        with self._lock:
            run = self._run
            late_s = 0.0 if run is None else self._monotonic() - run.started_s
            if run is None or late_s < self._hang_s:
                return
            why = f"{self._collector.name} has not answered for {late_s:.0f} s: it hangs"
            hint = "nvidia-smi on the node says whether the driver does"
            error = CollectError(why, kind="timeout", hint=hint)
            if run.given_up:
                self._show(error, t_s, late_s)
            else:
                run.given_up = True
                self._fail(error, t_s, late_s)

    def retire(self, pool: DaemonPool) -> None:
        """Read no more, and close the collector once no reading is under way."""
        with self._lock:
            self._retired = True
            self._monitors.clear()
            if self._run is not None:
                return
        pool.run(self._collector.close)

    def _read(self, pool: DaemonPool, run: Run) -> None:
        taken, failed = None, None
        try:
            taken = self._collector.collect()
        except CollectError as error:
            failed = error
        except Exception as error:
            log.exception("reading GPUs crashed; going on source=%s", self._collector.name)
            failed = CollectError(f"a bug: {error!r}", kind="internal", hint="the log has more")
        with self._lock:
            self._run = None
            took_s = self._monotonic() - run.started_s
            if self._retired:
                pool.run(self._collector.close)
            elif taken is not None and not run.given_up:
                self._take(taken, run.t_s, took_s)
            elif failed is not None and not run.given_up:
                self._fail(failed, run.t_s, took_s)
        run.done.set()

    def _take(self, taken: GpuPage, t_s: float, took_s: float) -> None:
        name = self._collector.name
        if self._failing:
            log.info("GPU source answers again source=%s failures=%d", name, self._failing)
        self._failing, self._last = 0, (t_s, taken)
        self._due_s = float("-inf")
        lost = [note.text for note in taken.notes if note.lost]
        for text in lost:
            self._tell(logging.ERROR, text)
        self._told.intersection_update(lost)
        error = "; ".join(lost)
        self.state = SourceState(name, t_s, not lost, took_s, error)
        for monitor in self._monitors.values():
            monitor.take(t_s, taken)

    def _fail(self, error: CollectError, t_s: float, took_s: float) -> None:
        said = _with_hint(error)
        if self._is_normal(error):
            wait_s = LOOK_AGAIN_S
            self._tell(logging.INFO, said)
        else:
            if not self._failing:
                log.warning("GPU source failed source=%s error=%s", self._collector.name, said)
            wait_s = min(self._interval_s * 2 ** min(self._failing, 8), BACKOFF_MOST_S)
            self._failing += 1
        self._due_s = self._monotonic() - took_s + max(wait_s, self._interval_s)
        self._show(error, t_s, took_s)

    def _show(self, error: CollectError, t_s: float, took_s: float) -> None:
        self._last = error
        name, said = self._collector.name, _with_hint(error)
        normal = self._is_normal(error)
        self.state = None if normal else SourceState(name, t_s, False, took_s, said)
        for monitor in self._monitors.values():
            monitor.failed(str(error), lost=error.kind == GPUS_LOST)

    def _is_normal(self, error: CollectError) -> bool:
        return self._optional and error.kind == NO_GPU

    def _tell(self, level: int, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.log(level, "told of the GPUs source=%s what=%s", self._collector.name, text)


def _with_hint(error: CollectError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)
