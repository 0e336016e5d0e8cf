"""The guide's memory plan on the texts' examples: framework, adapters, KV cache."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.sizing.memory.overhead import FRAMEWORK_HIGH_RATIO, FRAMEWORK_LOW_RATIO
from tests.diagnose.sizing.guide_formulas import kv_bytes, kv_bytes_per_token, lora_adapter_bytes

GB = 1e9
H100_BYTES = 80 * GB
LLAMA_70B_KV_BYTES = kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, bytes_per_element=2)
ATTENTION = [(8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192)]
MLP = [(8192, 28672), (8192, 28672), (28672, 8192)]


def test_framework_share_is_less_than_chapter_2_says_per_gpu() -> None:
    assert H100_BYTES * FRAMEWORK_LOW_RATIO == 4 * GB  # guide 2.4
    assert H100_BYTES * FRAMEWORK_HIGH_RATIO == 8 * GB
    assert 8 * GB < 10 * GB  # guide 2: "10-20 GB ... fixed tax on every deployment"


@pytest.mark.parametrize(
    ("matrices", "expected_bytes"),
    [
        pytest.param(
            [ATTENTION[0], ATTENTION[2]], 65.5e6, id="guide 2.5: 50-200 MB holds for Q, V"
        ),
        pytest.param(ATTENTION, 131.1e6, id="guide 2.5: and for Q, K, V, O"),
        pytest.param(ATTENTION + MLP, 414.2e6, id="guide 2.5: not for all matrices"),
    ],
)
def test_lora_adapter_of_rank_16(matrices: list[tuple[int, int]], expected_bytes: float) -> None:
    size = lora_adapter_bytes(rank=16, matrices=matrices, layers=80)
    assert size == pytest.approx(expected_bytes, rel=1e-3)
    assert size / (140 * GB) < 0.01  # guide 2.1 says 1-5 % of the base model


def test_int4_with_batch_32_leaves_no_room_on_one_a100() -> None:
    kv = kv_bytes(bytes_per_token=LLAMA_70B_KV_BYTES, tokens=4096, concurrency=32)
    assert (35 * GB + kv) / H100_BYTES == pytest.approx(0.974, abs=1e-3)  # text 004: "with room"
