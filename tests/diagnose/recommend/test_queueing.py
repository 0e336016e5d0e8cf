"""The wait for a seat, against figures of the queueing tables and a simulated queue."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.adviser import recommend
from kneewatch.diagnose.recommend.demand import QueueTrend
from kneewatch.diagnose.recommend.queueing import SeatQueue, with_bursts
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE, advised, changes


@pytest.mark.parametrize(
    ("seats", "running", "waits_ratio"),
    [
        pytest.param(1, 0.5, 0.5, id="one seat: as often as it is taken"),
        pytest.param(2, 1.0, 1 / 3, id="two seats, half full"),
        pytest.param(10, 8.0, 0.4092, id="ten seats, 80%"),
    ],
)
def test_the_share_that_waits(seats: int, running: float, waits_ratio: float) -> None:
    assert SeatQueue(seats, running, 1.0).waits_ratio == pytest.approx(waits_ratio, rel=1e-3)


@pytest.mark.parametrize("seats", [28, 30])
def test_the_wait_is_that_of_a_simulated_queue(seats: int) -> None:
    rng, free_s, waits_s, now_s = Random(7), [0.0] * seats, list[float](), 0.0
    for _ in range(60_000):
        now_s += rng.expovariate(24.0)
        start_s = max(now_s, heappop(free_s))
        heappush(free_s, start_s + rng.expovariate(1.0))
        waits_s.append(start_s - now_s)
    queue = SeatQueue(seats, 24.0, 1.0)
    assert queue.mean_s == pytest.approx(sum(waits_s) / len(waits_s), rel=0.25)
    assert queue.p99_s == pytest.approx(sorted(waits_s)[-len(waits_s) // 100], rel=0.25)


def test_bursts_find_a_seat() -> None:
    for running in (6.0, 60.0, 200.0):
        assert SeatQueue(round(with_bursts(running)), running, 1.0).p99_s == 0


GROWING = FULL.but(running=40.0, running_avg=40.0, running_max=40.0, kv_usage_avg_ratio=0.2,
                   completed_per_s=8.0, preemption_per_s=0.0, itl_mean_s=0.012, ttft_mean_s=4.0,
                   prefill_mean_s=0.05, prompt_tokens_mean=300.0, output_tokens_mean=400.0,
                   generation_tokens_per_s=3200.0)  # fmt: skip
"""40 seats, which 8 requests/s fill."""


def measured(trend: QueueTrend) -> dict[str, Advice]:
    config = {**PAGE, "max_num_seqs": "40"}
    facts = replace(GROWING, config=config).facts()
    server = deployment(config, LLAMA)
    return {each.id: each for each in recommend(facts, ["admission_limit"], server, trend=trend)}


def test_seats_are_for_the_bursts_of_the_rate_that_arrives() -> None:
    more = measured(QueueTrend(4.0))["max-num-seqs-up"]
    running, seats = more.predicted["running"], more.predicted["max_num_seqs"]
    assert running >= 60, "12 requests/s, each for 5 s or more"
    assert seats >= 1.3 * running
    assert f"keep {running:.0f} running on average: the other seats are for bursts" in more.summary
    assert more.predicted["ttft_s"] < 1


def test_no_seats_are_counted_before_the_rate_is_measured() -> None:
    more = measured(QueueTrend(4.0, is_measured=False))["max-num-seqs-up"]
    assert (more.changes, more.suffices) == ((), None)
    assert "The number is being measured" in more.summary


def test_a_second_replica_waits_for_its_seats_too() -> None:
    ttfts_s: list[float] = []
    for seats in ("128", "28"):
        stated = replace(LLAMA, flags={"--max-num-seqs": seats})
        growing = GROWING.but(waiting_slope_per_s=4.2)
        more = advised("queue_saturation", situation=growing, stated=stated)["replicas"]
        assert changes(more) == {"replicas": (2, 4)}
        ttfts_s.append(more.predicted["ttft_s"])
    assert ttfts_s[1] > 1.5 * ttfts_s[0], "24 of 28 seats are taken on average"


def test_aborted_calls_are_no_demand() -> None:
    """Most calls are aborted and sent again: the load is unknown, and seats are a step."""
    storm = replace(GROWING.but(finished_abort_per_s=7.9, waiting_slope_per_s=0.0))
    levers = advised("admission_limit", situation=storm, stated=LLAMA, max_num_seqs="40")
    more, replicas = levers["max-num-seqs-up"], levers["replicas"]
    assert changes(more) == {"--max-num-seqs": (40, 80)}
    assert more.before["served_per_s"] == pytest.approx(0.1)
    assert (more.suffices, replicas.suffices) == (None, None)
    assert "0.1 of 8 calls/s are answered" in more.summary
    assert "number of seats that the load needs is unknown" in more.summary
    assert "load_ratio" not in replicas.predicted
    few = advised("admission_limit", situation=GROWING.but(finished_abort_per_s=1.0), stated=LLAMA)
    assert "are answered" not in few["max-num-seqs-up"].summary


def test_slower_steps_are_no_remedy_for_clients_that_give_up() -> None:
    storm = GROWING.but(finished_abort_per_s=7.9, itl_mean_s=None, tpot_mean_s=None)
    levers = advised("admission_limit", situation=storm, stated=LLAMA)
    assert "max-num-seqs-up" not in levers, "how fast the steps of more requests are is unknown"
