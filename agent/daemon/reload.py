"""What a running daemon takes up of settings that were read again, and what it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kneewatch.agent import logs
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.notify.receivers import receivers
from kneewatch.agent.report.schedule import JOB_ID, ReportJob, add_report_job
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import KneewatchError

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetWatch

log = logging.getLogger(__name__)

FIXED = (
    "listen",
    "store.",
    "http.",
    "gpu_interval_s",
    "fleet.interval_s",
    "fleet.queries",
    "fleet.query_timeout_s",
)
"""What needs a restart: beginnings of keys."""


class Reload:
    """Passes settings on to everything but the targets.

    `restart_needed` are the keys of settings that are not in force: those of FIXED that differ from
    the ones at the start. They are read by other threads.

    Raises:
        SettingsError: the schedule of the reports cannot be.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        scheduler: Any,  # noqa: ANN401 - APScheduler has no types
        store_file: Path,
        notifier: Notifier,
        fleet_watch: FleetWatch | None = None,
    ) -> None:
        self._began, self._scheduler, self._store_file = settings, scheduler, store_file
        self._notifier, self._fleet_watch = notifier, fleet_watch
        self._reports: ReportJob | None = None
        self.restart_needed: tuple[str, ...] = ()
        self._plan_reports(settings)

    def __call__(self, settings: Settings) -> None:
        """Take up what can be; what cannot is logged, and stays as it was."""
        logs.configure(form=settings["log.format"], level=settings["log.level"])
        if self._fleet_watch is not None:
            self._fleet_watch.adopt(settings)
        _tried("notify", lambda: self._notifier.adopt(receivers(settings)))
        _tried("report", lambda: self._plan_reports(settings))
        self.restart_needed = tuple(
            setting.key
            for setting, effective in settings.rows()
            if setting.key.startswith(FIXED) and effective.value != self._began[setting.key]
        )
        for key in self.restart_needed:
            log.warning("a restart is needed to take up a setting key=%s", key)

    def stop(self) -> None:
        """End a report that is being made."""
        if self._reports is not None:
            self._reports.stop()

    def _plan_reports(self, settings: Settings) -> None:
        planned = add_report_job(
            self._scheduler,
            settings,
            self._store_file,
            before=self._reports,
            fleet=self._fleet_watch.asked if self._fleet_watch is not None else None,
        )
        if planned is None and self._scheduler.get_job(JOB_ID) is not None:
            self._scheduler.remove_job(JOB_ID)
        self._reports = planned or self._reports


def _tried(what: str, take_up: Callable[[], None]) -> None:
    try:
        take_up()
    except KneewatchError as error:
        log.error("settings stay as they were of=%s error=%s", what, error)  # noqa: TRY400 - no bug
