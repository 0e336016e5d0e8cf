"""When `run` makes reports: a cron expression in a time zone. I/O edge.

Each report is made by a process of its own, one at a time; the daemon only starts it and logs what
came of it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from kneewatch.agent.report.cron import cron_of
from kneewatch.agent.report.order import FleetAsked, order
from kneewatch.agent.report.sending import receivers_of
from kneewatch.agent.settings import Settings

log = logging.getLogger(__name__)

JOB_ID = "report"
FOLDER = "reports"
LIMIT_S = 1800.0
"""A report that is not made by then never will be."""

SAID_MOST = 2000


def folder_of(settings: Settings, store: Path) -> Path:
    """Where reports are kept: as stated, else beside the history."""
    stated: str | None = settings["report.folder"]
    return Path(stated) if stated else store.parent / FOLDER


class ReportJob:
    """Makes a report when it is due. Never two at once; safe between threads."""

    def __init__(
        self,
        settings: Settings,
        store: Path,
        *,
        clock: Callable[[], float] = time.time,
        limit_s: float = LIMIT_S,
        fleet: FleetAsked | None = None,
    ) -> None:
        self._settings, self._store, self._fleet = settings, store, fleet
        self._clock, self._limit_s = clock, limit_s
        self._turn, self._lock = Lock(), Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __call__(self) -> None:
        """Make it now, unless one is being made; what goes wrong is logged."""
        if not self._turn.acquire(blocking=False):
            log.warning("report skipped: the one before is still being made")
            return
        try:
            self._make()
        except Exception:
            # The scheduler goes on with the next one.
            log.exception("report not made store=%s", self._store)
        finally:
            self._turn.release()

    def adopt(self, settings: Settings) -> None:
        """Make the next reports by these settings."""
        self._settings = settings

    def stop(self) -> None:
        """End a report that is being made, and make none any more."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _make(self) -> None:
        folder = folder_of(self._settings, self._store)
        told = order(
            self._settings,
            store=self._store,
            folder=folder,
            due_s=self._clock(),
            fleet=self._fleet,
        )
        process = self._begin()
        if process is None:
            return
        late = False
        try:
            out, err = process.communicate(told, timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            out, err = process.communicate()
        with self._lock:
            self._process = None
        if self._stopped:
            return
        if late:
            log.error("report not made in time limit_s=%s", self._limit_s)
        elif process.returncode != 0:
            said = err.decode("utf-8", "replace").strip()[-SAID_MOST:]
            log.error("report not made status=%s error=%s", process.returncode, said)
        else:
            self._told(orjson.loads(out))

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kneewatch.agent.report.job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            return self._process

    def _told(self, result: dict[str, Any]) -> None:
        log.info(
            "report made file=%s severity=%s incidents=%s sent=%s",
            result["file"], result["severity"], result["incidents"], ",".join(result["sent"]),
        )  # fmt: skip
        for receiver, why in result["failed"].items():
            log.error("report not sent receiver=%s error=%s", receiver, why)


def add_report_job(
    scheduler: Any,  # noqa: ANN401 - APScheduler has no types
    settings: Settings,
    store: Path,
    *,
    clock: Callable[[], float] = time.time,
    before: ReportJob | None = None,
    fleet: FleetAsked | None = None,
) -> ReportJob | None:
    """Plan the reports with an APScheduler scheduler. Returns their job, to be stopped at the end;
    None where none are asked for. `before`, planned with other settings, goes on with these.
    `fleet` is what reports are of where the history knows no engine.

    Raises:
        SettingsError: the schedule, the time zone or a receiver cannot be.
    """
    cron = cron_of(settings)
    if cron is None:
        return None
    receivers_of(settings)
    job = before or ReportJob(settings, store, clock=clock, fleet=fleet)
    job.adopt(settings)
    scheduler.add_job(job, cron, id=JOB_ID, replace_existing=True)
    return job
