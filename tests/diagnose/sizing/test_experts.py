"""Experts that a batch reads, and what an uneven load costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.speed.guide_formulas import (
    all_to_all_bytes,
    expert_capacity_tokens,
    expert_parallel_bytes_per_gpu,
    imbalance_throughput_ratio,
    overflow_ratio,
    step_weights_bytes,
    touched_experts_ratio,
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(0, 0.0, id="nobody"),
        pytest.param(1, 8 / 256, id="one token: 8 of 256, not the 2 of guide 5.4"),
        pytest.param(16, 0.398, id="16 tokens"),
        pytest.param(64, 0.869, id="64 tokens: hardly any expert is idle, as 5.4 has it"),
        pytest.param(128, 0.983, id="128 tokens"),
    ],
)
def test_experts_of_deepseek_v3_that_a_batch_uses(tokens: int, expected: float) -> None:
    ratio = touched_experts_ratio(experts=256, experts_per_token=8, tokens=tokens)
    assert ratio == pytest.approx(expected, abs=1e-3)


def test_the_expectation_is_what_random_routing_gives() -> None:
    dice = random.Random(7)
    runs, experts, k, tokens = 400, 64, 6, 20
    touched = [
        len({e for _ in range(tokens) for e in dice.sample(range(experts), k)}) / experts
        for _ in range(runs)
    ]
    expected = touched_experts_ratio(experts=experts, experts_per_token=k, tokens=tokens)
    assert sum(touched) / runs == pytest.approx(expected, abs=0.01)


def test_a_step_reads_the_active_parameters_alone_and_all_of_them_in_a_crowd() -> None:
    # text 001, 4.3: 16 GB a token is true at batch 1 only; here 2 GB dense, 14 of 448 GB routed
    def read_bytes(tokens: int) -> float:
        return step_weights_bytes(
            dense_bytes=2e9,
            routed_bytes=448e9,
            experts=256,
            experts_per_token=8,
            tokens=tokens,
        )

    assert read_bytes(1) == pytest.approx(16e9)
    assert read_bytes(4096) == pytest.approx(450e9)
    assert read_bytes(64) / 64 == pytest.approx(6.1e9, rel=0.01)  # bytes per token shrink


def test_all_experts_are_stored_and_shared_ones_on_every_gpu() -> None:
    per_gpu = expert_parallel_bytes_per_gpu(
        dense_bytes=17e9, routed_bytes=654e9, experts=256, gpus=32
    )
    assert per_gpu == pytest.approx(17e9 + 654e9 / 32)
    assert 32 * per_gpu > 671e9  # guide 5.4: not 671 / 32
    uneven = expert_parallel_bytes_per_gpu(dense_bytes=0, routed_bytes=256, experts=256, gpus=72)
    assert uneven == 4  # 256 / 72 = 3.6: some GPUs hold four


def test_an_expert_with_three_times_the_load_leaves_a_third() -> None:
    assert imbalance_throughput_ratio(expert_tokens=[300, 0, 100, 0]) == pytest.approx(1 / 3)
    assert imbalance_throughput_ratio(expert_tokens=[7, 7]) == 1
    with pytest.raises(SizingError, match="no tokens"):
        imbalance_throughput_ratio(expert_tokens=[0, 0])


def test_capacity_factor_and_overflow() -> None:
    capacity = expert_capacity_tokens(
        tokens=128, experts=16, experts_per_token=2, capacity_factor=1.25
    )
    assert capacity == 20
    assert overflow_ratio(expert_tokens=[25, 15], capacity_tokens=capacity) == pytest.approx(5 / 40)
    assert overflow_ratio(expert_tokens=[20, 20], capacity_tokens=capacity) == 0
    assert overflow_ratio(expert_tokens=[0, 0], capacity_tokens=capacity) == 0


def test_all_to_all_goes_there_and_back() -> None:
    def moved_bytes(gpus: int) -> float:
        return all_to_all_bytes(tokens=10, hidden_size=7168, experts_per_token=8, gpus=gpus)

    assert moved_bytes(1) == 0
    assert moved_bytes(8) == 2 * 10 * 8 * 7168 * 2 * 7 / 8


@given(
    experts=st.integers(2, 512),
    data=st.data(),
    tokens=st.integers(0, 2000),
)
def test_coverage_rises_to_all_and_never_beyond(
    experts: int, data: st.DataObject, tokens: int
) -> None:
    k = data.draw(st.integers(1, experts))
    now, more = (
        touched_experts_ratio(experts=experts, experts_per_token=k, tokens=t)
        for t in (tokens, tokens + 1)
    )
    assert 0 <= now <= more <= 1
    assert now <= tokens * k / experts + 1e-12


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with pytest.raises(SizingError, match="experts_per_token is 9; it must be from 1 to 8"):
        touched_experts_ratio(experts=8, experts_per_token=9, tokens=1)
