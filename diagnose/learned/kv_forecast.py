"""Forecasts when the KV cache will be full, from KV demand and from arrivals. Pure.

Two series are followed, each as a share of the cache. One is the demand of the requests in flight.
The other is the demand that the present arrivals will reach when as many requests end as arrive
(Little's law). Arrivals show a climb earlier, by one request's duration. Demand also shows requests
that get longer.

Each series is averaged in bins of several lengths, so that climbs of a minute and climbs of hours
both stand out from the noise of random arrivals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import exp, inf, isfinite, sqrt
from operator import mul
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.rules.rule import is_queued

DEMAND_BINS = (1 / 12, 1 / 4, 1.0, 2.5, 5.0)
"""Bin lengths for demand, in windows: 5 s to 5 min at a window of 60 s.

They show trends of two minutes to two hours. A bin is never shorter than a scrape interval.
"""

ARRIVAL_BINS = (1 / 12, 1 / 4)
"""Bin lengths for arrivals, in windows. Over longer times demand shows the same climb."""

SCATTER_BINS_FROM = 1 / 4
"""Scatter is measured on the longest bins available, of at least this many windows.

Shorter bins show only part of it.
"""

BINS_MAX = 24
BINS_MIN = 8
PART_MIN = 4
"""Fewest bins in a climb, and fewest in the level before it."""

TREND_MIN = 4.5
"""A slope counts as a climb from this many standard errors on."""

NO_STEP = 1.1
"""A climb counts only if the best single step fits worse, by this factor in squared residuals."""

LATE_RISE = 0.6
"""Least rise from a climb's first half to its second, as a share of the line's rise.

A load that has stopped climbing rises less.
"""

REQUESTS_MIN = 2.0
"""Least length of a climb of demand, in durations of a request.

After a step of the arrivals, demand climbs for one duration.
"""

CHANCE = 1.4
"""Variance of demand under random arrivals, divided by (mean demand x demand of one request).

Above 1, because requests differ and grow.
"""

PEAK_SIGMAS = 2.8
"""Height of demand's peaks within some minutes, in standard deviations above its mean."""

DEMAND_MIN = 0.3
"""Below this share of the cache, demand gives no forecast, whatever its slope."""

BURST_REQUESTS = 30.0
"""A climb of demand shorter than this many durations of a request may be a burst.

It counts only if the present arrivals will fill the cache. A longer climb may come from requests
that get longer.
"""

ARRIVALS_MIN = 10.0
"""After this many arrivals, the mean demand of a request is known."""

MEMORY_WINDOWS = 15.0
"""Time constant, in windows, of a request's mean demand: a climb of minutes hardly changes it."""

HORIZON_S = 1800.0
"""Longest forecast in seconds: half an hour."""

AHEAD_S = 300.0
"""Default time, in seconds, that KV demand is projected ahead: new replicas need minutes to
start."""


def demand_ratio(values: Mapping[str, float | None]) -> float | None:
    """KV tokens demanded, divided by the KV cache's capacity; None if usage is unknown.

    Usage x requests in flight / running requests. Queued requests are assumed to need as much as
    running requests do on average.
    """
    usage, running = values.get("kv_usage_avg_ratio"), values.get("running_avg")
    if usage is None or not isfinite(usage):
        return None
    if not running:
        return usage
    return usage * (1 + (values.get("waiting_by_capacity") or 0.0) / running)


class KvForecaster:
    """Forecasts when the peaks of one engine's KV demand reach the cache's capacity.

    vLLM preempts at the first peak above the capacity, while the mean is still below. `window_s` is
    the short window; `ahead_s` is how far ahead demand is projected. Without counted arrivals there
    is no forecast.
    """

    def __init__(self, *, window_s: float, ahead_s: float = AHEAD_S) -> None:
        self._window_s, self._ahead_s = window_s, ahead_s
        self.forget()

    def forget(self) -> None:
        """Drop the trends after a restart: an empty cache has none."""
        self._demand = tuple(_BinTrend(share * self._window_s) for share in DEMAND_BINS)
        self._arrivals = tuple(_BinTrend(share * self._window_s) for share in ARRIVAL_BINS)
        self._requests = _Requests(memory_s=MEMORY_WINDOWS * self._window_s)
        self._last_s: float | None = None
        self._no_arrival_s = 0.0

    def update(
        self, now_s: float, values: Mapping[str, float | None], *, arrivals: float | None
    ) -> dict[str, float | None]:
        """The derived signals after a scrape with these values.

        `arrivals`: requests that arrived since the previous scrape; None if not counted.
        """
        mean_demand = demand_ratio(values)
        follows = self._follow(now_s, values, arrivals, mean_demand)
        mean, most = values.get("kv_usage_avg_ratio"), values.get("kv_usage_max_ratio")
        peak_demand = mean_demand * most / mean if mean_demand and mean and most else mean_demand
        if is_queued(values.get("waiting_by_capacity"), values.get("running") or 0.0):
            # The harm is not ahead, and requests may queue for something else than blocks.
            return _signals(mean_demand, peak_demand, None)
        if not follows or mean_demand is None or mean_demand >= 1.0:
            return _signals(mean_demand, peak_demand, mean_demand)
        climb = min(self._climbs(now_s, mean_demand), key=_Climb.left_s, default=None)
        if climb is None or climb.left_s() > HORIZON_S:
            return _signals(mean_demand, peak_demand, mean_demand)
        # A line from arrivals is behind demand by a request's duration, and may begin below it.
        now, ahead = climb.ahead_ratio(0.0), climb.ahead_ratio(self._ahead_s)
        return _signals(mean_demand, max(mean_demand, now), max(mean_demand, ahead), climb)

    def _follow(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        arrivals: float | None,
        mean_demand: float | None,
    ) -> bool:
        """Add a scrape to the trends. Returns whether they may show a climb."""
        usage, running = values.get("kv_usage_ratio"), values.get("running")
        if usage is None or not isfinite(usage) or running is None or mean_demand is None:
            self.forget()
            return False
        last_s, self._last_s = self._last_s, now_s
        if arrivals is None or last_s is None:
            return False
        since_s = now_s - last_s
        in_flight = running + (values.get("waiting_by_capacity") or 0.0)
        demand = usage * in_flight / running if running else usage
        requests = self._requests
        requests.add(since_s, demand=demand, in_flight=in_flight, arrivals=arrivals)
        for trend in self._demand:
            trend.add(now_s, demand, since_s)
        for trend in self._arrivals:
            trend.add(now_s, arrivals / since_s, since_s)
        self._no_arrival_s = 0.0 if arrivals else self._no_arrival_s + since_s
        may_grow = requests.arrivals >= ARRIVALS_MIN or self._grow_alone
        return demand >= DEMAND_MIN and may_grow

    @property
    def _grow_alone(self) -> bool:
        """Whether no request has arrived for a window: those in flight grow."""
        return self._no_arrival_s >= self._window_s

    def _grown(self, now_s: float) -> Iterator[_Climb]:
        """Climbs since the last arrival: the same requests grow, so none is due to chance."""
        for trend in self._demand:
            climb = trend.climb(now_s, 1.0, variance=0.0, overlap=1.0)
            if climb is not None and not climb.is_step and climb.lasts_s <= self._no_arrival_s:
                yield climb

    def _climbs(self, now_s: float, mean_demand: float) -> Iterator[_Climb]:
        if self._grow_alone:
            yield from self._grown(now_s)
            return
        requests, capacity = self._requests, self._capacity()
        sustained = requests.sustained(self._arrivals[0].bins)
        spread = CHANCE * requests.ratio * min(1.0, requests.lasts_s / self._window_s)
        most = mean_demand + sqrt(spread * mean_demand)
        for trend in self._demand:
            overlap = requests.lasts_s / trend.bins[-1].lasts_s if trend.bins else 0.0
            by_chance = CHANCE * requests.ratio * min(1.0, overlap)
            climb = trend.climb(now_s, capacity, variance=by_chance, overlap=max(1.0, overlap))
            if climb is None or climb.is_step or climb.lasts_s < REQUESTS_MIN * requests.lasts_s:
                continue
            is_burst = climb.lasts_s < BURST_REQUESTS * requests.lasts_s
            may_fill = not is_burst or sustained >= max(capacity, climb.level)
            if may_fill and climb.before(self._window_s / 2) <= most:
                yield climb
        for trend in self._arrivals:
            bin_s = trend.bins[-1].lasts_s if trend.bins else trend.bin_s
            climb = trend.climb(
                now_s, capacity, variance=1 / bin_s, overlap=1.0, scale=requests.ratio_s
            )
            if climb is None:
                continue
            climb = replace(climb, lag_s=requests.lasts_s)
            # A step of the arrivals that fills the cache does so before demand has followed it.
            is_followed = climb.lasts_s > REQUESTS_MIN * requests.lasts_s
            if climb.is_step and (is_followed or climb.late_least < capacity):
                continue
            if climb.before(self._window_s / 2 + REQUESTS_MIN * requests.lasts_s) <= most:
                yield climb

    def _capacity(self) -> float:
        """The mean demand at which peaks fill the cache. The variance of demand is proportional to
        its mean."""
        long = (t for t in self._demand if t.bin_s >= SCATTER_BINS_FROM * self._window_s)
        scatters = [scatter for trend in long if (scatter := trend.scatter()) is not None]
        scatter = scatters[-1] if scatters else CHANCE * self._requests.ratio
        peak = PEAK_SIGMAS * sqrt(scatter)
        return ((sqrt(peak * peak + 4) - peak) / 2) ** 2


def _signals(
    demand: float | None, peak: float | None, ahead: float | None, climb: _Climb | None = None
) -> dict[str, float | None]:
    latest_s = inf if climb is None else climb.left_s(-2.0)
    return {
        "kv_demand_ratio": demand,
        "kv_peak_demand_ratio": peak,
        "kv_demand_ahead_ratio": ahead,
        "kv_exhausted_in_s": None if climb is None else climb.left_s(),
        "kv_exhausted_soonest_s": None if climb is None else climb.left_s(2.0),
        "kv_exhausted_latest_s": latest_s if latest_s <= HORIZON_S else None,
    }


class _Requests:
    """Mean demand and duration of requests, from sums over time and arrivals that fade with
    time."""

    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._demand_s = self._in_flight_s = self.arrivals = 0.0

    def add(self, since_s: float, *, demand: float, in_flight: float, arrivals: float) -> None:
        kept = exp(-since_s / self._memory_s)
        self._demand_s = kept * self._demand_s + demand * since_s
        self._in_flight_s = kept * self._in_flight_s + in_flight * since_s
        self.arrivals = kept * self.arrivals + arrivals

    @property
    def ratio(self) -> float:
        """Share of the cache that a request in flight holds."""
        return self._demand_s / self._in_flight_s if self._in_flight_s else 0.0

    @property
    def lasts_s(self) -> float:
        """Mean duration of a request in seconds, by Little's law."""
        return self._in_flight_s / self.arrivals

    @property
    def ratio_s(self) -> float:
        """Mean demand of an arrival: share of the cache times the seconds for which it is held."""
        return self._demand_s / self.arrivals

    def sustained(self, arrivals: Sequence[_Bin]) -> float:
        """The highest demand that the newest arrivals can sustain; infinite before any arrival.

        It is the demand of the arrivals within one request's duration, plus a standard deviation
        for chance.
        """
        lasts_s = count = 0.0
        for at, part in enumerate(reversed(arrivals)):
            if at >= PART_MIN and lasts_s >= self.lasts_s:
                break
            lasts_s += part.lasts_s
            count += part.mean * part.lasts_s
        return (count + sqrt(max(1.0, count))) * self.ratio_s / lasts_s if lasts_s else inf


class _Bin(Struct, frozen=True):
    """A section of a series: its middle, mean, variance and length."""

    t_s: float
    mean: float
    variance: float
    lasts_s: float


class _Climb(Struct, frozen=True):
    """A climb of a series towards `capacity`, the mean demand at which peaks fill the cache.

    - `level`: the value at the middle of the newest bin, which is `age_s` old.
    - `slope_per_s`, `error_per_s`: the slope and its standard error.
    - `lasts_s`: seconds since the climb began.
    - `late_least`: the mean of its second half minus a standard deviation.
    - `is_step`: the climb may have ended.
    - `lag_s`: how much later demand follows.
    """

    level: float
    slope_per_s: float
    error_per_s: float
    lasts_s: float
    late_least: float
    is_step: bool
    capacity: float
    age_s: float
    lag_s: float = 0.0

    def left_s(self, errors: float = 0.0) -> float:
        """Seconds until the cache is full if the slope is steeper by this many standard errors."""
        slope_per_s = self.slope_per_s + errors * self.error_per_s
        if slope_per_s <= 0:
            return inf
        rise_s = (self.capacity - self.level) / slope_per_s
        return max(0.0, rise_s - self.age_s + self.lag_s)

    def before(self, ago_s: float) -> float:
        """The line's value `ago_s` seconds ago."""
        return self.level + self.slope_per_s * (self.age_s - ago_s)

    def ahead_ratio(self, ahead_s: float) -> float:
        """Demand at its peaks in `ahead_s`.

        Beyond a full cache, a climb is projected for at most as long as it has lasted.
        """
        ahead_s = min(ahead_s, self.left_s() + self.lasts_s)
        return self.before(self.lag_s - ahead_s) / self.capacity


class _BinTrend:
    """Means of a series in bins of equal length, and the climb fitted to the newest of them."""

    def __init__(self, bin_s: float) -> None:
        self.bin_s = bin_s
        self.bins: deque[_Bin] = deque(maxlen=BINS_MAX)
        self._lasts_s = self._sum = self._squares = 0.0
        self._fit: _Fit | None = None

    def add(self, now_s: float, value: float, lasts_s: float) -> None:
        """Add a value that is valid for the `lasts_s` before `now_s`."""
        self._lasts_s += lasts_s
        self._sum += value * lasts_s
        self._squares += value * value * lasts_s
        if self._lasts_s < self.bin_s * (1 - 1e-6):
            return
        mean = self._sum / self._lasts_s
        variance = max(0.0, self._squares / self._lasts_s - mean * mean)
        self.bins.append(_Bin(now_s - self._lasts_s / 2, mean, variance, self._lasts_s))
        self._lasts_s = self._sum = self._squares = 0.0
        self._fit = None

    def _fitted(self) -> _Fit | None:
        if self._fit is None and len(self.bins) >= BINS_MIN:
            self._fit = _fit(self.bins)
        return self._fit

    def scatter(self) -> float | None:
        """Variance of single values about the trend, divided by their mean; None with few bins."""
        fit = self._fitted()
        if fit is None or fit.mean <= 0:
            return None
        return (sum(part.variance for part in self.bins) / len(self.bins) + fit.variance) / fit.mean

    def climb(
        self, now_s: float, capacity: float, *, variance: float, overlap: float, scale: float = 1.0
    ) -> _Climb | None:
        """The climb, multiplied by `scale`; None if chance explains it.

        `variance`: a bin's variance by chance, divided by its mean. `overlap`: number of
        neighbouring bins that contain the same requests.
        """
        fit = self._fitted()
        if fit is None or fit.slope_per_s <= 0:
            return None
        bin_variance = max(fit.variance, variance * fit.mean)
        error_per_s = sqrt(bin_variance * overlap) * fit.error_unit
        if fit.slope_per_s < TREND_MIN * error_per_s:
            return None
        late_error = sqrt(fit.late_mean * variance / fit.late_bins)
        return _Climb(
            scale * fit.level,
            scale * fit.slope_per_s,
            scale * error_per_s,
            fit.lasts_s,
            scale * (fit.late_mean - late_error),
            fit.is_step,
            capacity,
            now_s - self.bins[-1].t_s,
        )


class _Fit(Struct, frozen=True):
    """The line through the newest bins, which begins after a level or at the first bin.

    `error_unit` is the slope's standard error if every bin has an error of 1.
    """

    level: float
    slope_per_s: float
    error_unit: float
    lasts_s: float
    mean: float
    variance: float
    late_mean: float
    late_bins: int
    is_step: bool


def _fit(bins: Sequence[_Bin]) -> _Fit:
    """The best least-squares fit: a line, or a level that a line follows."""
    count, mean = len(bins), fmean([part.mean for part in bins])
    times, values = [part.t_s - bins[-1].t_s for part in bins], [part.mean - mean for part in bins]
    best = min(line(times, values), *_levels_and_lines(times, values))
    squares_left, begin, slope, error_unit, level, begin_s = best
    late = (count - begin) // 2
    late_mean = fmean(values[-late:])
    rise = late_mean - fmean(values[begin : begin + late])
    line_rise = slope * (fmean(times[-late:]) - fmean(times[begin : begin + late]))
    sums = enumerate(accumulate(values[:-1]), 1)
    apart = max([total * total * (1 / at + 1 / (count - at)) for at, total in sums])
    step = sum(map(mul, values, values)) - apart
    return _Fit(
        mean + level,
        slope,
        error_unit,
        -begin_s,
        mean,
        squares_left / (count - 3),
        mean + late_mean,
        late,
        step <= NO_STEP * squares_left or rise < LATE_RISE * line_rise,
    )


_Candidate = tuple[float, int, float, float, float, float]
"""Squared residuals, the line's first bin, its slope, the slope's error, its value at time 0, and
the time at which the line begins. The slope's error is for bins with an error of 1."""


def line(times: Sequence[float], values: Sequence[float]) -> _Candidate:
    """The least-squares line through all points."""
    mean_s, mean = fmean(times), fmean(values)
    away_s = [t - mean_s for t in times]
    spread = sum(map(mul, away_s, away_s))
    slope = sum(map(mul, away_s, values)) / spread
    left = sum([(v - mean - slope * t) ** 2 for t, v in zip(away_s, values, strict=True)])
    return left, 0, slope, sqrt(1 / spread), mean - slope * mean_s, times[0]


def _levels_and_lines(times: Sequence[float], values: Sequence[float]) -> Iterator[_Candidate]:
    """Yields, for each point at which a line may begin, the mean of the points before it, followed
    by a line from this mean at the last of them. All sums are running sums."""
    pairs = (times, times), (times, values), (values, values)
    columns = map(accumulate, (times, values, *(map(mul, *pair) for pair in pairs)))
    before = list(zip(*columns, strict=True))
    all_t, all_v, all_tt, all_tv, all_vv = before[-1]
    for begin in range(PART_MIN, len(times) - PART_MIN + 1):
        t, v, tt, tv, _ = before[begin - 1]
        from_s, base, count = times[begin - 1], v / begin, len(times) - begin
        away_s, above = all_t - t - count * from_s, all_v - v - count * base
        spread = all_tt - tt - from_s * (all_t - t + away_s)
        product = all_tv - tv - from_s * (all_v - v) - base * away_s
        slope = product / spread
        left = max(0.0, all_vv - v * base - base * (all_v - v + above) - slope * product)
        error_unit = sqrt(1 / spread + (away_s / spread) ** 2 / begin)
        yield left, begin, slope, error_unit, base - slope * from_s, from_s
