"""The hour of the week: what is usual on a Monday morning is no anomaly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.daemon.baselines import SCRAPES_MIN, WEEKS, earlier_hours, hourly, usual
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.rule import HOUR_S, WEEK_S

MONDAY_S = 1_795_420_800.0 + 9.5 * HOUR_S


def test_the_same_hour_of_the_weeks_before() -> None:
    hours = list(earlier_hours(MONDAY_S))
    assert len(hours) == WEEKS
    assert hours[0] == (MONDAY_S - WEEK_S - HOUR_S / 2, MONDAY_S - WEEK_S + HOUR_S / 2)
    assert {(from_s - MONDAY_S) % WEEK_S for from_s, _ in hours} == {WEEK_S - HOUR_S / 2}


def test_an_hour_is_its_median_where_enough_is_known() -> None:
    values = {
        "ttft_p99_s": [1.0] * SCRAPES_MIN + [50.0, math.nan],
        "itl_p99_s": [0.02] * (SCRAPES_MIN - 1) + [math.nan] * 9,
    }
    assert hourly(values) == {"ttft_p99_s": 1.0}


@pytest.mark.parametrize(
    ("weeks", "expected"),
    [
        pytest.param([4.0], None, id="one week is no habit"),
        pytest.param([4.0, 4.4], 4.2, id="two alike"),
        pytest.param([4.0, 40.0], None, id="two that have nothing in common"),
        pytest.param([4.0, 40.0, 4.2], 4.2, id="an incident among three"),
        pytest.param([1.0, 4.0, 9.0, 30.0], None, id="never the same"),
        pytest.param([0.0, 0.0, 0.0], 0.0, id="nothing, always"),
    ],
)
def test_what_is_usual(weeks: list[float], expected: float | None) -> None:
    assert usual([{"ttft_p99_s": value} for value in weeks]).get("ttft_p99_s") == expected


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=WEEKS))
def test_it_lies_among_its_weeks(weeks: list[float]) -> None:
    for value in usual([{"ttft_p99_s": value} for value in weeks]).values():
        assert min(weeks) <= value <= max(weeks)


def test_monday_morning_is_held_against_mondays() -> None:
    baseline = Baseline(window_s=60.0)
    for turn in range(8):
        baseline.learn(MONDAY_S - 3600 + 30 * turn, {"ttft_p99_s": 0.5, "prefix_hit_ratio": 0.9})
    assert baseline.get("ttft_p99_s") == 0.5
    baseline.season = {"ttft_p99_s": 1.6, "prefix_hit_ratio": 0.6}
    assert baseline.get("ttft_p99_s") == baseline.usual("ttft_p99_s") == 1.6
    assert baseline.get("prefix_hit_ratio") == 0.6, "fewer hits are usual then"


def test_a_season_that_is_better_than_now_accuses_nobody() -> None:
    baseline = Baseline(window_s=60.0)
    for turn in range(4):
        baseline.learn(MONDAY_S + 30 * turn, {"ttft_p99_s": 2.0, "prefix_hit_ratio": 0.5})
    baseline.season = {"ttft_p99_s": 0.5, "prefix_hit_ratio": 0.9}
    assert baseline.get("ttft_p99_s") == 2.0
    assert baseline.get("prefix_hit_ratio") == 0.5


def test_a_season_is_a_baseline_before_there_is_another() -> None:
    baseline = Baseline(window_s=60.0)
    baseline.season = {"ttft_p99_s": 1.0}
    assert baseline.get("ttft_p99_s") == 1.0
    assert baseline.get("itl_p99_s") is None
