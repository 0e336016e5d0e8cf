"""The time that a report is of, and the one that it is compared with. Pure."""

from __future__ import annotations

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kneewatch.collector.base import SettingsError
from kneewatch.reports.weekly.grid import DAY_S, Grid, earlier, grid

LONGEST_S = 366 * DAY_S
"""Each hour of a report is kept for each engine, and shown."""


def periods(
    timezone: str,
    *,
    to_s: float,
    since_s: float,
    compare_s: float | None,
    unit_s: float = 0.0,
) -> tuple[Grid, Grid | None]:
    """The time of the report and the one that it is compared with; with `unit_s` both begin and end
    on multiples of it.

    Raises:
        SettingsError: there is no such time zone or time, or it is longer than a report can be.
    """
    zone = zone_of(timezone)
    if since_s > LONGEST_S:
        raise SettingsError("--since: a report is of a year (366d) at most")

    def cut(t_s: float) -> float:
        return t_s // unit_s * unit_s if unit_s else t_s

    def period(end_s: float) -> Grid:
        return grid(cut(earlier(end_s, since_s, zone)), end_s, timezone)

    try:
        to_s = cut(to_s)
        now = period(to_s)
        return now, None if compare_s is None else period(cut(earlier(to_s, compare_s, zone)))
    except (OverflowError, ValueError, OSError) as exc:
        raise SettingsError(f"--to, --since, --compare: no calendar has that time: {exc}") from exc


def zone_of(timezone: str) -> ZoneInfo:
    """A time zone by its name.

    Raises:
        SettingsError: there is none of that name.
    """
    try:
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise SettingsError(
            f"report.timezone: no time zone {timezone!r}; write one such as Europe/Berlin or UTC"
        ) from exc
