"""Exponential backoff for targets that do not answer. Pure."""

from __future__ import annotations

FAILURES_BEFORE_BACKOFF = 3
"""Failures in a row before backoff starts: the first ones are retried at the usual interval."""

MAX_INTERVALS = 12
MAX_S = 60.0


def backoff_s(interval_s: float, *, failing: int, jitter: float) -> float:
    """Seconds until the next try after `failing` failures in a row: doubled each time.

    At most 12 intervals or a minute, whichever is less, and never less than the interval itself.
    `jitter`, from 0 to 1, subtracts up to a fifth, so that targets that failed together are not
    retried together.
    """
    if failing < FAILURES_BEFORE_BACKOFF:
        return interval_s
    most_s = max(min(MAX_INTERVALS * interval_s, MAX_S), interval_s)
    # 2 ** 6 exceeds the limit already; larger powers in a long outage would overflow.
    times = 2.0 ** min(failing - FAILURES_BEFORE_BACKOFF + 1, 6)
    delay_s = min(interval_s * times, most_s)
    return max(delay_s * (1 - 0.2 * jitter), interval_s)
