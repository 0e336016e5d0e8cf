"""The token buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.api.guard import RateBuckets, network


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_seconds_worth_at_once_then_as_fast_as_the_bucket_fills() -> None:
    clock = Clock()
    buckets = RateBuckets(4.0, clock)
    assert [buckets.take("10.0.0.1") for _ in range(4)] == [0.0] * 4
    assert buckets.take("10.0.0.1") == pytest.approx(0.25)
    clock.now_s += 0.25
    assert buckets.take("10.0.0.1") == 0.0
    assert buckets.take("10.0.0.1") > 0.0


def test_asking_in_vain_does_not_cost_anything() -> None:
    clock = Clock()
    buckets = RateBuckets(1.0, clock)
    buckets.take("a")
    for _ in range(100):
        assert buckets.take("a") > 0
    clock.now_s += 1
    assert buckets.take("a") == 0.0


def test_addresses_do_not_disturb_each_other() -> None:
    buckets = RateBuckets(1.0, Clock())
    assert buckets.take("10.0.0.1") == 0.0
    assert buckets.take("10.0.0.1") > 0.0
    assert buckets.take("10.0.0.2") == 0.0


def test_less_than_one_a_second_still_lets_one_through() -> None:
    clock = Clock()
    buckets = RateBuckets(0.5, clock)
    assert buckets.take("a") == 0.0
    assert buckets.take("a") == pytest.approx(2.0)


def test_the_table_does_not_grow_and_forgets_the_quietest() -> None:
    buckets = RateBuckets(1.0, Clock(), most=3)
    for name in ("a", "b", "c"):
        buckets.take(name)
    buckets.take("a")
    buckets.take("d")
    assert len(buckets) == 3
    assert buckets.take("a") > 0.0
    assert buckets.take("b") == 0.0


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("not:an:address", "not:an:address"),
        ("", ""),
    ],
)
def test_half_of_an_ipv6_address_counts(address: str, expected: str) -> None:
    assert network(address) == expected


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60), st.floats(0.5, 50))
def test_no_more_is_let_through_than_the_rate_and_one_bucket(
    steps_s: list[float], per_s: float
) -> None:
    clock = Clock()
    buckets = RateBuckets(per_s, clock)
    admitted = 0
    for step_s in steps_s:
        clock.now_s += step_s
        admitted += not buckets.take("a")
    assert admitted <= max(1.0, per_s) + per_s * sum(steps_s) + 1e-6
