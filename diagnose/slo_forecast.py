"""When first tokens will come later than the TTFT target at the present trend. Pure.

Three loads, each scaled so that the target breaks where it reaches 1; the first there counts:

- KV and seats: what requests in flight ask for over what there is, as one arrival in a hundred
  finds it, for that one is who decides P99: requests in flight scatter about their mean by its
  square root (arrivals at random), so that a small batch breaks its target far below a full house.
- Latency: a server that serves one request after the other answers in 1 / (capacity - arrivals) in
  the mean, so that the inverse of its latency falls in proportion to the load, where latency itself
  runs away only at the end. Near it first tokens are late as exponentially as such a server's: P99
  is ln 100 times the mean, which a histogram gives exactly, P99 only as its buckets end. Where the
  wait of who comes now is longer by Little's law, it is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, log, sqrt

from kneewatch.diagnose.forecast import Forecast, Forecaster, demand_ratio, later

ONE_IN_A_HUNDRED = 2.33
"""Standard deviations of a normal distribution that one value in a hundred lies above."""

TAIL = log(100)
"""P99 over the mean of an exponential distribution."""

SHORT_OF_TARGET = 4.0
"""A latency below a quarter of the target has a long way to go: that load is 0."""

EASY = 10.0
"""Below a tenth of its target a latency says nothing more of the load: the noise would be all."""

Values = Mapping[str, float | None]


class SloForecaster:
    """The loads of one engine over its last minutes; silent without a target.

    `window_s` is the short window, `seats` the limit of requests that run at once.
    """

    def __init__(
        self, *, window_s: float, ttft_p99_s: float | None, seats: float | None = None
    ) -> None:
        self._target_s, self._seats, self._kept_s = ttft_p99_s, seats, window_s
        self._loads = {
            name: Forecaster(window_s=window_s, come_at=inf)
            for name in (LOADS if ttft_p99_s is not None else ())
        }
        self._last: tuple[float, Forecast] | None = None

    def forget(self) -> None:
        """The process was replaced."""
        self._last = None
        for load in self._loads.values():
            load.forget()

    def update(self, now_s: float, values: Values) -> dict[str, float | None]:
        """The derived signals of the forecast after a scrape, None without a trend or a target."""
        if self._target_s is None:
            return slo_values(None)
        loads = slo_loads(values, target_s=self._target_s, seats=self._seats)
        made = [load.update(now_s, loads[name]) for name, load in self._loads.items()]
        if (values.get("ttft_p99_s") or 0.0) > self._target_s:
            self._last = None
            return slo_values(None)
        return slo_values(self._kept(now_s, [one for one in made if one is not None]))

    def _kept(self, now_s: float, made: list[Forecast]) -> Forecast | None:
        """The soonest, or for a window the last one: a climb is not over at its first dip."""
        if made:
            self._last = now_s, min(made, key=_expected)
        if self._last is None or now_s - self._last[0] > self._kept_s:
            return None
        return later(self._last[1], now_s - self._last[0])


def slo_values(forecast: Forecast | None) -> dict[str, float | None]:
    """The derived signals of a forecast."""
    latest_s = None if forecast is None else forecast.latest_s
    return {
        "slo_breaks_in_s": None if forecast is None else forecast.expected_s,
        "slo_breaks_soonest_s": None if forecast is None else forecast.soonest_s,
        "slo_breaks_latest_s": latest_s if latest_s is not None and isfinite(latest_s) else None,
    }


LOADS = ("kv", "seats", "latency")


def slo_loads(values: Values, *, target_s: float, seats: float | None) -> dict[str, float | None]:
    """Each load over that at which the target breaks; None where it is not known."""
    demand, in_flight, latency_s = demand_ratio(values), _in_flight(values), _latency_s(values)
    return {
        "kv": None if demand is None else demand * _peak(in_flight),
        "seats": None if seats is None else in_flight / seats * _peak(in_flight),
        "latency": None if latency_s is None else _inverse(target_s, latency_s),
    }


def _peak(in_flight: float) -> float:
    """What one arrival in a hundred finds, over the mean."""
    return 1 + ONE_IN_A_HUNDRED / sqrt(in_flight) if in_flight > 0 else 1.0


def _in_flight(values: Values) -> float:
    return (values.get("running_avg") or 0.0) + (values.get("waiting_by_capacity") or 0.0)


def _latency_s(values: Values) -> float | None:
    """TTFT P99 as the mean has it, or the wait of who comes now where that is longer."""
    ttft_s, served_per_s = values.get("ttft_mean_s"), values.get("completed_per_s")
    if ttft_s is None or not isfinite(ttft_s):
        return None
    wait_s = (values.get("waiting_by_capacity") or 0.0) / served_per_s if served_per_s else 0.0
    return max(TAIL * ttft_s, wait_s)


def _inverse(target_s: float, latency_s: float) -> float:
    short = min(EASY, target_s / latency_s) if latency_s > 0 else EASY
    return (SHORT_OF_TARGET - short) / (SHORT_OF_TARGET - 1)


def _expected(forecast: Forecast) -> float:
    return forecast.expected_s
