"""Cron expressions as cron has them, in a time zone. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.cron import CronTrigger  # type: ignore[import-untyped]

from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError

NEVER_S = 32_503_680_000.0
"""The year 3000: for an expression such as 0 0 31 2 *."""

DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
"""Cron's weekdays by number; 7 is Sunday as well."""

FIELDS = 5


class Cron(CronTrigger):  # type: ignore[misc]
    """The times of a cron expression; one that a clock leaves out is the next that there is, and
    one that comes twice is only the first, unless the expression is of every hour."""

    every_hour = False

    def get_next_fire_time(
        self, previous_fire_time: datetime | None, now: datetime
    ) -> datetime | None:
        """The next time, as APScheduler asks for it."""
        follows = cast("Any", super()).get_next_fire_time
        found: datetime | None = follows(previous_fire_time, now)
        while found is not None and _again(found) and not self.every_hour:
            found = follows(found, found.astimezone(UTC) + timedelta(seconds=1))
        return found

    def after_s(self, now_s: float) -> float:
        """The first time after a time: the daemon's clockwork asks where the clock was set."""
        after = datetime.fromtimestamp(now_s, UTC)
        found = self.get_next_fire_time(None, after)
        return found.timestamp() if found is not None else NEVER_S


def _again(t: datetime) -> bool:
    """Whether the clock has shown this time before."""
    return t.utcoffset() != t.replace(fold=0).utcoffset()


def cron_of(settings: Settings) -> Cron | None:
    """When reports are due; None where none are asked for.

    Raises:
        SettingsError: the expression or the time zone is none; the message names the key.
    """
    expression: str | None = settings["report.cron"]
    if expression is None:
        return None
    name: str = settings["report.timezone"]
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise SettingsError(
            f"{settings.origin('report.timezone')}: report.timezone = {name!r} is no time zone; "
            "write one such as Europe/Berlin or UTC"
        ) from exc
    try:
        made: Cron = cast("Any", Cron).from_crontab(with_names(expression), timezone=zone)
    except ValueError as exc:
        raise SettingsError(
            f"{settings.origin('report.cron')}: report.cron = {expression!r} is no cron "
            f"expression ({exc}); write five fields: minute hour day month weekday, such as "
            "0 6 * * mon"
        ) from exc
    made.every_hour = expression.split()[1].startswith("*")
    return made


def with_names(expression: str) -> str:
    """The expression with weekdays by name: APScheduler counts them from Monday, cron from Sunday.

    Raises:
        ValueError: it has not five fields, or the last one names no weekdays.
    """
    fields = expression.split()
    if len(fields) != FIELDS:
        raise ValueError(f"{len(fields)} fields, not {FIELDS}")
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
    raise ValueError(f"{text!r} is no weekday")


def _step(text: str) -> int:
    if not text:
        return 1
    if text.isascii() and text.isdigit() and 0 < int(text) <= 7:
        return int(text)
    raise ValueError(f"{text!r} is no step")
