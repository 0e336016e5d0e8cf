"""Query parameters: formats, and parsing of times.

Parameters are any text for FastAPI. The endpoints check the values themselves, so that an error
message can show what to write instead.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated

from fastapi import Query
from msgspec import Struct

from kneewatch.agent.api.responses import HTML, JSON, MARKDOWN, TEXT, Problem
from kneewatch.agent.settings.table import UNITS_S
from kneewatch.rules.formatting import stamp

TRIAGE_FORMS = (TEXT, JSON, MARKDOWN, HTML)
Unavailable = Annotated[str | None, Query(include_in_schema=False)]
"""A parameter that an endpoint accepts only to answer why it is not available."""


class Asked(Struct, frozen=True):
    """What a request about diagnoses asks for.

    `target` is empty for all targets, `at_s` None for now, `since_s` the start of the history; None
    without one. On the page, `since` is the length of the timeline, a key of SINCE, and `notices`
    are mistakes in the parameters.
    """

    target: str
    now_s: float
    at_s: float | None
    since_s: float | None
    since: str = ""
    notices: tuple[str, ...] = ()

    @property
    def moment_s(self) -> float:
        """The moment, in Unix seconds."""
        return self.now_s if self.at_s is None else self.at_s


def asked(now_s: float, target: str, at: str | None, since: str | None) -> Asked:
    """The parameters of a request.

    Raises:
        Problem: a time is wrong.
    """
    at_s = moment("at", at, now_s=now_s) if at else None
    before_s = now_s if at_s is None else at_s
    since_s = moment("since", since, now_s=now_s, before_s=before_s) if since else None
    return Asked(target, now_s, at_s, since_s)


# --- Times: unix seconds, ISO 8601, a time of day, or a duration ago ------------------------------


SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
AGO = re.compile(r"-?([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])")
DAY_TIME = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?Z?")
LOST_PLUS = re.compile(r"(.+[T ][0-9:.]+) ([0-9]{2}:?[0-9]{2})")
"""A time whose "+" was lost: in a query string "+" means a space unless it is encoded as %2B."""

LONGEST = 40
AHEAD_S = 60.0
"""Seconds by which a time may be in the future, because clocks differ. A later time is an error."""

SYNTAX = (
    "write unix seconds (1795219600), ISO 8601 (2026-11-21T03:07:00Z), a time of day in UTC "
    "(03:07) or how long ago (-2h; units s, m, h, d, w)"
)


def moment(name: str, text: str, *, now_s: float, before_s: float | None = None) -> float:
    """Parse a time parameter. Returns Unix seconds.

    A duration counts back from `before_s` (default: now). A time without a zone is UTC.

    Raises:
        Problem: the text is no time, or the time is in the future or after `before_s`.
    """
    end_s = now_s if before_s is None else before_s
    t_s = _parsed(text.strip(), end_s) if len(text) <= LONGEST else None
    if t_s is None:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} is not a time: {SYNTAX}")
    if t_s > now_s + AHEAD_S:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"{name} is in the future: the time here is {stamp(now_s)}; omit {name} for the "
            "present",
        )
    if before_s is not None and t_s > before_s:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} must be before the requested moment"
        )
    return t_s


def _parsed(text: str, end_s: float) -> float | None:
    if SECONDS.fullmatch(text):
        return float(text)
    if ago := AGO.fullmatch(text):
        return max(0.0, end_s - float(ago[1]) * UNITS_S[ago[2]])
    if clock := DAY_TIME.fullmatch(text):
        return _time_of_day(end_s, int(clock[1]), int(clock[2]), int(clock[3] or 0))
    lost = LOST_PLUS.fullmatch(text)
    return _iso_moment(f"{lost[1]}+{lost[2]}" if lost else text)


def _time_of_day(end_s: float, hour: int, minute: int, second: int) -> float:
    """The last time at or before `end_s` with this time of day, in Unix seconds."""
    end = datetime.fromtimestamp(end_s, tz=UTC)
    moment = end.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (moment if moment <= end else moment - timedelta(days=1)).timestamp()


def _iso_moment(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
        t_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return t_s if math.isfinite(t_s) and t_s >= 0 else None
