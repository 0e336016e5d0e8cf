"""Hours and days of a period, also where clocks are set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.reports.weekly.observed import earlier, grid
from kneewatch.rules.rule import DAY_S, HOUR_S

BERLIN = ZoneInfo("Europe/Berlin")


def local(text: str, zone: ZoneInfo = BERLIN) -> float:
    """A local time as unix seconds."""
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("monday", "hours"),
    [
        pytest.param("2026-10-26T00:00", 169, id="clocks go back on Sunday: an hour twice"),
        pytest.param("2026-03-30T00:00", 167, id="clocks go forward on Sunday: an hour less"),
        pytest.param("2026-11-16T00:00", 168, id="a usual week"),
    ],
)
def test_a_week_of_the_calendar(monday: str, hours: int) -> None:
    to_s = local(monday)
    from_s = earlier(to_s, 7 * DAY_S, BERLIN)
    calendar_grid = grid(from_s, to_s, "Europe/Berlin")
    assert datetime.fromtimestamp(from_s, BERLIN).strftime("%a %H:%M") == "Mon 00:00"
    assert len(calendar_grid.slots) == hours
    assert to_s - from_s == hours * HOUR_S
    assert calendar_grid.days == 7
    assert [slot.weekday for slot in calendar_grid.slots if slot.hour == 12] == list(range(7))
    sunday = [slot for slot in calendar_grid.slots if slot.day == 6]
    assert len(sunday) == hours - 6 * 24
    assert all(slot.weekday == 6 for slot in sunday)


def test_the_hour_that_comes_twice_is_two_slots() -> None:
    to_s = local("2026-10-26T00:00")
    calendar_grid = grid(earlier(to_s, 7 * DAY_S, BERLIN), to_s, "Europe/Berlin")
    twice = [slot for slot in calendar_grid.slots if slot.weekday == 6 and slot.hour == 2]
    assert len(twice) == 2
    assert twice[0].end_s == twice[1].start_s


def test_half_hour_zones_have_their_own_full_hours() -> None:
    to_s = datetime(2026, 11, 16, 12, 10, tzinfo=UTC).timestamp()
    calendar_grid = grid(to_s - DAY_S, to_s, "Asia/Kolkata")
    zone = ZoneInfo("Asia/Kolkata")
    starts = [datetime.fromtimestamp(slot.start_s, zone) for slot in calendar_grid.slots[1:]]
    assert all(start.minute == 0 for start in starts)
    assert calendar_grid.slots[0].end_s - calendar_grid.slots[0].start_s == 20 * 60


def test_parts_of_days_are_plain_seconds() -> None:
    to_s = local("2026-10-25T12:00")
    assert to_s - earlier(to_s, 36 * HOUR_S, BERLIN) == 36 * HOUR_S
    assert to_s - earlier(to_s, DAY_S, BERLIN) == 25 * HOUR_S


def test_an_empty_period_is_refused() -> None:
    with pytest.raises(ValueError, match="is empty"):
        grid(10.0, 10.0, "UTC")


@given(
    from_s=st.floats(min_value=1.7e9, max_value=1.9e9),
    length_s=st.floats(min_value=1.0, max_value=40 * DAY_S),
    zone=st.sampled_from(
        ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Chatham"]
    ),
)
def test_slots_tile_the_period(from_s: float, length_s: float, zone: str) -> None:
    calendar_grid = grid(from_s, from_s + length_s, zone)
    assert calendar_grid.slots[0].start_s == from_s
    assert calendar_grid.edges_s[-1] == from_s + length_s
    for slot, following in zip(calendar_grid.slots, calendar_grid.slots[1:], strict=False):
        assert slot.end_s == following.start_s
        assert 0 < slot.end_s - slot.start_s <= HOUR_S + 1e-3
        assert following.day in (slot.day, slot.day + 1)
    assert calendar_grid.slots[-1].day <= calendar_grid.days - 1
    for slot in calendar_grid.slots:
        middle = datetime.fromtimestamp((slot.start_s + slot.end_s) / 2, ZoneInfo(zone))
        assert (slot.weekday, slot.hour) == (middle.weekday(), middle.hour)


@given(
    to_s=st.floats(min_value=1.7e9, max_value=1.9e9), days=st.integers(min_value=1, max_value=30)
)
def test_days_earlier_keep_the_time_of_day(to_s: float, days: int) -> None:
    before = datetime.fromtimestamp(earlier(to_s, days * DAY_S, BERLIN), BERLIN)
    now = datetime.fromtimestamp(to_s, BERLIN)
    assert now.date() - before.date() == timedelta(days=days)
    shift = abs((now.hour - before.hour) * 60 + now.minute - before.minute)
    assert shift in (0, 60), "an hour that the clock leaves out moves"
