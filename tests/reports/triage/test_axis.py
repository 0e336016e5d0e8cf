"""The time axis: places in percent, round moments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.reports.triage.charts import TICKS_MOST, Axis, axis_of
from kneewatch.reports.triage.view_model import EngineView
from kneewatch.rules.rule import OK
from tests.reports.diagnoses import HEALTHY, NOW_S
from tests.reports.triage import views

MIDNIGHT_S = 1795219200.0
"""2026-11-21 00:00 UTC."""


def test_places_are_percent_and_stay_on_the_axis() -> None:
    axis = Axis(1000.0, 2000.0)
    assert [axis.x(t_s) for t_s in (0.0, 1000.0, 1250.0, 2000.0, 9e9)] == [0, 0, 25, 100, 100]
    assert axis.spread(1500.0, None) == (50.0, 50.0)
    assert axis.spread(0.0, 1100.0) == (0.0, 10.0)


@pytest.mark.parametrize(
    ("reach_s", "labels"),
    [
        pytest.param(240.0, ["23:58", "23:59", "Nov 21", "00:01"], id="minutes"),
        pytest.param(3 * 3600.0, ["23:00", "Nov 21"], id="hours"),
        pytest.param(7 * 86400.0, ["Nov 15", "Nov 17", "Nov 19"], id="days"),
    ],
)
def test_labels_are_round_and_the_day_stands_where_it_begins(
    reach_s: float, labels: list[str]
) -> None:
    until_s = MIDNIGHT_S + min(90.0, reach_s / 2) + (reach_s > 7200) * 3600
    assert [words for _, words in Axis(until_s - reach_s, until_s).ticks()] == labels


def test_a_mark_at_the_end_is_none() -> None:
    assert Axis(0.0, 100.0).mark(50.0) == 50.0
    assert Axis(0.0, 100.0).mark(99.5) is None


def seen_for(seconds: float, *, asked_s: float = 10_800.0) -> Axis:
    engine = EngineView(HEALTHY, [views.interval("health", "ok", OK, NOW_S - seconds)])
    view = views.view(views.target("t", engine), back_s=asked_s)
    return axis_of(replace(view, now_s=NOW_S, since_s=NOW_S - asked_s, until_s=NOW_S))


@pytest.mark.parametrize(
    ("seconds", "length_s"),
    [(20.0, 120.0), (1000.0, 1050.0), (5399.0, 5668.95), (5401.0, 10_800.0), (1e6, 10_800.0)],
)
def test_a_young_daemon_does_not_draw_hours_of_nothing(seconds: float, length_s: float) -> None:
    assert seen_for(seconds).length_s == pytest.approx(length_s)


def test_nothing_known_leaves_the_axis_as_it_was_asked_for() -> None:
    assert axis_of(views.view()).length_s == 240.0
    assert seen_for(20.0, asked_s=60.0).length_s == 60.0


@given(st.floats(0, 4e9), st.floats(0, 1e8))
def test_ticks_are_few_and_on_the_axis(since_s: float, length_s: float) -> None:
    axis = Axis(since_s, since_s + length_s)
    ticks = axis.ticks()
    assert len(ticks) <= TICKS_MOST + 1 or length_s > TICKS_MOST * 604800
    assert all(0 <= x <= 100 for x, _ in ticks)
