"""Drift of a histogram: a bounded rate of false alarms whatever is measured, and real ones seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.fleet.workload_drift import drift
from kneewatch.diagnose.learned.live_workload import departure
from kneewatch.diagnose.lengths import (
    ALIKE,
    SHIFT_MIN,
    TAIL_SHIFT_MIN,
    StatedPoint,
    more_than_chance,
)
from kneewatch.diagnose.values import Histogram

EDGES = (1.0, 10.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, inf)
Draw = Callable[[random.Random], float]

KINDS: dict[str, Draw] = {
    "spread over decades": lambda dice: dice.lognormvariate(6.0, 1.0),
    "two kinds of request": lambda dice: dice.choice((50.0, 3000.0)),
    "all alike": lambda _dice: 700.0,
    "even": lambda dice: dice.uniform(0.0, 2000.0),
}


def sample(draw: Draw, dice: random.Random, count: int, *, each: int) -> Histogram:
    """So many independent requests, each seen `each` times."""
    values = [draw(dice) for _ in range(count)]
    return {edge: float(each * sum(value <= edge for value in values)) for edge in EDGES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "now"), [(40, 40), (300, 60)])
def test_what_has_not_changed_is_called_a_change_no_oftener_than_stated(
    kind: str, before: int, now: int
) -> None:
    dice, rate, tries = random.Random(20), 0.1, 400
    each, alarms = int(ALIKE), 0
    for _ in range(tries):
        change = drift(
            sample(KINDS[kind], dice, before, each=each),
            sample(KINDS[kind], dice, now, each=each),
            false_alarm=rate,
        )
        assert change is not None
        alarms += abs(change.shift_ratio) > change.chance_ratio
    # Three standard deviations of a count whose rate is exactly the stated one.
    assert alarms <= rate * tries + 3 * sqrt(rate * (1 - rate) * tries)


def test_the_band_is_no_wider_than_its_reason() -> None:
    """A bound that nothing passes would keep any rate: this is the one that is derived."""
    whole = {1.0: 5000.0, inf: 10_000.0}
    change = drift(whole, whole, false_alarm=0.01)
    assert change is not None
    assert change.chance_ratio == pytest.approx(2 * sqrt(log(400) / (2 * 10_000 / ALIKE)))


@pytest.mark.parametrize("longer", [True, False])
def test_another_workload_is_seen_with_its_direction(longer: bool) -> None:
    dice = random.Random(7)
    usual = sample(KINDS["spread over decades"], dice, 1500, each=10)
    other = sample(lambda d: d.lognormvariate(7.2 if longer else 4.8, 1.0), dice, 1500, each=10)
    change = drift(usual, other)
    assert change is not None
    assert change.real
    assert (change.shift_ratio > 0) == longer


def test_a_small_shift_is_none_however_sure() -> None:
    before, now = {100.0: 5e8, inf: 1e9}, {100.0: 4.5e8, inf: 1e9}
    change = drift(before, now)
    assert change is not None
    assert change.chance_ratio < 0.05 < SHIFT_MIN
    assert not change.real


def test_few_requests_tell_nothing() -> None:
    change = drift({100.0: 20.0, inf: 20.0}, {100.0: 0.0, inf: 20.0})
    assert change is not None
    assert not change.real


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
def test_what_cannot_be_compared(before: Histogram, now: Histogram) -> None:
    assert drift(before, now) is None


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6))
def test_the_same_is_no_drift(steps: list[float]) -> None:
    total, buckets = 0.0, dict[float, float]()
    for at, step in enumerate(steps):
        total += step
        buckets[float(at)] = total
    buckets[inf] = total + 1
    change = drift(buckets, buckets)
    assert change is not None
    assert change.shift_ratio == 0


def percentiles(draw: Draw) -> tuple[StatedPoint, ...]:
    """P50, P95 and P99 of a kind, as of a hundred thousand."""
    dice = random.Random(3)
    drawn = sorted(draw(dice) for _ in range(100_000))
    quantiles = [(ratio, drawn[round(ratio * len(drawn)) - 1]) for ratio in (0.5, 0.95, 0.99)]
    return tuple(StatedPoint(ratio, tokens, tokens) for ratio, tokens in quantiles)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_as_stated_is_called_a_departure_no_oftener_than_stated(kind: str) -> None:
    dice, rate, alarms = random.Random(21), 0.1, 0
    tries = 1000 if kind == "spread over decades" else 200
    points = percentiles(KINDS[kind])
    # Bounds of buckets at the percentiles themselves: nothing is hidden between two of them.
    edges = sorted({*EDGES, *(point.most for point in points), *(p.least - 1e-9 for p in points)})
    for _ in range(tries):
        values = [KINDS[kind](dice) for _ in range(60)]
        buckets = {edge: ALIKE * sum(value <= edge for value in values) for edge in edges}
        departed = departure(points, buckets, false_alarm=rate)
        assert departed is not None
        alarms += abs(departed.shift_ratio) > departed.chance_ratio
    assert alarms <= rate * tries + 3 * sqrt(rate * (1 - rate) * tries)


def test_the_band_of_one_sample_is_no_wider_than_its_reason() -> None:
    departed = departure(
        [StatedPoint(0.5, 1.0, 1.0)], {1.0: 5000.0, inf: 10_000.0}, false_alarm=0.01
    )
    assert departed is not None
    assert departed.chance_ratio == pytest.approx(sqrt(log(200) / (2 * 10_000 / ALIKE)))


STATED = (
    StatedPoint(0.5, 500.0, 500.0),
    StatedPoint(0.95, 2000.0, 2000.0),
    StatedPoint(0.99, 5000.0, 5000.0),
)


@pytest.mark.parametrize(
    ("shares", "shift", "ratio"),
    [
        pytest.param({500.0: 0.5, 2000.0: 0.95, 5000.0: 0.99}, None, None, id="as stated"),
        pytest.param({500.0: 0.1, 2000.0: 0.9, 5000.0: 0.99}, 0.4, 0.5, id="a longer middle"),
        pytest.param({500.0: 0.45, 2000.0: 0.7, 5000.0: 0.99}, 0.25, 0.95, id="thirty above P95"),
        pytest.param({500.0: 0.45, 2000.0: 0.8, 5000.0: 0.8}, 0.19, 0.99, id="twenty above P99"),
        pytest.param({200.0: 0.9, 500.0: 0.95, 2000.0: 0.99}, -0.4, 0.5, id="a shorter middle"),
        pytest.param({500.0: 0.99, 2000.0: 1.0}, None, None, id="shorter, by how much nobody sees"),
        pytest.param({500.0: 0.4, 2000.0: 0.92, 5000.0: 0.97}, None, None, id="hardly longer"),
        pytest.param({500.0: 0.5, 2000.0: 0.83, 5000.0: 0.99}, 0.12, 0.95, id="thrice above P95"),
    ],
)
def test_departures_of_many_requests(
    shares: dict[float, float], shift: float | None, ratio: float | None
) -> None:
    count = 1e6
    buckets: dict[float, float] = {}
    for edge in EDGES:
        shares_below = [share for at, share in shares.items() if at <= edge]
        buckets[edge] = count * (1.0 if edge == inf else max(shares_below, default=0.0))
    departed = departure(STATED, buckets)
    assert departed is not None
    assert departed.real == (shift is not None)
    if shift is not None:
        assert departed.shift_ratio == pytest.approx(shift)
        assert departed.point.ratio == ratio
        assert departed.least_ratio == (SHIFT_MIN if ratio == 0.5 else TAIL_SHIFT_MIN)


def test_between_two_bounds_nothing_is_counted() -> None:
    """All are 700 long: 600 is stated, and so may 900 be, for all that 500 and 1000 tell."""
    buckets = {edge: 1e6 * (edge >= 700) for edge in EDGES}
    for tokens in (600.0, 900.0):
        departed = departure([StatedPoint(0.5, tokens, tokens)], buckets)
        assert departed is not None
        assert departed.shift_ratio == 0
    for tokens, longer in ((400.0, True), (1100.0, False)):
        departed = departure([StatedPoint(0.5, tokens, tokens)], buckets)
        assert departed is not None
        assert departed.real
        assert (departed.shift_ratio > 0) == longer


def test_requests_that_are_all_of_the_stated_length_are_as_stated() -> None:
    points = [StatedPoint(ratio, 500.0, 500.0) for ratio in (0.5, 0.95, 0.99)]
    departed = departure(points, {edge: 1e6 * (edge >= 500) for edge in EDGES})
    assert departed is not None
    assert departed.shift_ratio == 0


@pytest.mark.parametrize(
    "now",
    [{}, {1.0: 1.0}, {1.0: 0.0, inf: 0.0}, {1.0: 1.0, inf: float("nan")}],
    ids=["nothing", "no histogram", "empty", "no number"],
)
def test_what_cannot_be_held_against_what_is_stated(now: Histogram) -> None:
    assert departure(STATED, now) is None
    assert departure((), {1.0: 1.0, inf: 2.0}) is None


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=12),
    st.lists(st.floats(0.5, 4000.0), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_departures_are_within_what_can_be(
    steps: list[int], stated: list[float], longer: int
) -> None:
    """A shift is a share; longer requests more never make requests shorter."""
    edges = [float(4**at) for at in range(len(steps) - 1)] + [inf]
    total, buckets = 0.0, dict[float, float]()
    for edge, step in zip(edges, steps, strict=True):
        total += step
        buckets[edge] = total
    low, middle, high = sorted(stated)
    points = [
        StatedPoint(0.5, low, low),
        StatedPoint(0.95, middle, middle),
        StatedPoint(0.99, middle, high),
    ]
    departed = departure(points, buckets)
    assert (departed is None) == (total == 0)
    if departed is None:
        return
    ratio = departed.point.ratio
    assert ratio - 1 - 1e-12 <= departed.shift_ratio <= ratio + 1e-12
    assert 0 <= departed.seen_ratio <= 1
    more = departure(points, {**buckets, inf: buckets[inf] + longer})
    assert more is not None
    assert more.shift_ratio >= min(departed.shift_ratio, 0.0) - 1e-12


def test_a_rate_is_called_more_no_oftener_than_stated() -> None:
    dice, rate, tries, expected = random.Random(22), 0.1, 2000, 40.0
    alarms = 0
    for _ in range(tries):
        at, bunches = dice.expovariate(1.0), 0
        while at < expected:
            at, bunches = at + dice.expovariate(1.0), bunches + 1
        alarms += more_than_chance(ALIKE * bunches, ALIKE * expected, false_alarm=rate)
    assert 0 < alarms <= rate * tries, "a bound, and one that is passed at times"


@pytest.mark.parametrize(
    ("count", "more"), [(0.0, False), (1000.0, False), (1100.0, False), (1500.0, True)]
)
def test_arrivals_against_a_thousand(count: float, more: bool) -> None:
    assert more_than_chance(count, 1000.0) == more
    assert not more_than_chance(count, 0.0)
