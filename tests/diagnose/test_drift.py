"""Drift of a histogram: a bounded rate of false alarms whatever is measured, and real ones seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.drift import ALIKE, SHIFT_MIN, Buckets, drift

EDGES = (1.0, 10.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, inf)
Draw = Callable[[random.Random], float]

KINDS: dict[str, Draw] = {
    "spread over decades": lambda dice: dice.lognormvariate(6.0, 1.0),
    "two kinds of request": lambda dice: dice.choice((50.0, 3000.0)),
    "all alike": lambda _dice: 700.0,
    "even": lambda dice: dice.uniform(0.0, 2000.0),
}


def sample(draw: Draw, dice: random.Random, count: int, *, each: int) -> Buckets:
    """So many independent requests, each seen `each` times."""
    values = [draw(dice) for _ in range(count)]
    return {edge: float(each * sum(one <= edge for one in values)) for edge in EDGES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "now"), [(40, 40), (300, 60)])
def test_what_has_not_changed_is_called_a_change_no_oftener_than_stated(
    kind: str, before: int, now: int
) -> None:
    dice, rate, tries = random.Random(20), 0.1, 400
    each, alarms = int(ALIKE), 0
    for _ in range(tries):
        found = drift(
            sample(KINDS[kind], dice, before, each=each),
            sample(KINDS[kind], dice, now, each=each),
            false_alarm=rate,
        )
        assert found is not None
        alarms += abs(found.shift_ratio) > found.chance_ratio
    # Three standard deviations of a count whose rate is exactly the stated one.
    assert alarms <= rate * tries + 3 * sqrt(rate * (1 - rate) * tries)


def test_the_band_is_no_wider_than_its_reason() -> None:
    """A bound that nothing passes would keep any rate: this is the one that is derived."""
    whole = {1.0: 5000.0, inf: 10_000.0}
    found = drift(whole, whole, false_alarm=0.01)
    assert found is not None
    assert found.chance_ratio == pytest.approx(2 * sqrt(log(400) / (2 * 10_000 / ALIKE)))


@pytest.mark.parametrize("longer", [True, False])
def test_another_workload_is_seen_with_its_direction(longer: bool) -> None:
    dice = random.Random(7)
    usual = sample(KINDS["spread over decades"], dice, 1500, each=10)
    other = sample(lambda d: d.lognormvariate(7.2 if longer else 4.8, 1.0), dice, 1500, each=10)
    found = drift(usual, other)
    assert found is not None
    assert found.real
    assert (found.shift_ratio > 0) == longer


def test_a_small_shift_is_none_however_sure() -> None:
    before, now = {100.0: 5e8, inf: 1e9}, {100.0: 4.5e8, inf: 1e9}
    found = drift(before, now)
    assert found is not None
    assert found.chance_ratio < 0.05 < SHIFT_MIN
    assert not found.real


def test_few_requests_tell_nothing() -> None:
    found = drift({100.0: 20.0, inf: 20.0}, {100.0: 0.0, inf: 20.0})
    assert found is not None
    assert not found.real


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param({1.0: 1.0, inf: 2.0}, {2.0: 1.0, inf: 2.0}, id="other edges"),
        pytest.param({1.0: 0.0, inf: 0.0}, {1.0: 1.0, inf: 2.0}, id="empty"),
        pytest.param({1.0: 1.0}, {1.0: 1.0}, id="no histogram"),
        pytest.param({}, {}, id="nothing"),
        pytest.param({1.0: 1.0, inf: float("nan")}, {1.0: 1.0, inf: 2.0}, id="no number"),
    ],
)
def test_what_cannot_be_compared(before: Buckets, now: Buckets) -> None:
    assert drift(before, now) is None


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6))
def test_the_same_is_no_drift(steps: list[float]) -> None:
    total, buckets = 0.0, dict[float, float]()
    for at, step in enumerate(steps):
        total += step
        buckets[float(at)] = total
    buckets[inf] = total + 1
    found = drift(buckets, buckets)
    assert found is not None
    assert found.shift_ratio == 0
