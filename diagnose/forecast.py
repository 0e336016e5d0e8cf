"""When the KV cache will be exhausted at the present trend, from what requests ask of it. Pure.

The gauge of KV usage saturates at 1 and says nothing of those who wait. Demand does: what the
running requests hold, times those in flight over those running, so that it passes 1 when the queue
would not fit either. A straight line through its last minutes is followed only where it is a trend:
steep against its own noise, and still going on. Everything else is silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

SPACINGS = (0.25, 1.0)
"""Samples a quarter window apart for what comes fast, a window apart for what comes slowly."""

SAMPLES_MAX = 24
SAMPLES_MIN = 8
"""Two windows at least, and six (or twenty-four) at most."""

TREND_MIN = 6.0
"""Slope over its standard error. Neighbouring samples overlap, so the error is underestimated."""

LATE_SAMPLES = 4
"""The newest ones must go on as the line does."""

DEMAND_MIN = 0.3
"""A cache that is hardly used has a long way to go, whatever the slope."""

HORIZON_S = 1800.0
"""A trend is not followed beyond half an hour."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until demand reaches the KV cache's capacity: soonest, expected, latest.

    `latest_s` is infinite where the slowest likely slope does not get there within the horizon.
    """

    soonest_s: float
    expected_s: float
    latest_s: float
    demand_ratio: float
    slope_per_s: float


def forecast_values(demand: float | None, forecast: Forecast | None) -> dict[str, float | None]:
    """The derived signals of a demand and its forecast."""
    latest_s = None if forecast is None else forecast.latest_s
    return {
        "kv_demand_ratio": demand,
        "kv_exhausted_in_s": None if forecast is None else forecast.expected_s,
        "kv_exhausted_soonest_s": None if forecast is None else forecast.soonest_s,
        "kv_exhausted_latest_s": latest_s if latest_s and isfinite(latest_s) else None,
    }


def demand_ratio(values: Mapping[str, float | None]) -> float | None:
    """KV tokens asked for over the KV cache's capacity; None where usage is not known.

    Usage x requests in flight / requests running: those who wait are taken to want what those who
    run hold on average.
    """
    usage, running = values.get("kv_usage_avg_ratio"), values.get("running_avg")
    if usage is None or not isfinite(usage):
        return None
    if not running:
        return usage
    return usage * (1 + (values.get("waiting_by_capacity") or 0.0) / running)


class Forecaster:
    """The demand of one engine over its last minutes. `window_s` is the short window; from
    `come_at` on there is nothing to foresee."""

    def __init__(self, *, window_s: float, come_at: float = 1.0) -> None:
        self._come_at = come_at
        self._trends = tuple(_Trend(spacing * window_s) for spacing in SPACINGS)

    def forget(self) -> None:
        """The process was replaced: an empty cache has no trend."""
        for trend in self._trends:
            trend.forget()

    def update(self, now_s: float, demand: float | None) -> Forecast | None:
        """The forecast after a scrape that tells a `demand_ratio`, the soonest; None where nothing
        tends to exhaustion."""
        if demand is None:
            self.forget()
            return None
        made = [trend.update(now_s, demand) for trend in self._trends]
        if demand >= self._come_at or not self._trends[0].rises:
            return None
        return min((one for one in made if one is not None), key=_expected, default=None)


class _Trend:
    """Samples of demand at one spacing, and the line through them."""

    def __init__(self, spacing_s: float) -> None:
        self._spacing_s = spacing_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._forecast: tuple[float, Forecast] | None = None

    def forget(self) -> None:
        self._samples.clear()
        self._forecast = None

    @property
    def rises(self) -> bool:
        """Whether the newest samples lie above those before them."""
        values = [value for _, value in self._samples]
        newest, before = values[-LATE_SAMPLES:], values[-2 * LATE_SAMPLES : -LATE_SAMPLES]
        return bool(before) and sum(newest) * len(before) > sum(before) * len(newest)

    def update(self, now_s: float, demand: float) -> Forecast | None:
        if not self._samples or now_s - self._samples[-1][0] >= self._spacing_s:
            self._samples.append((now_s, demand))
            made = self._made(demand)
            self._forecast = None if made is None else (now_s, made)
        if self._forecast is None:
            return None
        made_s, made = self._forecast
        return later(made, now_s - made_s)

    def _made(self, demand: float) -> Forecast | None:
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
        """Whether the newest samples rise too, and lie about where the line ends."""
        late = list(self._samples)[-LATE_SAMPLES:]
        rise = late[-1][1] - late[0][1]
        wanted = slope * (late[-1][0] - late[0][0])
        return rise >= wanted / 3 and late[-1][1] >= level - wanted


def _expected(forecast: Forecast) -> float:
    return forecast.expected_s


def _line(samples: deque[tuple[float, float]]) -> tuple[float, float, float]:
    """The least-squares line: slope, its standard error, and where it ends."""
    count = len(samples)
    mean_t = sum(t_s for t_s, _ in samples) / count
    mean = sum(value for _, value in samples) / count
    spread = sum((t_s - mean_t) ** 2 for t_s, _ in samples)
    slope = sum((t_s - mean_t) * (value - mean) for t_s, value in samples) / spread
    residual = sum((value - mean - slope * (t_s - mean_t)) ** 2 for t_s, value in samples)
    error = sqrt(residual / (count - 2) / spread)
    return slope, error, mean + slope * (samples[-1][0] - mean_t)


def later(made: Forecast, age_s: float) -> Forecast:
    """A forecast as it stands some seconds after it was made."""
    return Forecast(
        max(0.0, made.soonest_s - age_s),
        max(0.0, made.expected_s - age_s),
        max(0.0, made.latest_s - age_s),
        made.demand_ratio,
        made.slope_per_s,
    )
