"""Answers that ramble: a two-sample test of their lengths, with a bounded rate of false alarms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.workload import RUNAWAY_GENERATION
from kneewatch.diagnose.learned.length_drift import ANSWERS_MIN, OutputLengths
from kneewatch.diagnose.lengths import Drift
from kneewatch.diagnose.values import Histogram, Values
from tests.diagnose.situations import CONCLUSIVE

WINDOW_S = 60.0
EDGES = (50.0, 100.0, 200.0, 500.0, 1000.0, inf)


def counted(lengths: Sequence[float]) -> Histogram:
    """Answers of these lengths, by upper edge."""
    return {edge: float(sum(length <= edge for length in lengths)) for edge in EDGES}


def learned(windows: Sequence[Sequence[float]]) -> OutputLengths:
    """Quiet windows with answers of these lengths."""
    lengths = OutputLengths(window_s=WINDOW_S)
    for turn, answers in enumerate(windows):
        lengths.learn(WINDOW_S * turn, counted(answers))
    return lengths


def drawn(dice: random.Random, count: int, *, capped_ratio: float = 0.0) -> list[float]:
    """So many answers, of which a share goes on to the cap."""
    return [
        1024.0 if dice.random() < capped_ratio else dice.gammavariate(2, 125) for _ in range(count)
    ]


def length_drift(lengths: OutputLengths, answers: Sequence[float]) -> Drift | None:
    return lengths.drift(Values({}, answers=counted(answers)))


def test_few_answers_that_are_plainly_longer_are_told_by_the_window_alone() -> None:
    """The longest window holds those of before as well, and says so only minutes later."""
    dice = random.Random(3)
    lengths = learned([drawn(dice, 50) for _ in range(5)])
    far = length_drift(lengths, [1024.0] * 45)
    assert far is not None
    assert far.real
    near = length_drift(lengths, drawn(dice, 45))
    assert near is not None
    assert not near.real


def test_the_same_answers_are_called_longer_no_oftener_than_stated() -> None:
    dice, tries, alarms = random.Random(7), 1000, 0
    lengths = learned([drawn(dice, 200) for _ in range(5)])
    for _ in range(tries):
        drift = length_drift(lengths, drawn(dice, 200))
        assert drift is not None
        alarms += abs(drift.shift_ratio) > drift.chance_ratio
    assert alarms <= 4, "one in a thousand is stated; five come by a chance of 0.4 %"


def test_half_of_them_at_the_cap_are_longer() -> None:
    dice = random.Random(7)
    lengths = learned([drawn(dice, 200) for _ in range(3)])
    drift = length_drift(lengths, drawn(dice, 200, capped_ratio=0.5))
    assert drift is not None
    assert drift.real
    assert drift.shift_ratio > 0.3


def test_too_few_quiet_answers_say_nothing() -> None:
    dice = random.Random(7)
    assert length_drift(learned([]), drawn(dice, 300)) is None
    few = learned([drawn(dice, int(ANSWERS_MIN) - 1)])
    assert length_drift(few, drawn(dice, 300)) is None


def test_neighbouring_windows_count_once() -> None:
    lengths = OutputLengths(window_s=WINDOW_S)
    for turn in range(5):
        lengths.learn(5.0 * turn, counted([100.0] * 30))
    assert length_drift(lengths, [100.0] * 300) is None, "thirty answers, five times seen"


@pytest.mark.parametrize(
    ("lengths", "concluded"),
    [
        pytest.param(None, True, id="no histogram tells"),
        pytest.param(Drift(0.4, 500.0, 0.2), True, id="longer, surely"),
        pytest.param(Drift(0.2, 500.0, 0.3), False, id="chance may make it"),
        pytest.param(Drift(0.1, 500.0, 0.05), False, id="hardly longer"),
        pytest.param(Drift(-0.4, 500.0, 0.2), False, id="shorter"),
    ],
)
def test_the_cause_hangs_on_the_test(lengths: Drift | None, concluded: bool) -> None:
    facts = replace(CONCLUSIVE["runaway_generation"].facts(), lengths=lengths)
    assert (RUNAWAY_GENERATION.examine(facts) is not None) == concluded
