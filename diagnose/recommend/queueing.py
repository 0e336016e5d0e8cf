"""The wait for a seat of requests that arrive on their own (M/G/c), and P99 of TTFT and ITL after a
change. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from math import erfc, exp, floor, log, sqrt
from statistics import NormalDist, mean, median, stdev
from typing import Literal

from msgspec import Struct

from kneewatch.collector.signals.table import ITL_BOUNDS_S, TTFT_BOUNDS_S
from kneewatch.diagnose.halving import end_of
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
    new one, and `per_s` find one of the `seats`. `varies` is the squared coefficient of variation
    of the time for which a request has its seat."""

    ahead: float
    per_s: float
    seats: float = 1.0
    varies: float = 1.0

    @property
    def mean_s(self) -> float:
        """Mean wait over all requests."""
        return self.ahead / self.per_s

    @property
    def p99_s(self) -> float:
        """The wait of the request in a hundred that waits longest.

        Seats come free one by one. Where all requests take equally long, each seat comes free once
        in that time, so that only the order within it is random.
        """
        varies, part = min(1.0, self.varies), self.ahead / self.seats % 1
        variance = varies * self.ahead + (1 - varies) * self.seats * part * (1 - part)
        return (self.ahead + HELD_BURST * sqrt(variance)) / self.per_s


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


# --- P99 of TTFT and ITL after a change -----------------------------------------------------------


WINDOWS_MIN, NEAR_RATIO, CALIBRATED_FROM, WIDEST = 8, 2.0, 3, 10.0
"""From so many windows on, they say how much a P99 varies; from fewer on, how it compares with the
computed one. It is unknown where the upper end of its band would be above so many times the lower
end."""

RARE_TAIL = 0.025
"""The share of windows that may lie above the band, and below it."""

Z = NormalDist().inv_cdf(1 - RARE_TAIL)
Z_99 = NormalDist().inv_cdf(1 - RARE)
Latency = Literal["itl", "ttft"]

MEAN_ERROR = 1.15
"""Measured over predicted mean on real servers, and the reverse, at most."""

SPREAD: Mapping[Latency, tuple[float, float]] = {"itl": (0.4, 2.5), "ttft": (0.5, 2.2)}
"""Measured P99 over the computed one in nine of ten windows of the recorded servers, for a server
that has not shown how much its own varies."""

DECODES_LEAST_RATIO = 0.2
"""The decodes are at least this share of a mean step, and prompts the rest at most."""

ALIKE = 0.05
"""The least squared coefficient of variation of prompts: a gamma distribution needs one."""

HALVINGS, MANY_PROMPTS = 24, 200.0

BOUNDS_S: Mapping[Latency, Sequence[float]] = {"itl": ITL_BOUNDS_S, "ttft": TTFT_BOUNDS_S}
FIELDS = ("running", "itl_s", "itl_p99_s", "ttft_p99_s", "prefill_s", "outside_s", "requests_per_s")


class Latencies(Struct, frozen=True):
    """Mean latencies in seconds (TTFT includes the queue), and output tokens/s of one replica.

    `prompt_s` is what a prompt adds to its steps. `outside_s` is the part of TTFT in the API server
    and the network, from this server's windows; None if the prediction has none.
    """

    ttft_s: float
    itl_s: float
    tokens_per_s: float
    prompt_s: float
    outside_s: float | None = None


class Steps(Struct, frozen=True):
    """The steps of a batch, some of which also compute prompts.

    `itl_s` is their mean. `per_s` prompts arrive on their own; each adds `prompt_s` in the mean, in
    `chunks` steps, and `varies` is its squared coefficient of variation.
    """

    itl_s: float
    prompt_s: float
    per_s: float
    varies: float = 0.0
    chunks: int = 1

    @lru_cache(maxsize=256)  # noqa: B019 - the windows of a server are the same for each lever
    def itl_p99_s(self) -> float:
        """The step of a hundred that is longest: one with prompts, unless these are rare."""
        per_step = self.per_s * self.chunks * self.itl_s
        chunk_s = self.prompt_s / self.chunks
        if not per_step or not chunk_s:
            return self.itl_s
        chunk_s = min(chunk_s, (1 - DECODES_LEAST_RATIO) * self.itl_s / per_step)
        varies = ALIKE if self.chunks > 1 else max(ALIKE, self.varies)
        if per_step > MANY_PROMPTS:  # their sum is about normal
            return self.itl_s + Z_99 * chunk_s * sqrt(per_step * (1 + varies))

        def is_often_longer(prompts_s: float) -> bool:
            return _longer_ratio(prompts_s / (chunk_s * varies), per_step, varies) > RARE

        most_s = chunk_s
        while is_often_longer(most_s):
            most_s *= 2
        prompts_s = end_of(is_often_longer, holds=0.0, falls=most_s, halvings=HALVINGS)
        return self.itl_s - per_step * chunk_s + prompts_s

    def ttft_p99_s(self, outside_s: float) -> float:
        """The first token of a hundred that comes last: of the length of its prompt, of the prompts
        beside it, of the step before it and of what is outside the engine."""
        mean_s = outside_s + self.itl_s + self.prompt_s
        per_step = self.per_s * self.itl_s
        prompts = self.prompt_s**2 * (self.varies + per_step * (1 + self.varies))
        variance = prompts + outside_s**2 + (self.itl_p99_s() / 3) ** 2
        # The quantile of a gamma distribution (Wilson and Hilferty).
        spread = variance / mean_s**2 / 9
        return mean_s * max(0.0, 1 - spread + Z_99 * sqrt(spread)) ** 3

    def p99_s(self, name: Latency, outside_s: float) -> float:
        return self.itl_p99_s() if name == "itl" else self.ttft_p99_s(outside_s)


def _longer_ratio(length: float, per_step: float, varies: float) -> float:
    """The share of steps whose prompts together take longer than `length`, in units of a prompt's
    mean times `varies`: their number is of Poisson, their lengths are of a gamma distribution."""
    ratio, prompts, chance = 0.0, 0, exp(-per_step)
    while chance > NEVER or prompts < per_step:
        prompts += 1
        chance *= per_step / prompts
        shape = prompts / varies
        near = 1 / (9 * shape)
        ratio += chance * erfc(((length / shape) ** (1 / 3) - 1 + near) / sqrt(2 * near)) / 2
    return ratio


def tails(
    curve: CurveLearner | None,
    steps: Steps,
    speed: Latencies,
    waits: SeatQueue | CallerQueue | None,
    *,
    running: float,
    queues: bool,
) -> dict[str, float]:
    """P99 of TTFT and ITL with their bands, in seconds.

    The mean times the ratio of P99 to mean in this server's windows at about the batch that will
    run, without preemption (for TTFT: without a queue). Where these are too few, the P99 computed
    from the steps after the change, times the ratio of measured to computed P99 in the windows with
    the nearest batches. Of them, those with the nearest mean or P99 count, as these lie in the same
    buckets, whose widths are most of what the ratio varies by. If requests queue, the tail
    of TTFT is that of the wait for a seat, which a window's has between its mean and as much above
    it again. Without a known wait, TTFT has no P99.
    """
    numbers: dict[str, float] = {}
    outside_s = max(0.0, speed.ttft_s - speed.itl_s - speed.prompt_s)
    means = {"itl": speed.itl_s, "ttft": 0.0 if queues else speed.ttft_s}
    for name in BOUNDS_S:
        if not means[name]:
            continue
        windows = [] if curve is None else _windows(curve, name, steps, speed)
        windows.sort(key=lambda each: abs(log(each.batch / running)))
        near = [each for each in windows if 1 / NEAR_RATIO <= each.batch / running <= NEAR_RATIO]
        if len(near) >= WINDOWS_MIN:
            own_s, pairs = means[name], [(each.mean_s, each.p99_s) for each in near]
        else:
            own_s = steps.p99_s(name, outside_s)
            pairs = [
                (each.steps.p99_s(name, each.outside_s), each.p99_s)
                for each in windows[: 2 * WINDOWS_MIN]
            ]
        pairs.sort(key=lambda pair: abs(log(pair[0] / own_s)))
        ratios = [p99_s / window_s for window_s, p99_s in pairs]
        middle = median(ratios[:WINDOWS_MIN]) if len(ratios) >= CALIBRATED_FROM else 1.0
        low, high = (middle * ratio for ratio in SPREAD[name])
        if len(near) >= WINDOWS_MIN:
            low, high = _next_ratio(ratios)
        if high <= WIDEST * low:
            numbers |= banded(name, own_s * middle, own_s * low, own_s * high)
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
    low_s, high_s = max(own_p99_s, mean_s / MEAN_ERROR), MEAN_ERROR * (2 * p99_s - mean_s)
    numbers |= banded("ttft", p99_s, low_s, high_s)


def banded(name: Latency, p99_s: float, low_s: float, high_s: float) -> dict[str, float]:
    """A predicted P99 with its band, to the bounds of its buckets: a histogram shows no more."""
    bounds_s = BOUNDS_S[name]
    return {
        f"{name}_p99_s": float(f"{p99_s:.3g}"),
        f"{name}_p99_low_s": bounds_s[max(0, bisect_right(bounds_s, low_s) - 1)],
        f"{name}_p99_high_s": _bound_above(name, high_s),
    }


def at_most(tails_s: Mapping[str, float]) -> dict[str, float]:
    """Upper ends of the P99 after a change that lets no step take longer: as far above the present
    ones as those of windows without a change lie apart."""
    return {
        f"{name}_p99_high_s": _bound_above(name, SPREAD[name][1] * p99_s)
        for name in BOUNDS_S
        if (p99_s := tails_s.get(f"{name}_p99_s")) is not None
    }


def _bound_above(name: Latency, seconds: float) -> float:
    bounds_s = BOUNDS_S[name]
    return bounds_s[min(len(bounds_s) - 1, bisect_left(bounds_s, seconds))]


class _Window(Struct, frozen=True):
    """A window's batch and steps, and the mean and P99 that it measured, in seconds."""

    batch: float
    steps: Steps
    outside_s: float
    mean_s: float
    p99_s: float


def _windows(curve: CurveLearner, name: Latency, steps: Steps, speed: Latencies) -> list[_Window]:
    """The windows that show the P99 of TTFT or ITL, as with prompts like those of `steps`."""
    windows: list[_Window] = []
    columns = (curve.column(field) for field in FIELDS)
    for batch, itl_s, itl_p99_s, ttft_p99_s, prefill_s, outside_s, per_s in zip(
        *columns, strict=True
    ):
        # A comparison with NaN is false.
        if not (prefill_s > 0 and itl_s > 0 and per_s > 0):  # with preemptions
            continue
        # As the mean is predicted: what varies outside the engine is in the band.
        beside_s = outside_s if speed.outside_s is None else speed.outside_s
        mean_s, p99_s = (itl_s, itl_p99_s) if name == "itl" else (prefill_s + beside_s, ttft_p99_s)
        if p99_s > 0 and (name == "itl" or outside_s >= 0):  # without a queue
            own = Steps(itl_s, max(0.0, prefill_s - itl_s), per_s, steps.varies, steps.chunks)
            windows.append(_Window(max(batch, 1.0), own, outside_s, mean_s, p99_s))
    return windows


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
