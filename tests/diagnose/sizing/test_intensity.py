"""Arithmetic intensity and the ridge, on the worked examples of the texts."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.speed.roofline_inputs import Intensity, costs, intensity_of

LLAMA_70B = model("meta-llama/Llama-3.3-70B-Instruct")


def intensity(
    *, quantization: str = "bf16", context_tokens: float = 0.0, batch: float = 1.0
) -> Intensity:
    read = costs(Launch(LLAMA_70B, gpu("h100-sxm"), quantization=quantization))
    return intensity_of(read, context_tokens=context_tokens, sequences=batch)


@pytest.mark.parametrize(
    ("quantization", "ridge", "decode"),
    [
        pytest.param("bf16", 295, 1.0, id="text 003: H100 989 / 3.35; 1 FLOP per byte in FP16"),
        pytest.param("fp8", 591, 2.0, id="guide 3.3: about 2, which is FP8; ridge in FP8"),
    ],
)
def test_ridge_and_intensity_at_batch_1(quantization: str, ridge: float, decode: float) -> None:
    answer = intensity(quantization=quantization)
    assert answer.ridge_flop_per_byte == pytest.approx(ridge, rel=2e-3)
    # Tables and norms stay in 16 bit.
    assert answer.decode_flop_per_byte == pytest.approx(decode, rel=0.04)


def test_intensity_grows_with_the_batch() -> None:
    alone, many = (intensity(quantization="fp8", batch=batch) for batch in (1, 500))
    assert many.decode_flop_per_byte / alone.decode_flop_per_byte == pytest.approx(500)


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
    answer = intensity(context_tokens=context_tokens)
    if expected_batch is None:
        assert answer.batch_at_ridge is None
    else:
        assert answer.batch_at_ridge == pytest.approx(expected_batch, rel=0.02)


def test_the_ridge_batch_is_at_the_ridge() -> None:
    batch = intensity(context_tokens=500).batch_at_ridge
    assert batch is not None
    there = intensity(context_tokens=500, batch=batch)
    assert there.decode_flop_per_byte == pytest.approx(there.ridge_flop_per_byte, rel=1e-6)
