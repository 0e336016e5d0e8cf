"""What the load asks of the KV cache: in the mean, and at its peak."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.deployment.deployment import Deployment
from kneewatch.diagnose.recommend.demand import Demand, QueueHistory, ahead, demand
from kneewatch.diagnose.sizing.memory.launch import Launch
from tests.diagnose.recommend.scenes import FULL, LLAMA, advised, changes

SERVER = Deployment(stated=LLAMA, launch=Launch(block_tokens=32), capacity_tokens=5088.0)


def of(held_tokens: float, spread_tokens: float) -> Demand:
    """A demand whose requests hold so much."""
    return Demand(
        requests=30.0,
        mean_requests=30.0,
        running=20.0,
        waiting=10.0,
        held_tokens=held_tokens,
        served_per_s=3.0,
        arrival_per_s=3.0,
        input_tokens=100.0,
        output_tokens=300.0,
        saved_ratio=0.0,
        spread_tokens=spread_tokens,
    )


def test_a_burst_is_served_at_the_rate_at_which_requests_begin() -> None:
    burst = {"completed_per_s": 0.2, "arrival_per_s": 4.3, "waiting_slope_per_s": 7.0}
    wanted = demand(burst, SERVER)
    assert (wanted.served_per_s, wanted.arrival_per_s) == (4.3, 11.3)


def test_rates_are_measured_by_the_last_scrape_of_a_command_that_watches_for_a_window() -> None:
    history, window_s = QueueHistory(), 20.0
    for at_s in range(2, 21, 2):  # the first scrape, at 0, has no rates
        history.add(float(at_s), {"running": 8.0, "waiting": 20.0}, window_s, is_incident=True)
        assert history.trend({}, window_s).is_measured == (at_s == 20)


def test_a_queue_of_one_or_two_in_turn_does_not_grow() -> None:
    wanted = demand({"completed_per_s": 0.02, "waiting_slope_per_s": 0.04}, SERVER)
    assert wanted.arrival_per_s == 0.02


def test_a_request_grows_while_it_runs() -> None:
    lengths = {"prompt_tokens_mean": 100.0, "output_tokens_mean": 300.0}
    wanted = demand({"running": 1.0, **lengths}, SERVER)
    assert wanted.held_tokens == 266  # 100 + 300 / 2 + 32 / 2
    assert wanted.spread_tokens == pytest.approx(300 / sqrt(12))  # uniform over its life


def test_requests_in_flight_in_the_mean_are_those_that_clients_wait_for() -> None:
    """30 clients with one request each: three are on their way to the engine or from it."""
    signals = {
        **{"running": 20.0, "waiting_by_capacity": 10.0, "running_avg": 20.5, "waiting_avg": 6.5},
        **{"generation_tokens_per_s": 720.0, "output_tokens_mean": 100.0},
    }
    assert demand({**signals, "e2e_mean_s": 4.1}, SERVER).mean_requests == pytest.approx(29.52)
    assert demand({**signals, "e2e_mean_s": 9.0}, SERVER).mean_requests == 30
    assert demand(signals, SERVER).mean_requests == 27
    risen = demand({**signals, "waiting_by_capacity": 70.0}, SERVER)
    assert risen.mean_requests == 90  # the window's mean lies behind


def test_lengths_that_differ_spread_more() -> None:
    lengths = {"prompt_tokens_mean": 100.0, "prompt_tokens_p95": 429.0}
    wanted = demand({**lengths, "output_tokens_mean": 0.0}, SERVER)
    assert wanted.spread_tokens == pytest.approx(200)  # (429 - 100) / 1.645
    narrow = demand({**lengths, "prompt_tokens_p95": 97.0, "output_tokens_mean": 0.0}, SERVER)
    assert narrow.spread_tokens == 0


def test_seats_leave_room_for_the_peak() -> None:
    wanted = of(266.0, 86.6)
    # 17 by the mean (0.9 x 5,088 / 266); 15 x 266 + 3 x 86.6 x sqrt(15) = 4,996, 16: 5,295.
    assert wanted.most_requests(5088.0, usage_ratio=0.9) == 15
    assert of(266.0, 0.0).most_requests(5088.0, usage_ratio=0.9) == 17


@given(
    held=st.floats(1, 1e5),
    spread=st.floats(0, 1e5),
    capacity=st.floats(1, 1e8),
    usage=st.floats(0.1, 1.0),
)
def test_no_more_requests_than_fit_and_no_fewer(
    held: float, spread: float, capacity: float, usage: float
) -> None:
    wanted = of(held, spread)
    most = wanted.most_requests(capacity, usage_ratio=usage)
    fits = capacity * (1 + 1e-6)
    assert most * held <= usage * fits
    assert wanted.peak_tokens(most) <= fits
    more = most + 1 + 1e-6
    assert more * held >= usage * capacity or wanted.peak_tokens(more) >= capacity


def test_no_end_of_preemption_is_promised_where_the_peak_does_not_fit() -> None:
    # Twice 10,000 blocks hold 160 requests of 1,600 tokens at 80 %, and 3 x 226 x sqrt(160) more.
    calm = advised("kv_pressure", situation=FULL)["kv-fp8"]
    assert calm.predicted["preemption_per_s"] == 0
    # The same mean, with tails so long that a peak takes 3 x 1,838 x sqrt(160): 69,700 tokens more.
    wild = FULL.but(prompt_tokens_p95=4200.0)
    advice = advised("kv_pressure", situation=wild)["kv-fp8"]
    assert advice.predicted["kv_usage_ratio"] == pytest.approx(0.8, abs=0.001)
    assert "preemption_per_s" not in advice.predicted


def test_an_override_is_raised_to_the_peak() -> None:
    wild = FULL.but(prompt_tokens_p95=4200.0)
    advice = advised("kv_pressure", situation=wild, num_gpu_blocks_override="10001")["kv-blocks"]
    # (160 x 1,600 + 69,700) / 16 = 20,360 blocks, in round numbers.
    assert changes(advice) == {"--num-gpu-blocks-override": (10_001, 20_480)}
    assert advice.predicted["preemption_per_s"] == 0


def test_the_load_ahead_is_the_present_one_grown_at_its_trend() -> None:
    now = of(200.0, 0.0)
    grown = ahead(now, {"kv_peak_demand_ratio": 0.8, "kv_demand_ahead_ratio": 1.2})
    assert grown.requests == pytest.approx(45.0)
    assert grown.arrival_per_s == pytest.approx(4.5)
    assert grown.held_tokens == now.held_tokens
    assert ahead(now, {"kv_peak_demand_ratio": 0.8, "kv_demand_ahead_ratio": 0.8}) == now
    assert ahead(now, {}) == now


def test_a_backlog_is_no_demand_where_preemption_lets_nothing_finish() -> None:
    """Ten run, none completes, and the queue grows to any length: a step, not its length."""
    nothing = {"completed_per_s": 0.0, "generation_tokens_per_s": 0.0, "waiting_slope_per_s": 0.5}
    stuck = FULL.but(
        running=10.0,
        running_avg=10.0,
        running_max=10.0,
        arrival_per_s=0.0,
        kv_usage_avg_ratio=0.95,
        **nothing,
    )
    for waiting in (20.0, 130.0, 2000.0):
        queue = {"waiting": waiting, "waiting_avg": waiting, "waiting_by_capacity": waiting}
        more = advised("kv_pressure", situation=stuck.but(**queue))["replicas"]
        assert more.changes[0].after == 2
        assert "No request completes" in more.summary
        assert more.predicted["backlog_requests"] == waiting


def test_what_was_served_before_preemption_is_what_can_be_served() -> None:
    """A tenth of the usual rate completes while requests are computed again."""
    values = {"running": 10.0, "running_avg": 10.0, "waiting": 50.0, "waiting_avg": 50.0,
              "waiting_by_capacity": 50.0, "completed_per_s": 0.1, "waiting_slope_per_s": 0.9,
              "demand_moved_ratio": 1.0, "preemption_per_s": 0.3}  # fmt: skip
    preempted = demand(values, SERVER)
    assert preempted.proven_per_s == pytest.approx(1.0)
    assert preempted.requests == 10
    longer = demand({**values, "answers_moved_ratio": 2.0}, SERVER)
    assert longer.proven_per_s == pytest.approx(0.5)
    assert demand({**values, "preemption_per_s": 0.0}, SERVER).proven_per_s == 0.1


def callers_of(in_flight: list[float], *, served_per_s: float, interval_s: float = 5.0) -> object:
    """The callers after so many scrapes of a server with 20 seats, at a window of a minute."""
    history, values = QueueHistory(), dict[str, float | None]()
    for scrape, requests in enumerate(in_flight):
        values = {"running": 20.0, "waiting": requests - 20.0, "completed_per_s": served_per_s}
        history.add(scrape * interval_s, values, 60.0, is_incident=True)
    trend = history.trend(values, 60.0)
    return trend.callers if trend.is_closed else None


def test_callers_are_counted_although_some_are_between_two_requests() -> None:
    """40 clients as the gauges of a real vLLM show them: up to six are on their way."""
    seen = [40.0, 35.0, 40.0, 37.0, 36.0, 34.0, 36.0, 38.0, 35.0, 36.0, 39.0, 36.0, 34.0, 36.0]
    assert callers_of(seen, served_per_s=4.0) == 40.0
    assert callers_of(seen, served_per_s=0.05) is None  # six of three served


@pytest.mark.parametrize("served_per_s", [0.5, 2.0, 8.0])
def test_independent_arrivals_are_rarely_taken_for_callers(served_per_s: float) -> None:
    rng, told = Random(7), 0
    for _ in range(200):
        seen = [300.0]
        for _ in range(24):
            each = served_per_s * 5.0
            seen.append(seen[-1] + rng.gauss(0.0, sqrt(2 * each)) // 1)
        told += callers_of(seen, served_per_s=served_per_s) is not None
    assert told <= 0.02 * 200
