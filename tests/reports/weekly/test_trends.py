"""Arrows: only where the change is more than what days differ by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kneewatch.reports.weekly.figures import DOWN, SAME, UNKNOWN, UP, Trend
from kneewatch.reports.weekly.measures import judged

WEEKDAYS = (100.0, 110.0, 120.0, 115.0, 105.0, 40.0, 35.0)
"""A figure that is quiet on weekends."""


def trend(now: Sequence[float | None], before: Sequence[float | None], good: str = "") -> Trend:
    """The trend of two weeks of days; the weeks' values are the means of their days."""
    means = [
        sum(measured) / len(measured) if (measured := [v for v in days if v is not None]) else None
        for days in (now, before)
    ]
    return judged(Trend("x", "x", "", means[0], means[1]), good, now, before)


def test_the_same_week_again_shows_no_arrow() -> None:
    shown_trend = trend(WEEKDAYS, WEEKDAYS)
    assert shown_trend.direction == SAME
    assert shown_trend.noise == pytest.approx(0.02 * sum(WEEKDAYS) / 7), "2% is the least"


def test_weekends_are_not_noise() -> None:
    shown_trend = trend([1.3 * value for value in WEEKDAYS], WEEKDAYS, good=UP)
    assert shown_trend.direction == UP
    assert shown_trend.good is True


def test_a_change_within_the_days_own_spread_shows_no_arrow() -> None:
    wild = (200.0, 20.0, 190.0, 60.0, 170.0, 10.0, 90.0)
    assert trend(wild, WEEKDAYS).direction == SAME


@pytest.mark.parametrize(("good", "said"), [(UP, False), (DOWN, True), ("", None)])
def test_which_direction_is_good(good: str, said: bool | None) -> None:
    shown_trend = trend([0.7 * value for value in WEEKDAYS], WEEKDAYS, good=good)
    assert (shown_trend.direction, shown_trend.good) == (DOWN, said)


def test_too_few_days_show_no_arrow() -> None:
    few: list[float | None] = [200.0, 210.0, None, None, None, None, None]
    shown_trend = trend(few, WEEKDAYS)
    assert shown_trend.direction == UNKNOWN
    assert shown_trend.noise is None


def test_a_week_with_an_outlier_shows_no_arrow() -> None:
    shown_trend = trend([*WEEKDAYS[:6], 900.0], WEEKDAYS)
    assert shown_trend.value is not None
    assert shown_trend.before is not None
    assert shown_trend.value > 2 * shown_trend.before
    assert shown_trend.direction == SAME


def test_figures_that_may_be_nothing_are_compared_by_difference() -> None:
    calm = trend([0.0, 2.0, 0.0, 1.0, 3.0, 0.0, 1.0], [1.0, 0.0, 2.0, 0.0, 1.0, 2.0, 0.0])
    assert calm.direction == SAME
    assert calm.noise is not None
    assert calm.noise > 1.0
    risen = trend([5.0, 6.0, 5.0, 7.0, 6.0, 5.0, 6.0], [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0], DOWN)
    assert (risen.direction, risen.good) == (UP, False)


def test_chance_alone_shows_an_arrow_once_in_a_hundred() -> None:
    rng = random.Random(4)

    def days() -> list[float]:
        return [rng.gauss(100.0, 20.0) for _ in range(7)]

    arrows = sum(trend(days(), days()).direction != SAME for _ in range(2000))
    assert arrows < 2000 * 0.02


def test_a_steady_change_is_seen() -> None:
    rng = random.Random(5)
    seen = sum(
        trend(
            [rng.gauss(130.0, 8.0) for _ in range(7)], [rng.gauss(100.0, 8.0) for _ in range(7)]
        ).direction
        == UP
        for _ in range(200)
    )
    assert seen > 180
