"""The scheme that a checkpoint's own section names."""

from __future__ import annotations

from typing import Any

import pytest

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model_from_config
from kneewatch.diagnose.catalogue.quantization import scheme, schemes
from tests.diagnose.catalogue.configurations import llama


def compressed(*groups: dict[str, Any], **fields: object) -> dict[str, Any]:
    """A section as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{i}": {"weights": group} for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
        **fields,
    }


FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
INT4 = {"type": "int", "num_bits": 4, "group_size": 128}
FP4 = {"type": "float", "num_bits": 4, "group_size": 16}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        pytest.param(None, "bf16", id="none"),
        pytest.param({}, "bf16", id="empty"),
        pytest.param(
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            "fp8",
            id="fp8 of DeepSeek",
        ),
        pytest.param(compressed(FP8), "fp8", id="compressed-tensors FP8"),
        pytest.param(compressed(INT4), "int4", id="compressed-tensors W4A16"),
        pytest.param(
            compressed(INT4, ignore=["re:.*self_attn.*", "lm_head"]),
            "int4-experts",
            id="compressed-tensors W4A16, attention apart",
        ),
        pytest.param(compressed({"type": "int", "num_bits": 8}), "int8", id="compressed W8A8"),
        pytest.param(compressed(FP4), "nvfp4-linear", id="compressed-tensors NVFP4"),
        pytest.param(compressed({**FP4, "group_size": 32}), "mxfp4", id="compressed-tensors MXFP4"),
        pytest.param(compressed(FP8, FP8), "fp8", id="two groups of one kind"),
        pytest.param({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", id="gptq 4"),
        pytest.param({"quant_method": "gptq", "bits": 8}, "int8", id="gptq 8"),
        pytest.param({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", id="awq"),
        pytest.param({"quant_method": "mxfp4"}, "mxfp4", id="gpt-oss"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", id="modelopt FP8"),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", id="modelopt FP4"
        ),
        pytest.param(
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
            },
            "nvfp4-ffn",
            id="modelopt FP4, attention apart",
        ),
        pytest.param(
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["model.layers.3.self_attn*", "model.layers.3.mlp.shared_expert*"],
            },
            "nvfp4-experts",
            id="modelopt FP4, routed experts alone",
        ),
        pytest.param(
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}},
            },
            "nvfp4-mlp",
            id="modelopt mixed",
        ),
        pytest.param(
            {
                "quant_method": "fp8",
                "modules_to_not_convert": [
                    "model.layers.0.self_attn.indexers_proj",
                    "model.layers.0.self_attn.kv_a_layernorm",
                ],
            },
            "fp8",
            id="fp8, norms and indexers of attention apart (GLM-5)",
        ),
        pytest.param(
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            "nvfp4",
            id="hf_quant_config.json",
        ),
        pytest.param(
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes",
            id="bitsandbytes 4",
        ),
        pytest.param({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", id="bnb 8"),
        pytest.param({"quant_method": "fbgemm_fp8"}, "fp8", id="fbgemm"),
        pytest.param(
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
            "mxfp4",
            id="quark MXFP4",
        ),
    ],
)
def test_scheme_of_a_section(section: object, expected: str) -> None:
    assert model_from_config("m", llama(quantization_config=section)).quantization == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": FP8}, "fp8"),
        (compressed(INT4, kv_cache_scheme=FP8), "fp8"),
        (compressed(INT4, kv_cache_scheme=INT4), "auto"),
        # vLLM reads it of these two methods only.
        ({"quant_method": "fp8", "kv_cache_scheme": FP8}, "auto"),
        (None, "auto"),
    ],
    ids=repr,
)
def test_kv_cache_of_a_section(section: object, expected: str) -> None:
    assert model_from_config("m", llama(quantization_config=section)).kv_cache_dtype == expected


@pytest.mark.parametrize(
    ("section", "named"),
    [
        pytest.param({"quant_method": "torchao"}, "'torchao'", id="torchao"),
        pytest.param({"quant_method": "gptq", "bits": 3}, "3 bits", id="gptq 3"),
        pytest.param({"quant_method": "bitsandbytes"}, "load_in_4bit", id="neither 4 nor 8"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "W1"}, "'W1'", id="algorithm"),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED", id="mix"
        ),
        pytest.param(compressed(), "config_groups", id="no groups"),
        pytest.param(compressed(FP8, INT4), "fp8 and int4", id="two kinds"),
        pytest.param(compressed({"type": "int", "num_bits": 2}), "2 bit int", id="2 bit"),
        pytest.param({"bits": 4}, "quant_method", id="no method"),
    ],
)
def test_what_is_not_modelled_says_so_with_the_way_out(section: object, named: str) -> None:
    with pytest.raises(SizingError, match="state the quantization") as caught:
        model_from_config("m", llama(quantization_config=section))

    assert named in str(caught.value)
    assert "fp8" in caught.value.choices


@pytest.mark.parametrize(
    "section",
    [
        pytest.param({"quant_method": 8}, id="method a number"),
        pytest.param({"quant_method": "gptq", "bits": "four"}, id="bits a word"),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": [1]}, id="groups a list"
        ),
        pytest.param(compressed(FP8, ignore=7), id="ignore a number"),
        pytest.param({"quant_method": "bitsandbytes", "load_in_8bit": "yes"}, id="flag a word"),
    ],
)
def test_wrong_types_are_named(section: object) -> None:
    with pytest.raises(SizingError, match="quantization_config"):
        model_from_config("m", llama(quantization_config=section))


def test_aliases_lead_to_schemes() -> None:
    assert scheme("W4A16").id == "int4"
    assert scheme("modelopt_fp4").id == "nvfp4"
    assert all(scheme(name) is entry for name, entry in schemes().items())
    with pytest.raises(SizingError, match="unknown quantization 'fp3'") as caught:
        scheme("fp3")
    assert caught.value.name == "quantization"


def test_32_bit_weights_are_refused_with_the_reason() -> None:
    with pytest.raises(SizingError, match="set --dtype float32") as caught:
        scheme("float32")
    assert "bf16" in caught.value.choices
