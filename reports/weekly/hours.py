"""The hours and days of a period in a time zone, also where clocks are set. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
LEAST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Slot:
    """An hour of the local clock, or the part of it that lies in the period.

    `weekday` 0 is Monday; `day` counts the period's days from 0, each from the local time of day at
    which the period begins to the same time a day later.
    """

    start_s: float
    end_s: float
    weekday: int
    hour: int
    day: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A period, cut into local hours. `day_starts_s` are the beginnings of its days."""

    from_s: float
    to_s: float
    timezone: str
    slots: tuple[Slot, ...]
    day_starts_s: tuple[float, ...]

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The hours' bounds, one more than there are hours."""
        return (*(slot.start_s for slot in self.slots), self.to_s)

    @property
    def days(self) -> int:
        """The number of days; the last one may be partial."""
        return len(self.day_starts_s)


def earlier(t_s: float, span_s: float, zone: ZoneInfo) -> float:
    """The time `span_s` before `t_s`; whole days are calendar days, whose length varies."""
    days, rest_s = divmod(span_s, DAY_S)
    if rest_s:
        return t_s - span_s
    return _moved(datetime.fromtimestamp(t_s, zone), -int(days))


def grid(from_s: float, to_s: float, timezone: str) -> Grid:
    """The grid of a period.

    Raises:
        ValueError: the period is empty.
    """
    if not to_s > from_s:
        raise ValueError(f"a period from {from_s} to {to_s} is empty")
    zone = ZoneInfo(timezone)
    begin = datetime.fromtimestamp(from_s, zone)
    days = [from_s]
    while (next_s := _moved(begin, len(days))) < to_s - LEAST_S:
        days.append(next_s)
    slots: list[Slot] = []
    start_s = from_s
    while start_s < to_s - LEAST_S:
        end_s = min(_next_hour(start_s, zone), to_s)
        local = datetime.fromtimestamp(start_s, zone)
        day = bisect_right(days, start_s + LEAST_S) - 1
        slots.append(Slot(start_s, end_s, local.weekday(), local.hour, day))
        start_s = end_s
    return Grid(from_s, to_s, timezone, tuple(slots), tuple(days))


def _moved(local: datetime, days: int) -> float:
    """The same time of day some days later (or earlier), as unix seconds."""
    return (local + timedelta(days=days)).timestamp()


def _next_hour(t_s: float, zone: ZoneInfo) -> float:
    """The next full hour of the local clock, also in zones with a half-hour offset."""
    offset = datetime.fromtimestamp(t_s, zone).utcoffset() or timedelta()
    offset_s = offset.total_seconds()
    return (int((t_s + offset_s) // HOUR_S) + 1) * HOUR_S - offset_s
