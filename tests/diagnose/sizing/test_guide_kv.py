"""The guide's KV-cache formulas on the worked examples of the five texts, right and wrong."""

from __future__ import annotations

import pytest

from tests.diagnose.sizing.guide_formulas import (
    concurrency_above_weights,
    kv_budget_bytes,
    kv_bytes,
    kv_bytes_per_token,
    max_concurrency,
    mla_bytes_per_token,
)

GB = 1e9
GIB = 2**30
LLAMA_70B_KV_BYTES = kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, bytes_per_element=2)
KIMI_KV_BYTES = mla_bytes_per_token(
    layers=61, kv_lora_rank=512, rope_head_dim=64, bytes_per_element=1
)


def test_kv_per_token_of_the_texts_models() -> None:
    assert LLAMA_70B_KV_BYTES == 327_680  # text 000: 2 x 80 x 8 x 128 x 2
    assert KIMI_KV_BYTES == 35_136  # text 001, 4.10.1: 61 x (512 + 64) x 1
    heads = kv_bytes_per_token(layers=80, kv_heads=64, head_dim=128, bytes_per_element=2)
    assert heads == 2_621_440  # text 003: the same with 64 heads, which is MHA
    assert heads / LLAMA_70B_KV_BYTES == 8  # guide 2.2: what GQA saves


@pytest.mark.parametrize(
    ("says_bytes", "tokens", "concurrency", "bytes_per_token", "expected_bytes"),
    [
        pytest.param(2.68 * GB, 8192, 1, 327_680, 2.684 * GB, id="text 000: 8,192 tokens"),
        pytest.param(42.9 * GB, 131_072, 1, 327_680, 42.95 * GB, id="text 000: 128K"),
        pytest.param(106 * GB, 8192, 50, 0.26e6, 106.5 * GB, id="guide 2.2 with its own 0.26 MB"),
        pytest.param(104 * GB, 8000, 50, 0.26e6, 104 * GB, id="guide 2.6 with its own 0.26 MB"),
        pytest.param(416 * GB, 32_000, 50, 0.26e6, 416 * GB, id="guide 2.2, 32K, own 0.26 MB"),
        pytest.param(52 * GB, 4000, 50, 0.26e6, 52 * GB, id="guide 7.5 with its own 0.26 MB"),
        pytest.param(26 * GB, 4000, 50, 0.13e6, 26 * GB, id="guide 7.5, FP8"),
        pytest.param(13 * GB, 4000, 50, 0.065e6, 13 * GB, id="guide 7.5, FP4"),
        pytest.param(2.80 * GB, 80_000, 1, 35e3, 2.80 * GB, id="text 001, 4.10.2: 80K x 35 KB"),
        pytest.param(1.12 * GB, 32_000, 1, 35e3, 1.12 * GB, id="text 001, 4.10.2: 32K x 35 KB"),
        pytest.param(160 * GIB, 2048, 32, 2.5 * 2**20, 160 * GIB, id="text 003: 160 are GiB"),
    ],
)
def test_kv_examples_that_follow_from_the_texts_own_figures(
    says_bytes: float,
    tokens: float,
    concurrency: int,
    bytes_per_token: float,
    expected_bytes: float,
) -> None:
    size = kv_bytes(bytes_per_token=bytes_per_token, tokens=tokens, concurrency=concurrency)
    assert size == pytest.approx(expected_bytes, rel=1e-3)
    assert says_bytes == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("says_bytes", "tokens", "concurrency", "kv_bits", "expected_bytes"),
    [
        pytest.param(0.26e6, 1, 1, 16, 327_680, id="guide 2.2 and 7.5: 0.26 MB a token"),
        pytest.param(2.5e6, 1, 1, 16, 327_680, id="text 003: 2.5 MB a token, query heads"),
        pytest.param(106 * GB, 8192, 50, 16, 134.2 * GB, id="guide 2.2: 50 x 8K"),
        pytest.param(104 * GB, 8000, 50, 16, 131.1 * GB, id="guide 2.6: 50 x 8,000"),
        pytest.param(52 * GB, 8000, 50, 8, 65.5 * GB, id="guide 2.6: 50 x 8,000 in FP8"),
        pytest.param(416 * GB, 32_768, 50, 16, 536.9 * GB, id="guide 2.2: 50 x 32K"),
        pytest.param(51.5 * GB, 131_072, 1, 16, 42.95 * GB, id="text 004: 128K is 51.5 GB"),
        pytest.param(10 * GB, 131_072, 1, 16, 42.95 * GB, id="guide 9.4: 128K is 10 GB"),
        pytest.param(8 * GB, 100_000, 1, 16, 32.77 * GB, id="guide 7.6: 100K is 8 GB"),
        pytest.param(4 * GB, 100_000, 1, 8, 16.38 * GB, id="guide 7.6: 100K in FP8 is 4 GB"),
        pytest.param(52 * GB, 4096, 50, 16, 67.1 * GB, id="guide 7.5: 50 x 4K"),
        pytest.param(26 * GB, 4096, 50, 8, 33.6 * GB, id="guide 7.5: 50 x 4K in FP8"),
        pytest.param(13 * GB, 4096, 50, 4.5, 18.9 * GB, id="guide 7.5: NVFP4 is 4.5 bits"),
        pytest.param(320e6, 4096, 1, 8, 671.1e6, id="guide 6.5: 4K in FP8 is 320 MB"),
        pytest.param(16e6, 200, 1, 8, 32.8e6, id="guide 6.5: 200 tokens are 16 MB"),
        pytest.param(25.6 * GB, 4096, 32, 16, 42.95 * GB, id="text 004: 32 x 4,096 is 25.6 GB"),
        pytest.param(27_487_051_776, 4096, 32, 16, 42_949_672_960, id="text 004: the product"),
        pytest.param(160 * GB, 2048, 32, 16, 21.5 * GB, id="text 003: 32 x 2,048"),
    ],
)
def test_kv_figures_that_the_texts_get_wrong(
    says_bytes: float, tokens: float, concurrency: int, kv_bits: float, expected_bytes: float
) -> None:
    per_token = kv_bytes_per_token(
        layers=80, kv_heads=8, head_dim=128, bytes_per_element=kv_bits / 8
    )
    size = kv_bytes(bytes_per_token=per_token, tokens=tokens, concurrency=concurrency)
    assert size == pytest.approx(expected_bytes, rel=2e-3)
    assert abs(says_bytes / size - 1) > 0.15


@pytest.mark.parametrize(
    ("size_bytes", "unit_bytes", "shown"),
    [
        pytest.param(LLAMA_70B_KV_BYTES, 2**20, 0.3125, id="text 000: 0.31 MB are MiB"),
        pytest.param(8 * LLAMA_70B_KV_BYTES, 2**20, 2.5, id="text 003: 2.5 MB are MiB"),
        pytest.param(27_487_051_776, GIB, 25.6, id="text 004: 25.6 GB are GiB"),
        pytest.param(178.36 * GIB, GB, 191.5, id="B200: 192 GB sold, 178 GiB reported"),
        pytest.param(139.80 * GIB, GB, 150.1, id="H200: 141 GB sold are nearer to GiB"),
        pytest.param(79.18 * GIB, GB, 85.0, id="H100: 80 GB sold are nearer to GiB"),
    ],
)
def test_units_that_look_like_errors(size_bytes: float, unit_bytes: float, shown: float) -> None:
    assert size_bytes / unit_bytes == pytest.approx(shown, rel=1e-3)


def test_a_128k_request_is_a_third_of_an_h200() -> None:
    request_bytes = kv_bytes(bytes_per_token=LLAMA_70B_KV_BYTES, tokens=131_072)
    assert request_bytes / (141 * GB) == pytest.approx(0.305, abs=1e-3)  # text 000: 'over half'
    budget_bytes = kv_budget_bytes(
        vram_bytes=141 * GB, gpu_memory_utilization=0.9, weights_bytes=70 * GB
    )
    assert request_bytes / budget_bytes == pytest.approx(0.755, abs=1e-3)


@pytest.mark.parametrize(
    ("vram_gb", "kv_bits", "expected_requests"),
    [
        pytest.param(141, 16, 21, id="text 000: (0.9 x 141 - 70) / 2.68"),
        pytest.param(141, 8, 42, id="text 000: FP8 KV"),
        pytest.param(150.1, 16, 24, id="with what an H200's driver reports, 139.80 GiB"),
    ],
)
def test_requests_on_one_h200(vram_gb: float, kv_bits: int, expected_requests: int) -> None:
    free_bytes = kv_budget_bytes(
        vram_bytes=vram_gb * GB, gpu_memory_utilization=0.9, weights_bytes=70 * GB
    )
    request_bytes = LLAMA_70B_KV_BYTES * kv_bits / 16 * 8192
    requests = max_concurrency(free_bytes=free_bytes, bytes_per_request=request_bytes)
    assert requests == expected_requests


@pytest.mark.parametrize(
    ("free_bytes", "tokens", "per_token_bytes", "expected_users"),
    [
        pytest.param(956 * GB, 80_000, 35e3, 341, id="text 001: 956 GB / 2.80 GB"),
        pytest.param(956 * GB, 32_000, 35e3, 853, id="text 001: 956 GB / 1.12 GB"),
        pytest.param(956 * GB, 80_000, KIMI_KV_BYTES, 340, id="35,136 bytes, not 35 KB"),
        pytest.param(956 * GB, 32_000, KIMI_KV_BYTES, 850, id="35,136 bytes, 32K"),
        pytest.param(956 * GB / 8, 80_000, KIMI_KV_BYTES, 42, id="TP 8 copies the latent 8 times"),
        pytest.param(956 * GB / 8, 32_000, KIMI_KV_BYTES, 106, id="TP 8, 32K"),
    ],
)
def test_users_of_kimi_on_eight_b200(
    free_bytes: float, tokens: float, per_token_bytes: float, expected_users: int
) -> None:
    request_bytes = kv_bytes(bytes_per_token=per_token_bytes, tokens=tokens)
    assert max_concurrency(free_bytes=free_bytes, bytes_per_request=request_bytes) == expected_users


@pytest.mark.parametrize(
    ("tokens", "per_token_bytes", "expected_requests"),
    [
        pytest.param(131_072, 327_680, 4, id="guide 2.2: 4 at 128K"),
        pytest.param(131_072, 0.26e6, 5, id="guide 2.2: its own 0.26 MB needs 5"),
        pytest.param(32_768, 327_680, 14, id="figure 2.2 says 16 at 32K"),
        pytest.param(32_768, 0.26e6, 17, id="figure 2.2: its own 0.26 MB needs 17"),
        pytest.param(8192, 327_680, 53, id="figure 2.2: 8K stays below at 50"),
        pytest.param(4096, 327_680, 105, id="figure 2.2: 4K stays below at 50"),
    ],
)
def test_requests_whose_kv_exceeds_the_weights(
    tokens: float, per_token_bytes: float, expected_requests: int
) -> None:
    requests = concurrency_above_weights(
        weights_bytes=140 * GB, bytes_per_request=tokens * per_token_bytes
    )
    assert requests == expected_requests
