"""Series as lines: spikes are kept, what is not known breaks them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf, isfinite, isnan, nan

from hypothesis import given
from hypothesis import strategies as st

from kneewatch.reports.triage.charts import COLUMNS, ChartPoint, lines

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(nan)), min_size=1, max_size=1500)


def drawn(times: Sequence[float], values: Sequence[float]) -> list[list[ChartPoint]]:
    return lines(array("d", times), array("d", values), since_s=0.0, until_s=1e9)


def moments(drawn_lines: list[list[ChartPoint]]) -> list[list[float]]:
    return [[point.t_s for point in line] for line in drawn_lines]


def test_what_is_not_known_breaks_the_line() -> None:
    drawn_lines = drawn([0, 1, 2, 3, 4, 5], [1, 1, nan, 1, inf, 1])
    assert moments(drawn_lines) == [[0, 1], [3], [5]]


def test_a_gap_in_time_breaks_the_line_and_a_change_of_pace_does_not() -> None:
    times = [0, 5, 10, 15, 100, 105, 110]
    assert moments(drawn(times, [1.0] * 7)) == [[0, 5, 10, 15], [100, 105, 110]]
    times = [0, 60, 120, 180, 185, 190, 195]
    assert moments(drawn(times, [1.0] * 7)) == [times]


def test_only_the_time_asked_for() -> None:
    series = [1.0, 2.0, 3.0, 4.0]
    assert moments(lines(series, series, since_s=2.0, until_s=3.0)) == [[2.0, 3.0]]
    assert lines(series, series, since_s=5.0, until_s=9.0) == []
    assert lines([], [], since_s=0.0, until_s=1.0) == []


def test_a_single_spike_of_a_week_is_kept() -> None:
    values = [1.0] * 10_000
    values[7777] = 50.0
    (line,) = drawn([60.0 * n for n in range(10_000)], values)
    assert len(line) == COLUMNS
    assert max(point.most for point in line) == 50.0


def test_a_long_outage_breaks_a_thinned_line() -> None:
    values = [nan if 4000 <= n < 5000 else 1.0 for n in range(10_000)]
    assert len(drawn([60.0 * n for n in range(10_000)], values)) == 2
    times = [60.0 * n + (n >= 5000) * 90_000 for n in range(10_000)]
    assert len(drawn(times, [1.0] * 10_000)) == 2


@given(VALUES, st.floats(0.5, 120))
def test_extremes_are_kept_and_nothing_is_made_up(values: list[float], step_s: float) -> None:
    drawn_lines = drawn([step_s * n for n in range(len(values))], values)
    numbers = [value for value in values if not isnan(value)]
    points = [point for line in drawn_lines for point in line]
    assert all(isfinite(point.least) and point.least <= point.most for point in points)
    assert all(line for line in drawn_lines)
    assert [t for line in moments(drawn_lines) for t in line] == sorted(
        point.t_s for point in points
    )
    if numbers:
        assert min(point.least for point in points) == min(numbers)
        assert max(point.most for point in points) == max(numbers)
    else:
        assert points == []
