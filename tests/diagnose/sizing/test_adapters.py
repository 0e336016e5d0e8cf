"""LoRA adapters: their buffers against what vLLM's own code reserves, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.memory_arithmetic import memory_steps
from kneewatch.diagnose.sizing.memory.weights import (
    Adapters,
    Parallel,
    adapter_bytes,
    parameters_of,
    weights_per_gpu,
)
from tests.diagnose.sizing.guide_formulas import lora_adapter_bytes

RECORDED: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "adapters" / "vllm-0.32.0.json").read_text()
)
CASES = [
    pytest.param(case, id=f"{case['model']} over {case['tensor_parallel']}")
    for case in RECORDED["cases"]
]
# Recurrent layers are counted by their parameters, not matrix by matrix.
RECURRENT = {"ibm-granite/granite-4.0-h-tiny"}
LLAMA = Launch(
    model=model("meta-llama/Llama-3.1-8B-Instruct"), gpu=gpu("h100-sxm"), max_model_len=8192
)


@pytest.mark.parametrize("case", CASES)
def test_buffers_are_those_of_vllm(case: Mapping[str, Any]) -> None:
    asked = Adapters(RECORDED["max_loras"], RECORDED["max_lora_rank"])
    buffer_bytes = adapter_bytes(model(case["model"]), asked, Parallel(case["tensor_parallel"]))

    near = 0.02 if case["model"] in RECURRENT else 0.005
    assert buffer_bytes == pytest.approx(case["adapter_bytes"], rel=near)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_vllm_makes_room_for(case: Mapping[str, Any]) -> None:
    base_model = model(case["model"])
    weights = weights_per_gpu(base_model, scheme("bf16"), Parallel(case["tensor_parallel"]))

    # The recorded bytes are those of parameters, which tables of positions are not.
    rotary_bytes = parameters_of(base_model).rotary * 2
    assert sum(weights.values()) - rotary_bytes == pytest.approx(case["weights_bytes"], rel=0.007)


def test_one_adapter_of_a_dense_model_is_the_guides_sum() -> None:
    hidden, heads, kv, wide, vocab = 4096, 4096, 1024, 14336, 128256
    layer = [
        (hidden, heads), (hidden, kv), (hidden, kv), (heads, hidden),
        (hidden, wide), (hidden, wide), (wide, hidden),
    ]  # fmt: skip
    tables = [(vocab, hidden), (hidden, vocab)]

    buffer_bytes = adapter_bytes(LLAMA.model, Adapters(1, 16), Parallel())

    assert buffer_bytes == lora_adapter_bytes(
        rank=16, matrices=layer, layers=32
    ) + lora_adapter_bytes(rank=16, matrices=tables, layers=1)


@pytest.mark.parametrize(
    ("name", "slots", "tensor", "expected_gb"),
    [
        pytest.param("meta-llama/Llama-3.3-70B-Instruct", 8, 1, 3.38, id="guide 2.5 says 0.8"),
        pytest.param("meta-llama/Llama-3.3-70B-Instruct", 8, 4, 1.78, id="on each of four"),
        pytest.param("Qwen/Qwen3-30B-A3B", 1, 1, 1.70, id="experts have buffers of their own"),
        pytest.param("deepseek-ai/DeepSeek-R1", 1, 8, 10.7, id="and many experts many"),
    ],
)
def test_the_errata_of_adapters(name: str, slots: int, tensor: int, expected_gb: float) -> None:
    buffer_bytes = adapter_bytes(model(name), Adapters(slots, 16), Parallel(tensor))
    assert buffer_bytes / 1e9 == pytest.approx(expected_gb, rel=0.005)


def test_a_buffer_grows_with_slots_and_rank_and_shrinks_with_stages() -> None:
    slot_bytes = adapter_bytes(LLAMA.model, Adapters(1, 8), Parallel())

    assert adapter_bytes(LLAMA.model, Adapters(4, 8), Parallel()) == 4 * slot_bytes
    assert adapter_bytes(LLAMA.model, Adapters(1, 64), Parallel()) == 8 * slot_bytes
    assert (
        slot_bytes / 2
        < adapter_bytes(LLAMA.model, Adapters(1, 8), Parallel(pipeline=2))
        < slot_bytes
    )


def test_experts_that_are_dealt_out_take_their_adapters_along() -> None:
    base_model, asked = model("Qwen/Qwen3-30B-A3B"), Adapters(4, 16)
    split = adapter_bytes(base_model, asked, Parallel(4))
    dealt = adapter_bytes(base_model, asked, Parallel(4, experts=True))

    # Split, each rank keeps the inputs' factors of all experts; dealt out, all of a quarter.
    assert dealt < split / 2


def test_buffers_leave_less_for_the_cache() -> None:
    plain, adapted = memory(LLAMA), memory(replace(LLAMA, adapters=Adapters(8, 64)))

    taken = plain.available_bytes.expected - adapted.available_bytes.expected
    assert taken == adapted.adapter_bytes == 8 * 64 / (3 * 16) * 277_069_824
    assert (adapted.weights_bytes or 0) - (plain.weights_bytes or 0) == taken
    assert plain.overhead == adapted.overhead


def test_they_come_on_top_of_stated_weights() -> None:
    stated = replace(LLAMA, weights_bytes=16e9)
    adapted = memory(replace(stated, adapters=Adapters(1, 16)))

    assert adapted.weights_bytes == 16e9 + adapted.adapter_bytes


def test_the_guides_overhead_is_of_the_weights_alone() -> None:
    guide = replace(LLAMA, overhead="guide")

    assert memory(guide).overhead == memory(replace(guide, adapters=Adapters(8, 64))).overhead


def test_the_arithmetic_adds_up() -> None:
    lines = [step.line() for step in memory_steps(memory(replace(LLAMA, adapters=Adapters(4, 64))))]

    assert any("4 x 352.3 MiB of rank 64" in line for line in lines)
    assert any(
        line.startswith("Loaded on each GPU") and "14.99 GiB + 1.38 GiB = 16.36 GiB" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("name", "asked", "flag", "message"),
    [
        pytest.param("Qwen/Qwen3-8B", Adapters(0), "max_loras", "above 0", id="none"),
        pytest.param("Qwen/Qwen3-8B", Adapters(10**9), "max_loras", "4096", id="absurd"),
        pytest.param("Qwen/Qwen3-8B", Adapters(1, 24), "max_lora_rank", "24", id="no such rank"),
        pytest.param(
            "tiiuae/Falcon-H1-34B-Instruct", Adapters(1), "max_loras", "258,048", id="vocabulary"
        ),
    ],
)
def test_what_vllm_refuses(name: str, asked: Adapters, flag: str, message: str) -> None:
    launch = Launch(model=model(name), gpu=gpu("h200"), max_model_len=4096, adapters=asked)

    with pytest.raises(SizingError, match=message) as refused:
        memory(launch)
    assert refused.value.name == flag
