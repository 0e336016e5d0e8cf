"""Forecasts of when the KV cache will be full and when TTFT will exceed its target. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, log, sqrt

SPACINGS = (0.25, 1.0)
"""Distances of samples, in windows: a quarter for fast changes, one for slow ones."""

SAMPLES_MAX = 24
SAMPLES_MIN = 8
"""Samples of a trend: at the narrow spacing, 8 to 24 samples span two to six windows."""

TREND_MIN = 6.0
"""Smallest slope, in standard errors, that counts as a trend. Neighbouring samples overlap, so the
error is underestimated."""

LATE_SAMPLES = 4
"""Number of newest samples that must continue the line."""

DEMAND_MIN = 0.3
"""Demand below this share of the cache gives no forecast, whatever the slope."""

HORIZON_S = 1800.0
"""Longest forecast: half an hour."""

AHEAD_S = 300.0
"""How far ahead KV demand is projected unless configured: new replicas take minutes to serve."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until demand reaches the KV cache's capacity: soonest, expected, latest.

    `latest_s` is infinite if the smallest likely slope does not reach it within the horizon.
    """

    soonest_s: float
    expected_s: float
    latest_s: float
    demand_ratio: float
    slope_per_s: float


def forecast_values(
    demand: float | None, peak_demand: float | None, forecast: Forecast | None, *, ahead_s: float
) -> dict[str, float | None]:
    """The derived signals of KV demand, mean and at its peaks, and of their forecast."""
    latest_s = None if forecast is None else forecast.latest_s
    ahead = demand
    if forecast is not None and peak_demand is not None:
        ahead = peak_demand + forecast.slope_per_s * ahead_s
    return {
        "kv_demand_ratio": demand,
        "kv_peak_demand_ratio": peak_demand,
        "kv_demand_ahead_ratio": ahead,
        "kv_exhausted_in_s": None if forecast is None else forecast.expected_s,
        "kv_exhausted_soonest_s": None if forecast is None else forecast.soonest_s,
        "kv_exhausted_latest_s": latest_s if latest_s and isfinite(latest_s) else None,
    }


def demand_ratio(values: Mapping[str, float | None]) -> float | None:
    """KV tokens demanded over the KV cache's capacity; None if usage is unknown.

    Usage x requests in flight / running requests: queued requests are assumed to need as much as
    running ones do on average.
    """
    usage, running = values.get("kv_usage_avg_ratio"), values.get("running_avg")
    if usage is None or not isfinite(usage):
        return None
    if not running:
        return usage
    return usage * (1 + (values.get("waiting_by_capacity") or 0.0) / running)


def requests_fall(values: Mapping[str, float | None], *, window_s: float) -> bool:
    """Whether requests in flight fall by more than chance: in the window more ended than arrived,
    by more than a standard deviation of two random counts. False where either is unknown, and while
    more are in flight than on average in the window: an arrival is counted at its first token, and
    long prompts fill the cache before theirs."""
    arrivals, completions = values.get("arrival_per_s"), values.get("completed_per_s")
    if arrivals is None or completions is None:
        return False
    now, mean = (
        sum(values.get(key + part) or 0.0 for key in ("running", "waiting"))
        for part in ("", "_avg")
    )
    if now > mean:
        return False
    return (completions - arrivals) * window_s > sqrt((completions + arrivals) * window_s)


BURST_IN = 10.0
"""A climb that has lasted for less than ten requests one after the other may be a burst, which ends
at a higher level; one that has lasted for longer has rising arrivals."""


def sustained_demand(
    demand: float, values: Mapping[str, float | None], *, window_s: float
) -> float | None:
    """KV demand once as many requests end as arrive now, at least `demand`; None if unknown.

    By Little's law arrivals/s x seconds of a request are in flight then. Arrivals are those of the
    window and a standard deviation of such a random count more.
    """
    arrivals, request_s = values.get("arrival_per_s"), values.get("e2e_mean_s")
    in_flight = _in_flight(values)
    if arrivals is None or not request_s or not isfinite(request_s) or not in_flight:
        return None
    most_per_s = arrivals + sqrt(max(arrivals, 1 / window_s) / window_s)
    return demand * max(1.0, most_per_s * request_s / in_flight)


class KvForecaster:
    """Forecasts when one engine's KV demand reaches the cache's capacity at its peaks: vLLM evicts
    at the first peak beyond it, while the mean is still below. No forecast while requests in flight
    fall: the window's peak then still rises, and the burst is over; nor early in a climb whose
    arrivals, if they stay as they are, do not fill the cache. `window_s` is the short window,
    `ahead_s` how far ahead demand is projected."""

    def __init__(self, *, window_s: float, ahead_s: float = AHEAD_S) -> None:
        self._ahead_s, self._window_s = ahead_s, window_s
        self._load = Forecaster(window_s=window_s)

    def forget(self) -> None:
        """Drop the trend after a restart: an empty cache has none."""
        self._load.forget()

    def update(self, now_s: float, values: Mapping[str, float | None]) -> dict[str, float | None]:
        """The derived signals after a scrape with these values."""
        demand = demand_ratio(values)
        mean, most = values.get("kv_usage_avg_ratio"), values.get("kv_usage_max_ratio")
        peak_demand = demand * most / mean if demand is not None and mean and most else demand
        sustained = sustained_demand(peak_demand or 0.0, values, window_s=self._window_s)
        is_burst = sustained is not None and sustained < 1.0
        burst_s = BURST_IN * (values.get("e2e_mean_s") or 0.0) if is_burst else 0.0
        forecast = self._load.update(now_s, peak_demand, at_least_s=burst_s)
        come = demand is not None and demand >= 1.0
        if come or requests_fall(values, window_s=self._window_s):
            forecast = None
        return forecast_values(demand, peak_demand, forecast, ahead_s=self._ahead_s)


class Forecaster:
    """When a load of one engine reaches 1, by its last minutes. `window_s` is the short window."""

    def __init__(self, *, window_s: float) -> None:
        self._trends = tuple(_Trend(spacing * window_s) for spacing in SPACINGS)

    def forget(self) -> None:
        """Drop the samples after a restart: an empty cache has no trend."""
        for trend in self._trends:
            trend.forget()

    def update(
        self, now_s: float, demand: float | None, *, at_least_s: float = 0.0
    ) -> Forecast | None:
        """The forecast after a scrape with this demand, the soonest of the spacings whose samples
        span `at_least_s`; None without a rising trend."""
        if demand is None:
            self.forget()
            return None
        forecasts = [trend.update(now_s, demand) for trend in self._trends]
        if not self._trends[0].rises:
            return None
        long_enough = (
            forecast
            for trend, forecast in zip(self._trends, forecasts, strict=True)
            if forecast is not None and trend.lasts_s >= at_least_s
        )
        return min(long_enough, key=_expected, default=None)


class _Trend:
    """Demand samples at one spacing, and the line fitted to them."""

    def __init__(self, spacing_s: float) -> None:
        self._spacing_s = spacing_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._forecast: tuple[float, Forecast] | None = None

    def forget(self) -> None:
        self._samples.clear()
        self._forecast = None

    @property
    def lasts_s(self) -> float:
        """Seconds from the oldest sample to the newest."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    @property
    def rises(self) -> bool:
        """Whether the newest samples are above the earlier ones."""
        values = [value for _, value in self._samples]
        newest, before = values[-LATE_SAMPLES:], values[-2 * LATE_SAMPLES : -LATE_SAMPLES]
        return bool(before) and sum(newest) * len(before) > sum(before) * len(newest)

    def update(self, now_s: float, demand: float) -> Forecast | None:
        if not self._samples or now_s - self._samples[-1][0] >= self._spacing_s:
            self._samples.append((now_s, demand))
            forecast = self._fit(demand)
            self._forecast = None if forecast is None else (now_s, forecast)
        if self._forecast is None:
            return None
        made_s, forecast = self._forecast
        return aged(forecast, now_s - made_s)

    def _fit(self, demand: float) -> Forecast | None:
        if len(self._samples) < SAMPLES_MIN or demand < DEMAND_MIN:
            return None
        slope, error, level = _line(self._samples)
        if slope <= 0 or slope < TREND_MIN * error or not self._goes_on(slope, level):
            return None
        left = max(0.0, 1 - level)
        expected_s = left / slope
        if expected_s > HORIZON_S:
            return None
        slow = slope - 2 * error
        latest_s = left / slow if slow > 0 else float("inf")
        return Forecast(
            soonest_s=left / (slope + 2 * error),
            expected_s=expected_s,
            latest_s=latest_s if latest_s <= HORIZON_S else float("inf"),
            demand_ratio=demand,
            slope_per_s=slope,
        )

    def _goes_on(self, slope: float, level: float) -> bool:
        """Whether the newest samples rise too and end near the line's end."""
        late = list(self._samples)[-LATE_SAMPLES:]
        rise = late[-1][1] - late[0][1]
        expected_rise = slope * (late[-1][0] - late[0][0])
        return rise >= expected_rise / 3 and late[-1][1] >= level - expected_rise


def _expected(forecast: Forecast) -> float:
    return forecast.expected_s


def _line(samples: deque[tuple[float, float]]) -> tuple[float, float, float]:
    """The least-squares line: slope, its standard error, and the value at the end."""
    count = len(samples)
    mean_t = sum(t_s for t_s, _ in samples) / count
    mean = sum(value for _, value in samples) / count
    spread = sum((t_s - mean_t) ** 2 for t_s, _ in samples)
    slope = sum((t_s - mean_t) * (value - mean) for t_s, value in samples) / spread
    residual = sum((value - mean - slope * (t_s - mean_t)) ** 2 for t_s, value in samples)
    error = sqrt(residual / (count - 2) / spread)
    return slope, error, mean + slope * (samples[-1][0] - mean_t)


def aged(forecast: Forecast, age_s: float) -> Forecast:
    """A forecast, reduced by the seconds since it was made."""
    left_s = (forecast.soonest_s, forecast.expected_s, forecast.latest_s)
    soonest_s, expected_s, latest_s = (max(0.0, seconds - age_s) for seconds in left_s)
    return replace(forecast, soonest_s=soonest_s, expected_s=expected_s, latest_s=latest_s)


# --- When first tokens will come later than the TTFT target at the present trend. Pure ------------
#
# Four loads, each scaled so that the target breaks where it reaches 1; the first there counts:
#
# - Prompts: the share of the time that prefill takes. Where prompts are the limit, latency tells of
# a queue only when it stands, and the share of the time climbs with the arrivals long before.
# - KV and seats: what requests in flight ask for over what there is, as one arrival in a hundred
# finds it, for that one is who decides P99: requests in flight scatter about their mean by its
# square root (arrivals at random), so that a small batch breaks its target far below a full
# house. - Latency: a server that serves one request after the other answers in 1 / (capacity -
# arrivals) in the mean, so that the inverse of its latency falls in proportion to the load, where
# latency itself runs away only at the end. Near it first tokens are late as exponentially as such
# a server's: P99 is ln 100 times the mean, which a histogram gives exactly, P99 only as its
# buckets end. Where the wait of who comes now is longer by Little's law, it is what counts.


ONE_IN_A_HUNDRED = 2.33
"""Standard deviations above the mean that 1% of a normal distribution exceeds."""

TAIL = log(100)
"""P99 over the mean of an exponential distribution."""

SHORT_OF_TARGET = 4.0
"""A latency below a quarter of its target counts as load 0."""

EASY = 10.0
"""Below a tenth of its target, a latency says nothing about load: it is mostly noise."""

Values = Mapping[str, float | None]


class SloForecaster:
    """Forecasts when one engine's TTFT P99 exceeds its target; no forecast without a target.

    `window_s` is the short window, `seats` the limit on running requests.
    """

    def __init__(
        self, *, window_s: float, ttft_p99_s: float | None, seats: float | None = None
    ) -> None:
        self._target_s, self.seats, self._kept_s = ttft_p99_s, seats, window_s
        self._loads = {
            name: Forecaster(window_s=window_s)
            for name in (LOADS if ttft_p99_s is not None else ())
        }
        self._last: tuple[float, Forecast] | None = None

    def forget(self) -> None:
        """Drop the samples after a restart."""
        self._last = None
        for load in self._loads.values():
            load.forget()

    def update(self, now_s: float, values: Values) -> dict[str, float | None]:
        """The forecast's derived signals after a scrape; None without a trend or a target."""
        if self._target_s is None:
            return slo_values(None)
        loads = slo_loads(values, target_s=self._target_s, seats=self.seats)
        forecasts = [load.update(now_s, loads[name]) for name, load in self._loads.items()]
        if (values.get("ttft_p99_s") or 0.0) > self._target_s:
            self._last = None
            return slo_values(None)
        return slo_values(
            self._kept(now_s, [forecast for forecast in forecasts if forecast is not None])
        )

    def _kept(self, now_s: float, forecasts: list[Forecast]) -> Forecast | None:
        """The soonest forecast, or for one window the previous one: a climb does not end at its
        first dip."""
        if forecasts:
            self._last = now_s, min(forecasts, key=_expected)
        if self._last is None or now_s - self._last[0] > self._kept_s:
            return None
        return aged(self._last[1], now_s - self._last[0])


def slo_values(forecast: Forecast | None) -> dict[str, float | None]:
    """The derived signals of a TTFT forecast."""
    latest_s = None if forecast is None else forecast.latest_s
    return {
        "slo_breaks_in_s": None if forecast is None else forecast.expected_s,
        "slo_breaks_soonest_s": None if forecast is None else forecast.soonest_s,
        "slo_breaks_latest_s": latest_s if latest_s is not None and isfinite(latest_s) else None,
    }


LOADS = ("kv", "seats", "prompts", "latency")


def slo_loads(values: Values, *, target_s: float, seats: float | None) -> dict[str, float | None]:
    """Each measure of load, relative to the load at which the target breaks; None where unknown."""
    demand, in_flight, latency_s = demand_ratio(values), _in_flight(values), _latency_s(values)
    return {
        "kv": None if demand is None else demand * _peak(in_flight),
        "seats": None if seats is None else in_flight / seats * _peak(in_flight),
        "prompts": _prompts(values),
        "latency": None if latency_s is None else _inverse(target_s, latency_s),
    }


def _peak(in_flight: float) -> float:
    """The 99th percentile of requests in flight over their mean, for Poisson arrivals."""
    return 1 + ONE_IN_A_HUNDRED / sqrt(in_flight) if in_flight > 0 else 1.0


def _prompts(values: Values) -> float | None:
    """Share of the engine's time spent on prefill; at 1 more prompts arrive than can be
    prefilled."""
    arrivals, prefill_s = values.get("arrival_per_s"), values.get("prefill_mean_s")
    if arrivals is None or prefill_s is None or not isfinite(prefill_s):
        return None
    return arrivals * prefill_s


def _in_flight(values: Values) -> float:
    return (values.get("running_avg") or 0.0) + (values.get("waiting_by_capacity") or 0.0)


def _latency_s(values: Values) -> float | None:
    """TTFT P99 by the mean TTFT, or the wait of a request arriving now if that is longer."""
    ttft_s = values.get("ttft_mean_s")
    if ttft_s is None or not isfinite(ttft_s):
        return None
    return max(TAIL * ttft_s, values.get("expected_wait_s") or 0.0)


def _inverse(target_s: float, latency_s: float) -> float:
    short = min(EASY, target_s / latency_s) if latency_s > 0 else EASY
    return (SHORT_OF_TARGET - short) / (SHORT_OF_TARGET - 1)
