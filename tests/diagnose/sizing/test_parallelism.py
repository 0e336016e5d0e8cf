"""TP, PP and DP on the worked examples of the guide and of text 003."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.sizing.memory.launch import tensor_parallel_choices


@pytest.mark.parametrize(
    ("attention_heads", "kv_heads", "domain_gpus", "expected"),
    [
        pytest.param(64, 8, 8, (1, 2, 4, 8), id="Llama-3 70B on a node of 8: no TP 3, 5, 6 or 7"),
        pytest.param(64, 4, 8, (1, 2, 4, 8), id="4 KV heads are replicated at 8"),
        pytest.param(28, 4, 8, (1, 2, 4), id="28 heads: 7 divides them, not the KV heads"),
        pytest.param(40, 8, 8, (1, 2, 4, 8), id="40 heads: 5 does not fit 8 KV heads"),
        pytest.param(64, 8, 2, (1, 2), id="two GPUs on NVLink"),
        pytest.param(12, 3, 8, (1, 3, 6), id="three KV heads"),
        pytest.param(128, 1, 72, (1, 2, 4, 8, 16, 32, 64), id="a domain of 72"),
    ],
)
def test_tensor_parallel_choices(
    attention_heads: int, kv_heads: int, domain_gpus: int, expected: tuple[int, ...]
) -> None:
    choices = tensor_parallel_choices(
        attention_heads=attention_heads, kv_heads=kv_heads, domain_gpus=domain_gpus
    )
    assert choices == expected
