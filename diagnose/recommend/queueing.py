"""The wait for a seat of requests that arrive on their own: M/G/c. Pure."""

from __future__ import annotations

from functools import cached_property
from math import log, sqrt

from msgspec import Struct

RARE = 0.01
"""The P99 is exceeded by this share of requests."""

NEVER = 1e-6
"""A share of requests that is none."""

BURST, HELD_BURST = 3.0, 2.326
"""Standard deviations of the requests at once that new seats are for, and that advised ones must
keep: arrivals that are independent exceed the first 0.1% of the time, the second 1%."""


def with_bursts(running: float, deviations: float = BURST) -> float:
    """Requests at once that are rarely exceeded where so many run in the mean.

    Independent arrivals vary by the square root of their mean, whatever their lengths.
    """
    return running + deviations * sqrt(running)


class CallerQueue(Struct, frozen=True):
    """The queue of callers who send again when answered: about `ahead` requests are before each
    new one, and `per_s` find a seat."""

    ahead: float
    per_s: float

    @property
    def mean_s(self) -> float:
        """Mean wait over all requests."""
        return self.ahead / self.per_s

    @property
    def p99_s(self) -> float:
        """The wait of the request in a hundred that waits longest: seats come free one by one, at
        random."""
        return with_bursts(self.ahead, HELD_BURST) / self.per_s


class SeatQueue(Struct, frozen=True, dict=True):
    """The queue for seats where independent requests arrive.

    `running` of them run in the mean, fewer than there are `seats`, each for `stay_s`; `varies` is
    the squared coefficient of variation of that time.
    """

    seats: int
    running: float
    stay_s: float
    varies: float = 1.0

    @cached_property
    def waits_ratio(self) -> float:
        """Share of requests that find no free seat (Erlang C)."""
        blocked = 1.0
        for seats in range(1, self.seats + 1):
            blocked = self.running * blocked / (seats + self.running * blocked)
            if blocked < NEVER:
                return 0.0
        return blocked / (1 - self.running / self.seats * (1 - blocked))

    @property
    def mean_s(self) -> float:
        """Mean wait over all requests (Allen and Cunneen)."""
        return self.waits_ratio * self._next_s

    @property
    def p99_s(self) -> float:
        """The wait of the request in a hundred that waits longest; 0 if fewer wait at all."""
        return self._next_s * log(max(RARE, self.waits_ratio) / RARE)

    @property
    def _next_s(self) -> float:
        # The mean wait of those that wait; its distribution is about exponential.
        return self.stay_s / (self.seats - self.running) * (1 + self.varies) / 2
