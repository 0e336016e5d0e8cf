"""Reload: applies settings to a running daemon, and reports those that need a restart."""

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
    """Applies settings to everything but the targets.

    `restart_needed` holds the keys of settings that changed since the start and need a restart. It
    is read by other threads.

    Raises:
        SettingsError: the schedule of the reports is invalid.
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
        """Apply the settings; a part that fails keeps its old ones, which is logged."""
        logs.configure(form=settings["log.format"], level=settings["log.level"])
        if self._fleet_watch is not None:
            self._fleet_watch.adopt(settings)
        _apply("notify", lambda: self._notifier.adopt(receivers(settings)))
        _apply("report", lambda: self._plan_reports(settings))
        self.restart_needed = tuple(
            setting.key
            for setting, effective in settings.rows()
            if setting.key.startswith(RESTART_ONLY) and effective.value != self._began[setting.key]
        )
        for key in self.restart_needed:
            log.warning("setting needs a restart to take effect key=%s", key)

    def stop(self) -> None:
        """Cancel a running report."""
        if self._reports is not None:
            self._reports.stop()

    def _plan_reports(self, settings: Settings) -> None:
        planned = add_report_job(
            self._scheduler,
            settings,
            self._store_file,
            before=self._reports,
            fleet=self._fleet_watch.url_and_selector if self._fleet_watch is not None else None,
        )
        if planned is None and self._scheduler.get_job(JOB_ID) is not None:
            self._scheduler.remove_job(JOB_ID)
        self._reports = planned or self._reports


def _apply(part: str, apply: Callable[[], None]) -> None:
    try:
        apply()
    except KneewatchError as error:
        log.error("reload failed, keeping the old settings part=%s error=%s", part, error)  # noqa: TRY400 - no bug
