"""The learned knee: on the recorded sweep within a step of the client's, and quiet on little."""

from __future__ import annotations

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.account_signals import CAPACITY_USED
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.learned.knee import FORGOTTEN_S, CurveLearner, capacity_used
from kneewatch.rules.facts import Targets
from kneewatch.rules.library import RULES_BY_ID
from tests.recordings import CAPTURES

NOTHING = Targets(None, None)
CLIENTS_KNEE = 16
"""Where the sweep's client saw its power (requests per second over their mean latency) peak: 13.6
per s2 at 16 in flight, 9.2 at 8 and 12.0 at 32, from its own log of 2,281 requests."""

CLIENTS_C_MAX = 32
"""The highest concurrency at which the client's TTFT P99 was within 0.3 s: 0.18 s; at 64, 0.31."""


def swept(window_s: float = 6.0) -> tuple[CurveLearner, float]:
    """What a learner makes of the recorded sweep; short windows, for a step lasts 20 s."""
    learner, now_s = CurveLearner(window_s=window_s), 0.0
    stream = TargetStream("sweep", Profile(window_s=window_s), Limits())
    for entry in CaptureReader(CAPTURES / "knee_sweep.jsonl.gz"):
        for diagnosis in stream.replay(entry):
            now_s = diagnosis.t_s
            learner.learn(now_s, diagnosis.values)
    return learner, now_s


def test_the_recorded_sweep_within_one_step() -> None:
    learner, now_s = swept()
    knee = learner.knee(now_s, NOTHING)
    assert knee is not None
    assert knee.reached
    assert abs(log2(knee.c_max.expected / CLIENTS_KNEE)) <= 1.0
    assert knee.c_max.low <= knee.c_max.expected <= knee.c_max.high


def test_without_a_gpu_source_the_load_is_a_share_of_c_max() -> None:
    learner, now_s = swept()
    knee = learner.knee(now_s, NOTHING)
    assert knee is not None
    load = {"running_avg": 4.0, "waiting_avg": 1.0}
    assert capacity_used(load, knee) == pytest.approx(5.0 / knee.c_max.expected)
    assert capacity_used({**load, "waiting_avg": 3000.0}, knee) == 1.0
    assert capacity_used({**load, "gpu_engine_active_ratio": 0.9}, knee) == 0.9
    assert capacity_used({**load, "gpu_engine_active_ratio": 3186.0}, knee) is None
    assert capacity_used(load, replace(knee, reached=False)) is None
    assert RULES_BY_ID["FLEET-LOW"].signal == RULES_BY_ID["FLEET-HIGH"].signal == CAPACITY_USED


def test_c_max_at_a_target_within_one_step() -> None:
    learner, now_s = swept()
    knee = learner.knee(now_s, Targets(ttft_p99_s=0.3, itl_p99_s=None))
    assert knee is not None
    assert abs(log2(knee.c_max.expected / CLIENTS_C_MAX)) <= 1.0
    assert 15 <= knee.usable_requests_per_s.expected <= 31


def values_at_load(
    in_flight: float, *, knee_at: float, service_s: float = 1.0, ttft_s: float = 0.1
) -> dict[str, float]:
    """A server that slows down in proportion once its batch is past the knee."""
    slow = max(1.0, in_flight / knee_at) ** 1.5
    e2e_s = service_s * slow
    return {
        "running_avg": in_flight,
        "waiting_avg": 0.0,
        "completed_per_s": in_flight / e2e_s,
        "generation_tokens_per_s": 100 * in_flight / e2e_s,
        "e2e_mean_s": e2e_s,
        "output_tokens_mean": 100.0,
        "ttft_p99_s": ttft_s * slow,
        "itl_p99_s": 0.01 * slow,
    }


def learned(loads: list[float], *, knee_at: float, each: int = 4) -> tuple[CurveLearner, float]:
    learner, now_s = CurveLearner(window_s=60.0), 0.0
    for load in loads:
        for _ in range(each):
            now_s += 60.0
            learner.learn(now_s, values_at_load(load, knee_at=knee_at))
    return learner, now_s


@given(st.floats(6, 150), st.randoms(use_true_random=False))
def test_a_known_knee_is_found_in_any_order(knee_at: float, random: object) -> None:
    loads = [2.0**power for power in range(9)]
    random.shuffle(loads)  # type: ignore[attr-defined]
    learner, now_s = learned(loads, knee_at=knee_at)
    knee = learner.knee(now_s, NOTHING)
    assert knee is not None
    assert abs(log2(knee.c_max.expected / knee_at)) <= 1.0


def test_a_knee_that_was_not_reached_is_a_lower_bound() -> None:
    learner, now_s = learned([1, 2, 4, 8, 16], knee_at=100)
    knee = learner.knee(now_s, NOTHING)
    assert knee is not None
    assert not knee.reached
    assert knee.c_max.expected == 16


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param([], id="nothing"),
        pytest.param([8, 8, 8], id="one load"),
        pytest.param([8, 10, 12], id="a narrow span"),
        pytest.param([1, 8], id="two loads"),
    ],
)
def test_little_data_is_no_knee(loads: list[float]) -> None:
    learner, now_s = learned(loads, knee_at=10)
    assert learner.knee(now_s, NOTHING) is None


def test_old_points_are_forgotten() -> None:
    learner, now_s = learned([1, 2, 4, 8, 16, 32], knee_at=8)
    assert learner.knee(now_s, NOTHING) is not None
    assert learner.knee(now_s + FORGOTTEN_S + 3600, NOTHING) is None


def test_a_server_that_changed_moves_its_knee() -> None:
    loads = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    learner, now_s = learned(loads, knee_at=4, each=10)
    for load in loads:
        for _ in range(60):
            now_s += 60.0
            learner.learn(now_s, values_at_load(load, knee_at=16))
    knee = learner.knee(now_s, NOTHING)
    assert knee is not None
    assert abs(log2(knee.c_max.expected / 16)) <= 1.0


def test_windows_from_before_do_not_oust_newer_ones() -> None:
    loads = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    old, _ = learned(loads, knee_at=4, each=60)
    newer, now_s = learned(loads, knee_at=16, each=60)
    newer.recall(old.points())
    knee = newer.knee(now_s, NOTHING)
    assert knee is not None
    assert abs(log2(knee.c_max.expected / 16)) <= 1.0
    few, now_s = learned(loads[:2], knee_at=16)
    assert few.knee(now_s, NOTHING) is None
    few.recall(old.points())
    assert few.knee(now_s, NOTHING) is not None


def test_a_target_that_no_load_keeps_has_no_c_max() -> None:
    learner, now_s = learned([1, 2, 4, 8, 16], knee_at=4)
    assert learner.knee(now_s, Targets(ttft_p99_s=0.01, itl_p99_s=None)) is None


def test_idle_and_unreadable_windows_teach_nothing() -> None:
    learner = CurveLearner(window_s=60.0)
    learner.learn(60.0, {})
    learner.learn(120.0, {**values_at_load(8, knee_at=4), "completed_per_s": 0.0})
    learner.learn(180.0, {**values_at_load(8, knee_at=4), "given_up_ratio": 0.5})
    learner.learn(180.0, {**values_at_load(8, knee_at=4), "e2e_mean_s": None})
    learner.learn(240.0, {**values_at_load(8, knee_at=4), "running_avg": inf})
    assert learner.points() == []


@pytest.mark.parametrize(("waiting", "most_per_s"), [(0.0, 32.0), (16.0, 48.0)])
def test_a_queue_does_not_show_the_limit_of_a_concurrency(
    waiting: float, most_per_s: float
) -> None:
    learner, now_s = learned([8.0, 16.0, 32.0], knee_at=64.0)
    late = values_at_load(64.0 - waiting, knee_at=64.0, ttft_s=5.0) | {"waiting_avg": waiting}
    for _ in range(4):
        now_s += 60.0
        learner.learn(now_s, late)
    knee = learner.knee(now_s, Targets(ttft_p99_s=0.3, itl_p99_s=None))
    assert knee is not None
    assert (knee.c_max.expected, knee.usable_requests_per_s.expected) == (32.0, 32.0)
    assert knee.most_requests_per_s == most_per_s
