"""Formats figures, times and durations of the report. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, time
from functools import cached_property
from zoneinfo import ZoneInfo

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.capacity import Range
from kneewatch.reports.lines import usd
from kneewatch.reports.weekly.figures import DOWN, UP, Period, ReportedFlag, Trend
from kneewatch.reports.weekly.report import TrackRecord
from kneewatch.rules.formatting import as_sentence, duration, number, percent, plural, span

UNKNOWN = "unknown"
GIB = 1024.0**3
WORD = re.compile(r"[a-zA-Z]+")
MINUS = "\N{MINUS SIGN}"

ARROWS: Mapping[str, str] = {UP: "▲", DOWN: "▼"}
"""Arrows by direction. A change within the noise has no arrow."""

_WORDS = packaged_tables("reports.weekly.page", "words.toml")
HEALTH: Mapping[str, str] = _WORDS["health"]
STATES: Mapping[str, str] = {**{word: word for word in HEALTH}, **_WORDS["states"]}
PLAIN = tuple(_WORDS["states"])
"""States of rows that are not health states."""

SIZES: Mapping[str, str] = _WORDS["sizes"]
SIZE_STATES: Mapping[str, str] = _WORDS["size_states"]
LATENCIES: Mapping[str, str] = _WORDS["latencies"]
OUTCOMES: Mapping[str, tuple[str, str]] = _WORDS["outcomes"]
"""For each outcome of a recommendation: a health state, and its name in words."""


def with_unit(value: float | None, unit: str) -> str:
    """A value with its unit; `unknown` for None."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    formatter = _FORMATTERS.get(unit)
    return formatter(value) if formatter else " ".join((number(value), *WORD.findall(unit)))


def _counted(noun: str) -> Callable[[float], str]:
    return lambda value: f"{number(value)} {noun if value == 1 else noun + 's'}"


MANY_BUDGETS = 10.0

_FORMATTERS: Mapping[str, Callable[[float], str]] = {
    "": number,
    "s": duration,
    "ratio": percent,
    "ratio_per_s": lambda value: f"{percent(value)}/s",
    "per_s": lambda value: f"{number(value)}/s",
    "tokens": lambda value: f"{number(value)} tokens",
    "tokens_per_s": lambda value: f"{number(value)} tokens/s",
    "bytes": lambda value: f"{number(value / GIB)} GiB",
    "usd": usd,
    "usd_per_hour": lambda value: f"{usd(value)}/h",
    "usd_per_million_tokens": lambda value: f"{usd(value)} per million tokens",
    "requests": lambda value: _counted("request")(round(value) if value >= 10 else value),
    "requests_per_usd": lambda value: f"{number(value)} requests per USD",
    "gpus": _counted("GPU"),
    "hours": _counted("hour"),
    "gpu_hours": lambda value: (
        f"{number(value)} GPU-hours" if value >= 0.1 else f"{number(60 * value)} GPU-minutes"
    ),
    "factor": lambda value: f"{number(value)}x",
}


def request_count(value: float | None) -> str:
    """A rounded number of requests, such as "9 requests". It is rounded because shares of histogram
    buckets and extrapolated increases are not whole numbers."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return plural(round(value), "request") if value >= 0.5 or value == 0 else "under 1 request"


def bare(value: float | None, unit: str) -> str:
    """A value without unit, for a column whose heading contains the unit."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return (
        with_unit(value, unit) if unit in ("s", "ratio", "ratio_per_s", "bytes") else number(value)
    )


def spread(value: Range | None, unit: str) -> str:
    """An expected value with its range, such as "48 (40 to 55)"."""
    if value is None:
        return UNKNOWN
    if value.low == value.high:
        return with_unit(value.expected, unit)
    return (
        f"{with_unit(value.expected, unit)} ({bare(value.low, unit)} to {bare(value.high, unit)})"
    )


def share(ratio: float | None) -> str:
    """A share in percent, such as 98% or 99.94%. Near 1 it is rounded down, so that 100%
    means all."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    if 0.99 <= ratio < 1:
        return f"{math.floor(1e4 * ratio + 1e-6) / 100:g}%"
    return percent(ratio)


def spent(ratio: float) -> str:
    """The spent part of a budget, such as 220%; from ten budgets on, such as "27x the budget"."""
    return percent(ratio) if ratio < MANY_BUDGETS else f"{ratio:,.0f}x the budget"


def saved(value: float | None, unit: str) -> str:
    """Money saved or spent, such as "saves 12 USD"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "no change in cost"
    return f"{'saves' if value > 0 else 'costs'} {with_unit(abs(value), unit)}"


def points(off: float | None, unit: str) -> str:
    """A difference: in points if the figure is a ratio, else in percent."""
    if off is None or not math.isfinite(off):
        return UNKNOWN
    signed = f"{100 * off:+.0f}".replace("-", MINUS)
    return f"{signed} points" if unit == "ratio" else f"{signed}%"


def change(trend: Trend) -> str:
    """The change of a figure in words, such as "up, worse". Empty without a significant change."""
    return f"{trend.direction}{_judged(trend)}" if trend.direction in ARROWS else ""


def _judged(trend: Trend) -> str:
    return "" if trend.good is None else ", better" if trend.good else ", worse"


def tone(trend: Trend) -> str:
    """The CSS class for a change: better, worse or quiet."""
    if trend.direction not in ARROWS or trend.good is None:
        return "quiet"
    return "better" if trend.good else "worse"


def arrow(trend: Trend) -> str:
    """The arrow for a change. Empty without a significant change."""
    return ARROWS.get(trend.direction, "")


def sentence(trend: Trend) -> str:
    """A figure with its change, such as "TTFT P99 4.2 s, up from 1.2 s, worse"."""
    value = f"{trend.name} {with_unit(trend.value, trend.unit)}"
    if trend.direction not in ARROWS:
        return value
    return f"{value}, {trend.direction} from {with_unit(trend.before, trend.unit)}{_judged(trend)}"


def flag(change: ReportedFlag) -> str:
    """A flag with its old and its new value."""
    if not change.after:
        return f"drop {change.flag}"
    if not change.before:
        return f"{change.flag} {change.after}"
    if change.flag.startswith("--"):
        return f"{change.flag} {change.after} (now {change.before})"
    return f"{change.flag} {change.before} → {change.after}"


def has_number(text: str) -> bool:
    """Whether a sentence contains its number already, so that the number need not be shown
    again."""
    return any(letter.isdecimal() for letter in text)


def size_name(verdict: str) -> str:
    return SIZES.get(verdict, SIZES["unknown"])


def size_state(verdict: str) -> str:
    return SIZE_STATES.get(verdict, "unknown")


def size_verdict(verdict: str, words: str) -> tuple[str, str]:
    """The verdict on the size in words, and its explanation. If the explanation starts with the
    verdict, that start is removed."""
    head = size_name(verdict)
    first, colon, rest = words.partition(": ")
    same = colon and first.lower() in (verdict, head.lower())
    return head, as_sentence(rest if same else words)


def health(word: str) -> str:
    """The health state. An unexpected word becomes unknown."""
    return word if word in HEALTH else "unknown"


def state(word: str) -> str:
    """The state of a row. An unexpected word becomes unknown."""
    return word if word in STATES else "unknown"


def outcome(word: str) -> tuple[str, str]:
    """The health state and the words for an outcome of a recommendation."""
    state, words = OUTCOMES.get(word, ("unknown", word))
    return state, words


def followed(record: TrackRecord) -> str:
    """One line with the number of recommendations and their outcomes."""
    total = f"{plural(record.made, 'recommendation')} made"
    if record.unknown and record.unknown == record.made:
        return f"{total}. Whether they were applied is unknown: only kneewatch run tracks them."
    counts = (
        (record.kept, "worked as predicted"),
        (record.missed, "helped less than predicted"),
        (record.worsened, "made things worse"),
        (
            record.applied - record.kept - record.missed - record.worsened,
            "applied and not measured yet",
        ),
        (record.open, "not applied yet"),
        (record.lapsed, "never applied and no longer recommended"),
        (record.unknown, "unknown"),
    )
    outcomes = ", ".join(f"{count} {outcome}" for count, outcome in counts if count > 0)
    return f"{total}: {outcomes}." if outcomes else f"{total}."


# --- Moments and stretches of time in the report's time zone --------------------------------------


WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
"""Names of months. They are English, whatever the locale of the machine."""

WEEK_DAYS = 7
MIDNIGHT = time()
TO_THE_SECOND_S = 600.0
"""Intervals shorter than this many seconds are shown with seconds."""


class Calendar(Struct, frozen=True, dict=True):
    """Formats times in the report's time zone."""

    timezone: str
    period: Period

    @cached_property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @cached_property
    def shifts(self) -> bool:
        """Whether clocks change within the period. An hour of the day may then occur twice."""
        ends = (self.period.from_s, self.period.to_s)
        return len({self.local(t_s).utcoffset() for t_s in ends}) > 1

    def local(self, t_s: float) -> datetime:
        return datetime.fromtimestamp(t_s, self._zone)

    def day(self, t_s: float) -> str:
        """A day, such as "Mon 9 Nov"."""
        local = self.local(t_s)
        return f"{WEEKDAYS[local.weekday()]} {local.day} {MONTHS[local.month - 1]}"

    def clock(self, t_s: float, *, seconds: bool = False) -> str:
        """A time of day, such as "14:03". It includes the zone's abbreviation if clocks change
        within the period."""
        local = self.local(t_s)
        clock = f"{local:%H:%M:%S}" if seconds else f"{local:%H:%M}"
        return f"{clock} {local.tzname()}" if self.shifts else clock

    def moment(self, t_s: float, *, seconds: bool = False) -> str:
        """A time with its day, such as "Mon 9 Nov, 14:03"."""
        return f"{self.day(t_s)}, {self.clock(t_s, seconds=seconds)}"

    def dated(self, t_s: float) -> str:
        """A time with its day and year, such as "Mon 9 Nov 2026, 14:03"."""
        return f"{self.day(t_s)} {self.local(t_s).year}, {self.clock(t_s)}"

    def stretch(self, start_s: float, end_s: float) -> str:
        """A time range, such as "Mon 9 Nov, 14:03 to 14:41". The end includes its day if that is
        another day."""
        seconds = end_s - start_s < TO_THE_SECOND_S
        same = self.local(start_s).date() == self.local(end_s).date()
        end = self.clock(end_s, seconds=seconds) if same else self.moment(end_s, seconds=seconds)
        return f"{self.moment(start_s, seconds=seconds)} to {end}"

    def days(self, period: Period) -> str:
        """The days of a period if it begins and ends at midnight, else its times."""
        if not self._of_whole_days(period):
            return self.stretch(period.from_s, period.to_s)
        return " to ".join(dict.fromkeys(map(self.day, (period.from_s, period.to_s - 1.0))))

    @property
    def title(self) -> str:
        """The period with its year, such as "Mon 9 Nov to Sun 15 Nov 2026"."""
        from_s, to_s = self.period.from_s, self.period.to_s
        first, last = self.local(from_s), self.local(to_s - 1.0)
        if not self._of_whole_days(self.period):
            same_day = first.date() == last.date()
            return f"{self.dated(from_s)} to {self.clock(to_s) if same_day else self.dated(to_s)}"
        if first.year == last.year:
            return f"{self.days(self.period)} {last.year}"
        return f"{self.day(from_s)} {first.year} to {self.day(to_s - 1.0)} {last.year}"

    def _of_whole_days(self, period: Period) -> bool:
        """Whether a period begins and ends at midnight."""
        return {self.local(t_s).time() for t_s in (period.from_s, period.to_s)} == {MIDNIGHT}

    @property
    def length(self) -> str:
        """The length of the period: in days if they are whole calendar days, else as a duration."""
        if self._whole:
            return plural(self.period.days, "day")
        return span(self.period.to_s - self.period.from_s)

    @property
    def _whole(self) -> bool:
        """Whether the period begins and ends at the same time of day."""
        return self.local(self.period.from_s).time() == self.local(self.period.to_s).time()

    @property
    def week(self) -> bool:
        return self._whole and self.period.days == WEEK_DAYS

    @property
    def now(self) -> str:
        return "this week" if self.week else "this period"

    @property
    def before(self) -> str:
        """The report's name for the period before."""
        return "last week" if self.week else "the period before"
