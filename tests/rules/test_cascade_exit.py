"""How the stages of the KV cascade end, what holds them, and what they forecast."""

from __future__ import annotations

import pytest

from kneewatch.rules.cascade import EXIT_HOLD_S, FULL_FROM_RATIO
from kneewatch.rules.rule import Severity
from tests.rules.cascade_run import FULL, QUEUE, START_S, Run


def test_a_stage_ends_once_its_evidence_has_been_gone_for_a_while() -> None:
    run = Run()
    run.at(0.0, 1, **FULL)
    assert run.at(EXIT_HOLD_S - 0.1).number == 2
    assert run.at(EXIT_HOLD_S).number == 0
    assert run.at(EXIT_HOLD_S + 2).since_s == START_S + EXIT_HOLD_S


def test_a_stage_ends_sooner_once_no_request_is_left() -> None:
    run, idle = Run(), {"running": 0.0, "kv_usage_ratio": 0.0}
    run.at(0.0, 1, **QUEUE)
    assert run.at(EXIT_HOLD_S / 2 - 0.1, **idle).number == 3
    assert run.at(EXIT_HOLD_S / 2, **idle).number == 0


@pytest.mark.parametrize("scale", [0.25, 5.0])
def test_holds_stretch_with_the_window(scale: float) -> None:
    run = Run(scale=scale)
    run.at(0.0, 1, **FULL)
    assert run.at(0.99 * EXIT_HOLD_S * scale).number == 2
    assert run.at(EXIT_HOLD_S * scale).number == 0


def test_a_stage_falls_step_by_step() -> None:
    run = Run()
    steps: list[tuple[float, float, dict[str, float]]] = [
        (0.0, 1, QUEUE),
        (20.0, 1, FULL),
        (29.0, 1, FULL),
        (30.0, 1, FULL),
        (58.0, 0, {}),
        (60.0, 0, {}),
    ]
    assert run.numbers(*steps) == [3, 3, 3, 2, 2, 0]


def test_a_counter_that_stands_still_behind_a_full_cache_holds_the_stage() -> None:
    run = Run()
    run.at(0.0, 1, **QUEUE)
    for t_s in range(2, 600, 2):
        stage = run.at(float(t_s), **QUEUE)
        assert stage.level >= 3
        assert "still full" in stage.reasons[0]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({**QUEUE, "kv_usage_ratio": FULL_FROM_RATIO - 0.01}, id="room in the cache"),
        pytest.param({**FULL, "waiting_by_capacity": 0.0}, id="nobody waits for it"),
        pytest.param({**QUEUE, "kv_usage_ratio": None}, id="usage unknown"),
    ],
)
def test_the_counter_standing_still_holds_nothing_else(values: dict[str, float | None]) -> None:
    run = Run()
    run.at(0.0, 1, **QUEUE)
    assert run.at(EXIT_HOLD_S, 0.0, **values).level < 2


def test_a_full_cache_with_a_queue_is_no_eviction_before_the_first_preemption() -> None:
    run = Run()
    assert {run.at(float(t_s), **QUEUE).number for t_s in range(0, 300, 2)} == {0, 1}


def test_alternating_evidence_does_not_flap() -> None:
    run = Run()
    steps: list[tuple[float, float, dict[str, float]]] = [
        (2.0 * n, float(n % 2), QUEUE if n % 2 else {}) for n in range(1, 200)
    ]
    assert set(run.numbers(*steps)) == {3}


def test_a_new_process_starts_without_a_stage() -> None:
    run = Run()
    run.at(0.0, 1, **QUEUE)
    run.forget()
    fresh = run.at(2.0, **QUEUE)
    assert (fresh.number, fresh.severity) == (0, Severity.OK)
    assert fresh.since_s == START_S + 2.0, "not when the old process's stage began"


# Forecast


def test_a_forecast_is_told_while_nothing_is_evicted() -> None:
    assert Run().at(0.0, 0, kv_usage_ratio=0.8, kv_exhausted_in_s=240.0).forecast_s == 240.0
    assert Run().at(0.0, 0, kv_usage_ratio=0.8, kv_exhausted_in_s=None).forecast_s is None


def test_once_requests_are_evicted_there_is_nothing_to_forecast() -> None:
    assert Run().at(0.0, 1, kv_usage_ratio=0.9, kv_exhausted_in_s=60.0).forecast_s is None


def test_a_cache_that_emptied_is_no_longer_filling() -> None:
    run = Run()
    steps: list[tuple[float, float, dict[str, float]]] = [
        (0.0, 1, FULL),
        (28.0, 0, {"kv_usage_ratio": 0.95, "kv_usage_slope_per_s": 0.01}),
        (30.0, 0, {"kv_usage_ratio": 0.85}),
        (32.0, 0, {"kv_usage_ratio": 0.3}),
        (34.0, 0, {"kv_usage_ratio": 0.84}),
    ]
    assert run.numbers(*steps) == [2, 2, 1, 0, 0]
