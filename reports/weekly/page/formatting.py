"""The report's figures, times and durations in words. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time
from functools import cached_property
from zoneinfo import ZoneInfo

from kneewatch.reports.formatting import duration, number, percent, plural, quantity, span
from kneewatch.reports.weekly.figures import DOWN, UP, FlagChange, Period, Spread, Trend
from kneewatch.reports.weekly.report import TrackRecord

UNKNOWN = "not known"
GIB = 1024.0**3
WORD = re.compile(r"[a-zA-Z]+")
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"

ARROWS: Mapping[str, str] = {UP: "▲", DOWN: "▼"}
"""A change within the noise has none."""

HEALTH: Mapping[str, str] = {
    "ok": "Healthy",
    "info": "Healthy, with a note",
    "warning": "Warning",
    "critical": "Critical",
    "unknown": "Unknown",
}
RANKS: Mapping[str, int] = {
    "ok": 0,
    "trend": 0,
    "info": 1,
    "unknown": 2,
    "warning": 3,
    "critical": 4,
}
"""Unknown is worse than a note: somebody must look."""

STATES: Mapping[str, str] = {
    "ok": "in band",
    "info": "note",
    "warning": "warning",
    "critical": "critical",
    "unknown": "unknown",
    "trend": "no bound",
    "off": "not in use",
}
PLAIN = ("trend", "off")
"""States that say nothing of health."""

SIZES: Mapping[str, str] = {
    "right": "Right-sized",
    "too small": "Too small",
    "too large": "Too large",
    "unknown": "Not known",
}
SIZE_STATES: Mapping[str, str] = {"right": "ok", "too small": "warning", "too large": "info"}

LATENCIES: Mapping[str, str] = {
    "ttft": "TTFT (first token)",
    "itl": "ITL (between tokens)",
    "e2e": "E2E (whole request)",
    "queue": "Queue",
    "prefill": "Prefill",
    "decode": "Decode",
}
FATES: Mapping[str, tuple[str, str]] = {
    "open": ("info", "not seen to be followed"),
    "applied": ("info", "followed, not measured yet"),
    "kept": ("ok", "followed: it did what was predicted"),
    "missed": ("warning", "followed: it did less than predicted"),
    "worsened": ("critical", "followed: it made things worse"),
    "lapsed": ("unknown", "never followed, no longer advised"),
    "unknown": ("unknown", "not known: only kneewatch run follows what is advised"),
}
"""What became of a recommendation: how good that is, and in words."""


ENDINGS = {
    "restarted": "ended by a restart",
    "unwatched": "ended when nobody watched",
}


def ending(how: str, *, goes_on: bool) -> str:
    """How an incident ended."""
    return "still going on at the end" if goes_on else ENDINGS.get(how, "ended")


def told(value: float | None, unit: str) -> str:
    """A value with its unit; `not known` for none."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    known = _TOLD.get(unit)
    return known(value) if known else " ".join((number(value), *WORD.findall(unit)))


def _usd(value: float) -> str:
    cents = 0 < abs(value) < 100
    return f"{value:,.2f} USD" if cents else f"{value:,.0f} USD"


def _gpus(value: float) -> str:
    return "1 GPU" if value == 1 else f"{number(value)} GPUs"


_TOLD: Mapping[str, Callable[[float], str]] = {
    "": number,
    "s": duration,
    "ratio": percent,
    "ratio_per_s": lambda value: f"{percent(value)} a second",
    "per_s": lambda value: f"{number(value)} a second",
    "tokens": lambda value: f"{number(value)} tokens",
    "tokens_per_s": lambda value: f"{number(value)} tokens a second",
    "bytes": lambda value: f"{number(value / GIB)} GiB",
    "usd": _usd,
    "usd_per_hour": lambda value: f"{_usd(value)} an hour",
    "usd_per_million_tokens": lambda value: f"{_usd(value)} per million tokens",
    "requests": lambda value: f"{number(value)} {'request' if value == 1 else 'requests'}",
    "gpus": _gpus,
    "hours": lambda value: f"{number(value)} {'hour' if value == 1 else 'hours'}",
    "gpu_hours": lambda value: f"{number(value)} GPU-hours",
    "factor": lambda value: f"{number(value)} times",
}


def bare(value: float | None, unit: str) -> str:
    """A value in a column whose head has the unit: only what carries none in itself is short."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return told(value, unit) if unit in ("s", "ratio", "ratio_per_s", "bytes") else number(value)


def spread(value: Spread | None, unit: str) -> str:
    """An expected value with what it may be: 48 (40 to 55)."""
    if value is None:
        return UNKNOWN
    if value.low == value.high:
        return told(value.expected, unit)
    return f"{told(value.expected, unit)} ({bare(value.low, unit)} to {bare(value.high, unit)})"


def quantity_of(values: Mapping[str, float], key: str) -> str:
    """A signal's value among others, with its unit; a dash where it is not there."""
    return quantity(key, values.get(key))


def share(ratio: float | None) -> str:
    """A share of what was well, in percent; only all of it is 100 %: 98 %, 99.94 %."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    if 0.99 <= ratio < 1:
        return f"{math.floor(1e4 * ratio + 1e-6) / 100:g} %"
    return percent(ratio)


def saved(value: float | None, unit: str) -> str:
    """Money that is saved, or that it costs."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "costs and saves nothing"
    return f"{'saves' if value > 0 else 'costs'} {told(abs(value), unit)}"


def points(off: float | None, unit: str) -> str:
    """A difference: in points where the figure is a ratio, else in percent of it."""
    if off is None or not math.isfinite(off):
        return UNKNOWN
    signed = f"{100 * off:+.0f}".replace("-", MINUS)
    return f"{signed} points" if unit == "ratio" else f"{signed} %"


def change(trend: Trend) -> str:
    """The change in words, without a value: up, worse; empty where none is told."""
    return f"{trend.direction}{_judged(trend)}" if trend.direction in ARROWS else ""


def _judged(trend: Trend) -> str:
    return "" if trend.good is None else ", better" if trend.good else ", worse"


def tone(trend: Trend) -> str:
    """How a change is painted: better, worse, or neither."""
    if trend.direction not in ARROWS or trend.good is None:
        return "quiet"
    return "better" if trend.good else "worse"


def arrow(trend: Trend) -> str:
    """The change's sign; empty where nothing can be said."""
    return ARROWS.get(trend.direction, "")


def sentence(trend: Trend) -> str:
    """A figure with its change: TTFT P99 4.2 s, up from 1.2 s, worse."""
    return f"{trend.name} {moved(trend)}"


def moved(trend: Trend) -> str:
    """A figure's value with its change: 4.2 s, up from 1.2 s, worse."""
    value = told(trend.value, trend.unit)
    if trend.direction not in ARROWS:
        return value
    return f"{value}, {trend.direction} from {told(trend.before, trend.unit)}{_judged(trend)}"


def flag(made: FlagChange) -> str:
    """A change of a flag as it would be typed."""
    if not made.after:
        return f"drop {made.flag}"
    if not made.before:
        return f"{made.flag} {made.after}"
    return f"{made.flag} {made.before} → {made.after}"


def said(text: str) -> str:
    """A text as a sentence; a name with a sign in it begins as it is written."""
    first = text.split(" ", 1)[0]
    begun = text[:1].upper() + text[1:] if first.isalpha() else text
    return begun if not begun or begun.endswith((".", "!", "?")) else f"{begun}."


def told_size(verdict: str, words: str) -> tuple[str, str]:
    """The verdict on a size, and the rest of its words, which may begin with the verdict."""
    head = SIZES.get(verdict, SIZES["unknown"])
    first, colon, rest = words.partition(": ")
    same = colon and first.lower() in (verdict, head.lower())
    return head, said(rest if same else words)


def health(word: str) -> str:
    """A health or severity that the page knows; anything else is unknown."""
    return word if word in HEALTH else "unknown"


def state(word: str) -> str:
    """A row's state that the page knows; anything else is unknown."""
    return word if word in STATES else "unknown"


def followed(record: TrackRecord) -> str:
    """How many recommendations there were, and what came of them, in a line."""
    made = f"{plural(record.made, 'recommendation')} made"
    if record.unknown and record.unknown == record.made:
        return f"{made}. Whether they were followed is not known: only kneewatch run follows them."
    unknown = f" Of {record.unknown} nothing is known." if record.unknown else ""
    return (
        f"{made}, {record.applied} followed. Of those measured, {record.kept} did what was "
        f"predicted, {record.missed} did less, {record.worsened} made things worse. {record.open} "
        f"open, {record.lapsed} lapsed.{unknown}"
    )


# --- Moments and stretches of time in the report's time zone --------------------------------------


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
