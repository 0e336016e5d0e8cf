"""Arithmetic intensity and the ridge, on the worked examples of the five texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    batch_at_ridge,
    decode_intensity_flop_per_byte,
    ridge_flop_per_byte,
)

TERA = 1e12
H100_BANDWIDTH = 3.35 * TERA
H100_BF16, H100_FP8 = 989 * TERA, 1979 * TERA
LLAMA_70B_KV_BYTES = 327_680


@pytest.mark.parametrize(
    ("peak", "bandwidth", "expected"),
    [
        pytest.param(989e12, 3.35e12, 295, id="guide 3.1, text 003: H100 989 / 3.35"),
        pytest.param(312e12, 2.0e12, 156, id="text 003, Q3: A100 312 / 2.0"),
        pytest.param(362e12, 0.864e12, 419, id="text 003, script: L40S 362 / 0.864"),
        pytest.param(10e15, 8e12, 1250, id="text 001, 4.5: B200 FP4 10 P / 8"),
        pytest.param(1979e12, 3.35e12, 591, id="H100 in FP8, which the texts leave at 295"),
    ],
)
def test_ridge(peak: float, bandwidth: float, expected: float) -> None:
    ridge = ridge_flop_per_byte(peak_flop_per_s=peak, bandwidth_bytes_per_s=bandwidth)
    assert ridge == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("bytes_per_parameter", "expected"),
    [
        pytest.param(2.0, 1.0, id="text 003: 1 FLOP per byte in FP16"),
        pytest.param(1.0, 2.0, id="guide 3.3: about 2, which is FP8"),
        pytest.param(0.5, 4.0, id="text 001, 4.5 says about 2 at FP4"),
    ],
)
def test_decode_intensity_at_batch_1(bytes_per_parameter: float, expected: float) -> None:
    intensity = decode_intensity_flop_per_byte(
        batch=1, parameters=70e9, weights_bytes=70e9 * bytes_per_parameter
    )
    assert intensity == expected


def test_fp4_decode_is_312_times_below_the_b200_ridge_not_600() -> None:
    intensity = decode_intensity_flop_per_byte(batch=1, parameters=32e9, weights_bytes=16e9)
    ridge = ridge_flop_per_byte(peak_flop_per_s=10e15, bandwidth_bytes_per_s=8e12)
    assert ridge / 2 == 625
    assert ridge / intensity == 312.5


def test_text_003s_script_counts_60_of_70_billion_parameters() -> None:
    script = 80 * (4 * 8192**2 + 2 * 8192 * 28672) + 128_256 * 8192
    assert script == pytest.approx(60.1e9, rel=1e-3)
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024  # K and V have 8 heads
    gated_mlp = 3 * 8192 * 28672
    norms = 161 * 8192
    assert 80 * (attention + gated_mlp) + 2 * 128_256 * 8192 + norms == 70_553_706_496


def test_five_hundred_tokens_at_once_are_1000_flop_per_byte() -> None:
    one, many = (
        decode_intensity_flop_per_byte(batch=tokens, parameters=70e9, weights_bytes=70e9)
        for tokens in (1, 500)
    )
    assert (one, many) == pytest.approx((2, 1000))  # guide 3.3: 500 times


@pytest.mark.parametrize(
    ("context_tokens", "expected_batch"),
    [
        pytest.param(0, 295, id="text 003: about 295 on an H100, weights alone"),
        pytest.param(1024, 1010, id="1K of context triples it"),
        pytest.param(1500, None, id="figure 3.3.2: never past the ridge, true from 1.4K on"),
        pytest.param(8192, None, id="8K: never"),
    ],
)
def test_batch_at_the_ridge(context_tokens: int, expected_batch: float | None) -> None:
    batch = batch_at_ridge(
        ridge_flop_per_byte=H100_BF16 / H100_BANDWIDTH,
        parameters=70e9,
        weights_bytes=140e9,
        kv_bytes_per_request=context_tokens * LLAMA_70B_KV_BYTES,
    )
    assert batch == (None if expected_batch is None else pytest.approx(expected_batch, rel=5e-3))


@given(ridge=st.floats(1, 2000), kv=st.floats(0, 1e8))
def test_the_ridge_batch_is_at_the_ridge(ridge: float, kv: float) -> None:
    batch = batch_at_ridge(
        ridge_flop_per_byte=ridge, parameters=7e9, weights_bytes=14e9, kv_bytes_per_request=kv
    )
    if batch is None:
        most = 2 * 7e9 / kv
        assert most <= ridge * (1 + 1e-9)
    else:
        intensity = decode_intensity_flop_per_byte(
            batch=batch, parameters=7e9, weights_bytes=14e9, kv_bytes_per_request=kv
        )
        assert intensity == pytest.approx(ridge, rel=1e-6)
