"""TTFT and ITL P99 after a change, with a band: from what this server's own windows showed."""

from __future__ import annotations

from math import exp
from random import Random
from statistics import median

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.recommend.queueing import CallerQueue, Steps
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.test_own_steps import BUSY, LOADS, learned, page, recommended
from tests.recordings import LAB, diagnoses
from tests.tails import BEYOND_RATIO, told, windows


def test_a_window_lies_in_the_band_predicted_from_the_others() -> None:
    """A window of 15 s has few requests, so its own P99 is noisy: the band says by how much."""
    names = ("loads", "slow_open", "slower_prefill", "few_seats")
    of = [each for name in names for each in told(windows(diagnoses(LAB / f"{name}.jsonl.gz")))]
    for key, near_ratio in (("itl_p99", 0.66), ("ttft_p99", 0.4)):
        mine = [each for each in of if each.key == key]
        assert len(mine) >= 60
        assert sum(each.is_inside for each in mine) >= 0.95 * len(mine)
        near = sum(1 / 1.3 <= each.said_s / each.was_s <= 1.3 for each in mine)
        assert near >= near_ratio * len(mine)
        widths = [each.high_s / each.low_s for each in mine]
        assert median(widths) <= 10, "wide enough to say nothing"


def test_a_batch_beyond_all_seen_has_its_band_too() -> None:
    """Its steps are computed from those of batches of two thirds and less."""
    names = ("loads", "slow_open", "slower_prefill", "slow_closed")
    of = [
        each
        for name in names
        for each in told(windows(diagnoses(LAB / f"{name}.jsonl.gz")), most_ratio=BEYOND_RATIO)
    ]
    for key in ("itl_p99", "ttft_p99"):
        mine = [each for each in of if each.key == key]
        assert len(mine) >= 60
        assert sum(each.is_inside for each in mine) >= 0.9 * len(mine)
        assert median(each.high_s / each.low_s for each in mine) <= 10


def test_callers_of_equal_answers_wait_equally_long() -> None:
    """With 16 seats each comes free once in the time of an answer: 14 ahead, 4.1 s in the mean and
    5.0 s at P99 on a real server."""
    equal = CallerQueue(14, 3.4, 16, 0.0)
    assert equal.p99_s == pytest.approx(1.22 * equal.mean_s, rel=0.02)
    assert CallerQueue(14, 3.4, 16, 1.0).p99_s == pytest.approx(1.62 * equal.mean_s, rel=0.02)


def test_the_p99_of_steps_is_that_of_the_prompts_in_them() -> None:
    """Against 200,000 drawn steps."""
    draw = Random(7)
    for per_step, varies in ((0.004, 0.5), (0.05, 0.2), (0.3, 1.0), (1.5, 0.5)):
        drawn: list[float] = []
        for _ in range(200_000):
            prompts, chance = 0, draw.random()
            term = total = exp(-per_step)
            while chance > total:
                prompts += 1
                term *= per_step / prompts
                total += term
            drawn.append(sum(draw.gammavariate(1 / varies, varies) for _ in range(prompts)))
        p99 = sorted(drawn)[int(0.99 * len(drawn))]
        itl_s = 10 * (1 + per_step)
        steps = Steps(itl_s, 1.0, per_step / itl_s, varies)
        assert steps.itl_p99_s() == pytest.approx(itl_s - per_step + p99, rel=0.02, abs=0.02)


def test_many_prompts_a_step_take_no_longer_to_compute() -> None:
    """Their sum is about normal; just below, all their numbers are summed."""
    few, many = (Steps(1.0, 0.8 / per_s, per_s, 0.5).itl_p99_s() for per_s in (199.0, 201.0))
    assert many == pytest.approx(few, rel=0.01)
    assert Steps(1.0, 1e-18, 1e18, 0.5).itl_p99_s() == pytest.approx(1.0)


def test_a_target_is_compared_with_the_predicted_p99() -> None:
    pages = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in (*LOADS, *LOADS)]
    targets = Targets(itl_p99_s=0.15)
    growing = BUSY.but(itl_p99_s=0.4, waiting_slope_per_s=1.0)
    situation = replace(growing, targets=targets, curve=learned(*pages))
    fewer = recommended(situation)
    band = [fewer.predicted[f"itl_p99_{end}s"] for end in ("low_", "", "high_")]
    assert band == sorted(band)
    assert fewer.unmet == ("ITL P99 target of 150 ms",)
    assert "ttft_p99_s" not in fewer.predicted, "the queue grows: nobody knows its tail"


def test_no_p99_without_windows_of_such_a_batch() -> None:
    few = [page(load, itl_p99_s=0.2, ttft_p99_s=1.0) for load in LOADS[:2]]
    assert "itl_p99_s" not in recommended(replace(BUSY, curve=learned(*few))).predicted
