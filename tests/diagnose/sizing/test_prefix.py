"""Prefix caching on the guide's examples, and what round-robin really costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.memory.kv_reuse import (
    RESERVE_HIGH_RATIO,
    computed_tokens,
    prefixes_held,
    remapped_ratio,
    reserve_bytes,
    unrouted_hit_ratio,
)

GB = 1e9
LLAMA_70B_KV_BYTES = 327_680


@pytest.mark.parametrize(
    ("hit_ratio", "block", "expected"),
    [
        pytest.param(1.0, 1, 50, id="guide 7.2: 50 of 12,050"),
        pytest.param(0.0, 1, 12_050, id="guide 7.2: a cold cache"),
        pytest.param(0.25, 1, 9050, id="guide 7.3: 25 % behind round-robin"),
        pytest.param(1.0, 16, 50, id="12,000 is 750 blocks of 16"),
        pytest.param(1.0, 64, 12_050 - 187 * 64, id="187 whole blocks of 64"),
    ],
)
def test_tokens_left_to_compute(hit_ratio: float, block: int, expected: float) -> None:
    tokens = computed_tokens(
        prompt_tokens=12_050, prefix_tokens=8000 + 4000, hit_ratio=hit_ratio, block_tokens=block
    )
    assert tokens == expected


def test_a_turn_of_text_001_computes_the_delta() -> None:
    # 4.9: 80K of context, of which 8-10K are new
    tokens = computed_tokens(prompt_tokens=80_000, prefix_tokens=71_000, hit_ratio=1.0)
    assert tokens == 9000


def test_reserve_of_20_to_30_percent() -> None:
    low, high = (
        reserve_bytes(kv_budget_bytes=57 * GB, ratio=ratio) for ratio in (0.20, RESERVE_HIGH_RATIO)
    )
    assert (low, high) == pytest.approx((11.4 * GB, 17.1 * GB))
    held = prefixes_held(
        reserve_bytes=high, prefix_tokens=8192, kv_bytes_per_token=LLAMA_70B_KV_BYTES
    )
    assert held == 6  # 8K prefixes of 2.68 GB


def test_round_robin_over_four_replicas() -> None:
    assert unrouted_hit_ratio(routed_hit_ratio=1.0, replicas=4) == 0.25  # guide 7.3: about 25 %
    assert unrouted_hit_ratio(routed_hit_ratio=0.9, replicas=4) == pytest.approx(0.225)


def test_figure_7_3_hits_a_third_and_says_a_quarter() -> None:
    drawn = 1 - 2 / 3  # "two of the three requests miss"
    assert drawn - unrouted_hit_ratio(routed_hit_ratio=1.0, replicas=4) == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("consistent", "expected"),
    [
        pytest.param(False, 4 / 5, id="guide 7.3: modulo moves (N - 1) / N"),
        pytest.param(True, 1 / 5, id="guide 7.3: consistent hashing moves 1 / N"),
    ],
)
def test_growing_from_four_to_five_replicas(consistent: bool, expected: float) -> None:
    moved = remapped_ratio(replicas=4, new_replicas=5, consistent=consistent)
    assert moved == pytest.approx(expected)
    assert 17 % 4 == 1  # guide 7.3: hash 17 moves from replica 1 ...
    assert 17 % 5 == 2  # ... to replica 2


def test_doubling_moves_half_either_way() -> None:
    assert remapped_ratio(replicas=4, new_replicas=8, consistent=False) == 0.5
    assert remapped_ratio(replicas=4, new_replicas=8, consistent=True) == 0.5


@given(old=st.integers(1, 40), new=st.integers(1, 40))
def test_consistent_hashing_never_moves_more_than_modulo(old: int, new: int) -> None:
    modulo, ring = (
        remapped_ratio(replicas=old, new_replicas=new, consistent=consistent)
        for consistent in (False, True)
    )
    moved = sum(key % old != key % new for key in range(old * new)) / (old * new)
    assert modulo == pytest.approx(moved)
    assert 0 <= ring <= modulo + 1e-9
    if new == old + 1:
        assert modulo == pytest.approx(1 - 1 / new)
        assert ring == pytest.approx(1 / new)


@given(
    prompt=st.integers(1, 200_000),
    share=st.floats(0, 1),
    hits=st.floats(0, 1),
    block=st.sampled_from([1, 16, 64]),
)
def test_what_is_computed_lies_between_the_rest_and_the_prompt(
    prompt: int, share: float, hits: float, block: int
) -> None:
    prefix = int(prompt * share)
    tokens = computed_tokens(
        prompt_tokens=prompt, prefix_tokens=prefix, hit_ratio=hits, block_tokens=block
    )
    assert prompt - prefix <= tokens + 1e-6
    assert tokens <= prompt
