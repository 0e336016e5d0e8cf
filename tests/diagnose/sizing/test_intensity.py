"""Arithmetic intensity and the ridge, on the worked examples of the five texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.sizing.speed.guide_formulas import (
    attainable_flop_per_s,
    batch_at_ridge,
    decode_ceiling_tokens_per_s,
    decode_intensity_flop_per_byte,
    matmul_intensity_flop_per_byte,
    prefill_flop,
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


@pytest.mark.parametrize(
    ("batch", "expected_ratio"),
    [
        pytest.param(1, 0.0034, id="text 003: below 0.4 %"),
        pytest.param(2, 0.0068, id="guide 3.3: 2 of 295 leaves 99.3 % idle, not 98 %"),
        pytest.param(64, 0.217, id="text 003: about 20 % at batch 64"),
    ],
)
def test_share_of_an_h100s_compute(batch: int, expected_ratio: float) -> None:
    intensity = decode_intensity_flop_per_byte(batch=batch, parameters=70e9, weights_bytes=140e9)
    attained = attainable_flop_per_s(
        intensity_flop_per_byte=intensity,
        peak_flop_per_s=H100_BF16,
        bandwidth_bytes_per_s=H100_BANDWIDTH,
    )
    assert attained / H100_BF16 == pytest.approx(expected_ratio, abs=1e-3)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(1, 1.0, id="text 003: a vector is 1 FLOP per byte"),
        pytest.param(32, 31.66, id="text 003: about the batch while it is small"),
        pytest.param(295, 268.5, id="text 003: 295 rows are not yet 295 FLOP per byte"),
        pytest.param(10**9, 2985.2, id="text 003 says K/2 = 2048; it is KN / (K + N)"),
    ],
)
def test_matmul_intensity(rows: int, expected: float) -> None:
    intensity = matmul_intensity_flop_per_byte(
        rows=rows, inner=4096, columns=11008, bytes_per_element=2
    )
    assert intensity == pytest.approx(expected, rel=1e-3)


def test_a_square_matmul_tends_to_half_its_size() -> None:
    intensity = matmul_intensity_flop_per_byte(
        rows=10**9, inner=4096, columns=4096, bytes_per_element=2
    )
    assert intensity == pytest.approx(2048, rel=1e-4)


def test_one_mlp_matrix_of_text_003_q1() -> None:
    flop = prefill_flop(tokens=1, parameters=8192 * 28672)
    assert flop == pytest.approx(470e6, rel=1e-3)
    bytes_in_fp16 = 8192 * 28672 * 2
    assert flop / bytes_in_fp16 == 1


@pytest.mark.parametrize(
    ("gpu_peak", "bandwidth", "batch", "expected_tokens_per_s"),
    [
        pytest.param(989.4e12, 3.35e12, 1, 28.36, id="text 003: H100, batch 1"),
        pytest.param(989.4e12, 3.35e12, 128, 3630.5, id="text 003: H100, batch 128"),
        pytest.param(312e12, 2.0e12, 32, 541.9, id="text 003: A100, batch 32"),
        pytest.param(362e12, 0.864e12, 8, 58.5, id="text 003: L40S, batch 8"),
    ],
)
def test_text_003s_script_with_its_59_billion_layer_parameters(
    gpu_peak: float, bandwidth: float, batch: int, expected_tokens_per_s: float
) -> None:
    parameters = 80 * (4 * 8192**2 + 2 * 8192 * 28672)
    speed = attainable_flop_per_s(
        intensity_flop_per_byte=decode_intensity_flop_per_byte(
            batch=batch, parameters=parameters, weights_bytes=2 * parameters
        ),
        peak_flop_per_s=gpu_peak,
        bandwidth_bytes_per_s=bandwidth,
    ) / (2 * parameters)
    assert speed == pytest.approx(expected_tokens_per_s, rel=1e-3)
    bound = decode_ceiling_tokens_per_s(
        batch=batch, weights_bytes=2 * parameters, bandwidth_bytes_per_s=bandwidth
    )
    assert speed == pytest.approx(bound)


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


@given(batch=st.integers(1, 4096), kv=st.floats(0, 1e9))
def test_intensity_rises_with_the_batch_and_the_floor_agrees(batch: int, kv: float) -> None:
    def at(requests: int) -> float:
        return decode_intensity_flop_per_byte(
            batch=requests, parameters=7e9, weights_bytes=14e9, kv_bytes_per_request=kv
        )

    assert at(batch + 1) >= at(batch)
    speed = decode_ceiling_tokens_per_s(
        batch=batch,
        weights_bytes=14e9,
        bandwidth_bytes_per_s=H100_BANDWIDTH,
        kv_bytes_per_request=kv,
    )
    assert at(batch) * H100_BANDWIDTH / (2 * 7e9) == pytest.approx(speed)


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


@given(rows=st.integers(1, 10**5), inner=st.integers(1, 20_000), columns=st.integers(1, 20_000))
def test_matmul_intensity_stays_below_its_limits(rows: int, inner: int, columns: int) -> None:
    intensity = matmul_intensity_flop_per_byte(
        rows=rows, inner=inner, columns=columns, bytes_per_element=2
    )
    assert intensity < min(rows, inner, columns)
