"""The stages of the KV cascade: heat is not harm, evidence is."""

from __future__ import annotations

import pytest

from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    EXIT_HOLD_S,
    FILLING_FROM_RATIO,
    NAMES,
    TTFT_DRIFT,
    Stage,
)
from kneewatch.rules.rule import Severity
from tests.rules.cascade_run import FULL, QUEUE, START_S, Run


def test_stages_have_names_and_a_beginning() -> None:
    run = Run()
    calm = run.at(0.0)
    assert (calm.number, calm.name, calm.severity) == (0, "steady", Severity.OK)
    assert (calm.since_s, calm.reasons) == (START_S, ())
    hit = run.at(10.0, 1, **FULL)
    assert (hit.name, hit.since_s) == ("evicting", START_S + 10)
    assert run.at(12.0, 1, **FULL).since_s == START_S + 10
    assert NAMES == ("steady", "filling", "evicting", "queueing", "collapsing")


# Stages 0 and 1: heat is not harm


def test_a_full_cache_without_eviction_or_queue_is_filling_and_a_note() -> None:
    run = Run()
    assert run.at(0.0, **FULL).number == 0
    assert run.at(EXIT_HOLD_S - 1, **FULL).number == 0
    full = run.at(EXIT_HOLD_S, **FULL)
    assert (full.number, full.severity) == (1, Severity.INFO)
    for t_s in range(100, 4_000, 100):
        assert run.at(float(t_s), kv_usage_ratio=1.0).severity == Severity.INFO


def test_a_cache_above_its_band_and_rising_is_filling_at_once() -> None:
    assert Run().at(0.0, kv_usage_ratio=0.92, kv_usage_slope_per_s=0.001).number == 1
    assert Run().at(0.0, kv_usage_ratio=0.92, kv_usage_slope_per_s=-0.001).number == 0
    rising = Run().at(0.0, kv_usage_ratio=FILLING_FROM_RATIO - 0.01, kv_usage_slope_per_s=0.01)
    assert rising.number == 0, "inside its band it may rise"


def test_usage_that_swings_around_the_band_s_edge_is_not_filling() -> None:
    run = Run()
    swings = [(2.0 * n, 0.0, {"kv_usage_ratio": 0.95 if n % 4 else 0.85}) for n in range(100)]
    assert set(run.numbers(*swings)) == {0}


@pytest.mark.parametrize("waiting", [0.0, 100.0], ids=["no queue", "a queue by seats"])
def test_a_queue_or_slow_first_tokens_without_eviction_are_no_stage(waiting: float) -> None:
    run = Run(ttft_slo_s=0.5)
    slow = {"waiting_by_capacity": waiting, "waiting_avg": waiting, "ttft_p99_s": 60.0}
    for t_s in (0.0, 30.0, 60.0, 90.0):
        assert run.at(t_s, ttft_p99_drift_ratio=100.0, **slow).number == 0


def test_an_unknown_usage_is_no_stage_but_a_counted_preemption_is() -> None:
    run = Run()
    assert run.at(0.0, kv_usage_ratio=None).number == 0
    assert run.at(2.0, 3, kv_usage_ratio=None).number == 2


# Stage 2: evicting


def test_the_first_counted_preemption_is_evicting() -> None:
    run = Run()
    assert run.at(0.0).number == 0
    hit = run.at(2.0, 1)
    assert hit.number == 2
    assert hit.reasons == ("vLLM preempted running requests",)


def test_a_single_preemption_stays_a_note() -> None:
    run = Run()
    seen = [run.at(0.0, 1, preemption_ratio_per_s=1 / 60 / 20).severity or Severity.OK]
    for n in range(1, 30):
        seen.append(run.at(2.0 * n, preemption_ratio_per_s=1 / 60 / 20).severity or Severity.OK)
    assert max(seen) == Severity.INFO
    assert run.at(120.0).number == 0


@pytest.mark.parametrize(
    ("ratio_per_s", "severity"),
    [
        pytest.param(None, Severity.INFO, id="not known"),
        pytest.param(EVICT_WARNING_PER_S, Severity.INFO, id="at 5 %"),
        pytest.param(EVICT_WARNING_PER_S + 0.001, Severity.WARNING, id="above 5 %"),
        pytest.param(EVICT_CRITICAL_PER_S, Severity.WARNING, id="at 20 %"),
        pytest.param(EVICT_CRITICAL_PER_S + 0.001, Severity.CRITICAL, id="above 20 %"),
    ],
)
def test_how_bad_evicting_is(ratio_per_s: float | None, severity: Severity) -> None:
    stage = Run().at(0.0, 2, **FULL, preemption_ratio_per_s=ratio_per_s)
    assert (stage.number, stage.severity) == (2, severity)


# Stage 3: queueing


@pytest.mark.parametrize(
    ("values", "number"),
    [
        pytest.param({"waiting_by_capacity": 5.0}, 3, id="a quarter of the batch queues"),
        pytest.param({"waiting_by_capacity": 4.9}, 2, id="less than a quarter"),
        pytest.param(
            {"waiting_by_capacity": 1.0, "running": 2.0}, 2, id="one request is no queue"
        ),
        pytest.param({"waiting_by_capacity": 2.0, "running": 2.0}, 3, id="two are"),
        pytest.param(
            {"ttft_p99_drift_ratio": TTFT_DRIFT + 0.1, "waiting": 1.0, "waiting_avg": 0.5}, 3,
            id="first tokens left their baseline and a queue is there",
        ),
        pytest.param(
            {"ttft_p99_drift_ratio": 50.0, "waiting_avg": 4.0}, 2,
            id="the window holds a queue that is gone",
        ),
        pytest.param(
            {"ttft_p99_drift_ratio": 50.0, "waiting": 1.0, "waiting_avg": 0.1}, 2,
            id="the request that was just preempted is no queue",
        ),
        pytest.param(
            {"ttft_p99_drift_ratio": TTFT_DRIFT, "waiting": 1.0, "waiting_avg": 0.5}, 2,
            id="within the baseline",
        ),
        pytest.param(
            {"ttft_p99_drift_ratio": 50.0, "waiting_avg": 0.0}, 2,
            id="slow first tokens without a queue may be longer prompts",
        ),
        pytest.param({"ttft_p99_drift_ratio": None}, 2, id="no baseline"),
    ],
)  # fmt: skip
def test_evicting_with_a_queue_is_queueing(values: dict[str, float | None], number: int) -> None:
    stage = Run().at(0.0, 1, **{**FULL, **values})
    assert stage.number == number
    assert stage.severity == (Severity.WARNING if number == 3 else Severity.INFO)


@pytest.mark.parametrize(
    ("ttft_s", "drift", "number"),
    [
        pytest.param(2.1, 1.0, 3, id="over the target"),
        pytest.param(1.9, 50.0, 2, id="within the target, whatever the baseline says"),
        pytest.param(None, 50.0, 2, id="no first token in the window"),
    ],
)
def test_with_a_target_first_tokens_are_held_against_it(
    ttft_s: float | None, drift: float, number: int
) -> None:
    run = Run(ttft_slo_s=2.0)
    values = {"ttft_p99_s": ttft_s, "ttft_p99_drift_ratio": drift}
    assert run.at(0.0, 1, **FULL, **values, waiting=1.0, waiting_avg=1.0).number == number


def test_an_eviction_behind_an_incident_that_is_over_is_no_queue() -> None:
    run = Run(ttft_slo_s=2.0)
    for waiting_avg in (0.0, 6.0):
        stage = run.at(0.0, 1, **FULL, ttft_p99_s=9.0, waiting=0.0, waiting_avg=waiting_avg)
        assert (stage.number, stage.severity) == (2, Severity.INFO)


def test_a_stage_that_is_only_held_says_so() -> None:
    run = Run()
    assert run.at(0.0, 1, **QUEUE).number == 3
    held = run.at(12.0)
    assert held.number == 3
    assert held.reasons == ("stage 3 held: its evidence was last seen 12 s ago",)


# Stage 4: collapsing


def collapse(run: Run, seconds: int = 60, **values: float | None) -> list[Stage]:
    """Five minutes of a steady load, then preemption with a queue at what `values` say."""
    for t_s in range(0, 300, 5):
        run.at(float(t_s), running_avg=25.0, gpu_engine_active_ratio=0.9)
    queue = {**QUEUE, "gpu_engine_active_ratio": 0.9, **values}
    return [run.at(float(t_s), 1, **queue) for t_s in range(300, 300 + seconds, 5)]


@pytest.mark.parametrize(
    ("values", "number"),
    [
        pytest.param({"generation_tokens_per_s": 690.0}, 4, id="tokens fall below 70 %"),
        pytest.param({"generation_tokens_per_s": 710.0}, 3, id="tokens fall to 71 %"),
        pytest.param({"gpu_engine_active_ratio": 0.44}, 4, id="the GPU falls below half"),
        pytest.param({"gpu_engine_active_ratio": 0.46}, 3, id="the GPU falls to more than half"),
        pytest.param({"gpu_engine_active_ratio": None}, 3, id="the GPU is not known"),
        pytest.param({"generation_tokens_per_s": None}, 3, id="tokens are not known"),
        pytest.param(
            {"generation_tokens_per_s": 500.0, "running_avg": 10.0}, 3,
            id="the load fell with the tokens",
        ),
    ],
)  # fmt: skip
def test_useful_work_that_falls_while_the_load_holds_is_a_collapse(
    values: dict[str, float | None], number: int
) -> None:
    stages = collapse(Run(), 60, **values)
    assert stages[0].number == 3
    assert stages[-1].number == number
    assert stages[-1].severity == (Severity.CRITICAL if number == 4 else Severity.WARNING)
    assert ("while the load holds" in stages[-1].reasons[-1]) == (number == 4)


def test_a_dip_of_one_scrape_is_no_collapse() -> None:
    run = Run()
    collapse(run)
    dips = [
        run.at(360.0 + 5 * n, 1, **QUEUE, generation_tokens_per_s=900.0 if n % 3 else 500.0)
        for n in range(20)
    ]
    assert {stage.number for stage in dips} == {3}


def test_without_a_time_before_there_is_nothing_to_fall_from() -> None:
    run = Run()
    stages = [run.at(5.0 * n, 1, **QUEUE, generation_tokens_per_s=10.0) for n in range(20)]
    assert {stage.number for stage in stages} == {3}
    fresh = Run()
    collapse(fresh)
    fresh.forget()
    low = {**QUEUE, "generation_tokens_per_s": 100.0}
    assert {fresh.at(400.0 + 5 * n, 1, **low).number for n in range(20)} == {3}


def test_work_that_falls_without_eviction_is_no_collapse() -> None:
    run = Run()
    collapse(run, seconds=0)
    fallen = {"generation_tokens_per_s": 100.0, "waiting_by_capacity": 9.0}
    assert {run.at(300.0 + 5 * n, **fallen).number for n in range(20)} == {0}
