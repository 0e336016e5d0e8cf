"""How long to leave a target alone that does not answer. Pure."""

from __future__ import annotations

FAILURES_BEFORE_BACKOFF = 3
"""Failures in a row until the target counts as down: so many scrapes are not spaced out."""

MAX_INTERVALS = 12
MAX_S = 60.0


def backoff_s(interval_s: float, *, failing: int, jitter: float) -> float:
    """Seconds until the next try after so many failures in a row: twice as long each time.

    At most 12 intervals or a minute, whichever is less, and never less than the interval itself.
    `luck`, from 0 to 1, takes up to a fifth off: targets that died together are not tried together.
    """
    if failing < FAILURES_BEFORE_BACKOFF:
        return interval_s
    most_s = max(min(MAX_INTERVALS * interval_s, MAX_S), interval_s)
    # Beyond 2 ** 6 the limit has been reached, and powers of a long outage would overflow.
    times = 2.0 ** min(failing - FAILURES_BEFORE_BACKOFF + 1, 6)
    wanted_s = min(interval_s * times, most_s)
    return max(wanted_s * (1 - 0.2 * jitter), interval_s)
