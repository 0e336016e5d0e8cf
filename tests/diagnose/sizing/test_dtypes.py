"""The dtypes of activations, weights and KV cache that vLLM 0.32 takes on each GPU."""

import pytest

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.launch_command import sized_command
from kneewatch.diagnose.sizing.launch_notes import launch_doubts
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.launch import Launch, check
from kneewatch.diagnose.sizing.memory.weights import Parallel


def _launch(model_id: str, gpu_id: str, **fields: str) -> Launch:
    return Launch(model(model_id), gpu(gpu_id), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("spelled", ["float32", "float", "FLOAT32"])
def test_float32_doubles_weights_and_kv_cache(spelled: str) -> None:
    half, wide = (
        memory(_launch("Qwen/Qwen3-8B", "h100-sxm", dtype=dtype)) for dtype in ("auto", spelled)
    )

    assert wide.weights_bytes == 2 * (half.weights_bytes or 0)
    assert wide.layout.token_bytes == 2 * half.layout.token_bytes
    assert wide.launch.scheme.id == "float32"
    assert sized_command(wide.launch) == f"vllm serve Qwen/Qwen3-8B --dtype {spelled}"


def test_a_gpu_without_bfloat16_takes_float32_for_a_model_that_refuses_float16() -> None:
    plain = _launch("Qwen/Qwen3-4B", "t4")
    refused = _launch("google/gemma-3-4b-it", "t4")

    assert (plain.computed_dtype, plain.scheme.id) == ("float16", "bf16")
    assert (refused.computed_dtype, refused.scheme.id) == ("float32", "float32")
    assert not list(launch_doubts(plain))
    assert "takes float32" in "".join(launch_doubts(refused))


@pytest.mark.parametrize(
    ("model_id", "gpu_id", "fields", "words"),
    [
        ("Qwen/Qwen3-8B", "t4", {"dtype": "bfloat16"}, "refuses bfloat16 on NVIDIA T4"),
        ("Qwen/Qwen3-8B", "v100-32gb", {"dtype": "bfloat16"}, "refuses bfloat16"),
        ("google/gemma-3-12b-it", "h100-sxm", {"dtype": "half"}, "refuses float16"),
        ("openai/gpt-oss-20b", "h100-sxm", {"dtype": "half"}, "with mxfp4 weights: bfloat16"),
        ("Qwen/Qwen3-32B-FP8", "h100-sxm", {"dtype": "float32"}, "with fp8 weights"),
        ("deepseek-ai/DeepSeek-V2-Lite", "h200", {"dtype": "float32"}, "for latent attention"),
        ("Qwen/Qwen3-8B", "h100-sxm", {"dtype": "int8"}, "unknown dtype"),
        # Weights: the lowest capability of each format.
        ("openai/gpt-oss-20b", "t4", {}, "no kernels for mxfp4"),
        ("Qwen/Qwen3-8B", "v100-32gb", {"quantization": "awq"}, "no kernels for awq"),
        ("Qwen/Qwen3-8B", "v100-32gb", {"quantization": "fp8"}, "no kernels for fp8"),
        # KV cache: Triton needs capability 8.9 for FP8, FlashInfer runs from 8.0 on.
        ("Qwen/Qwen3-8B", "t4", {"kv_cache_dtype": "fp8"}, "this model's attention"),
        ("Qwen/Qwen3-8B", "t4", {"kv_cache_dtype": "bfloat16"}, "this model's attention"),
        ("openai/gpt-oss-20b", "a100-80gb", {"kv_cache_dtype": "fp8"}, "this model's attention"),
        ("Qwen/Qwen3-8B", "a100-80gb", {"kv_cache_dtype": "fp8_per_token_head"}, "on NVIDIA A100"),
        (
            "deepseek-ai/DeepSeek-V2-Lite",
            "a100-80gb",
            {"kv_cache_dtype": "fp8"},
            "latent attention",
        ),
        (
            "deepseek-ai/DeepSeek-V2-Lite",
            "h200",
            {"kv_cache_dtype": "int8_per_token_head"},
            "latent",
        ),
        ("deepseek-ai/DeepSeek-V3.2", "a100-80gb", {}, "sparse latent attention"),
        ("Qwen/Qwen3-8B", "jetson-thor", {"kv_cache_dtype": "nvfp4"}, "KV cache in nvfp4"),
    ],
)
def test_what_vllm_refuses_is_refused(
    model_id: str, gpu_id: str, fields: dict[str, str], words: str
) -> None:
    with pytest.raises(SizingError, match=words):
        check(_launch(model_id, gpu_id, **fields))


@pytest.mark.parametrize(
    ("model_id", "gpu_id", "fields"),
    [
        ("Qwen/Qwen3-8B", "a100-80gb", {"kv_cache_dtype": "fp8"}),
        ("Qwen/Qwen3-8B", "rtx-3090", {"kv_cache_dtype": "fp8_e5m2"}),
        ("openai/gpt-oss-20b", "l4", {"kv_cache_dtype": "fp8"}),
        ("deepseek-ai/DeepSeek-V2-Lite", "l40s", {"kv_cache_dtype": "fp8"}),
        ("deepseek-ai/DeepSeek-V2-Lite", "mi300x", {"kv_cache_dtype": "fp8"}),
        ("Qwen/Qwen3-8B", "t4", {"kv_cache_dtype": "int8_per_token_head"}),
        ("Qwen/Qwen3-8B", "t4", {"quantization": "awq", "dtype": "half"}),
        ("Qwen/Qwen3-8B", "rtx-3090", {"quantization": "nvfp4"}),
        ("Qwen/Qwen3-8B", "h100-sxm", {"quantization": "fp8", "dtype": "half"}),
        ("google/gemma-3-4b-it", "a100-80gb", {"dtype": "float32"}),
    ],
)
def test_what_vllm_runs_is_sized(model_id: str, gpu_id: str, fields: dict[str, str]) -> None:
    check(_launch(model_id, gpu_id, **fields))


def test_the_error_lists_the_formats_that_run() -> None:
    with pytest.raises(SizingError) as caught:
        check(_launch("Qwen/Qwen3-8B", "t4", kv_cache_dtype="fp8"))

    assert {"auto", "float16", "int8_per_token_head"} <= {*caught.value.choices}
    assert not {"fp8", "bfloat16", "nvfp4"} & {*caught.value.choices}


def test_sparse_attention_needs_hopper_or_later_in_a_replica_of_any_size() -> None:
    launch = Launch(model("deepseek-ai/DeepSeek-V3.2"), gpu("h200"), parallel=Parallel(tensor=8))

    check(launch)
