"""What a quiet engine looks like: medians of its own, and how far values have left them."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.rules.baseline import SAMPLES_MAX, SAMPLES_MIN, Baseline
from kneewatch.rules.rule import ITL, PREFIX
from tests.examples import examples

WINDOW_S = 60.0
START_S = 1_795_000_000.0


def learned(*values: float, every_s: float = WINDOW_S / 2, key: str = "ttft_p99_s") -> Baseline:
    """A baseline that has seen these values."""
    baseline = Baseline(window_s=WINDOW_S)
    for number, value in enumerate(values):
        baseline.learn(START_S + number * every_s, {key: value})
    return baseline


def test_one_window_is_no_baseline() -> None:
    assert SAMPLES_MIN > 1
    assert learned(1.0).get("ttft_p99_s") is None
    assert learned(1.0, 3.0).get("ttft_p99_s") == 2.0
    assert learned(1.0, 3.0).get("itl_p99_s") is None


def test_a_single_outlier_does_not_move_it() -> None:
    assert learned(1.0, 1.0, 1.0, 500.0, 1.0).get("ttft_p99_s") == 1.0


def test_neighbouring_windows_count_once() -> None:
    crowded = learned(1.0, 5.0, 5.0, 5.0, 1.0, every_s=WINDOW_S / 8)
    assert crowded.get("ttft_p99_s") == 1.0, "the first and the one half a window later"


def test_it_follows_what_has_been_usual_for_long_enough() -> None:
    moved = learned(*[1.0] * SAMPLES_MAX, *[4.0] * SAMPLES_MAX)
    assert moved.get("ttft_p99_s") == 4.0


@examples(50)
@given(values=st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.5, 7.0, math.inf)), max_size=600))
def test_it_is_the_median_of_the_newest_samples(values: list[float]) -> None:
    newest = values[-SAMPLES_MAX:]
    expected = median(newest) if len(newest) >= SAMPLES_MIN else None
    assert learned(*values).get("ttft_p99_s") == expected


def test_a_family_is_learned_while_another_is_disturbed() -> None:
    baseline = Baseline(window_s=WINDOW_S)
    values = {"prefix_hit_ratio": 0.9, "itl_mean_s": 0.5}
    for number in range(4):
        baseline.learn(START_S + number * WINDOW_S / 2, values, [PREFIX])
    assert baseline.get("prefix_hit_ratio") == 0.9
    assert baseline.get("itl_mean_s") is None
    # A scrape that is too soon for one family is the first for the other.
    for number in range(2):
        t_s = START_S + 4 * WINDOW_S / 2 - 1 + number * WINDOW_S / 2
        baseline.learn(t_s, {"prefix_hit_ratio": 0.1, "itl_mean_s": 0.02}, [PREFIX, ITL])
    assert baseline.get("itl_mean_s") == 0.02


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_an_unknown_value_is_no_sample(unknown: float | None) -> None:
    baseline = learned(1.0, 3.0)
    baseline.learn(START_S + 1_000, {"ttft_p99_s": unknown})
    assert baseline.get("ttft_p99_s") == 2.0


def test_a_clock_set_back_does_not_stop_the_learning() -> None:
    baseline = learned(1.0, 1.0)
    for number in range(10):
        baseline.learn(START_S - 7_200 + number * WINDOW_S, {"ttft_p99_s": 9.0})
    assert baseline.get("ttft_p99_s") == 9.0
