"""The wait for a seat of requests that arrive on their own (M/G/c), and P99 of TTFT and ITL after a
change. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from math import exp, floor, log, sqrt
from statistics import NormalDist, mean, median, stdev

from msgspec import Struct

from kneewatch.collector.signals.table import ITL_BOUNDS_S, TTFT_BOUNDS_S
from kneewatch.diagnose.learned.knee import CurveLearner

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


# --- P99 of TTFT and ITL after a change, from this server's own windows ---------------------------


WINDOWS_MIN, NEAR_RATIO, WIDEST = 8, 2.0, 10.0
"""A P99 needs so many windows with up to so many times the batch. It is unknown where the upper end
of its band would be above so many times the lower end."""

RARE_TAIL = 0.025
"""The share of windows that may lie above the band, and below it."""

Z = NormalDist().inv_cdf(1 - RARE_TAIL)
FIELDS = ("running", "itl_s", "itl_p99_s", "ttft_p99_s", "prefill_s", "outside_s")


class Latencies(Struct, frozen=True):
    """Mean latencies in seconds (TTFT includes the queue), and output tokens/s of one replica.

    `outside_s` is the part of TTFT in the API server and the network, from this server's windows;
    None if the prediction has none.
    """

    ttft_s: float
    itl_s: float
    tokens_per_s: float
    outside_s: float | None = None


def tails(
    curve: CurveLearner | None,
    speed: Latencies,
    waits: SeatQueue | CallerQueue | None,
    *,
    running: float,
    queues: bool,
) -> dict[str, float]:
    """P99 of TTFT and ITL with their bands, in seconds; none where this server has not shown it.

    The mean times the ratio of P99 to mean in windows without a queue, at about the batch that will
    run: it holds the bursts of arrivals and the spread of lengths. Of them, the windows with the
    nearest means count: their prompts are most alike, and their P99 lies in the same buckets, whose
    widths are most of what the ratio varies by. If requests queue, such windows do
    not show the tail of TTFT: it is that of the wait for a seat, which a window's has between its
    mean and as much above it again. Without a known wait, TTFT has no P99.
    """
    numbers: dict[str, float] = {}
    itls, ttfts = ([], []) if curve is None else _windows(curve, speed, running)
    for name, mean_s, windows, bounds_s in (
        ("itl", speed.itl_s, itls, ITL_BOUNDS_S),
        ("ttft", speed.ttft_s, [] if queues else ttfts, TTFT_BOUNDS_S),
    ):
        if len(windows) < WINDOWS_MIN:
            continue
        low, high = (mean_s * ratio for ratio in _next_ratio([p99 / own for own, p99 in windows]))
        windows.sort(key=lambda each: abs(log(each[0] / mean_s)))
        middle = mean_s * median(p99 / own for own, p99 in windows[:WINDOWS_MIN])
        if high <= WIDEST * low:
            low_s, high_s = _in_buckets(low, high, bounds_s)
            numbers[f"{name}_p99_s"] = float(f"{middle:.3g}")
            numbers[f"{name}_p99_low_s"], numbers[f"{name}_p99_high_s"] = low_s, high_s
    if waits is not None and waits.p99_s > 0:
        own_s = speed.ttft_s - waits.mean_s if queues else speed.ttft_s
        _add_wait(numbers, max(0.0, own_s), waits)
    return numbers


def _add_wait(numbers: dict[str, float], own_s: float, waits: SeatQueue | CallerQueue) -> None:
    """Raise the TTFT P99 to that of the wait for a seat, after which the first token takes
    `own_s`. No P99 is added where requests seldom wait and their own was not measured."""
    mean_s, p99_s = own_s + waits.mean_s, own_s + waits.p99_s
    own_p99_s = numbers.get("ttft_p99_s", 0.0)
    if p99_s < own_p99_s or not (own_p99_s or isinstance(waits, CallerQueue)):
        return
    low_s, high_s = max(own_p99_s, mean_s), 2 * p99_s - mean_s
    numbers["ttft_p99_s"] = float(f"{p99_s:.3g}")
    numbers["ttft_p99_low_s"], numbers["ttft_p99_high_s"] = _in_buckets(low_s, high_s)


def _in_buckets(
    low_s: float, high_s: float, bounds_s: Sequence[float] = TTFT_BOUNDS_S
) -> tuple[float, float]:
    """The band to the bounds of its buckets: a histogram shows no more."""
    return (
        bounds_s[max(0, bisect_right(bounds_s, low_s) - 1)],
        bounds_s[min(len(bounds_s) - 1, bisect_left(bounds_s, high_s))],
    )


_Windows = list[tuple[float, float]]


def _windows(curve: CurveLearner, speed: Latencies, running: float) -> tuple[_Windows, _Windows]:
    """Mean and P99 of ITL and of TTFT in windows with about so many running requests."""
    itls, ttfts = _Windows(), _Windows()
    columns = (curve.column(name) for name in FIELDS)
    for batch, itl_s, itl_p99_s, ttft_p99_s, prefill_s, outside_s in zip(*columns, strict=True):
        # A comparison with NaN is false.
        if not running / NEAR_RATIO <= max(batch, 1.0) <= running * NEAR_RATIO:
            continue
        if prefill_s > 0 and itl_s > 0 and itl_p99_s > 0:  # without preemptions
            itls.append((itl_s, itl_p99_s))
        if ttft_p99_s > 0 and prefill_s + outside_s > 0:  # without a queue
            # As the mean is predicted: what varies outside the engine is in the band.
            beside_s = outside_s if speed.outside_s is None else speed.outside_s
            ttfts.append((prefill_s + beside_s, ttft_p99_s))
    return itls, ttfts


def _next_ratio(ratios: Sequence[float]) -> tuple[float, float]:
    """The ends of a band in which the next measured ratio lies with 95%.

    By Student's t of the logarithms, as few windows say little of how much they vary. It is no
    narrower than what was measured, as tails are heavier.
    """
    ordered, free = sorted(map(log, ratios)), len(ratios) - 1
    # Its quantile by Abramowitz and Stegun 26.7.5.
    t = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    middle, away = mean(ordered), t * stdev(ordered) * sqrt(1 + 1 / len(ordered))
    rare = floor(RARE_TAIL * len(ordered))
    low, high = min(middle - away, ordered[rare]), max(middle + away, ordered[-1 - rare])
    return exp(low), exp(high)
