"""A broken TTFT target, foreseen from what requests ask for and from how late they are."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.learned.slo_forecast import Forecaster, SloForecaster, slo_loads
from tests.slo_ramps import climbs, kinds, run

TARGET_S = 2.0
Values = dict[str, float | None]


def idle(**but: float | None) -> Values:
    """An engine with next to no load."""
    values: Values = {"kv_usage_avg_ratio": 0.1, "running_avg": 4.0, "completed_per_s": 1.0}
    return {**values, "ttft_mean_s": 0.05, "ttft_p99_s": 0.1, **but}


def foreseen(
    at: Callable[[float], Values], *, target_s: float | None = TARGET_S, seats: float | None = None
) -> list[float | None]:
    """What is foreseen at each scrape of ten minutes."""
    forecaster = SloForecaster(window_s=60.0, ttft_p99_s=target_s, seats=seats)
    return [forecaster.update(t, at(t))["slo_breaks_in_s"] for t in range(0, 601, 5)]


def slower(t_s: float) -> Values:
    """A server whose load climbs to all that it can do within 20 minutes."""
    return idle(ttft_mean_s=0.05 / (1 - t_s / 1200))


def test_the_inverse_of_latency_is_followed_to_the_target() -> None:
    # The mean is at target / ln 100 once 1 - t / 1200 is 0.05 ln 100 / 2: 1062 s.
    breaks_s = 1200 * (1 - 0.05 * log(100) / TARGET_S)
    left = foreseen(lambda t: slower(min(1.7 * t, 1000.0)))
    at = next(n for n, left_s in enumerate(left) if left_s is not None)
    assert left[at] == pytest.approx(breaks_s / 1.7 - 5 * at, rel=0.1)
    assert 5 * at < 480, "the target breaks at 625 s"


def test_seats_run_out_for_one_in_a_hundred_first() -> None:
    climbing = foreseen(lambda t: idle(running_avg=20 + t / 20), seats=64)
    # 49 in flight and 2.33 times 7 more are 65.
    assert climbing[-1] is not None
    assert climbing[-1] < 20
    assert foreseen(lambda t: idle(running_avg=20 + t / 20))[-1] is None, "seats are not known"


def test_the_time_for_prompts_runs_out_before_latency_shows_it() -> None:
    # Arrivals climb to what fills the GPUs' time (1 / 0.6 s) within 800 s; TTFT stands still.
    climbing = foreseen(
        lambda t: idle(arrival_per_s=(0.4 + 0.6 * t / 800) / 0.6, prefill_mean_s=0.6)
    )
    assert climbing[60] == pytest.approx(500, rel=0.1)
    assert foreseen(lambda t: idle(arrival_per_s=1.0, prefill_mean_s=0.6))[-1] is None, "it stays"
    assert foreseen(lambda t: idle(arrival_per_s=1 + t / 800))[-1] is None, "their time is unknown"


def test_kv_runs_out() -> None:
    climbing = foreseen(lambda t: idle(running_avg=100.0, kv_usage_avg_ratio=0.3 + t / 1500))
    assert climbing[60] == pytest.approx((1 / 1.233 - 0.5) * 1500, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(idle(), id="no load"),
        pytest.param(idle(running_avg=60.0), id="seats are taken, steadily"),
        pytest.param(idle(ttft_mean_s=0.42, ttft_p99_s=1.9), id="latency is high, steadily"),
        pytest.param({}, id="nothing is known"),
        pytest.param(idle(ttft_mean_s=None, kv_usage_avg_ratio=None), id="little is known"),
    ],
)
def test_no_trend_is_silence(values: Values) -> None:
    assert set(foreseen(lambda _t: values, seats=64)) == {None}


def test_without_a_target_there_is_nothing_to_break() -> None:
    assert set(foreseen(slower, target_s=None)) == {None}


def test_a_broken_target_is_not_foreseen() -> None:
    left = foreseen(
        lambda t: {**slower(1.7 * min(t, 600.0)), "ttft_p99_s": 3.0 if t > 500 else 0.2}
    )
    assert left[100] is not None
    assert set(left[101:]) == {None}


def test_a_dip_does_not_end_a_forecast_and_an_end_does() -> None:
    forecaster = SloForecaster(window_s=60.0, ttft_p99_s=TARGET_S)
    left = [forecaster.update(t, slower(1.7 * min(t, 530.0))) for t in range(0, 801, 5)]
    stood = [values["slo_breaks_in_s"] is not None for values in left]
    assert all(stood[94:106])
    assert not any(stood[-10:]), "what has ended is forgotten"
    forecaster = SloForecaster(window_s=60.0, ttft_p99_s=TARGET_S)
    for t in range(0, 531, 5):
        forecaster.update(t, slower(1.7 * t))
    dips = [forecaster.update(t, slower(1.7 * 400)) for t in range(535, 561, 5)]
    assert [values["slo_breaks_in_s"] for values in dips if values["slo_breaks_in_s"] is None] == []
    forecaster.forget()
    assert forecaster.update(565, slower(1.7 * 565))["slo_breaks_in_s"] is None


def test_who_waits_is_late_though_none_of_them_has_started() -> None:
    loads = slo_loads(
        idle(waiting_by_capacity=2.0, expected_wait_s=2.0), target_s=TARGET_S, seats=None
    )
    assert loads["latency"] == pytest.approx(1.0), "two wait at one a second: as long as the target"
    assert loads["seats"] is None


def test_slow_ramps_leave_time_to_scale() -> None:
    runs = [
        run(kind, climbs(kind, 20, quiet_s=300), for_s=1800, seed=seed)
        for kind in kinds()
        for seed in range(2)
    ]
    assert [ramp for ramp in runs if ramp.exhausted_s is None] == []
    assert median(ramp.lead_s or 0.0 for ramp in runs) >= 120


def climb(slope_per_s: float, *, start: float = 0.4, for_s: float = 600.0) -> Forecaster:
    """A forecaster after a load that climbs by so much a second."""
    forecaster = Forecaster(window_s=60.0)
    for tick in range(round(for_s / 5)):
        forecaster.update(5.0 * tick, start + slope_per_s * 5 * tick)
    return forecaster


@given(st.floats(4e-4, 8e-4))
def test_a_straight_climb_is_foreseen_exactly(slope_per_s: float) -> None:
    forecast = climb(slope_per_s).update(600.0, 0.4 + 600 * slope_per_s)
    assert forecast is not None
    assert forecast.expected_s == pytest.approx(
        (1 - 0.4 - 600 * slope_per_s) / slope_per_s, rel=0.05
    )
    assert forecast.soonest_s <= forecast.expected_s <= forecast.latest_s


def test_it_counts_down_between_samples() -> None:
    forecaster = climb(5e-4)
    forecast = forecaster.update(600.0, 0.7)
    other = forecaster.update(610.0, 0.705)
    assert forecast is not None
    assert other is not None
    assert other.expected_s == pytest.approx(forecast.expected_s - 10, abs=1)


@pytest.mark.parametrize("usage", [0.0, 0.5, 0.95])
def test_a_load_that_stays_is_silence(usage: float) -> None:
    forecaster = Forecaster(window_s=60.0)
    forecasts = [forecaster.update(5.0 * tick, usage) for tick in range(400)]
    assert forecasts == [None] * 400


def test_a_climb_that_has_ended_is_silence() -> None:
    forecaster = climb(5e-4)
    forecasts = [forecaster.update(600.0 + 5 * tick, 0.7) for tick in range(31)]
    assert forecasts[-1] is None
