"""Moments and stretches of time in the report's time zone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time
from functools import cached_property
from zoneinfo import ZoneInfo

from kneewatch.reports.weekly.figures import Period
from kneewatch.reports.words import plural, span

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
"""Not the locale's: a report is the same wherever it is made."""

WEEK_DAYS = 7
MIDNIGHT = time()
TO_THE_SECOND_S = 600.0
"""Stretches shorter than this are told with their seconds."""


@dataclass(frozen=True)
class Calendar:
    """How moments are told: in a time zone, from a period's point of view."""

    timezone: str
    period: Period

    @cached_property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @cached_property
    def shifts(self) -> bool:
        """Whether clocks are set within the period, so that an hour's name may be there twice."""
        ends = (self.period.from_s, self.period.to_s)
        return len({self.local(t_s).utcoffset() for t_s in ends}) > 1

    def local(self, t_s: float) -> datetime:
        """A moment by the clocks of the time zone."""
        return datetime.fromtimestamp(t_s, self._zone)

    def day(self, t_s: float) -> str:
        """Mon 9 Nov."""
        local = self.local(t_s)
        return f"{WEEKDAYS[local.weekday()]} {local.day} {MONTHS[local.month - 1]}"

    def clock(self, t_s: float, *, seconds: bool = False) -> str:
        """14:03; with the zone's letters where clocks are set within the period."""
        local = self.local(t_s)
        told = f"{local:%H:%M:%S}" if seconds else f"{local:%H:%M}"
        return f"{told} {local.tzname()}" if self.shifts else told

    def moment(self, t_s: float, *, seconds: bool = False) -> str:
        """Mon 9 Nov, 14:03."""
        return f"{self.day(t_s)}, {self.clock(t_s, seconds=seconds)}"

    def dated(self, t_s: float) -> str:
        """Mon 9 Nov 2026, 14:03."""
        return f"{self.day(t_s)} {self.local(t_s).year}, {self.clock(t_s)}"

    def stretch(self, start_s: float, end_s: float) -> str:
        """Mon 9 Nov, 14:03 to 14:41; both days where they differ."""
        seconds = end_s - start_s < TO_THE_SECOND_S
        same = self.local(start_s).date() == self.local(end_s).date()
        end = self.clock(end_s, seconds=seconds) if same else self.moment(end_s, seconds=seconds)
        return f"{self.moment(start_s, seconds=seconds)} to {end}"

    def days(self, period: Period) -> str:
        """A period by its days where it begins and ends at midnight, else by its moments."""
        first, end = self.local(period.from_s), self.local(period.to_s)
        if not first.time() == end.time() == MIDNIGHT:
            return f"{self.moment(period.from_s)} to {self.moment(period.to_s)}"
        last_s = period.to_s - 1.0
        if self.local(last_s).date() == first.date():
            return self.day(period.from_s)
        return f"{self.day(period.from_s)} to {self.day(last_s)}"

    @property
    def title(self) -> str:
        """The period, with its year, or those of its ends."""
        years = {self.local(t_s).year for t_s in (self.period.from_s, self.period.to_s - 1.0)}
        return f"{self.days(self.period)} {'/'.join(map(str, sorted(years)))}"

    @property
    def length(self) -> str:
        """How long the period is: in days of the calendar where it has whole ones, else in time."""
        if self._whole:
            return plural(self.period.days, "day")
        return span(self.period.to_s - self.period.from_s)

    @property
    def _whole(self) -> bool:
        """Whether the period begins and ends at the same time of day."""
        return self.local(self.period.from_s).time() == self.local(self.period.to_s).time()

    @property
    def week(self) -> bool:
        """Whether the period is a week."""
        return self._whole and self.period.days == WEEK_DAYS

    @property
    def now(self) -> str:
        """What the period is called."""
        return "this week" if self.week else "this period"

    @property
    def before(self) -> str:
        """What the period before is called."""
        return "last week" if self.week else "the period before"


def stamp(t_s: float) -> str:
    """A moment for machines: 2026-11-09T13:03:00Z."""
    return datetime.fromtimestamp(t_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def lasted(start_s: float, end_s: float) -> str:
    """How long a stretch is: 38 min."""
    return span(end_s - start_s)
