"""KV exhaustion, foreseen from demand: early on ramps, silent without a trend."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.learned.forecast import Forecaster, KvForecaster, demand_ratio
from tests.ramps import ramp, run, steady


def climb(slope_per_s: float, *, start: float = 0.4, for_s: float = 600.0) -> Forecaster:
    """A forecaster that has seen demand climb by so much a second."""
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


@pytest.mark.parametrize(
    ("values", "demand"),
    [
        pytest.param({"kv_usage_avg_ratio": 0.5, "running_avg": 10.0}, 0.5, id="nobody waits"),
        pytest.param(
            {"kv_usage_avg_ratio": 0.9, "running_avg": 10.0, "waiting_by_capacity": 5.0},
            1.35,
            id="those who wait would want half as much again",
        ),
        pytest.param({"kv_usage_avg_ratio": 0.0, "running_avg": 0.0}, 0.0, id="idle"),
        pytest.param({"running_avg": 10.0}, None, id="usage unknown"),
        pytest.param({"kv_usage_avg_ratio": float("nan")}, None, id="usage is no number"),
    ],
)
def test_demand(values: dict[str, float], demand: float | None) -> None:
    assert demand_ratio(values) == pytest.approx(demand)


@pytest.mark.parametrize("usage", [0.0, 0.5, 0.95])
def test_no_trend_is_silence(usage: float) -> None:
    forecaster = Forecaster(window_s=60.0)
    forecasts = [forecaster.update(5.0 * tick, usage) for tick in range(400)]
    assert forecasts == [None] * 400


def test_a_climb_that_has_ended_is_silence() -> None:
    forecaster = climb(5e-4)
    forecasts = [forecaster.update(600.0 + 5 * tick, 0.7) for tick in range(31)]
    assert forecasts[-1] is None


def climbing(
    peak_to_mean: float, *, to: float, flows: dict[str, float] | None = None
) -> dict[str, float | None]:
    """The forecast's signals after ten minutes in which mean KV usage climbed from 0.4; `flows`:
    arrivals and completions in the last window."""
    forecaster, values = KvForecaster(window_s=60.0), dict[str, float | None]()
    for tick in range(121):
        mean = 0.4 + (to - 0.4) * tick / 120
        usage = {"kv_usage_avg_ratio": mean, "kv_usage_max_ratio": mean * peak_to_mean}
        values = forecaster.update(5.0 * tick, {**usage, **(flows or {}), "running_avg": 10.0})
    return values


def test_the_cache_is_exhausted_when_its_peaks_are() -> None:
    # From 0.4 to 0.7 in 600 s: the mean would take another 600 s, peaks of 1.25 times 200 s.
    assert climbing(1.0, to=0.7)["kv_exhausted_in_s"] == pytest.approx(600, rel=0.05)
    values = climbing(1.25, to=0.7)
    assert values["kv_exhausted_in_s"] == pytest.approx(200, rel=0.05)
    assert values["kv_peak_demand_ratio"] == pytest.approx(0.875)
    assert values["kv_demand_ahead_ratio"] == pytest.approx(0.875 + 300 * 0.3 * 1.25 / 600, 0.05)


def test_demand_beyond_capacity_needs_no_forecast() -> None:
    assert climbing(1.0, to=1.02)["kv_exhausted_in_s"] is None


@pytest.mark.parametrize(
    ("arrivals", "completions", "is_forecast"),
    [
        pytest.param(18.0, 24.0, True, id="6 more ended of 42: chance, their deviation is 6.5"),
        pytest.param(17.0, 24.0, False, id="7 more ended of 41: chance is 6.4"),
        pytest.param(24.0, 17.0, True, id="more arrive"),
    ],
)
def test_a_climb_is_over_when_more_requests_end_than_arrive(
    arrivals: float, completions: float, *, is_forecast: bool
) -> None:
    flows = {"arrival_per_s": arrivals / 60, "completed_per_s": completions / 60}
    signals = climbing(1.25, to=0.7, flows=flows)
    assert (signals["kv_exhausted_in_s"] is not None) == is_forecast
    assert (signals["kv_demand_ahead_ratio"] == signals["kv_demand_ratio"]) != is_forecast


@pytest.mark.parametrize(
    ("arrivals_per_s", "request_s", "is_forecast"),
    [
        pytest.param(0.1, 100.0, False, id="a burst: these arrivals keep 14 requests in flight"),
        pytest.param(0.15, 100.0, True, id="these keep 20 in flight, and 10 fill 65%"),
        pytest.param(0.2, 50.0, True, id="a climb for 15 requests: more and more arrive"),
    ],
)
def test_a_burst_that_does_not_fill_the_cache_is_no_climb(
    arrivals_per_s: float, request_s: float, *, is_forecast: bool
) -> None:
    flows = {"arrival_per_s": arrivals_per_s, "completed_per_s": 0.1, "e2e_mean_s": request_s}
    # 14 requests in flight would ask for 0.9 of this cache at its peaks, 20 for more than it holds.
    signals = climbing(1.0, to=0.65, flows=flows)
    assert (signals["kv_exhausted_in_s"] is not None) == is_forecast


@pytest.mark.parametrize(
    ("running", "waiting", "is_forecast"),
    [
        pytest.param(12.0, 0.0, True, id="prompts are under prefill: their first tokens are late"),
        pytest.param(10.0, 2.0, True, id="they queue"),
        pytest.param(9.0, 0.0, False, id="fewer are in flight than before"),
    ],
)
def test_a_climb_goes_on_while_requests_in_flight_do_not_fall(
    running: float, waiting: float, *, is_forecast: bool
) -> None:
    flows = {"arrival_per_s": 0.2, "completed_per_s": 0.4}
    signals = climbing(1.25, to=0.7, flows={**flows, "running": running, "waiting": waiting})
    assert (signals["kv_exhausted_in_s"] is not None) == is_forecast


def test_a_restart_forgets_the_trend() -> None:
    forecaster = climb(5e-4)
    forecaster.forget()
    assert forecaster.update(600.0, 0.7) is None


def test_slow_ramps_leave_time_to_scale() -> None:
    runs = [run(ramp(2.0, 9.0, 1200.0), for_s=3600, seed=seed) for seed in range(6)]
    leads = [slow_run.lead_s for slow_run in runs if slow_run.lead_s is not None]
    assert len(leads) == 6
    assert median(leads) >= 120


def test_a_steady_load_is_hardly_ever_alarming() -> None:
    runs = [run(steady(2.0), for_s=2 * 3600, seed=seed) for seed in range(3)]
    assert sum(steady_run.alarmed_s for steady_run in runs) <= 0.01 * sum(
        steady_run.lasted_s for steady_run in runs
    )
