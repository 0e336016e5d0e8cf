"""The daemon's main loop: the jobs of all targets, signals, changed files, the service manager."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

from kneewatch.agent.daemon.cycle import Sinks, Watch
from kneewatch.agent.daemon.discovery import Discovery
from kneewatch.agent.daemon.process import Systemd
from kneewatch.agent.daemon.scheduler import Scheduler, phase_ratio
from kneewatch.agent.daemon.target_profile import TargetProfile, TargetProfiles, basis
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import KneewatchError

log = logging.getLogger(__name__)

FIRST_CYCLE_S = 0.02
"""First cycles are so far apart on average: a page is dearest when it is first seen."""


class TargetJobs:
    """Watches what it is told to, and goes on with what it watched already.

    `on_targets` is called with the targets whenever they may be others.
    """

    def __init__(
        self,
        clockwork: Scheduler,
        sinks: Sinks,
        *,
        on_targets: Callable[[Sequence[TargetSpec]], None] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clockwork, self._sinks, self._wall = clockwork, sinks, wall
        self._on_targets = on_targets
        self._watches: dict[str, Watch] = {}
        self._specs: tuple[TargetSpec, ...] = ()

    def specs(self) -> Sequence[TargetSpec]:
        """What is watched. Safe between threads."""
        return self._specs

    @property
    def all_seen(self) -> bool:
        """Whether every target has had a cycle."""
        return all(watch.cycles for watch in self._watches.values())

    def apply(self, specs: Sequence[TargetSpec], found: Mapping[str, TargetProfile]) -> None:
        """Watch these targets and no others. What was seen of a target is kept where it is still
        the same address, judged by the same.

        Raises:
            CaptureError: a capture cannot be played; nothing has changed then.
        """
        watches: dict[str, Watch] = {}
        for spec in specs:
            old, basis = self._watches.get(spec.name), found[spec.name]
            same = old is not None and old.spec.address == spec.address and old.basis == basis
            watches[spec.name] = (
                old
                if old is not None and same
                else Watch(spec, basis, self._sinks, wall=self._wall)
            )
        before, self._watches, self._specs = self._watches, watches, tuple(specs)
        for name, watch in before.items():
            if watches.get(name) is not watch:
                self._end(name, watch)
        if self._on_targets:
            self._on_targets(self._specs)
        for spec in specs:
            self._go_on(spec, before.get(spec.name))
        log.info("targets are watched targets=%s kept=%s", len(specs), self._kept(before))

    def _go_on(self, spec: TargetSpec, before: Watch | None) -> None:
        watch, interval_s = self._watches[spec.name], float(spec.settings["interval_s"])
        if watch is not before:
            spread_s = FIRST_CYCLE_S * len(self._watches)
            soon = spread_s <= interval_s / 2
            first_in_s = phase_ratio(spec.name) * spread_s if soon else None
            self._clockwork.put(spec.name, watch, interval_s=interval_s, first_in_s=first_in_s)
            return
        other_interval = watch.spec.settings["interval_s"] != interval_s
        watch.adopt(spec)
        if other_interval:
            self._clockwork.put(spec.name, watch, interval_s=interval_s)

    def _end(self, name: str, watch: Watch) -> None:
        self._clockwork.drop(name)
        watch.retire()
        if name not in self._watches:
            self._sinks.board.drop(name)

    def _kept(self, before: Mapping[str, Watch]) -> int:
        return sum(before.get(name) is watch for name, watch in self._watches.items())


# --- The daemon's main loop: signals, files that change, the clock, the service manager -----------


TICK_S = 0.5
READY_AFTER_S = 10.0
SILENT_S = 10.0
"""A scheduler that has run nothing for so long makes no progress: it has a job every second."""

STOPS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOPS, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the supervisor looks after. `reload` reads the settings again, `take_up` passes them on
    to what is not a target; `address` is where people look."""

    clockwork: Scheduler
    fleet: TargetJobs
    roster: Discovery
    board: Board
    systemd: Systemd
    reload: Callable[[], Settings]
    take_up: Callable[[Settings], None]
    address: str


class Supervisor:
    """Runs until it is told to stop."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._roster, self._bases = parts, parts.roster, TargetProfiles()
        # A signal handler may only do what is safe in the middle of anything else: this put is.
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._ready = False
        self._status = ""

    def begin(self) -> None:
        """Watch the configured targets.

        Raises:
            KneewatchError: one of them cannot be watched.
        """
        self._watch(self._roster)

    def run(self, for_s: float | None = None) -> None:
        """Returns after SIGTERM, SIGINT or `for_s`; within `handled`."""
        began_s = time.monotonic()
        while for_s is None or time.monotonic() - began_s < for_s:
            self._tick(time.monotonic() - began_s)
            got = self._next_signal()
            if got in STOPS:
                log.info("stopping signal=%s", signal.Signals(got).name)
                break
            if got == signal.SIGHUP:
                self._reload()
        self._parts.systemd.stopping()

    def _tick(self, elapsed_s: float) -> None:
        parts = self._parts
        step_s = parts.clockwork.check()
        if step_s:
            log.warning("the clock was set; cycles are planned anew step_s=%.1f", step_s)
        if self._roster.poll():
            self._follow_files()
        if not self._ready and (parts.fleet.all_seen or elapsed_s > READY_AFTER_S):
            self._ready = True
            parts.systemd.ready(self._told())
            log.info("ready targets=%s after_s=%.1f", len(parts.fleet.specs()), elapsed_s)
        if parts.clockwork.silent_s < SILENT_S:
            parts.systemd.alive()
        if self._ready and (told := self._told()) != self._status:
            self._status = told
            parts.systemd.status(told)

    def _watch(self, roster: Discovery) -> None:
        specs = roster.specs()
        self._parts.fleet.apply(specs, self._bases.of(specs))
        self._roster = roster

    def _follow_files(self) -> None:
        try:
            self._watch(self._roster)
        except KneewatchError as error:
            log.error("targets stay as they were error=%s", error)  # noqa: TRY400 - no bug

    def _reload(self) -> None:
        parts = self._parts
        parts.systemd.reloading()
        try:
            settings = parts.reload()
            basis(settings)  # files that are empty or broken now may bring targets later
            self._watch(self._roster.renewed(settings))
            parts.take_up(settings)
            log.info("settings were read again targets=%s", len(parts.fleet.specs()))
        except KneewatchError as error:
            log.error("settings stay as they were error=%s", error)  # noqa: TRY400 - no bug
        parts.systemd.ready(self._told())

    def _told(self) -> str:
        states = self._parts.board.states()
        answering = sum(not state.failing for state in states)
        watched = len(self._parts.fleet.specs())
        return f"{watched} targets, {answering} answer; {self._parts.address}"

    def _next_signal(self) -> int | None:
        try:
            return self._signals.get(timeout=TICK_S)
        except Empty:
            return None

    @contextmanager
    def handled(self) -> Generator[None]:
        """Within it signals wait for the loop; a second one to stop ends the process at once."""

        def handle(number: int, _frame: FrameType | None) -> None:
            self._signals.put(number)
            if number in STOPS:
                for stop in STOPS:
                    signal.signal(stop, signal.SIG_DFL)

        before = {one: signal.signal(one, handle) for one in SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler or signal.SIG_DFL)
