"""`kneewatch run`: builds, starts and stops the daemon. I/O edge.

Only the `run` command imports this module, because its imports are slow.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from kneewatch.agent import logs
from kneewatch.agent.api.app import make_app
from kneewatch.agent.api.server import HttpServer
from kneewatch.agent.api.service import Service
from kneewatch.agent.console import NO_DATA, OK
from kneewatch.agent.daemon import supervisor as process
from kneewatch.agent.daemon.baselines import (
    LearnedStates,
    SeasonalBaselines,
    WeeklyPeaks,
)
from kneewatch.agent.daemon.cycle import Sinks
from kneewatch.agent.daemon.discovery import Discovery, target_profile
from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, DueQueue
from kneewatch.agent.daemon.supervisor import Reload, Supervisor, TargetJobs
from kneewatch.agent.diagnose_command import DEMO, DEMO_CRITICAL_AFTER_S, DEMO_WINDOW_S
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.report.schedule import ReportJob
from kneewatch.agent.server.process import control_groups, host_memory
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import RUN_DEFAULTS
from kneewatch.agent.store.database import STORE_NAME, store_path
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import Store
from kneewatch.agent.stream import AcceptRequest, EngineAcceptance
from kneewatch.agent.target_state import Board
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.page_memory import PAGES
from kneewatch.rules.formatting import span

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetWatch

log = logging.getLogger(__name__)

DEMO_DEFAULTS = {**RUN_DEFAULTS, "window_s": DEMO_WINDOW_S}

STOP_S = 2.2
"""Maximum seconds for the shutdown: service managers send SIGKILL a few seconds after SIGTERM."""

OWN_BYTES, UNLIMITED_BYTES = 160 * 1024**2, 1024**3
"""Memory of the daemon without pages, and memory that it takes where nothing limits it."""

FLUSH_S = 0.4
"""Minimum seconds that the history gets at shutdown to write queued cycles."""


def run(
    arguments: Sequence[str],
    settings_of: Callable[[], Settings],
    *,
    demo: bool,
    for_s: float | None,
    prometheus: str | None = None,
    selector: str = "",
) -> NoReturn:
    """Run the daemon until a signal or `for_s`, then end the process.

    Raises:
        KneewatchError: it cannot start.
    """
    if demo and arguments:
        raise SettingsError("--demo plays its own recording: leave the targets out")
    settings = settings_of()
    logs.configure(form=settings["log.format"], level=settings["log.level"])
    targets = [str(files("kneewatch.agent") / DEMO)] if demo else arguments
    prometheus = prometheus or settings["fleet.prometheus"]
    if selector and prometheus is None:
        raise SettingsError("--selector needs --prometheus or the setting fleet.prometheus")
    discovery = Discovery(targets, settings, may_be_empty=prometheus is not None)
    fleet_watch = None if prometheus is None else _fleet_watch(prometheus, settings, selector)
    with _store_file(settings, demo=demo) as store_file:
        note = _demo_note(settings, for_s, store_file) if demo else ""
        daemon = Daemon(discovery, settings, store_file, fleet_watch)
        daemon.run(settings_of, for_s, note=note)
    # Everything is closed. Freeing the memory of 1,000 targets would take seconds.
    os._exit(OK if daemon.history_is_whole else NO_DATA)


def _fleet_watch(url: str, settings: Settings, selector: str) -> FleetWatch:
    from kneewatch.agent.fleet.watch import FleetWatch  # here: only this needs requests

    return FleetWatch(url, settings, selector)


def _demo_note(settings: Settings, for_s: float | None, store_file: Path) -> str:
    """The start-up message of the demo: when the recording turns critical, that it is played in a
    loop, how to report on its history, and that this is deleted at exit."""
    note = f"demo     healthy at first, critical after {span(DEMO_CRITICAL_AFTER_S)}"
    if for_s is not None and for_s <= DEMO_CRITICAL_AFTER_S:
        note += f" (--for {for_s:g}s ends before that)"
    else:
        note += "; at its end the recording starts again"
    if not settings["store.file"]:
        note += (
            f"\n         its history is deleted at exit (--store FILE keeps it); until then: "
            f"kneewatch report --store {store_file}"
        )
    return note


@contextmanager
def _store_file(settings: Settings, *, demo: bool) -> Generator[Path]:
    """A context with the path of the history's file: a temporary file in the demo, unless
    `store.file` is set."""
    if not demo or settings["store.file"]:
        yield store_path(settings["store.file"], os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="kneewatch-demo-") as folder:
        yield Path(folder) / STORE_NAME


class Daemon:
    """Builds the daemon's parts, runs them, and shuts them down in order.

    Raises:
        KneewatchError: a part cannot start: the history, the address, a token, a receiver.
    """

    def __init__(
        self,
        discovery: Discovery,
        settings: Settings,
        store_file: Path,
        fleet_watch: FleetWatch | None = None,
    ) -> None:
        target_profile(settings)
        self._discovery, self._settings, self._fleet_watch = discovery, settings, fleet_watch
        self._store_file = store_file
        self._deadline_s: float | None = None
        self._supervisor: Supervisor | None = None
        self._board = Board()
        # Closed in reverse order: the history last, because the other parts still write to it.
        with ExitStack() as parts:
            kept = settings["store.keep_s"], settings["store.keep_coarse_s"]
            self._store = Store.open(
                store_file, retention=Retention(*kept, settings["store.max_bytes"])
            )
            parts.callback(lambda: self._store.close(max(self._left_s(), FLUSH_S)))
            self._reader = Reader(store_file, on_damage=self._store.check, may_be_late=True)
            parts.callback(self._reader.close)
            self._notifier = Notifier.of(settings, store=store_file)
            parts.callback(lambda: self._notifier.close(self._left_s(0.3)))
            self._gpus = GpuSources(discovery.specs(), settings)
            parts.callback(lambda: self._gpus.close(self._left_s(0.3)))
            if fleet_watch is not None:
                fleet_watch.notify_through(self._notifier, self._report_watched)
                fleet_watch.store_through(self._store.put)
            self._cycles = DueQueue(on_idle=self._store.flush)
            parts.callback(self._end_cycles)
            of_fleet = None if fleet_watch is None else fleet_watch.url_and_selector
            self._reports = ReportJob(settings, store_file, fleet=of_fleet)
            parts.callback(self._reports.stop)
            self._reload = Reload(
                settings, reports=self._reports, notifier=self._notifier, fleet_watch=fleet_watch
            )
            peaks = WeeklyPeaks(self._reader, lambda: self._jobs.specs())
            seasons = SeasonalBaselines(self._reader, lambda: self._jobs.specs())
            learned = LearnedStates(self._reader, self._store.learn)
            if fleet_watch is not None:
                fleet_watch.learned = learned
            self._recalled = peaks, seasons, learned
            """Jobs with the history."""
            sinks = Sinks(
                board=self._board,
                store=self._store.put,
                notify=self._notifier.offer,
                gpus=self._gpus,
                exchanges=tuple(job.exchange for job in self._recalled),
            )
            self._jobs = TargetJobs(self._cycles, sinks, on_targets=self._retarget)
            self._server = HttpServer(make_app(self._service()), settings)
            parts.callback(lambda: self._server.stop(self._left_s(0.7)))
            self._server.bind()
            self._parts = parts.pop_all()

    def run(
        self, settings_of: Callable[[], Settings], for_s: float | None, *, note: str = ""
    ) -> None:
        """Print the addresses and the note, then run until stopped. The shutdown takes less than 3
        s, even if a part hangs."""
        supervisor = self._supervisor = Supervisor(
            cycles=self._cycles,
            jobs=self._jobs,
            discovery=self._discovery,
            board=self._board,
            systemd=os.environ.get("NOTIFY_SOCKET", ""),
            read_settings=settings_of,
            apply_settings=self._reload,
            address=f"{self._server.url}/triage",
            fleet_watch=self._fleet_watch,
        )
        process.tune_process()
        memory = host_memory(control_groups(os.getpid()))
        limit_bytes = memory.get("host_memory_limit_bytes", UNLIMITED_BYTES)
        PAGES.limit_bytes = max(0.0, limit_bytes - OWN_BYTES)
        with supervisor.handled(), self._parts:
            self._cycles.start()
            supervisor.start()
            optional = self._discovery.pods, self._fleet_watch
            for job in (self._gpus, *self._recalled, self._reports, *optional):
                if job is not None:
                    name = f"\0{type(job).__name__}"  # no target's name: those are printable
                    self._cycles.put(name, job, interval_s=job.every_s, first_in_s=job.first_in_s)
            self._server.start()
            lines = [f"triage   {self._server.url}/triage", f"history  {self._store_file}"]
            if self._fleet_watch is not None:
                lines.append(f"fleet    {self._server.url}/api/v1/fleet")
            _announce("\n".join([*lines, note] if note else lines))
            supervisor.run(for_s)
            self._deadline_s = time.monotonic() + STOP_S

    @property
    def history_is_whole(self) -> bool:
        """Whether the store has written every cycle."""
        stats = self._store.stats()
        return not (stats.queued or stats.dropped)

    def _service(self) -> Service:
        return Service(
            board=self._board,
            settings=self._settings,
            targets=lambda: self._jobs.specs(),
            version=version("kneewatch"),
            started_s=OWN_CLOCK(),
            clock=OWN_CLOCK,
            reader=self._reader,
            store=self._store,
            notifier=self._notifier,
            fleet=self._fleet_watch,
            restart_needed=lambda: self._reload.restart_needed,
            problems=lambda: self._supervisor.problems() if self._supervisor else (),
            accept=self._accept,
        )

    def _accept(self, request: AcceptRequest) -> list[EngineAcceptance]:
        accepted = self._jobs.accept(request)
        if not accepted and self._fleet_watch is not None:
            accepted = self._fleet_watch.accept(request)
        return accepted

    def _retarget(self, specs: Sequence[TargetSpec]) -> None:
        self._gpus.update(specs)
        self._report_watched()

    def _report_watched(self) -> None:
        names = [spec.name for spec in self._jobs.specs()]
        fleet = self._fleet_watch.names if self._fleet_watch else ()
        self._notifier.set_watched([*names, *fleet])

    def _end_cycles(self) -> None:
        self._cycles.stop()
        until_s = time.monotonic() + self._left_s(0.3)
        while self._cycles.busy and time.monotonic() < until_s:
            time.sleep(0.01)

    def _left_s(self, most_s: float = STOP_S) -> float:
        """Seconds left for the shutdown; at most `most_s`."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + STOP_S
        return max(0.0, min(most_s, self._deadline_s - time.monotonic()))


def _announce(text: str) -> None:
    """Print where the daemon answers. A full disk behind stdout does not stop it."""
    try:
        click.echo(text)
    except OSError as exc:
        log.warning("cannot write to stdout error=%s text=%s", exc.strerror, text)
