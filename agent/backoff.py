"""How long to leave a target alone that does not answer. Pure."""

from __future__ import annotations

PATIENT_FAILURES = 3
"""Failures in a row until the target counts as down: so many scrapes are not spaced out."""

MOST_INTERVALS = 12
MOST_S = 60.0


def backoff_s(interval_s: float, *, failing: int, luck: float) -> float:
    """Seconds until the next try after so many failures in a row: twice as long each time.

    At most 12 intervals or a minute, whichever is less, and never less than the interval itself.
    `luck`, from 0 to 1, takes up to a fifth off: targets that died together are not tried together.
    """
    if failing < PATIENT_FAILURES:
        return interval_s
    most_s = max(min(MOST_INTERVALS * interval_s, MOST_S), interval_s)
    # Beyond 2 ** 6 the limit has been reached, and powers of a long outage would overflow.
    times = 2.0 ** min(failing - PATIENT_FAILURES + 1, 6)
    wanted_s = min(interval_s * times, most_s)
    return max(wanted_s * (1 - 0.2 * luck), interval_s)
