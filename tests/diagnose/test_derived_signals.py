"""Derived signals: one record each."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.account_signals import (
    ACCOUNT_SIGNALS,
    OPEN_CALLS_SIGNALS,
    PREFILL_SILENCE,
    STALL,
)
from kneewatch.diagnose.learned.derived_signals import (
    DERIVED,
    against_baseline,
    momentary,
)
from kneewatch.diagnose.slow_quantities import SLOW
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.quantities import BaselineValue
from tests.reference_pages import DERIVED_HELP

TARGETS = Targets(ttft_p99_s=2.0)
DRIFTS = {
    key: node.key
    for key, of in DERIVED.items()
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


@pytest.mark.parametrize(
    ("key", "values", "limit"),
    [
        pytest.param(
            "input_limit_tokens",
            {"prompt_tokens_p95": 1000.0, "prompt_tokens_p99": 1500.0},
            2000.0,
            id="twice the P95",
        ),
        pytest.param(
            "input_limit_tokens",
            {"prompt_tokens_p95": 1000.0, "prompt_tokens_p99": 2600.0},
            2600.0,
            id="at least the P99",
        ),
        pytest.param(
            "queue_limit",
            {"waiting_avg": 4.0, "expected_wait_s": 2.0, "prefill_mean_s": 0.2},
            (0.85 * 2.0 - 0.2) * 4.0 / 2.0,
            id="2/s are served for what the target leaves",
        ),
        pytest.param(
            "queue_limit", {"waiting_avg": 0.0}, None, id="no rate at which a queue moves"
        ),
    ],
)
def test_limits_for_the_gateway(key: str, values: dict[str, float], limit: float | None) -> None:
    found = momentary(Moment(values, TARGETS))[key]
    assert found == (None if limit is None else pytest.approx(limit))


def test_every_derived_signal_has_a_help_text() -> None:
    keys = {*DERIVED, *ACCOUNT_SIGNALS, *OPEN_CALLS_SIGNALS, STALL, PREFILL_SILENCE}
    keys |= {key for slow in SLOW for key in slow.keys}
    assert keys <= DERIVED_HELP.keys()
