"""Times in requests: what they may look like, and what is said of those that are none."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.api.responses import AHEAD_S, Problem, moment

NOW_S = 1795219600.0  # 2026-11-21 00:06:40 UTC


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("1795219000", 1795219000.0),
        ("1795219000.25", 1795219000.25),
        ("2026-11-21T00:03:00Z", NOW_S - 220),
        ("2026-11-21T00:03:00", NOW_S - 220),
        ("2026-11-21 00:03", NOW_S - 220),
        ("2026-11-21T01:03:00+01:00", NOW_S - 220),
        pytest.param("2026-11-21T01:03:00 01:00", NOW_S - 220, id="a + that became a space"),
        ("2026-11-20", NOW_S - 400 - 86400),
        ("00:03", NOW_S - 220),
        ("00:03:10", NOW_S - 210),
        pytest.param("03:07", NOW_S - 86400 + 3 * 3600 + 20, id="later than now: yesterday's"),
        ("-2h", NOW_S - 7200),
        ("2h", NOW_S - 7200),
        ("-90s", NOW_S - 90),
        ("-1.5d", NOW_S - 129600),
        ("-1w", NOW_S - 604800),
        pytest.param("-999999999w", 0.0, id="before 1970 is 1970"),
        (str(int(NOW_S + AHEAD_S)), NOW_S + AHEAD_S),
    ],
)
def test_a_time_is_understood(text: str, expected_s: float) -> None:
    assert moment("at", text, now_s=NOW_S) == expected_s


def test_so_long_ago_counts_from_the_moment_asked_for() -> None:
    assert moment("since", "-2h", now_s=NOW_S, before_s=NOW_S - 3600) == NOW_S - 3600 - 7200
    assert moment("since", "23:00", now_s=NOW_S, before_s=NOW_S - 86400) == NOW_S - 86400 - 4000


@pytest.mark.parametrize(
    "text",
    ["", "x", "25:00", "2026-13-01", "2026-02-30T00:00:00Z", "nan", "inf", "-inf", "1e9", "-5",
     "1795219000;", "٣", "9" * 41, "\x00", "2026-11-21T00:03:00+99:00", "0001-01-01T00:00:00",
     "9999999999999", "../../etc/passwd"],
)  # fmt: skip
def test_what_is_no_time_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(Problem) as refused:
        moment("at", text, now_s=NOW_S)
    assert refused.value.status == 422
    assert "at is not a time: write unix seconds" in refused.value.detail


def test_a_time_ahead_is_refused_and_now_is_told() -> None:
    with pytest.raises(Problem, match="in the future: the time here is 2026-11-21T00:06:40Z;"):
        moment("at", "2026-11-21T01:00:00Z", now_s=NOW_S)


def test_an_interval_that_begins_after_its_end_is_refused() -> None:
    with pytest.raises(Problem, match="before the requested moment"):
        moment("since", str(NOW_S - 10), now_s=NOW_S, before_s=NOW_S - 20)


@given(st.text(max_size=60))
def test_any_text_is_a_time_or_a_problem(text: str) -> None:
    try:
        found_s = moment("at", text, now_s=NOW_S)
    except Problem as problem:
        fits = problem.status == 422
    else:
        fits = 0 <= found_s <= NOW_S + AHEAD_S
    assert fits


@given(st.datetimes(datetime(1970, 1, 2), datetime(2026, 11, 20)))
def test_every_moment_comes_back_from_iso_and_from_seconds(when: datetime) -> None:
    stamped = when.replace(tzinfo=UTC)
    assert moment("at", stamped.isoformat(), now_s=NOW_S) == stamped.timestamp()
    seconds = int(stamped.timestamp())
    assert moment("at", str(seconds), now_s=NOW_S) == seconds
