"""Derived signals: one record each."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.learned.derived_signals import (
    DERIVED,
    against_baseline,
)
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.quantities import BaselineValue

TARGETS = Targets(ttft_p99_s=2.0)
EXPRESSIONS = {signal.key: signal.of for signal in DERIVED if signal.of is not None}
DRIFTS = {
    key: node.key
    for key, of in EXPRESSIONS.items()
    for node in nodes(of)
    if isinstance(node, BaselineValue) and key.endswith("_drift_ratio")
}


def learned(key: str, *values: float) -> Baseline:
    """A baseline that has seen these values."""
    baseline = Baseline(window_s=60.0)
    for turn, value in enumerate(values):
        baseline.learn(30.0 * turn, {key: value})
    return baseline


@pytest.mark.parametrize(("drift", "of"), DRIFTS.items())
def test_a_drift_is_the_value_over_its_own_median(drift: str, of: str) -> None:
    quiet = learned(of, 2.0, 2.0)
    assert against_baseline(Moment({of: 6.0}, TARGETS, baseline=quiet))[drift] == 3.0
    assert against_baseline(Moment({of: None}, TARGETS, baseline=quiet))[drift] is None
    assert against_baseline(Moment({}, TARGETS, baseline=quiet))[drift] is None
    for lacking in (learned(of, 2.0), learned(of, 0.0, 0.0)):
        assert against_baseline(Moment({of: 6.0}, TARGETS, baseline=lacking))[drift] is None


def test_a_drift_is_held_against_the_usual_hour_where_that_is_worse() -> None:
    baseline = learned("ttft_p99_s", 0.5, 0.5)
    baseline.season = {"ttft_p99_s": 1.6}
    values = against_baseline(Moment({"ttft_p99_s": 8.0}, TARGETS, baseline=baseline))
    assert values["ttft_p99_drift_ratio"] == 5.0
