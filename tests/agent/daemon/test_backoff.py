"""How long a target that does not answer is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.target_state import backoff_s


@pytest.mark.parametrize(
    ("interval_s", "expected_s"),
    [
        pytest.param(5.0, [5, 5, 10, 20, 40, 60, 60], id="5 s: up to a minute"),
        pytest.param(1.0, [1, 1, 2, 4, 8, 12, 12], id="1 s: up to 12 intervals"),
        pytest.param(15.0, [15, 15, 30, 60, 60], id="15 s"),
        pytest.param(120.0, [120, 120, 120], id="longer than a minute: never less"),
    ],
)
def test_twice_as_long_each_time(interval_s: float, expected_s: list[float]) -> None:
    delays_s = [backoff_s(interval_s, failing=n, jitter=0.0) for n in range(1, len(expected_s) + 1)]
    assert delays_s == expected_s


@given(st.floats(0.1, 86_400), st.integers(1, 10**9), st.floats(0, 1))
def test_bounds(interval_s: float, failing: int, luck: float) -> None:
    waited_s = backoff_s(interval_s, failing=failing, jitter=luck)
    assert interval_s <= waited_s <= max(interval_s, min(12 * interval_s, 60.0))
    assert waited_s >= 0.8 * backoff_s(interval_s, failing=failing, jitter=0.0)
    assert waited_s <= backoff_s(interval_s, failing=failing + 1, jitter=luck)
