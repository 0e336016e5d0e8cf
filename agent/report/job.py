"""Makes, stores and sends one scheduled report. Runs as a process. I/O edge.

    python -m kneewatch.agent.report.job < order.json

A process of its own keeps the daemon small: the report's memory is freed when the process ends. The
order comes on stdin because it may contain secrets. The result is one line of JSON on stdout.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import orjson

from kneewatch.agent.report.command import renderer, report_of, write
from kneewatch.agent.report.history import History, seen
from kneewatch.agent.report.schedule import receivers_of, send_report, settings_of
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import KneewatchError, SettingsError
from kneewatch.reports.weekly.report import WeeklyReport

OK, FAILED = 0, 2
PREFIX = "report-"


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Make, store and send the report that an order describes. Returns the report's file and
    severity, its number of incidents, and the receivers that got it or failed.

    Raises:
        KneewatchError: the report cannot be made or stored.
    """
    settings, folder = settings_of(given), Path(given["folder"])
    to = receivers_of(settings)
    due_s: float = given["due_s"]
    zone: str = settings["report.timezone"]
    report = _report(given, settings, due_s)
    day = datetime.fromtimestamp(due_s, ZoneInfo(zone)).strftime("%Y-%m-%d-%H%M")
    page = folder / f"{PREFIX}{day}.html"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise SettingsError(
            f"report.folder: {folder} cannot be created: {exc.strerror or exc}"
        ) from exc
    write(renderer("json")(report), str(page.with_suffix(".json")))
    write(renderer("html", settings.docs_url)(report), str(page))
    prune(folder, keep=settings["report.keep"])
    failed = send_report(to, report, page)
    return {
        "file": str(page),
        "severity": report.severity,
        "incidents": len(report.incidents),
        "sent": [receiver.name for receiver in to if receiver.name not in failed],
        "failed": failed,
    }


def _report(given: dict[str, Any], settings: Settings, due_s: float) -> WeeklyReport:
    """A report from the daemon's history. If the history has no engine in the period: a report
    about the fleet that the daemon watches through a metrics system."""
    since_s: float = settings["report.since_s"]
    store = Path(given["store"])
    metrics = given["fleet"]
    if metrics is not None and _has_engines(store, due_s - since_s, due_s):
        metrics = None
    report, _ = report_of(
        settings,
        to_s=due_s,
        since_s=since_s,
        compare_s=since_s,
        made_s=time.time(),
        store=store,
        metrics=metrics,
    )
    return report


def _has_engines(store: Path, from_s: float, to_s: float) -> bool:
    with closing(History(store)) as history:
        return any(seen(engine, from_s, to_s) for engine in history.engines())


def prune(folder: Path, *, keep: int) -> None:
    """Delete the oldest reports of a folder, so that `keep` reports remain. Other files are not
    touched."""
    names = sorted({path.stem for path in folder.glob(f"{PREFIX}*.html")}, reverse=True)
    for name in names[keep:]:
        for ending in (".html", ".json"):
            with suppress(OSError):
                (folder / f"{name}{ending}").unlink()


def main() -> None:
    """Read the order from stdin, make the report, and print the result."""
    try:
        result = run(orjson.loads(sys.stdin.buffer.read()))
    except KneewatchError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(FAILED)
    sys.stdout.write(orjson.dumps(result).decode() + "\n")


if __name__ == "__main__":
    main()
