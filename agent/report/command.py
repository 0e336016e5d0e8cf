"""`kneewatch report`: builds a report from the store or Prometheus and writes it to a file. I/O
edge."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import click
import orjson
from msgspec.structs import replace

from kneewatch.agent.console import FOUND, NO_DATA, OK, say
from kneewatch.agent.logs import without_secrets
from kneewatch.agent.report import schedule
from kneewatch.agent.report.history import History, ReportRequest, seen, stated_of
from kneewatch.agent.report.prometheus.queries import unit_s as whole_s
from kneewatch.agent.report.reader import PeriodReader
from kneewatch.agent.report.schedule import (
    MetricsQuery,
    receivers_of,
    send_report,
    settings_of,
    zone_of,
)
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import SPAN, timestamp
from kneewatch.agent.store.database import store_path
from kneewatch.collector.errors import KneewatchError, SettingsError
from kneewatch.reports.weekly.build_report import build
from kneewatch.reports.weekly.observed import Grid, earlier, grid
from kneewatch.reports.weekly.report import WeeklyReport, render_json
from kneewatch.rules.rule import BY_WORD, DAY_S, Severity

LONGEST_S = 366 * DAY_S
"""Maximum length of a period in seconds. Every hour of every engine is held in memory and drawn."""


def periods(
    timezone: str,
    *,
    to_s: float,
    since_s: float,
    compare_s: float | None,
    unit_s: float = 0.0,
) -> tuple[Grid, Grid | None]:
    """The report's period, and the period that it is compared with. With `unit_s`, both begin and
    end on multiples of `unit_s` seconds.

    Raises:
        SettingsError: the time zone or a time does not exist, or the period exceeds LONGEST_S.
    """
    zone = zone_of(timezone)
    if since_s > LONGEST_S:
        raise SettingsError("--since: a report covers a year (366d) at most")

    def cut(t_s: float) -> float:
        return t_s // unit_s * unit_s if unit_s else t_s

    def period(end_s: float) -> Grid:
        return grid(cut(earlier(end_s, since_s, zone)), end_s, timezone)

    try:
        to_s = cut(to_s)
        now = period(to_s)
        return now, None if compare_s is None else period(cut(earlier(to_s, compare_s, zone)))
    except (OverflowError, ValueError, OSError) as exc:
        raise SettingsError(f"--to, --since, --compare: time out of range: {exc}") from exc


# --- `kneewatch report`: reads, builds and writes the report. I/O edge --------------------------
#
# Imported by this command only: pandas and the charts take time and memory.


FORMATS = ("html", "json", "markdown")
BY_ENDING = {
    ".json": "json",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
}
STDOUT, NOTHING = "-", "none"
BAR = 24


def run(
    settings: Settings,
    *,
    since_s: float,
    to_s: float | None,
    compare_s: float | None,
    out: str,
    form: str | None,
    tiers: Sequence[str],
    targets: Sequence[str],
    prometheus: str | None = None,
    selector: str = "",
    summary: bool = False,
) -> int:
    """Build the report and write it, in brief with `summary`. Returns the exit status.

    The compared period is `compare_s` seconds earlier; None means no comparison.

    Raises:
        KneewatchError: there is no history, or a setting is not valid.
    """
    _check_writable(out)
    if selector and prometheus is None:
        raise SettingsError("--selector needs --prometheus")
    form = form or BY_ENDING.get(Path(out).suffix.lower(), "text" if summary else "html")
    render = renderer(form, settings.docs_url, in_brief=summary)
    made_s = time.time()
    report, partial = report_of(
        settings,
        to_s=made_s if to_s is None else to_s,
        since_s=since_s,
        compare_s=compare_s,
        made_s=made_s,
        metrics=None if prometheus is None else (prometheus, selector),
        targets=targets,
        tiers=tiers,
    )
    write(render(report), out)
    exit_status = status(report)
    if exit_status == NO_DATA:
        source = prometheus or store_path(settings["store.file"], os.environ)
        say(f"no data in this period: {without_secrets(str(source))}: {'; '.join(report.notices)}")
    return NO_DATA if partial and exit_status == OK else exit_status


def compared_s(value: str | None, since_s: float) -> float | None:
    """Parse `--compare`. Returns by how many seconds the compared period is earlier; None for no
    comparison.

    Raises:
        click.ClickException: it is neither a duration nor `none`.
    """
    if value is None:
        return since_s
    return None if value == NOTHING else SPAN.convert(value, None, None)


def end_s(value: str | None, settings: Settings) -> float | None:
    """Parse `--to`: the end of the period in Unix seconds. A time without a zone is in the report's
    time zone.

    Raises:
        SettingsError: `value` is not a time, or the time zone does not exist.
    """
    try:
        return timestamp(value, zone_of(settings["report.timezone"]))
    except OverflowError as exc:
        raise SettingsError(f"--to {value}: time out of range: {exc}") from exc


def report_of(
    settings: Settings,
    *,
    to_s: float,
    since_s: float,
    compare_s: float | None,
    made_s: float,
    store: Path | None = None,
    metrics: MetricsQuery | None = None,
    targets: Sequence[str] = (),
    tiers: Sequence[str] = (),
) -> tuple[WeeklyReport, bool]:
    """Build a report. Returns it, and whether its data is partial.

    The data comes from the metrics system `metrics`; if that is None, from `store`, by default the
    store in the settings.

    Raises:
        KneewatchError: the source cannot be read, or a setting, target or tier is not valid.
    """
    now, before = periods(
        settings["report.timezone"],
        to_s=to_s,
        since_s=since_s,
        compare_s=compare_s,
        unit_s=whole_s(since_s) if metrics is not None else 0.0,
    )
    request = ReportRequest(
        grid=now,
        before=before,
        stated=stated_of(settings),
        targets=tuple(targets),
        tiers=tuple(tiers),
        window_s=settings["window_s"],
    )
    with _history(settings, store, metrics, request) as history:
        observed = PeriodReader(history, request, progress).read()
        seen = history.engines() if metrics is None else []
    report = build(observed, made_s=made_s, version=version("kneewatch"))
    if seen and status(report) == NO_DATA:
        calendar = zone_of(settings["report.timezone"])
        first, last = (
            f"{datetime.fromtimestamp(t_s, calendar):%Y-%m-%dT%H:%M}"
            for t_s in (min(e.first_s for e in seen), max(e.last_s for e in seen) + 60.0)
        )
        notice = f"the history has data from {first} to {last}: use --to {last}"
        report = replace(report, notices=(*report.notices, notice))
    return report, observed.partial


@contextmanager
def _history(
    settings: Settings, store: Path | None, metrics: MetricsQuery | None, request: ReportRequest
) -> Generator[History]:
    if metrics is None:
        path = store or store_path(settings["store.file"], os.environ)
        with closing(History(path)) as history:
            yield history
        return
    from kneewatch.agent.report.prometheus.fill import filled_history  # a store needs no HTTP

    url, selector = metrics
    with filled_history(url, settings, selector, request, progress) as history:
        yield history


def renderer(
    form: str, docs_url: str = "", *, in_brief: bool = False
) -> Callable[[WeeklyReport], str]:
    """The function that renders a report in the format `form`. Its links to cause pages start with
    `docs_url`."""
    if form == "json":
        return render_json
    if in_brief:
        return partial(schedule.summary, form=form)
    # Here: JSON needs no charts.
    from kneewatch.reports.weekly.page.html import render, render_markdown

    return partial(render_markdown if form == "markdown" else render, docs_url=docs_url)


def status(report: WeeklyReport) -> int:
    """The exit status: OK, FOUND (warning or worse), or NO_DATA."""
    # A single scrape covers no time, and a router has no engine.
    if not report.period.covered_s and not any(tier.engines for tier in report.tiers):
        return NO_DATA
    return FOUND if BY_WORD[report.severity] >= Severity.WARNING else OK


def write(text: str, out: str) -> None:
    """Write a report atomically.

    Raises:
        SettingsError: the file cannot be written.
    """
    if out == STDOUT:
        click.echo(text, nl=False)
        return
    path = Path(out)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as exc:
        with suppress(OSError):
            part.unlink()
        raise SettingsError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def progress(done: int, steps: int) -> None:
    """Overwrite the progress line on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    if done >= steps:
        click.echo("\r\x1b[K", nl=False, err=True)
        return
    filled = BAR * done // max(steps, 1)
    bar = "#" * filled + "." * (BAR - filled)
    click.echo(f"\r\x1b[Kreading the history [{bar}] {done} of {steps}", nl=False, err=True)


def _check_writable(out: str) -> None:
    """Check that the file can be written: reading the data may take minutes."""
    if out == STDOUT:
        return
    path = Path(out)
    if not path.parent.is_dir():
        raise SettingsError(f"{out} cannot be written: {path.parent} does not exist")
    if not out or path.is_dir():
        raise SettingsError(f"--out {out or repr(out)}: expected the name of a file")


# --- One scheduled report: made, stored and sent by a process of its own --------------------------
#
#     python -m kneewatch.agent.report.command < order.json
#
# That keeps the daemon small: the report's memory is freed when the process ends. The order comes
# on stdin because it may contain secrets. The result is one line of JSON on stdout.


PREFIX = "report-"


def scheduled(given: dict[str, Any]) -> dict[str, Any]:
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
        result = scheduled(orjson.loads(sys.stdin.buffer.read()))
    except KneewatchError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(NO_DATA)
    sys.stdout.write(orjson.dumps(result).decode() + "\n")


if __name__ == "__main__":
    main()
