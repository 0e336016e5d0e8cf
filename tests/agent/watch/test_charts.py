"""Charts: time goes to the right, the worst of a column shows, unknown is empty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.watch.rendering import (
    ASCII,
    UNICODE,
    ChartSpan,
    Line,
    cells_of,
    chart,
    chart_span,
    top_of,
)

NAN = math.nan
TIMES = st.lists(st.floats(1e9, 1e9 + 1e5), min_size=1, max_size=60, unique=True).map(sorted)
VALUES = st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=40)


def text_of(line: Line) -> str:
    """A line without its tones."""
    return "".join(text for text, _ in line)


def tones_of(line: Line) -> str:
    """The first letter of each column's tone."""
    return "".join((tone or " ")[0] * len(text) for text, tone in line)


def test_columns_are_times() -> None:
    over = ChartSpan(columns=4, cell_s=10, end_s=1035)
    times = [1000, 1009, 1010, 1025, 1026, 1035]
    assert cells_of(times, [1, 3, 2, NAN, NAN, 5], over) == [3, 2, None, 5]


def test_what_is_older_than_the_chart_is_left_out() -> None:
    assert cells_of([10, 1000], [9, 1], ChartSpan(columns=3, cell_s=10, end_s=1000)) == [
        None,
        None,
        1,
    ]


@given(TIMES, st.integers(8, 80))
def test_the_newest_is_in_the_last_column(times: list[float], columns: int) -> None:
    over = chart_span(times, columns)
    cells = cells_of(times, [1.0] * len(times), over)
    assert len(cells) == columns
    assert cells[-1] == 1.0


@given(TIMES, st.integers(8, 80))
def test_a_history_of_an_hour_is_seen_whole(times: list[float], columns: int) -> None:
    over = chart_span(times, columns)
    assert over.length_s >= min(times[-1] - times[0], 3600 * columns) - over.cell_s


def test_no_column_is_empty_while_scrapes_are_regular() -> None:
    for apart_s in (1.0, 2.03, 5.1, 14.7):
        times = [1e9 + apart_s * number for number in range(40)]
        over = chart_span(times, 12)
        cells = cells_of(times, [1.0] * 40, over)
        assert None not in cells[cells.index(1.0) :]


def test_a_value_stays_in_its_column_as_time_goes_on() -> None:
    times = [1e9 + 2 * number for number in range(30)]
    values = [9.0 if number == 20 else 1.0 for number in range(30)]
    before = cells_of(times[:29], values[:29], ChartSpan(20, 3, times[28]))
    after = cells_of(times, values, ChartSpan(20, 3, times[29]))
    moved = math.floor(times[29] / 3) - math.floor(times[28] / 3)
    assert after.index(9.0) == before.index(9.0) - moved


def test_one_scrape_is_a_chart() -> None:
    over = chart_span([1e9], 10)
    assert cells_of([1e9], [2.0], over)[-1] == 2.0
    assert chart_span([], 10).columns == 10


@pytest.mark.parametrize(
    ("rows", "drawn"),
    [
        (1, [" _-#"]),
        (2, ["---#", " _##"]),
    ],
)
def test_a_chart(rows: int, drawn: list[str]) -> None:
    values = [None, 0.0, 0.5, 1.0]
    lines = chart(values, rows=rows, top=1.0, bound=0.9, glyphs=ASCII)
    assert [text_of(line) for line in lines] == drawn


def test_columns_beyond_the_bound_are_marked() -> None:
    (line,) = chart([0.2, 0.95, 0.3], rows=1, top=1.0, bound=0.9, glyphs=UNICODE)
    assert tones_of(line) == "bob"
    (line,) = chart([0.2, 0.95, 0.3], rows=1, top=1.0, bound=None, glyphs=UNICODE)
    assert tones_of(line) == "bbb"


@given(VALUES, st.integers(1, 6), st.none() | st.floats(0.001, 1e6))
def test_known_is_drawn_and_unknown_is_empty(
    values: list[float | None], rows: int, bound: float | None
) -> None:
    top = top_of(values, bound, least=1.0)
    lines = chart(values, rows=rows, top=top, bound=bound, glyphs=ASCII)
    assert len(lines) == rows
    assert {len(text_of(line)) for line in lines} == {len(values)}
    for column, value in enumerate(values):
        drawn = [text_of(line)[column] for line in lines]
        bars = [c for c, line in zip(drawn, lines, strict=True) if tones_of(line)[column] in "bo"]
        assert bool(bars) == (value is not None)


@given(st.floats(0, 100), st.floats(0, 100))
def test_more_is_not_lower(first: float, other: float) -> None:
    def height(value: float) -> list[int]:
        lines = chart([value], rows=4, top=100.0, bound=None, glyphs=ASCII)
        return [(" " + ASCII.bars).index(text_of(line)) for line in lines]

    low, high = sorted((first, other))
    assert sum(height(low)) <= sum(height(high))
