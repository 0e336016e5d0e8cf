"""Scheduled reports: the cron expression, the process that makes each report, and the message about
it. I/O edge."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from importlib.util import find_spec
from math import floor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson
from apscheduler.triggers.cron import CronTrigger  # type: ignore[import-untyped]

from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, Job
from kneewatch.agent.notify.delivery import SendError, send
from kneewatch.agent.notify.message import Line, Message, Part, identity, markdown, page
from kneewatch.agent.notify.receivers import TEXTS, Receiver, receivers
from kneewatch.agent.settings.effective import Effective, Settings, gathered, reported_together
from kneewatch.agent.stated_deployment import named_by
from kneewatch.collector.errors import SettingsError
from kneewatch.reports.lines import wrapped
from kneewatch.rules.formatting import plural
from kneewatch.rules.rule import BY_WORD

if TYPE_CHECKING:
    from kneewatch.reports.weekly.report import WeeklyReport, WeeklyVerdict


STATUS = "report"
TIERS_MOST = 12
"""Maximum number of tiers in a message, the worst ones; the report contains all."""

UNKNOWN = 1.5
"""Rank of unknown health: above info, because somebody must look, and below warning."""

SUMMARIES = {"html": page, "markdown": markdown}
"""Formats of the summary besides plain text."""

WAITS_S = (5.0, 60.0)
"""Seconds to wait before the second and the third attempt."""


def receivers_of(settings: Settings) -> tuple[Receiver, ...]:
    """The receivers that the setting report.send names.

    Raises:
        SettingsError: a name belongs to no receiver, or to one that gets no reports.
    """
    by_name = {receiver.name: receiver for receiver in receivers(settings)}
    names = list(dict.fromkeys(settings["report.send"] or ()))
    place = f"{settings.origin('report.send')}: report.send"
    with reported_together() as mistakes:
        for name in names:
            if name not in by_name:
                there = ", ".join(by_name) or "none"
                mistakes.append(
                    f"{place}: no receiver is named {name!r}; the [[notify]] tables have {there}"
                )
            elif (kind := by_name[name].kind) not in TEXTS:
                mistakes.append(f"{place}: {name!r} is of kind {kind}, which gets no reports")
    return tuple(by_name[name] for name in names)


def message_of(report: WeeklyReport, file: str = "", *, most: int = TIERS_MOST) -> Message:
    """The message about a report, with at most `most` tiers, the worst first. `file` is the
    report's file."""
    # Lazy: the daemon checks the receivers at start, but builds no reports itself.
    from kneewatch.reports.weekly.page.formatting import Calendar
    from kneewatch.reports.weekly.page.html import headline, title
    from kneewatch.reports.weekly.report import document

    period = Calendar(report.timezone, report.period).title
    return Message(
        id=identity(STATUS, report.period.from_s, report.period.to_s, report.made_s),
        status=STATUS,
        severity=report.severity,
        t_s=report.made_s,
        headline=f"{title(report)} {period}: {headline(report)[1]}",
        parts=_parts(report, most=most),
        more=f"Report: {file} (attached to mails; open it in a browser)" if file else "",
        events=({"verdicts": document(report)["verdicts"], "file": file},),
    )


def summary(report: WeeklyReport, form: str) -> str:
    """The message with all tiers, for a mail, a chat or a ticket: as `html`, `markdown`, or plain
    text."""
    message = message_of(report, most=len(report.verdicts))
    if form in SUMMARIES:
        return SUMMARIES[form](message)
    rows = [message.headline]
    for part in message.parts:
        rows += ["", part.title, *(f"- {line.plain()}" for line in part.lines)]
    return "\n".join(line for row in rows for line in wrapped(row) or [""]) + "\n"


def _parts(report: WeeklyReport, *, most: int) -> tuple[Part, ...]:
    """What a report says in brief: notices, the first actions, what changed, what is the same for
    all tiers, and a part for each tier, the worst first; at most `most` of them."""
    from kneewatch.reports.weekly.page.formatting import sentence
    from kneewatch.reports.weekly.page.html import CHANGES_MOST, changed, first_steps

    steps = [
        Line(
            step.tier,
            f"{'' if step.command else f'{step.text} '}{step.why} "
            + "; ".join(
                filter(
                    None,
                    (f"By {step.owner}", step.effort and f"takes {step.effort}", step.saving),
                )
            ),
            step.command,
        )
        for step in first_steps(report)
    ]
    tiers = {verdict.tier: _tier_lines(verdict) for verdict in report.verdicts}
    first = next(iter(tiers.values()), list[Line]())
    shared = [line for line in first if len(tiers) > 1 and all(line in t for t in tiers.values())]
    named = {
        "Notices": [Line("", notice) for notice in report.notices],
        "Do first": steps,
        "Changed against the period before": [
            Line(tier, sentence(trend)) for tier, trend in changed(report)[:CHANGES_MOST]
        ],
        "All tiers": shared,
    }
    order = sorted(
        report.verdicts, key=lambda verdict: -float(BY_WORD.get(verdict.health, UNKNOWN))
    )
    parts = [Part(name, tuple(lines)) for name, lines in named.items() if lines]
    parts += [
        Part(f"{each.tier}: {each.health}", tuple(x for x in tiers[each.tier] if x not in shared))
        for each in order[:most]
    ]
    if len(order) > most:
        parts.append(Part(f"{plural(len(order) - most, 'more tier')}: see the report"))
    return tuple(parts)


def _tier_lines(verdict: WeeklyVerdict) -> list[Line]:
    texts = {
        "health": verdict.health_text,
        "size": verdict.size_text,
        "money": verdict.money_text,
    }
    # A tier that was not watched has one reason for all three.
    return [
        Line(label, text)
        for label, text in texts.items()
        if label == "health" or not text.endswith(verdict.health_text)
    ]


def send_report(to: Sequence[Receiver], report: WeeklyReport, file: Path) -> dict[str, str]:
    """Send a report to each receiver, with up to three attempts. Returns the errors of receivers
    that did not get it."""
    message = message_of(report, file.name)
    failed: dict[str, str] = {}
    for receiver in to:
        for wait_s in (*WAITS_S, None):
            try:
                send(
                    receiver,
                    message,
                    timeout_s=receiver.timeout_s,
                    now_s=message.t_s,
                    attachment=file,
                )
                failed.pop(receiver.name, None)
                break
            except SendError as exc:
                failed[receiver.name] = str(exc)
                if exc.final or wait_s is None:
                    break
                time.sleep(min(exc.after_s or wait_s, max(WAITS_S)))
    return failed


# When the daemon makes reports: cron expressions, and the process that runs each one. I/O edge.


NEVER_S = 32_503_680_000.0
"""The year 3000 in Unix seconds: the next time of an expression that never fires, such as 0 0 31 2
*."""

DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
"""Cron's names of weekdays; the index is the number of the day. 7 means Sunday too."""

FIELDS = 5

LIBRARIES = ("numpy", "pandas")
"""Libraries that only reports need (the extra `report`). Images are built without them by
default."""


def check_libraries() -> None:
    """Check that the libraries for reports are installed.

    Raises:
        SettingsError: the report's libraries are missing.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"reports need {', '.join(missing)}, not installed here. Try: pip install "
            "'./WHEEL[report]' with the release's wheel, or build the image with "
            "--build-arg EXTRAS=[report]"
        )


def zone_of(timezone: str) -> ZoneInfo:
    """Find a time zone by name.

    Raises:
        SettingsError: there is no time zone with this name.
    """
    try:
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise SettingsError(
            f"report.timezone = {timezone!r} is not a time zone; write one such as Europe/Berlin "
            "or UTC"
        ) from exc


class Cron(CronTrigger):  # type: ignore[misc]
    """The times at which a cron expression fires.

    When clocks are set forward, a skipped time fires at the next existing time. When clocks are set
    back, a repeated time fires once, unless the expression fires every hour.
    """

    every_hour = False

    def get_next_fire_time(
        self, previous_fire_time: datetime | None, now: datetime
    ) -> datetime | None:
        """The next time at which the expression fires."""
        follows = cast("Any", super()).get_next_fire_time
        fire_time: datetime | None = follows(previous_fire_time, now)
        while fire_time is not None and _is_second_occurrence(fire_time) and not self.every_hour:
            fire_time = follows(fire_time, fire_time.astimezone(UTC) + timedelta(seconds=1))
        return fire_time

    def after_s(self, now_s: float) -> float:
        """The first time after `now_s` at which the expression fires, in Unix seconds. NEVER_S if
        there is none."""
        after = datetime.fromtimestamp(floor(now_s) + 1, UTC)  # it fires at whole seconds
        fire_time = self.get_next_fire_time(None, after)
        return fire_time.timestamp() if fire_time is not None else NEVER_S


def _is_second_occurrence(t: datetime) -> bool:
    """Whether this local time occurs for the second time because clocks were set back."""
    return t.utcoffset() != t.replace(fold=0).utcoffset()


def cron_of(settings: Settings) -> Cron | None:
    """The times at which reports are due; None if `report.cron` is not set.

    Raises:
        SettingsError: the expression, the time zone or a receiver is invalid, or the report's
            libraries are missing; a message for each mistake names the key.
    """
    if settings["report.cron"] is None:
        return None
    zone: tzinfo = UTC
    cron: Cron | None = None
    with reported_together() as mistakes:
        with gathered(mistakes), named_by(settings, "report.cron", "report.cron: "):
            check_libraries()
        with gathered(mistakes), named_by(settings, "report.timezone"):
            zone = zone_of(settings["report.timezone"])
        with gathered(mistakes):
            cron = _cron(settings, zone)
        with gathered(mistakes):
            receivers_of(settings)
    return cron


def _cron(settings: Settings, zone: tzinfo) -> Cron:
    expression: str = settings["report.cron"]
    try:
        cron: Cron = cast("Any", Cron).from_crontab(with_names(expression), timezone=zone)
    except ValueError as exc:
        raise SettingsError(
            f"{settings.origin('report.cron')}: report.cron = {expression!r} is not a cron "
            f"expression ({exc}); write five fields: minute hour day month weekday, such as "
            "0 6 * * mon"
        ) from exc
    cron.every_hour = expression.split()[1].startswith("*")
    if cron.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise SettingsError(
            f"{settings.origin('report.cron')}: report.cron = {expression!r} never fires: no month "
            "has that day"
        )
    return cron


def with_names(expression: str) -> str:
    """The expression with names instead of numbers for weekdays: APScheduler counts weekdays from
    Monday, cron from Sunday.

    Raises:
        ValueError: it does not have five fields, or the last one is not a list of weekdays.
    """
    fields = expression.split()
    if len(fields) != FIELDS:
        raise ValueError(f"{len(fields)} fields instead of {FIELDS}")
    return " ".join((*fields[:-1], _weekdays(fields[-1].lower())))


def _weekdays(field: str) -> str:
    if field in ("*", "?"):
        return "*"
    days: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            low, high = 0, 6
        else:
            low = _day(first)
            # Cron takes 5/2 for every second day from Friday on.
            high = _day(last) if last else 6 if step else low
        if high < low:
            high += 7
        days.update(day % 7 for day in range(low, high + 1, _step(step)))
    return ",".join(DAYS[day] for day in sorted(days))


def _day(text: str) -> int:
    if text in DAYS:
        return DAYS.index(text)
    if text.isascii() and text.isdigit() and int(text) <= 7:
        return int(text)
    raise ValueError(f"{text!r} is not a weekday")


def _step(text: str) -> int:
    if not text:
        return 1
    if text.isascii() and text.isdigit() and 0 < int(text) <= 7:
        return int(text)
    raise ValueError(f"{text!r} is not a step")


# --- The order: input of the process that makes a scheduled report, as JSON ----------------------


MetricsQuery = tuple[str, str]
"""The URL of a metrics system, and matchers of the series to read. Empty matchers mean all
series."""


def order(
    settings: Settings,
    *,
    store: Path,
    folder: Path,
    due_s: float,
    fleet: MetricsQuery | None = None,
) -> bytes:
    """The order for the report process, encoded as JSON."""
    values = {
        setting.key: [effective.value, effective.origin] for setting, effective in settings.rows()
    }
    return orjson.dumps(
        {
            "settings": values,
            "thresholds": settings.thresholds,
            "thresholds_origin": settings.thresholds_origin,
            "tables": settings.tables,
            "store": str(store),
            "folder": str(folder),
            "due_s": due_s,
            "fleet": fleet,
        }
    )


def settings_of(given: dict[str, Any]) -> Settings:
    """The settings that an order contains."""
    values = {key: Effective(value, origin) for key, (value, origin) in given["settings"].items()}
    return Settings(values, given["thresholds"], given["thresholds_origin"], given["tables"])


# --- When `run` makes reports: a cron expression in a time zone. I/O edge -------------------------
#
# Each report is made by a process of its own, one at a time; the daemon starts it and logs its
# result.


log = logging.getLogger(__name__)

FOLDER = "reports"
LIMIT_S = 1800.0
"""Seconds after which a report process is killed."""

CHECK_S = 30.0
"""Maximum seconds between two looks at the clock, which somebody may set."""

ERROR_CHARS_MAX = 2000


def folder_of(settings: Settings, store: Path) -> Path:
    """The folder of the reports: the setting `report.folder`; without it, `reports` in the store's
    folder."""
    stated: str | None = settings["report.folder"]
    return Path(stated) if stated else store.parent / FOLDER


class ReportJob(Job):
    """Makes a report at the times of `report.cron`. `fleet` is the metrics system to report on if
    the history has no engine. `due_s` is the time of the next one. Thread-safe.

    Raises:
        SettingsError: the schedule, the time zone or a receiver is invalid.
    """

    every_s, first_in_s = CHECK_S, 0.0

    def __init__(
        self,
        settings: Settings,
        store: Path,
        *,
        clock: Callable[[], float] = OWN_CLOCK,
        limit_s: float = LIMIT_S,
        fleet: MetricsQuery | None = None,
    ) -> None:
        self._store, self._fleet = store, fleet
        self._clock, self._limit_s = clock, limit_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self.due_s = NEVER_S
        self.adopt(settings)

    def adopt(self, settings: Settings) -> None:
        """Use these settings for the next reports.

        Raises:
            SettingsError: as for the job; then the old settings stay.
        """
        cron = cron_of(settings)
        with self._lock:
            self._settings, self._cron, now_s = settings, cron, self._clock()
            if self.due_s > now_s:  # a report that is due already is still made
                self.due_s = self._after_s(now_s)

    def cycle(self) -> float | None:
        """Make a report if one is due. Returns the seconds until the clock is read again."""
        with self._lock:
            now_s = self._clock()
            is_due, self.due_s = now_s >= self.due_s, self._after_s(now_s)
        if is_due:
            self.make()
        return min(CHECK_S, max(0.0, self.due_s - self._clock()))

    def _after_s(self, now_s: float) -> float:
        return NEVER_S if self._cron is None else self._cron.after_s(now_s)

    def stop(self) -> None:
        """Kill the running report process and make no more reports."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def make(self) -> None:
        """Make a report now, and log its result or its error."""
        folder = folder_of(self._settings, self._store)
        report_order = order(
            self._settings,
            store=self._store,
            folder=folder,
            due_s=self._clock(),
            fleet=self._fleet,
        )
        process = self._start()
        if process is None:
            return
        timed_out = False
        try:
            out, err = process.communicate(report_order, timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            out, err = process.communicate()
        with self._lock:
            self._process = None
        if self._stopped:
            return
        if timed_out:
            log.error("report timed out limit_s=%s", self._limit_s)
        elif process.returncode != 0:
            message = err.decode("utf-8", "replace").strip()[-ERROR_CHARS_MAX:]
            log.error("report failed status=%s error=%s", process.returncode, message)
        else:
            self._log_result(orjson.loads(out))

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kneewatch.agent.report.command"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            return self._process

    def _log_result(self, result: dict[str, Any]) -> None:
        log.info(
            "report written file=%s severity=%s incidents=%s sent=%s",
            result["file"], result["severity"], result["incidents"], ",".join(result["sent"]),
        )  # fmt: skip
        for receiver, why in result["failed"].items():
            log.error("report delivery failed receiver=%s error=%s", receiver, why)
