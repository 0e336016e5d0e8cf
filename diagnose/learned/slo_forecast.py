"""Forecasts when TTFT will exceed its target if the present trend continues. Pure.

Four measures of load are followed. Each is scaled so that the target is missed at 1; the first to
reach 1 is used:

- Prompts: the share of time spent on prefill. If prompts are the limit, latency shows a queue only
  when the queue exists. This share climbs with the arrivals, long before.
- KV cache and seats (max_num_seqs), two measures: demand divided by capacity. P99 is decided by one
  arrival in a hundred, so the demand that such an arrival finds is used. With random arrivals, the
  number of requests in flight varies by the square root of its mean. So a small batch misses its
  target far below full use.
- Latency: a server that serves one request at a time answers in 1 / (capacity - arrivals) on
  average. So the inverse of its latency falls linearly with the load, while latency itself grows
  fast only at the end. Near capacity, TTFT is distributed exponentially as on such a server, so P99
  is ln 100 times the mean. The mean is used because a histogram gives it exactly. If a request that
  arrives now would wait longer by Little's law, that wait is used instead.
"""

from __future__ import annotations

from collections import deque
from math import isfinite, log, sqrt

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.learned.kv_forecast import HORIZON_S, demand_ratio, line
from kneewatch.diagnose.values import Signals

SPACINGS = (0.25, 1.0)
"""Distances between samples, in windows: a quarter for fast changes, one for slow changes."""

SAMPLES_MAX = 24
SAMPLES_MIN = 8
"""Fewest samples for a trend. At the narrow spacing, 8 to 24 samples span two to six windows."""

TREND_MIN = 6.0
"""A slope counts as a trend from this many standard errors on.

Neighbouring samples overlap, so the error is underestimated.
"""

LATE_SAMPLES = 4
"""Number of newest samples that must also follow the line."""

LOAD_MIN = 0.3
"""Below this load there is no forecast, whatever the slope."""


class Forecast(Struct, frozen=True):
    """Seconds until a load reaches 1: soonest, expected and latest.

    `latest_s` is infinite if the load does not reach 1 within the horizon at the smallest likely
    slope.
    """

    soonest_s: float
    expected_s: float
    latest_s: float


class Forecaster:
    """Forecasts from the last minutes when one load of an engine reaches 1.

    `window_s` is the short window.
    """

    def __init__(self, *, window_s: float) -> None:
        self._trends = tuple(_Trend(spacing * window_s) for spacing in SPACINGS)

    def forget(self) -> None:
        """Drop the samples after a restart: an empty cache has no trend."""
        for trend in self._trends:
            trend.forget()

    def update(self, now_s: float, load: float | None) -> Forecast | None:
        """The forecast after a scrape with this load; None without a rising trend.

        If several spacings give a forecast, the soonest.
        """
        if load is None:
            self.forget()
            return None
        forecasts = [trend.update(now_s, load) for trend in self._trends]
        if not self._trends[0].rises:
            return None
        return min((f for f in forecasts if f is not None), key=_expected, default=None)


class _Trend:
    """Samples of a load at one spacing, and the line that fits them."""

    def __init__(self, spacing_s: float) -> None:
        self._spacing_s = spacing_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._forecast: tuple[float, Forecast] | None = None

    def forget(self) -> None:
        self._samples.clear()
        self._forecast = None

    @property
    def rises(self) -> bool:
        """Whether the newest samples are above the earlier ones."""
        values = [value for _, value in self._samples]
        newest, before = values[-LATE_SAMPLES:], values[-2 * LATE_SAMPLES : -LATE_SAMPLES]
        return bool(before) and sum(newest) * len(before) > sum(before) * len(newest)

    def update(self, now_s: float, load: float) -> Forecast | None:
        if not self._samples or now_s - self._samples[-1][0] >= self._spacing_s:
            self._samples.append((now_s, load))
            forecast = self._fit(load)
            self._forecast = None if forecast is None else (now_s, forecast)
        if self._forecast is None:
            return None
        made_s, forecast = self._forecast
        return aged(forecast, now_s - made_s)

    def _fit(self, load: float) -> Forecast | None:
        if len(self._samples) < SAMPLES_MIN or load < LOAD_MIN:
            return None
        times, values = zip(*self._samples, strict=True)
        squares_left, _, slope, error, level, _ = line([t_s - times[-1] for t_s in times], values)
        error *= sqrt(squares_left / (len(times) - 2))
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
        )

    def _goes_on(self, slope: float, level: float) -> bool:
        """Whether the newest samples also rise, and end near the line's end."""
        late = list(self._samples)[-LATE_SAMPLES:]
        rise = late[-1][1] - late[0][1]
        expected_rise = slope * (late[-1][0] - late[0][0])
        return rise >= expected_rise / 3 and late[-1][1] >= level - expected_rise


def _expected(forecast: Forecast) -> float:
    return forecast.expected_s


def aged(forecast: Forecast, age_s: float) -> Forecast:
    """A forecast, shortened by the seconds since it was made."""
    left_s = (forecast.soonest_s, forecast.expected_s, forecast.latest_s)
    soonest_s, expected_s, latest_s = (max(0.0, seconds - age_s) for seconds in left_s)
    return replace(forecast, soonest_s=soonest_s, expected_s=expected_s, latest_s=latest_s)


ONE_IN_A_HUNDRED = 2.33
"""Standard deviations above the mean that 1% of a normal distribution exceeds."""

TAIL = log(100)
"""P99 divided by the mean, for an exponential distribution."""

SHORT_OF_TARGET = 4.0
"""Below a quarter of its target, a latency counts as load 0."""

EASY = 10.0
"""Below a tenth of its target, a latency is mostly noise and shows nothing about the load."""


class SloForecaster:
    """Forecasts when one engine's TTFT P99 exceeds its target; no forecast without a target.

    `window_s` is the short window; `seats` is the limit on running requests.
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

    def update(self, now_s: float, values: Signals) -> dict[str, float | None]:
        """The forecast's derived signals after a scrape; None for each without a trend or a
        target."""
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
        """The soonest forecast; if there is none, the previous one for up to one window.

        A climb does not end at its first dip.
        """
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


def slo_loads(values: Signals, *, target_s: float, seats: float | None) -> dict[str, float | None]:
    """Each measure of load, divided by the load at which the target is missed; None if unknown."""
    demand, in_flight, latency_s = demand_ratio(values), _in_flight(values), _latency_s(values)
    return {
        "kv": None if demand is None else demand * _peak(in_flight),
        "seats": None if seats is None else in_flight / seats * _peak(in_flight),
        "prompts": _prompts(values),
        "latency": None if latency_s is None else _inverse(target_s, latency_s),
    }


def _peak(in_flight: float) -> float:
    """P99 of requests in flight divided by their mean, for Poisson arrivals."""
    return 1 + ONE_IN_A_HUNDRED / sqrt(in_flight) if in_flight > 0 else 1.0


def _prompts(values: Signals) -> float | None:
    """Share of the engine's time spent on prefill; at 1, prompts arrive as fast as they can be
    prefilled."""
    arrivals, prefill_s = values.get("arrival_per_s"), values.get("prefill_mean_s")
    if arrivals is None or prefill_s is None or not isfinite(prefill_s):
        return None
    return arrivals * prefill_s


def _in_flight(values: Signals) -> float:
    return (values.get("running_avg") or 0.0) + (values.get("waiting_by_capacity") or 0.0)


def _latency_s(values: Signals) -> float | None:
    """TTFT P99 estimated from the mean TTFT, or the wait of a request arriving now if longer."""
    ttft_s = values.get("ttft_mean_s")
    if ttft_s is None or not isfinite(ttft_s):
        return None
    return max(TAIL * ttft_s, values.get("expected_wait_s") or 0.0)


def _inverse(target_s: float, latency_s: float) -> float:
    short = min(EASY, target_s / latency_s) if latency_s > 0 else EASY
    return (SHORT_OF_TARGET - short) / (SHORT_OF_TARGET - 1)
