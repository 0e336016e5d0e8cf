"""The times that requests name: unix seconds, ISO 8601, a time of day, or so long ago. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

from kneewatch.agent.api.responses import Problem

UNITS_S: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
AGO = re.compile(r"-?([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])")
DAY_TIME = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?Z?")
LOST_PLUS = re.compile(r"(.+[T ][0-9:.]+) ([0-9]{2}:?[0-9]{2})")
"""A + in a query that was not written %2B arrives as a space."""

LONGEST = 40
AHEAD_S = 60.0
"""Clocks differ; a time further ahead is a mistake."""

PATTERN = (
    r"^(-?[0-9]{1,9}[smhdw]|[0-9]{1,12}(\.[0-9]{1,9})?|"
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?|"
    r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?)$"
)
"""The same for the OpenAPI document."""

WAYS = (
    "write unix seconds (1795219600), ISO 8601 (2026-11-21T03:07:00Z), a time of day in UTC "
    "(03:07) or how long ago (-2h; units s, m, h, d, w)"
)


def moment(name: str, told: str, *, now_s: float, before_s: float | None = None) -> float:
    """The unix time that a parameter names. So long ago counts from `before_s`, which is now where
    none is given; a time without a zone is UTC.

    Raises:
        Problem: it is no time, or lies ahead.
    """
    ends_s = now_s if before_s is None else before_s
    found_s = _parsed(told.strip(), ends_s) if len(told) <= LONGEST else None
    if found_s is None:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} is no time: {WAYS}")
    if found_s > now_s + AHEAD_S:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"{name} is in the future: it is {_iso(now_s)} here; leave {name} out for now",
        )
    if before_s is not None and found_s > before_s:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} must be before the moment asked for"
        )
    return found_s


def _parsed(told: str, ends_s: float) -> float | None:
    if SECONDS.fullmatch(told):
        return float(told)
    if ago := AGO.fullmatch(told):
        return max(0.0, ends_s - float(ago[1]) * UNITS_S[ago[2]])
    if clock := DAY_TIME.fullmatch(told):
        return _time_of_day(ends_s, int(clock[1]), int(clock[2]), int(clock[3] or 0))
    lost = LOST_PLUS.fullmatch(told)
    return _iso_moment(f"{lost[1]}+{lost[2]}" if lost else told)


def _time_of_day(ends_s: float, hour: int, minute: int, second: int) -> float:
    """The last one before the end."""
    end = datetime.fromtimestamp(ends_s, tz=UTC)
    found = end.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (found if found <= end else found - timedelta(days=1)).timestamp()


def _iso_moment(told: str) -> float | None:
    try:
        found = datetime.fromisoformat(told)
        found_s = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return found_s if math.isfinite(found_s) and found_s >= 0 else None


def _iso(t_s: float) -> str:
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
