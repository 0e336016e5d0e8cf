"""The daemon's main loop: schedules the jobs of all targets, handles signals, reloads and changed
files, sets process limits, and notifies systemd. I/O edge."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING

from kneewatch.agent import logs
from kneewatch.agent.console import OK
from kneewatch.agent.daemon.cycle import Sinks, TargetWatch
from kneewatch.agent.daemon.discovery import Discovery, target_profile
from kneewatch.agent.daemon.periodic_jobs import (
    OWN_CLOCK,
    STEP_S,
    DueQueue,
    phase_count,
    phase_ratio,
)
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.notify.receivers import receivers
from kneewatch.agent.report.schedule import ReportJob
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stream import AcceptRequest, EngineAcceptance
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.diagnosis_config import Profile

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetWatch


M_ARENA_MAX = -8
MALLOC_ARENAS = 2
OPEN_FILES = 65_536
"""Number of files that the process may open. Each target keeps a connection open, and the usual
limit is 1,024."""


def tune_process() -> None:
    """Limit malloc arenas, return freed memory to the system after the imports, and raise the limit
    on open files.

    glibc gives each allocating thread its own arena, up to 8 per core, and rarely returns an
    arena's memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library, such as musl
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, MALLOC_ARENAS)
        libc.malloc_trim(0)


# --- Notifications to systemd ---------------------------------------------------------------------


def notify_systemd(name: str, *lines: str) -> None:
    """Send lines to systemd's socket `name`, as sd_notify does; nothing happens if that is empty or
    nobody reads there. systemd ignores lines that it did not ask for."""
    if not name:
        return
    # A leading @ stands for the zero byte of an abstract address.
    address = "\0" + name[1:] if name.startswith("@") else name
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.setblocking(False)
        sock.sendto("\n".join(lines).encode(), address)


# --- Jobs of all targets --------------------------------------------------------------------------


log = logging.getLogger(__name__)

FIRST_CYCLE_S = 0.02
"""Mean seconds between the first cycles of two targets. They are spread because the first parse of
a page takes the most CPU time."""


class TargetJobs:
    """Schedules a cycle for each configured target. Targets that did not change keep running.

    Calls `on_targets` with all targets after each change.
    """

    def __init__(
        self,
        cycles: DueQueue,
        sinks: Sinks,
        *,
        on_targets: Callable[[Sequence[TargetSpec]], None] | None = None,
        wall: Callable[[], float] = OWN_CLOCK,
    ) -> None:
        self._cycles, self._sinks, self._wall = cycles, sinks, wall
        self._on_targets = on_targets
        self._watches: dict[str, TargetWatch] = {}
        self._specs: tuple[TargetSpec, ...] = ()

    def specs(self) -> Sequence[TargetSpec]:
        """The watched targets. Thread-safe."""
        return self._specs

    def accept(self, request: AcceptRequest) -> list[EngineAcceptance]:
        """Make the present values of a target's engines the usual ones. Thread-safe."""
        watch = self._watches.get(request.target)
        return [] if watch is None else watch.accept(request)

    @property
    def all_scraped(self) -> bool:
        """Whether every target has finished at least one cycle."""
        return all(watch.cycles for watch in self._watches.values())

    def apply(self, specs: Sequence[TargetSpec]) -> None:
        """Watch exactly these targets. A target keeps its state if its address and profile are
        unchanged. Targets with the same settings share a profile.

        Raises:
            SettingsError: as in `target_profile`; then nothing changes.
            CaptureError: a capture cannot be played; then nothing changes.
        """
        watches: dict[str, TargetWatch] = {}
        profiles = {id(old.spec.settings): old.profile for old in self._watches.values()}
        for spec in specs:
            at = id(spec.settings)
            if at not in profiles:
                profiles[at] = target_profile(spec.settings)
            old, profile = self._watches.get(spec.name), profiles[at]
            same = old is not None and _same_watch(old, spec, profile)
            watches[spec.name] = (
                old
                if old is not None and same
                else TargetWatch(
                    spec, profile, self._sinks, wall=self._wall, computing=self._cycles.computing
                )
            )
        before, self._watches, self._specs = self._watches, watches, tuple(specs)
        for name, watch in before.items():
            if watches.get(name) is not watch:
                self._end(name, watch)
        if self._on_targets:
            self._on_targets(self._specs)
        for spec in specs:
            self._schedule(spec, before)
        unchanged = sum(before.get(name) is watch for name, watch in watches.items())
        log.info("watching targets targets=%s unchanged=%s", len(specs), unchanged)

    def _schedule(self, spec: TargetSpec, before: Mapping[str, TargetWatch]) -> None:
        """Schedule a target if its watch is new, or if its interval or phase changed."""
        watch, interval_s = self._watches[spec.name], float(spec.settings["interval_s"])
        phases, first_in_s = phase_count(len(self._watches), interval_s), None
        if before.get(spec.name) is not watch:
            spread_s = FIRST_CYCLE_S * len(self._watches)
            if spread_s <= interval_s / 2:
                first_in_s = phase_ratio(spec.name, phases) * spread_s
        else:
            same = watch.spec.settings["interval_s"] == interval_s
            watch.adopt(spec)
            if same and phase_count(len(before), interval_s) == phases:
                return
        self._cycles.put(
            spec.name, watch, interval_s=interval_s, phases=phases, first_in_s=first_in_s
        )

    def _end(self, name: str, watch: TargetWatch) -> None:
        self._cycles.drop(name)
        watch.retire()
        if name not in self._watches:
            self._sinks.board.drop(name)


def _same_watch(old: TargetWatch, spec: TargetSpec, profile: Profile) -> bool:
    limits = old.spec.settings.limits(), spec.settings.limits()
    return old.spec.address == spec.address and old.profile == profile and limits[0] == limits[1]


# --- The main loop --------------------------------------------------------------------------------


TICK_S, STARTING_TICK_S = 5.0, 0.5
"""Seconds between two checks of files, the clock and the daemon's parts: when the daemon is ready,
and before. A signal is handled at once."""

READY_AFTER_S = 10.0
STALLED_S = 20.0
"""The queue of cycles counts as stalled when a cycle is late by this many seconds."""

HUNG_S = 30.0
"""The reading of files and settings counts as hung after this many seconds."""

OUTDATED = "reload failed, the old settings are in use (the log says why)"

STANDS = "the system clock stands still; times go on by the monotonic clock"

STOP_MAX_S = 2.8
"""Seconds after a stop signal at which the process ends, whatever it waits for: service managers
send SIGKILL after 3 s at the earliest."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)


class Supervisor:
    """Runs the daemon until a signal stops it.

    Files and settings are read in a thread of their own, so that a file system that hangs delays no
    signal. `read_settings` reads the settings again. `apply_settings` passes new settings to all
    parts except the targets, and returns those that keep their old ones. `address` is the URL of
    the triage page.
    """

    def __init__(
        self,
        *,
        cycles: DueQueue,
        jobs: TargetJobs,
        discovery: Discovery,
        board: Board,
        systemd: str,
        read_settings: Callable[[], Settings],
        apply_settings: Callable[[Settings], Sequence[str]],
        address: str,
        fleet_watch: FleetWatch | None = None,
    ) -> None:
        self._cycles, self._fleet_watch = cycles, fleet_watch
        self._jobs, self._discovery = jobs, discovery
        self._board, self._address = board, address
        self._notify = partial(notify_systemd, systemd)
        self._read_settings, self._apply_settings = read_settings, apply_settings
        # A signal handler may only call reentrant code; SimpleQueue.put is.
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._stops: SimpleQueue[int] = SimpleQueue()
        self._is_reload_due = Event()
        self._reading_since_s: float | None = None
        self._failure = self._hung = self._outdated = self._stands = ""
        self._ready = False
        self._status = ""

    def start(self) -> None:
        """Start to watch the configured targets.

        Raises:
            KneewatchError: a target cannot be watched.
        """
        self._watch(self._discovery)

    def run(self, for_s: float | None = None) -> None:
        """Run until SIGTERM, SIGINT or the end of `for_s` seconds. Call this within the context
        `handled`."""
        began_s = time.monotonic()
        Thread(target=self._follow_files, name="kneewatch-files", daemon=True).start()
        while for_s is None or time.monotonic() - began_s < for_s:
            with self._surviving():
                self._tick(time.monotonic() - began_s)
            left_s = math.inf if for_s is None else began_s + for_s - time.monotonic()
            number = self._next_signal(max(0.0, left_s))
            if number in STOP_SIGNALS:
                log.info("stopping signal=%s", signal.Signals(number).name)
                break
            if number == signal.SIGHUP:
                self._is_reload_due.set()
        self._notify("STOPPING=1")

    def problems(self) -> list[str]:
        """A line for each reason why targets or settings may be older than their files.
        Thread-safe."""
        lines = [self._failure, self._hung, self._outdated, self._stands]
        return [line for line in lines if line] + self._discovery.problems()

    @contextmanager
    def _surviving(self) -> Generator[None]:
        """A context whose exceptions are logged and reported, and do not end the daemon."""
        try:
            yield
        except Exception as error:
            failure = f"internal error: {type(error).__name__}: {error}"
            if failure != self._failure:
                log.exception("main loop failed, going on")
            self._failure = failure
        else:
            self._failure = ""

    def _follow_files(self) -> None:
        """Read changed files at each tick, and the settings after each SIGHUP."""
        while True:
            work = self._poll
            if self._is_reload_due.wait(self._tick_s()):
                self._is_reload_due.clear()  # only here: a SIGHUP from now on has its own reload
                work = self._reload
            self._reading_since_s = time.monotonic()
            with self._surviving():
                work()
            self._reading_since_s, self._hung = None, ""

    def _poll(self) -> None:
        if not self._discovery.poll():
            return
        try:
            self._watch(self._discovery)
        except KneewatchError as error:
            log.error("keeping the previous targets error=%s", error)  # noqa: TRY400 - not a bug

    def _tick_s(self) -> float:
        return TICK_S if self._ready else STARTING_TICK_S

    def _tick(self, elapsed_s: float) -> None:
        stands = STANDS if OWN_CLOCK() - time.time() > STEP_S else ""
        if stands and not self._stands:
            log.error("%s", stands)
        self._stands = stands
        since_s = self._reading_since_s
        if since_s is not None and time.monotonic() - since_s > HUNG_S and not self._hung:
            self._hung = f"reading files and settings has taken more than {HUNG_S:.0f} s"
            log.error("%s, keeping the previous targets", self._hung)
        fleet = None if self._fleet_watch is None else self._fleet_watch.state
        is_all_read = self._jobs.all_scraped and (fleet is None or fleet.watching.cycles > 0)
        if not self._ready and (is_all_read or elapsed_s > READY_AFTER_S):
            self._ready = True
            self._notify("READY=1", self._status_line())
            log.info("ready targets=%s after_s=%.1f", len(self._jobs.specs()), elapsed_s)
            if why := self._fleet_unknown():
                log.warning("the fleet's state is unknown: %s", why)
        if self._cycles.late_s < STALLED_S:
            self._notify("WATCHDOG=1")
        if self._ready and (status := self._status_line()) != self._status:
            self._status = status
            self._notify(status)

    def _watch(self, discovery: Discovery) -> None:
        specs = discovery.specs()
        self._jobs.apply(specs)
        self._discovery = discovery

    def _reload(self) -> None:
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            settings = self._read_settings()
            target_profile(settings)  # check them even if no target uses them yet
            self._watch(self._discovery.reloaded(settings))
            parts = self._apply_settings(settings)
            self._outdated = f"{OUTDATED}: {', '.join(parts)}" if parts else ""
            log.info("settings reloaded targets=%s", len(self._jobs.specs()))
        except KneewatchError as error:
            self._outdated = OUTDATED
            log.error("reload failed, keeping the old settings error=%s", error)  # noqa: TRY400 - not a bug
        self._notify("READY=1", self._status_line())

    def _status_line(self) -> str:
        watched = len(self._jobs.specs())
        fleet = "; the fleet's state is unknown" if self._fleet_unknown() else ""
        return f"STATUS={self._board.answering} of {watched} targets up{fleet}; {self._address}"

    def _fleet_unknown(self) -> str:
        return "" if self._fleet_watch is None else self._fleet_watch.state.why_unknown(OWN_CLOCK())

    def _next_signal(self, left_s: float) -> int | None:
        """Wait for the next signal until the next tick, and at most `left_s` seconds. Returns None
        if no signal came."""
        try:
            return self._signals.get(timeout=min(self._tick_s(), left_s))
        except Empty:
            return None

    @contextmanager
    def handled(self) -> Generator[None]:
        """A context in which signals are queued for the main loop. A second stop signal ends the
        process at once, and it ends in any case `STOP_MAX_S` after the first one."""

        def end() -> None:
            self._stops.get()
            time.sleep(STOP_MAX_S)
            os._exit(OK)

        def handle(number: int, _frame: FrameType | None) -> None:
            self._signals.put(number)
            if number in STOP_SIGNALS:
                self._stops.put(number)
                for stop in STOP_SIGNALS:
                    signal.signal(stop, signal.SIG_DFL)

        Thread(target=end, name="kneewatch-end", daemon=True).start()
        before = {number: signal.signal(number, handle) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the command line blocks SIGHUP
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)


# --- Reload ---------------------------------------------------------------------------------------


RESTART_ONLY = (
    "listen",
    "store.",
    "http.",
    "gpu_interval_s",
    "fleet.interval_s",
    "fleet.queries",
    "fleet.query_timeout_s",
    "kubernetes.",
)
"""Prefixes of the settings that need a restart."""


class Reload:
    """Applies new settings to all parts except the targets.

    `restart_needed` holds the keys of settings that changed since the start but take effect only
    after a restart. Other threads read it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        reports: ReportJob,
        notifier: Notifier,
        fleet_watch: FleetWatch | None = None,
    ) -> None:
        self._began, self._reports = settings, reports
        self._notifier, self._fleet_watch = notifier, fleet_watch
        self.restart_needed: tuple[str, ...] = ()

    def __call__(self, settings: Settings) -> Sequence[str]:
        """Apply the settings. A part that rejects them keeps its old ones, and an error is logged.
        Returns these parts."""
        logs.configure(form=settings["log.format"], level=settings["log.level"])
        if self._fleet_watch is not None:
            self._fleet_watch.adopt(settings)
        applied = {
            "notify": _apply("notify", lambda: self._notifier.adopt(receivers(settings))),
            "report": _apply("report", lambda: self._reports.adopt(settings)),
        }
        self.restart_needed = tuple(
            setting.key
            for setting, effective in settings.rows()
            if setting.key.startswith(RESTART_ONLY) and effective.value != self._began[setting.key]
        )
        for key in self.restart_needed:
            log.warning("setting needs a restart to take effect key=%s", key)
        return [part for part, is_applied in applied.items() if not is_applied]


def _apply(part: str, apply: Callable[[], None]) -> bool:
    try:
        apply()
    except KneewatchError as error:
        log.error("reload failed, keeping the old settings part=%s error=%s", part, error)  # noqa: TRY400 - not a bug
        return False
    return True
