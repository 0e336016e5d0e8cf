"""KV exhaustion, foreseen from demand and arrivals: early on ramps, silent without a trend."""

from __future__ import annotations

from statistics import median

import pytest

from kneewatch.diagnose.learned.kv_forecast import KvForecaster, demand_ratio
from tests.ramps import CHAT, REASONING, Answers, ramp, run, steady


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


def signals(
    *,
    mean: float,
    until_s: float,
    slope_per_s: float,
    request_s: float = 5.0,
    arrivals_grow: bool = True,
    swing: float = 0.0,
    climbs_from_s: float = 0.0,
    counted: bool = True,
    queued: float = 0.0,
) -> dict[str, float | None]:
    """The forecast's signals after a stretch in which KV demand climbed from `mean`: by more
    arrivals, or by requests that grow longer. Usage swings about its mean by `swing` of it.
    Requests hold 1% of the cache at first."""
    forecaster, values = KvForecaster(window_s=60.0), dict[str, float | None]()
    usages = list[float]()
    for tick in range(round(until_s / 5) + 1):
        rise = slope_per_s * max(0.0, 5.0 * tick - climbs_from_s)
        usages.append((mean + rise) * (1 + swing * (-1) ** tick))
        last = usages[-12:]
        in_flight = 100 * (mean + rise if arrivals_grow else mean)
        usage = {
            "kv_usage_ratio": usages[-1],
            "kv_usage_avg_ratio": sum(last) / len(last),
            "kv_usage_max_ratio": max(last),
            "running": in_flight,
            "running_avg": in_flight,
            "waiting_by_capacity": queued,
        }
        arrivals = 5 * in_flight / request_s if counted else None
        values = forecaster.update(5.0 * tick, usage, arrivals=arrivals)
    return values


def test_a_climb_of_arrivals_is_foreseen() -> None:
    # At 0.6 with 0.001/s more the mean is full in 400 s.
    values = signals(mean=0.3, until_s=300, slope_per_s=1e-3)
    left_s, soonest_s = values["kv_exhausted_in_s"], values["kv_exhausted_soonest_s"]
    latest_s = values["kv_exhausted_latest_s"]
    assert left_s is not None
    assert soonest_s is not None
    assert latest_s is not None
    assert soonest_s < left_s < latest_s
    assert left_s == pytest.approx(400, rel=0.1)


def test_the_cache_is_exhausted_when_its_peaks_are() -> None:
    smooth = signals(mean=0.3, until_s=300, slope_per_s=1e-3)
    swinging = signals(mean=0.3, until_s=300, slope_per_s=1e-3, swing=0.1)
    early_s, late_s = swinging["kv_exhausted_in_s"], smooth["kv_exhausted_in_s"]
    assert early_s is not None
    assert late_s is not None
    assert early_s < 0.7 * late_s
    assert (swinging["kv_peak_demand_ratio"] or 0) > 0.7


def test_what_is_ahead_is_above_capacity_where_exhaustion_is() -> None:
    for start in (0.3, 0.4, 0.5):
        values = signals(mean=start, until_s=300, slope_per_s=1e-3)
        assert ((values["kv_exhausted_in_s"] or 0) < 300) == (
            (values["kv_demand_ahead_ratio"] or 0) > 1
        )


@pytest.mark.parametrize(("queued", "known"), [(1.0, True), (500.0, False)])
def test_nothing_is_ahead_once_requests_queue(queued: float, *, known: bool) -> None:
    values = signals(mean=0.3, until_s=300, slope_per_s=1e-3, queued=queued)
    assert (values["kv_exhausted_in_s"] is not None) == known
    assert (values["kv_demand_ahead_ratio"] is not None) == known


def test_a_short_climb_is_not_projected_far_beyond_exhaustion() -> None:
    values = signals(mean=0.4, until_s=330, slope_per_s=5e-3, climbs_from_s=280)
    ahead = values["kv_demand_ahead_ratio"]
    assert ahead is not None
    assert 1 < ahead < 1.6


def test_requests_that_grow_longer_are_foreseen_once_the_climb_is_no_burst() -> None:
    def longer(request_s: float) -> float | None:
        values = signals(
            mean=0.3, until_s=300, slope_per_s=1e-3, request_s=request_s, arrivals_grow=False
        )
        return values["kv_exhausted_in_s"]

    assert longer(5.0) == pytest.approx(400, rel=0.1)
    # Fifteen requests one after the other: the arrivals of this climb do not fill the cache.
    assert longer(20.0) is None


@pytest.mark.parametrize("climbed_s", [120, 240])
def test_a_climb_that_has_ended_is_silence(climbed_s: float) -> None:
    forecaster = KvForecaster(window_s=60.0)
    said: list[float | None] = []
    for tick in range(121):
        usage = 0.2 + 1.5e-3 * min(climbed_s, 5.0 * tick)
        values = {
            "kv_usage_ratio": usage,
            "kv_usage_avg_ratio": usage,
            "kv_usage_max_ratio": usage,
            "running": 100 * usage,
            "running_avg": 100 * usage,
        }
        now = forecaster.update(5.0 * tick, values, arrivals=100 * usage)
        said.append(now["kv_exhausted_in_s"])
    assert said[-1] is None
    assert said[round(climbed_s / 5)] is not None


def test_more_arrivals_that_demand_does_not_follow_fill_no_cache() -> None:
    # Three times as many requests a second, which take a third of the time.
    forecaster = KvForecaster(window_s=60.0)
    values = {"kv_usage_avg_ratio": 0.4, "kv_usage_max_ratio": 0.4, "kv_usage_ratio": 0.4}
    values |= {"running": 20.0, "running_avg": 20.0}
    said = [
        forecaster.update(5.0 * tick, values, arrivals=10.0 if tick < 60 else 30.0)
        for tick in range(120)
    ]
    assert sum(now["kv_exhausted_in_s"] is not None for now in said) <= 5


def test_uncounted_arrivals_give_no_forecast() -> None:
    values = signals(mean=0.3, until_s=300, slope_per_s=1e-3, counted=False)
    assert values["kv_exhausted_in_s"] is None
    assert values["kv_demand_ratio"] == pytest.approx(0.6, abs=0.03)


def test_requests_that_grow_without_an_arrival_fill_the_cache() -> None:
    forecaster, left_s = KvForecaster(window_s=60.0), list[float | None]()
    for tick in range(41):
        usage = 0.6 + 0.006 * tick
        values = {"kv_usage_ratio": usage, "kv_usage_avg_ratio": usage, "running": 16.0}
        updated = forecaster.update(5.0 * tick, values | {"running_avg": 16.0}, arrivals=0.0)
        left_s.append(updated["kv_exhausted_in_s"])
    assert left_s[-1] == pytest.approx(0.16 / 0.0012, rel=0.1)


def test_demand_beyond_capacity_needs_no_forecast() -> None:
    assert signals(mean=0.5, until_s=560, slope_per_s=1e-3)["kv_exhausted_in_s"] is None


@pytest.mark.parametrize("usage", [0.0, 0.5, 0.95])
def test_no_trend_is_silence(usage: float) -> None:
    assert signals(mean=usage, until_s=2000, slope_per_s=0.0)["kv_exhausted_in_s"] is None


def test_a_restart_forgets_the_trend() -> None:
    forecaster = KvForecaster(window_s=60.0)

    def forecast(tick: int) -> float | None:
        usage = 0.3 + 0.005 * tick
        values = {"kv_usage_ratio": usage, "kv_usage_avg_ratio": usage, "running": 50.0}
        values["running_avg"] = 50.0
        updated = forecaster.update(5.0 * tick, values, arrivals=20.0 + tick)
        return updated["kv_exhausted_in_s"]

    assert [forecast(tick) for tick in range(60)][-1] is not None
    forecaster.forget()
    assert forecast(60) is None


@pytest.mark.parametrize(
    ("answers", "over_s", "lead_s"),
    [
        pytest.param(CHAT, 120.0, 45, id="two minutes of chat; an oracle has 65 s"),
        pytest.param(CHAT, 380.0, 130, id="six minutes of chat"),
        pytest.param(REASONING, 120.0, 50, id="two minutes of reasoning"),
        pytest.param(CHAT, 1800.0, 250, id="half an hour"),
        pytest.param(CHAT, 14_400.0, 60, id="four hours"),
    ],
)
def test_ramps_are_foreseen(answers: Answers, over_s: float, lead_s: float) -> None:
    rate = ramp(answers.rate_for(0.2), answers.rate_for(1.3), over_s)
    runs = [
        run(rate, for_s=2100 + over_s, seed=seed, answers=answers)
        for seed in range(4 if over_s > 2000 else 8)
    ]
    assert median(ramp_run.lead_s or 0.0 for ramp_run in runs) >= lead_s


@pytest.mark.parametrize("answers", [CHAT, REASONING])
def test_a_steady_load_is_hardly_ever_alarming(answers: Answers) -> None:
    rate = steady(answers.rate_for(0.45))
    runs = [run(rate, for_s=2 * 3600, seed=seed, answers=answers) for seed in range(3)]
    assert sum(steady_run.false_s for steady_run in runs) <= 0.003 * sum(
        steady_run.lasted_s for steady_run in runs
    )
