"""The guide's memory plan: weights, activations, adapters, GPUs; on the texts' examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.memory.overhead import (
    BYTES_PER_VALUE,
    FRAMEWORK_HIGH_RATIO,
    FRAMEWORK_LOW_RATIO,
    HEADROOM_HIGH_RATIO,
    HEADROOM_LOW_RATIO,
    MemoryNeed,
    activation_bytes,
    bytes_per_value,
    gpus_with_headroom,
    min_gpus,
)
from tests.diagnose.sizing.guide_formulas import kv_bytes, kv_bytes_per_token, lora_adapter_bytes

GB = 1e9
H100_BYTES = 80 * GB
LLAMA_70B_KV_BYTES = kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, bytes_per_element=2)
ATTENTION = [(8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192)]
MLP = [(8192, 28672), (8192, 28672), (28672, 8192)]


def guide_example(*, bytes_per_parameter: float, kv_bytes_per_token: float) -> MemoryNeed:
    """Guide 2.6: Llama-3 70B, 50 requests of 8,000 tokens, activations kept at 28 GB."""
    return MemoryNeed(
        weights_bytes=70e9 * bytes_per_parameter,
        kv_bytes=kv_bytes(bytes_per_token=kv_bytes_per_token, tokens=8000, concurrency=50),
        activation_bytes=activation_bytes(weights_bytes=140 * GB),
        framework_bytes=15 * GB,
    )


@pytest.mark.parametrize(
    ("parameters", "dtype", "expected_bytes"),
    [
        pytest.param(8e9, "fp16", 16 * GB, id="guide 2.1, text 004: 8B x 2"),
        pytest.param(70e9, "bf16", 140 * GB, id="guide 1, 2.1, text 003: 70B x 2"),
        pytest.param(70e9, "fp8", 70 * GB, id="guide 1, text 000: 70B x 1"),
        pytest.param(70e9, "int4", 35 * GB, id="guide 2.1, text 004: 70B x 0.5"),
        pytest.param(8e9, "int8", 8 * GB, id="text 004: 8B x 1"),
        pytest.param(8e9, "int4", 4 * GB, id="text 004: 8B x 0.5"),
        pytest.param(47e9, "fp16", 94 * GB, id="text 004: Mixtral 47B x 2"),
        pytest.param(47e9, "int4", 23.5 * GB, id="text 004: Mixtral 47B x 0.5"),
        pytest.param(72e9, "fp16", 144 * GB, id="text 004: Qwen2 72B x 2"),
        pytest.param(72e9, "int4", 36 * GB, id="text 004: Qwen2 72B x 0.5"),
        pytest.param(1e12, "fp4", 500 * GB, id="text 001, 4: 1T x 0.5"),
        pytest.param(13e9, "fp16", 26 * GB, id="text 003, Q3: 13B x 2"),
        pytest.param(3e9, "fp16", 6 * GB, id="guide 6.6: draft 3B x 2"),
        pytest.param(70e9, "fp32", 280 * GB, id="guide 2.1: 4 bytes"),
        pytest.param(405e9, "fp8", 405 * GB, id="guide 5 says 'well over 200 GB' for 405B in FP8"),
    ],
)
def test_weights(parameters: float, dtype: str, expected_bytes: float) -> None:
    assert parameters * bytes_per_value(dtype) == expected_bytes


def test_the_b200_node_of_text_001() -> None:
    node_bytes = 8 * 192 * GB
    kimi_bytes = 1e12 * bytes_per_value("fp4")
    assert node_bytes == 1536 * GB
    assert node_bytes - kimi_bytes == 1036 * GB
    assert node_bytes - kimi_bytes - 80 * GB == 956 * GB
    # the guide's rule would take more, and the framework's share is missing
    assert activation_bytes(weights_bytes=kimi_bytes) == 100 * GB
    assert node_bytes * FRAMEWORK_LOW_RATIO == pytest.approx(76.8 * GB)


def test_activations_are_a_fifth_of_the_weights() -> None:
    assert activation_bytes(weights_bytes=140 * GB) == pytest.approx(28 * GB)  # guide 2.3
    # figure 2.1 keeps 28 GB at FP8, where 9.1 (step 4) would give 14
    assert activation_bytes(weights_bytes=70 * GB) == pytest.approx(14 * GB)


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


def test_adapters_count_when_active_not_when_registered() -> None:
    need = MemoryNeed(
        weights_bytes=140 * GB,
        kv_bytes=0,
        activation_bytes=0,
        simultaneous_adapters=8,
        adapter_bytes=0.1 * GB,
    )
    assert need.adapters_bytes == pytest.approx(0.8 * GB)  # guide 2.6
    assert need.total_bytes == pytest.approx(140.8 * GB)


@pytest.mark.parametrize(
    ("bytes_per_parameter", "per_token_bytes", "expected_gb", "expected_gpus"),
    [
        pytest.param(2, 0.26e6, 287, 4, id="guide 2.6: 140 + 104 + 28 + 15"),
        pytest.param(1, 0.13e6, 165, 3, id="guide 2.6: 70 + 52 + 28 + 15, not 2-3"),
        pytest.param(2, 327_680, 314.1, 4, id="with the KV cache computed"),
        pytest.param(1, 163_840, 178.5, 3, id="with the KV cache computed, FP8"),
    ],
)
def test_minimum_gpus_of_the_worked_example(
    bytes_per_parameter: float, per_token_bytes: float, expected_gb: float, expected_gpus: int
) -> None:
    need = guide_example(
        bytes_per_parameter=bytes_per_parameter, kv_bytes_per_token=per_token_bytes
    )
    assert need.total_bytes == pytest.approx(expected_gb * GB, rel=1e-3)
    assert min_gpus(needed_bytes=need.total_bytes, vram_bytes=H100_BYTES) == expected_gpus


@pytest.mark.parametrize(
    ("needed_gb", "expected"),
    [
        pytest.param(287, (5, 6), id="guide 2.6: FP16, 4 becomes 6"),
        pytest.param(165, (3, 4), id="guide 2.6: FP8, 3-4"),
        pytest.param(314.1, (6, 6), id="FP16 with the KV cache computed"),
        pytest.param(3 * 80, (4, 5), id="guide 2.6: FP8, on the 3 whole GPUs: 4-5, not 3-4"),
        pytest.param(4 * 80, (6, 6), id="guide 2.6: FP16, on the 4 whole GPUs"),
    ],
)
def test_headroom(needed_gb: float, expected: tuple[int, int]) -> None:
    low, high = (
        gpus_with_headroom(needed_bytes=needed_gb * GB, vram_bytes=H100_BYTES, headroom_ratio=ratio)
        for ratio in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO)
    )
    assert (low, high) == expected


@pytest.mark.parametrize(
    ("needed_gb", "expected_gpus"),
    [
        pytest.param(140, 2, id="guide 4.1, text 004: 70B in FP16 on 80 GB"),
        pytest.param(70, 1, id="guide 4.1: 70B in FP8, weights alone"),
        pytest.param(35, 1, id="text 004: INT4 on one A100"),
        pytest.param(165.6, 3, id="text 004: 140 + 25.6"),
        pytest.param(182.9, 3, id="text 004 computed: 140 + 42.9"),
        pytest.param(300, 4, id="text 003: 140 + 160"),
        pytest.param(161.5, 3, id="text 003 computed: 140 + 21.5"),
        pytest.param(80, 1, id="an exact fit"),
        pytest.param(240, 3, id="an exact fit of three"),
    ],
)
def test_gpus_of_80_gb(needed_gb: float, expected_gpus: int) -> None:
    assert min_gpus(needed_bytes=needed_gb * GB, vram_bytes=H100_BYTES) == expected_gpus


def test_int4_with_batch_32_leaves_no_room_on_one_a100() -> None:
    kv = kv_bytes(bytes_per_token=LLAMA_70B_KV_BYTES, tokens=4096, concurrency=32)
    assert (35 * GB + kv) / H100_BYTES == pytest.approx(0.974, abs=1e-3)  # text 004: "with room"


def test_framework_share_taken_from_each_gpu() -> None:
    assert min_gpus(needed_bytes=76 * GB, vram_bytes=H100_BYTES, framework_ratio=0.05) == 1
    assert min_gpus(needed_bytes=77 * GB, vram_bytes=H100_BYTES, framework_ratio=0.05) == 2


def test_an_exact_fit_is_not_rounded_up_by_a_float() -> None:
    needed_bytes = 3 * 141 * GB * (1 - 0.07)
    assert needed_bytes / (141 * GB * (1 - 0.07)) > 3
    assert min_gpus(needed_bytes=needed_bytes, vram_bytes=141 * GB, framework_ratio=0.07) == 3
    assert min_gpus(needed_bytes=1, vram_bytes=H100_BYTES) == 1


@given(
    needed=st.floats(1e8, 1e14),
    vram=st.floats(1e10, 3e11),
    framework=st.floats(0, 0.5),
    headroom=st.floats(0, 1),
)
def test_gpus_hold_what_is_needed(
    needed: float, vram: float, framework: float, headroom: float
) -> None:
    gpus = min_gpus(needed_bytes=needed, vram_bytes=vram, framework_ratio=framework)
    usable = vram * (1 - framework)
    assert (gpus - 1) * usable < needed <= gpus * usable * (1 + 1e-6)
    with_headroom = gpus_with_headroom(
        needed_bytes=needed, vram_bytes=vram, headroom_ratio=headroom
    )
    assert with_headroom >= min_gpus(needed_bytes=needed, vram_bytes=vram)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_absurd_numbers_are_refused_by_name(bad: float) -> None:
    with pytest.raises(SizingError, match="vram_bytes"):
        min_gpus(needed_bytes=1, vram_bytes=bad)


def test_an_unknown_dtype_lists_the_choices() -> None:
    with pytest.raises(SizingError, match="choose one of fp32, bf16") as refused:
        bytes_per_value("fp7")
    assert refused.value.choices == tuple(BYTES_PER_VALUE)
